#!/usr/bin/env bash
# Builds the wheel in build/python and installs it into .venv; returns at once when no source is
# newer than the last build.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$ROOT"
use_venv

stamp="$VENV/.built"
roots=(CMakeLists.txt pyproject.toml)
for d in src include python bench/slowfs bench/preload cmake; do
  [ ! -d "$d" ] || roots+=("$d")
done
sources() { find "${roots[@]}" -type f ! -name '*.pyc' ! -name '*_test.cc' "$@"; }
# The list of files catches removals, the times catch edits.
list="$(sources | LC_ALL=C sort | sha256sum | cut -c1-16)"
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$list" ] && [ -x "$VENV/bin/forebay" ] &&
  [ -z "$(sources -newer "$stamp" -print -quit)" ]; then
  exit 0
fi

say "build: package into .venv"
began="$(mktemp "$VENV/.built.XXXXXX")"
trap 'rm -f "$began"' EXIT
printf '%s' "$list" >"$began"
start=$SECONDS
export CMAKE_BUILD_PARALLEL_LEVEL="$JOBS"
verbose=(--quiet)
[ -z "${V:-}" ] || verbose=(--verbose)
progress_detail() {
  echo "$(find build/python -name '*.o' -newer "$began" 2>/dev/null | wc -l) files compiled"
}
if ! progress "build" "$VENV/bin/python" -m pip install "${verbose[@]}" --disable-pip-version-check --no-build-isolation \
  --no-deps --no-index --force-reinstall .; then
  die "the build failed (make build V=1 shows every command)"
fi
# Benches and what tests need are no part of the package: they run from where they lie.
site="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
printf '%s\n' "$ROOT/bench" >"$site/forebay_benches.pth"
# The stamp carries the time the build began: an edit made meanwhile is built next time.
mv "$began" "$stamp"
trap - EXIT
say "build: done in $((SECONDS - start)) s"
[ -x "$VENV/bin/slowfs" ] || warn "built without slowfs (libfuse3 not found)"
