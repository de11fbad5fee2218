#!/bin/sh
# fuzz/run.sh SECONDS: builds the fuzzers and runs each for SECONDS. Fails on any finding, whose input
# is left in build/fuzz/findings. The corpus in build/fuzz/corpus grows from run to run.
set -eu
seconds=${1:?usage: fuzz/run.sh SECONDS}
cd "$(dirname "$0")/.."
fuzzers="catalog tar tfrecord folder wire jpeg policy"
targets=fuzz_seeds
for name in $fuzzers; do targets="$targets fuzz_$name"; done

cmake --preset fuzz >/dev/null
# shellcheck disable=SC2086  # a list
cmake --build --preset fuzz --target $targets
corpus=build/fuzz/corpus
mkdir -p "$corpus" build/fuzz/findings
build/fuzz/fuzz/fuzz_seeds "$corpus"

# The folder fuzzer makes real trees.
if [ -d /dev/shm ] && [ -w /dev/shm ]; then export TMPDIR=/dev/shm; fi
status=0
for name in $fuzzers; do
  echo "== fuzz_$name, $seconds s"
  "build/fuzz/fuzz/fuzz_$name" "$corpus/$name" -max_total_time="$seconds" -timeout=10 \
    -rss_limit_mb=2048 -max_len=16384 -print_final_stats=1 -verbosity=0 -print_funcs=0 \
    -artifact_prefix="build/fuzz/findings/$name-" || status=1
done
exit $status
