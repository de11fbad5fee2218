#!/usr/bin/env bash
# Eight benches in their shortest form against the wide bounds of bench/forebay_bench/check.json.
#
#   make bench-check                    all of them
#   make bench-check NAME=epoch         one
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$ROOT"
use_venv
exec timeout --kill-after=60 900 python -m forebay_bench.check "$@"
