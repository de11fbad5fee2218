#!/usr/bin/env bash
# The seeded tests over many seeds, then longer fuzzing.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$ROOT"
use_venv
scripts/build.sh
export FOREBAY_SEEDS="${FOREBAY_SEEDS:-1000}"
say "soak: pytest -m seeds with FOREBAY_SEEDS=$FOREBAY_SEEDS"
mkdir -p build/reports
FOREBAY_SOAK=1 python -m pytest tests -m seeds --timeout=0 --junitxml=build/reports/soak.xml
say "soak: writers of the cache folder, killed $FOREBAY_SEEDS times"
cmake --preset dev >build/reports/soak-cpp.log
cmake --build --preset dev -j "$JOBS" --target forebay_tier_test powerloss_test >>build/reports/soak-cpp.log
build/dev/src/forebay_tier_test --gtest_filter='FolderCrashTest.*'
say "soak: a cache folder whose disk loses its power"
build/dev/bench/powerloss/powerloss_test
say "soak: clusters under faults, 10,000 seeds"
cmake --build --preset dev -j "$JOBS" --target forebay-faultsim >>build/reports/soak-cpp.log
running=()
for ((part = 0; part < JOBS; ++part)); do
  build/dev/src/forebay-faultsim --seed $((1 + part * 10000 / JOBS)) \
    --seeds $(((part + 1) * 10000 / JOBS - part * 10000 / JOBS)) &
  running+=($!)
done
for one in "${running[@]}"; do wait "$one"; done
say "soak: fuzzers, ${FUZZ_SECONDS:-120} s each"
fuzz/run.sh "${FUZZ_SECONDS:-120}"
