#!/usr/bin/env bash
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$ROOT"
use_venv
have clang-format-14 || die "clang-format-14 is not installed"
cpp_files | xargs -r clang-format-14 -i
for d in python tests scripts bench fuzz examples; do
  [ ! -d "$d" ] || ruff format --quiet "$d"
done
