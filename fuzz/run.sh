#!/bin/sh
# fuzz/run.sh SECONDS: builds the fuzzers and runs each for SECONDS. Fails on any finding, whose input
# is left in build/fuzz/findings. The corpus in build/fuzz/corpus grows from run to run.
set -eu
seconds=${1:?usage: fuzz/run.sh SECONDS}
cd "$(dirname "$0")/.."
fuzzers="catalog tar tfrecord folder wire ring jpeg images npy policy files peer members tcp http folder_log"
targets=fuzz_seeds
for name in $fuzzers; do targets="$targets fuzz_$name"; done

cmake --preset fuzz >/dev/null
# shellcheck disable=SC2086  # a list
cmake --build --preset fuzz --target $targets
corpus=build/fuzz/corpus
mkdir -p build/fuzz/findings
for name in $fuzzers; do mkdir -p "$corpus/$name"; done
build/fuzz/fuzz/fuzz_seeds "$corpus"

# The fuzzers of folders make real trees.
if [ -d /dev/shm ] && [ -w /dev/shm ]; then export TMPDIR=/dev/shm; fi
# As many at a time as there are processors.
export corpus seconds
# shellcheck disable=SC2086,SC2016  # a list; expanded by the inner shell
printf '%s\n' $fuzzers | xargs -P "$(nproc)" -I{} sh -c '
  name={}
  log=build/fuzz/$name.log
  status=0
  "build/fuzz/fuzz/fuzz_$name" "$corpus/$name" -max_total_time="$seconds" -timeout=10 \
    -rss_limit_mb=2048 -max_len=16384 -print_final_stats=1 -verbosity=0 -print_funcs=0 \
    -artifact_prefix="build/fuzz/findings/$name-" >"$log" 2>&1 || status=1
  if [ "$status" -ne 0 ]; then cat "$log"; fi
  echo "== fuzz_$name, $seconds s: $(sed -n "s/^stat::number_of_executed_units: */inputs /p" "$log")"
  exit "$status"
'
