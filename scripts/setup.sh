#!/usr/bin/env bash
# Makes the machine ready: Debian packages from packages/apt.txt, .venv from packages/python.txt and,
# for the tests of other frameworks, packages/frameworks.txt.
# Does nothing when the stamp of the same package lists is there. What cannot be installed is named
# with what it costs, and the set-up goes on.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$ROOT"

PYTHON="${PYTHON:-python3}"
hash="$(cat packages/apt.txt packages/python.txt packages/frameworks.txt scripts/setup.sh | sha256sum | cut -c1-16)"
stamp="$VENV/.setup-$hash"
missing_note="$VENV/.missing-apt"

apt_names() { sed -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d' packages/apt.txt; }
apt_cost() { sed -n "s/^$1[[:space:]]*#[[:space:]]*//p" packages/apt.txt; }

# Prints the packages of the list that are not installed; all of them where there is no dpkg.
apt_missing() {
  local installed
  have dpkg-query || { apt_names; return 0; }
  installed="$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' $(apt_names) 2>/dev/null |
    sed -n 's/^installed //p' || true)"
  apt_names | grep -vxF -f <(printf '%s\n' "$installed") || true
}

# A tool that came another way (cmake from a module, clang from a tarball) counts as present.
tool_of() {
  case "$1" in
    build-essential) echo c++ ;;
    cmake | ccache | pkg-config) echo "$1" ;;
    ninja-build) echo ninja ;;
    clang-14) echo clang++-14 ;;
    clang-format-14) echo clang-format-14 ;;
    llvm-14) echo llvm-symbolizer-14 ;;
    fuse3) echo fusermount3 ;;
    git | sqlite3) echo "$1" ;;
    xz-utils) echo xz ;;
    prometheus) echo prometheus ;;
    chromium-headless-shell) echo chromium ;;
  esac
}
without_tools() {
  local name tool
  while read -r name; do
    tool="$(tool_of "$name")"
    { [ -n "$tool" ] && have "$tool"; } || printf '%s\n' "$name"
  done
}

warn_missing() {
  local name
  warn "could not be installed (no apt, no root, or apt-get failed):"
  for name in $1; do
    printf '  %-20s %s\n' "$name" "$(apt_cost "$name")" >&2
  done
}

if [ -e "$stamp" ]; then
  if [ -s "$missing_note" ]; then
    still="$(apt_missing | without_tools)"
    printf '%s' "$still" >"$missing_note"
    [ -z "$still" ] || warn "still without: $(echo $still) (rm .venv/.setup-* && make setup to try again)"
  fi
  exit 0
fi

say "setup: system packages"
missing="$(apt_missing)"
if [ -n "$missing" ]; then
  as_root=()
  can_apt=no
  if have apt-get; then
    if [ "$(id -u)" = 0 ]; then
      can_apt=yes
    elif have sudo && { sudo -n true 2>/dev/null || { [ -t 0 ] && sudo -v; }; }; then
      can_apt=yes
      as_root=(sudo)
    fi
  fi
  if [ "$can_apt" = yes ]; then
    say "installing: $(echo $missing)"
    export DEBIAN_FRONTEND=noninteractive
    progress "package lists" "${as_root[@]}" apt-get update -qq || warn "apt-get update failed; trying with the lists at hand"
    # One by one after a failure, so that one unknown package does not cost the others.
    quiet_apt() {
      "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        --no-install-recommends "$@" >/dev/null
    }
    progress "system packages" quiet_apt $missing ||
      for name in $missing; do
        progress "$name" quiet_apt "$name" || warn "apt-get could not install $name"
      done
  fi
  missing="$(apt_missing | without_tools)"
  [ -z "$missing" ] || warn_missing "$missing"
fi

say "setup: Python environment .venv"
have "$PYTHON" || die "no $PYTHON on PATH; Forebay needs Python 3.10 or newer"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  die "$("$PYTHON" --version) is too old; Forebay needs Python 3.10 or newer (set PYTHON=...)"
if ! [ -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
  progress "new environment" "$PYTHON" -m venv "$VENV" || die "$PYTHON -m venv failed; install python3-venv or set PYTHON=..."
fi
rm -f "$VENV"/.setup-*
printf '%s' "$missing" >"$missing_note"

pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
extra=()
have cmake || extra+=("cmake>=3.22,<4")
have ninja || extra+=(ninja)
index=yes
say "setup: packages for building and testing (packages/python.txt), some minutes the first time"
if ! progress "pip" "${pip[@]}" -r packages/python.txt "${extra[@]}"; then
  index=no
  # No package index: the machine's own Python packages are the next best, and the offline bundle
  # brings the pure ones that the build needs.
  warn "pip could not install packages/python.txt; using the packages of $PYTHON" \
    "(rm .venv/.setup-* && make setup to try again)"
  sed -i 's/^include-system-site-packages.*/include-system-site-packages = true/' "$VENV/pyvenv.cfg"
  if [ -d offline/python ]; then
    site="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    printf '%s\n' "$ROOT/offline/python" >"$site/forebay_offline.pth"
  fi
  "$VENV/bin/python" - <<'PY' >&2
import importlib.metadata as md
import re

absent = []
for line in open("packages/python.txt"):
    name = re.match(r"[A-Za-z0-9._-]+", line)
    if name:
        try:
            md.version(name[0])
        except md.PackageNotFoundError:
            absent.append(name[0])
if absent:
    print("warning: without these Python packages:", *absent)
    if {"nanobind", "scikit-build-core"} & set(absent):
        print("warning: make build needs nanobind and scikit-build-core: run make offline-bundle on a"
              " machine with packages and copy the folder offline/ here")
PY
fi
[ "$index" = no ] || say "setup: other frameworks, for their tests (packages/frameworks.txt)"
if [ "$index" = no ] || ! progress "pip" "${pip[@]}" -r packages/frameworks.txt; then
  warn "packages/frameworks.txt is not installed: the tests and examples of TensorFlow, Grain," \
    "Lightning, pandas and PyArrow are skipped"
fi
: >"$stamp"
say "setup: done in $SECONDS s"
