#!/usr/bin/env bash
# All static checks; runs every one and fails at the end if any failed.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$ROOT"
use_venv

failed=()
check() {
  local name="$1"
  shift
  if "$@"; then
    printf '  ok    %s\n' "$name"
  else
    printf '  FAIL  %s\n' "$name"
    failed+=("$name")
  fi
}

shell_syntax() {
  local file bad=0
  for file in .ci/run scripts/*.sh $(find fuzz bench tests examples -name '*.sh' 2>/dev/null); do
    bash -n "$file" || bad=1
  done
  return $bad
}

cpp_format() {
  have clang-format-14 || { warn "clang-format-14 is not installed"; return 1; }
  local bad
  bad="$(cpp_files | xargs -r clang-format-14 --dry-run -Werror 2>&1 |
    sed -n 's/^\([^:]*\):[0-9]*:.*clang-format-violations.*/\1/p' | sort | uniq -c)"
  [ -z "$bad" ] || { printf 'places to format:\n%s\n' "$bad"; return 1; }
}

python_dirs() {
  local d
  for d in python tests scripts bench fuzz examples; do
    [ ! -d "$d" ] || printf '%s\n' "$d"
  done
}

# mypy sees the packages with the generated stub beside them; without a build, a stub that allows all.
types() {
  ls python/forebay/*.py >/dev/null 2>&1 || { warn "python/forebay is empty"; return 0; }
  local copy=build/mypy stub
  rm -rf "$copy"
  mkdir -p "$copy"
  cp -r python/forebay bench/forebay_bench bench/forebay_testing "$copy/"
  stub="$(find build/python .venv/lib -name _forebay.pyi -print -quit 2>/dev/null || true)"
  if [ -n "$stub" ]; then
    # nanobind says object of whatever Python makes of it: an array, a string, nothing.
    { echo 'from typing import Any'; sed 's/-> object:/-> Any:/' "$stub"; } >"$copy/forebay/_forebay.pyi"
  else
    printf 'from typing import Any\ndef __getattr__(name: str) -> Any: ...\n' >"$copy/forebay/_forebay.pyi"
  fi
  (cd "$copy" && mypy --config-file "$ROOT/pyproject.toml" --cache-dir "$ROOT/build/mypy-cache" --no-error-summary \
    forebay forebay_bench forebay_testing) | sed -E 's#^forebay/#python/&#; s#^forebay_(bench|testing)/#bench/&#'
}

check "include order" python tests/check_includes.py
check "include order: self-test" python tests/check_includes.py --self-test
check "documents" python tests/check_docs.py
check "results and their age" python scripts/update_results.py --check
check "shell syntax" shell_syntax
check "clang-format" cpp_format
check "ruff check" ruff check --quiet $(python_dirs)
check "ruff format" ruff format --check --quiet $(python_dirs)
check "mypy" types
[ ${#failed[@]} -eq 0 ] || die "failed: $(IFS=,; echo "${failed[*]}") (make format repairs the format)"
