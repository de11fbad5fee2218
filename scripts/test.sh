#!/usr/bin/env bash
# Everything that must pass before a change lands. All phases run even when one fails; at the end come
# the duration of each, what did not run, and one line of counts.
#
#   make test                           all phases
#   make test PHASES="checks dev"       some of: build checks dev bench-check pytest programs asan-build
#                                       asan-ubsan tsan-build tsan fuzz
#
# A test that fails beside the others runs once more, alone (decision 60): scripts/second_try.py says
# which may. FOREBAY_SECOND_TRY=0: none.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$ROOT"
use_venv

# The build is first: mypy reads the stub that it makes.
all_phases=(build checks dev bench-check pytest programs asan-build asan-ubsan tsan-build tsan fuzz)
# Tests wait about as much as they compute.
at_once=$((JOBS + 1))
read -ra phases <<<"${PHASES:-${all_phases[*]}}"
reports=build/reports
rm -rf "$reports"
mkdir -p "$reports"

export FOREBAY_SEEDS="${FOREBAY_SEEDS:-20}"
export PYTHONDONTWRITEBYTECODE=1
symbolizer="$(command -v llvm-symbolizer-14 || true)"
# clang 14 guesses where the memory of a library that was loaded late lies, by the bytes before it
# (DTLS), and its search for leaks may then crash.
export ASAN_OPTIONS="detect_stack_use_after_return=1:strict_string_checks=1:intercept_tls_get_addr=0${symbolizer:+:external_symbolizer_path=$symbolizer}"
export UBSAN_OPTIONS="print_stacktrace=1${symbolizer:+:external_symbolizer_path=$symbolizer}"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1${symbolizer:+:external_symbolizer_path=$symbolizer}"
[ ! -f tests/tsan.supp ] || TSAN_OPTIONS+=":suppressions=$ROOT/tests/tsan.supp"

# clang 14's tsan cannot map its shadow under strong address randomisation.
plain_addresses=()
if have setarch && setarch "$(uname -m)" -R true 2>/dev/null; then
  plain_addresses=(setarch "$(uname -m)" -R)
fi

# Of the package's build, so that the core is compiled once for both.
build_package() {
  SKBUILD_CMAKE_DEFINE="FOREBAY_PYTHON=ON;FOREBAY_TESTS=ON;FOREBAY_WERROR=ON" scripts/build.sh
}

cpp_build() {
  local preset="$1" log="build/reports/cpp-$1-build.log" folder="build/$1"
  shift
  if [ "$preset" = dev ]; then
    build_package
    folder=build/python
    cmake -S . -B "$folder" -DFOREBAY_TESTS=ON -DFOREBAY_WERROR=ON >"$log" 2>&1 || { cat "$log"; return 1; }
  else
    cmake --preset "$preset" >"$log" 2>&1 || { cat "$log"; return 1; }
  fi
  "$@" cmake --build "$folder" -j "$JOBS" --target forebay_tests >"$log" 2>&1 || { cat "$log"; return 1; }
}
# Builds first what is not built yet.
cpp_tests() {
  local preset="$1" log="build/reports/cpp-$1.log" folder="build/$1" again
  cpp_build "$@"
  shift
  [ "$preset" != dev ] || folder=build/python
  if ! "$@" ctest --test-dir "$folder" -j "$at_once" --timeout 300 --output-on-failure --no-tests=error \
    --output-junit "$ROOT/$reports/cpp-$preset.xml" >"$log" 2>&1; then
    grep -vE '^ *(Start +[0-9]+:|[0-9]+/[0-9]+ Test .* Passed )' "$log" || true
    again="$(python scripts/second_try.py "$reports" "cpp-$preset")" || return 1
    say "once more, alone: $again"
    "$@" ctest --test-dir "$folder" -j 1 --timeout 300 --output-on-failure --no-tests=error -R "$again" \
      --output-junit "$ROOT/$reports/again-cpp-$preset.xml" || return 1
  fi
  grep -E 'tests passed' "$log"
}

run_checks() { scripts/lint.sh; }
run_bench-check() {
  build_package
  scripts/bench_check.sh --junit "$reports/bench-check.xml"
}
run_dev() { cpp_tests dev; }
run_build() { build_package; }
# Tests of programs that know nothing of Forebay are a phase of their own.
programs=(tests/test_{accelerate_run,cpython,files,fsspec,hook,large,libraries,mount,run,run_*,tensorflow,transparent_*}.py)
# python_tests NAME ARGUMENT...: with a report of that name
python_tests() {
  local report="$1" folder rc=0
  shift
  local again tests
  build_package # never against an older build
  # A file of tests to each. The folder's name is short, since sockets lie below it.
  folder="$(mktemp -d /tmp/fb.XXXXXX)"
  timeout --foreground --kill-after=20 1200 python -m pytest -q -p no:cacheprovider -n "$at_once" --dist loadfile \
    --basetemp="$folder/t" -o junit_family=xunit1 --junitxml="$reports/$report.xml" "$@" || rc=$?
  if [ "$rc" -eq 1 ] && again="$(python scripts/second_try.py "$reports" "$report")"; then
    say "once more, alone: $again"
    mapfile -t tests <<<"$again"
    rc=0
    timeout --foreground --kill-after=20 600 python -m pytest -q -p no:cacheprovider --basetemp="$folder/u" \
      -o junit_family=xunit1 --junitxml="$reports/again-$report.xml" "${tests[@]}" || rc=$?
  fi
  rm -rf "$folder"
  return "$rc"
}
run_pytest() { python_tests pytest-rest tests "${programs[@]/#/--ignore=}"; }
run_programs() { python_tests pytest-programs "${programs[@]}"; }
run_asan-build() { cpp_build asan-ubsan; }
run_asan-ubsan() { cpp_tests asan-ubsan; }
run_tsan-build() {
  have clang++-14 || { warn "clang-14 is not installed: the thread sanitizer cannot run"; return 1; }
  cpp_build tsan "${plain_addresses[@]}"
}
run_tsan() { cpp_tests tsan "${plain_addresses[@]}"; }
run_fuzz() {
  [ -x fuzz/run.sh ] || { warn "fuzz/run.sh is missing"; return 1; }
  timeout --foreground --kill-after=20 900 fuzz/run.sh "${FUZZ_SECONDS:-6}"
}

summary=()
failed=()
expected_reports=()
for phase in "${phases[@]}"; do
  case " ${all_phases[*]} " in
    *" $phase "*) ;;
    *) die "no phase '$phase'; there are: ${all_phases[*]}" ;;
  esac
  case "$phase" in
    dev | asan-ubsan | tsan) expected_reports+=("cpp-$phase") ;;
    pytest) expected_reports+=(pytest-rest) ;;
    programs) expected_reports+=(pytest-programs) ;;
    bench-check) expected_reports+=("$phase") ;;
  esac
  say "test: $phase"
  start=$SECONDS
  # A subshell in a condition would switch -e off inside it; this way each phase keeps it.
  set +e
  (
    set -e
    "run_$phase"
  )
  rc=$?
  set -e
  verdict=ok
  if [ "$rc" -ne 0 ]; then
    verdict=FAILED
    failed+=("$phase")
  fi
  summary+=("$(printf '%-12s %-7s %4d s' "$phase" "$verdict" $((SECONDS - start)))")
done

echo
say "test: phases"
printf '  %s\n' "${summary[@]}"
printf '  %-12s %-7s %4d s\n' total "" "$SECONDS"
[ ${#phases[@]} -eq ${#all_phases[@]} ] || warn "only some phases ran: ${phases[*]}"
rc=0
[ ${#failed[@]} -eq 0 ] || rc=1
python scripts/check_ran.py "$reports" "${expected_reports[@]}" --failed "${failed[*]:-}" || rc=1
exit $rc
