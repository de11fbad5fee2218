# Sourced by the other scripts: the repository root, messages, the virtual environment on PATH.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
JOBS="${JOBS:-$(nproc 2>/dev/null || echo 2)}"

# Another clone of the same sources finds what this one compiled.
export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$ROOT}" CCACHE_NOHASHDIR=1

say() { printf '%s\n' "==> $*"; }
warn() { printf '%s\n' "warning: $*" >&2; }
die() {
  printf '%s\n' "error: $*" >&2
  exit 1
}

# progress WHAT COMMAND...: runs it, and says every few seconds that it goes on. A function
# progress_detail, where there is one, prints how far it is.
progress() {
  local what="$1" start=$SECONDS rc=0 ticker
  shift
  (
    # The pause does not hold the output open after the end.
    while sleep "${PROGRESS_SECONDS:-5}" </dev/null >/dev/null 2>&1; do
      detail="$(declare -F progress_detail >/dev/null && progress_detail || true)"
      printf '    %s: %d s%s\n' "$what" "$((SECONDS - start))" "${detail:+, $detail}"
    done
  ) &
  ticker=$!
  "$@" || rc=$?
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  return "$rc"
}
have() { command -v "$1" >/dev/null 2>&1; }

# The venv comes first: it also holds cmake and ninja where the machine has none.
use_venv() { export PATH="$VENV/bin:$PATH"; }

# Our own C++ files, one a line.
cpp_files() {
  (cd "$ROOT" && for d in src include python bench fuzz tests examples; do
    [ -d "$d" ] && find "$d" -type f \( -name '*.cc' -o -name '*.h' -o -name '*.c' \) -print
  done | LC_ALL=C sort) || true
}
