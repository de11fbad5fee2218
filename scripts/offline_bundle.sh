#!/usr/bin/env bash
# Gathers in offline/ (ignored by git) what `make build` and the C++ tests need from packages, so that a
# machine with a compiler, CMake and Python but no package access can build: copy the folder beside the
# sources there. CMake looks into it last (FOREBAY_BUNDLE), scripts/setup.sh puts offline/python on the
# path of a .venv that pip could not fill.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$ROOT"

out="$ROOT/offline"
rm -rf "$out"
mkdir -p "$out/python" "$out/include" "$out/lib"

say "offline-bundle: Python packages"
"$VENV/bin/python" - "$out/python" <<'PY'
"""Copies pure Python distributions, with what they need, from the environment."""
import importlib.metadata as md
import re
import shutil
import sys
from pathlib import Path

target = Path(sys.argv[1])
wanted = ["nanobind", "scikit-build-core", "rich", "pytest", "pytest-timeout"]
done = set()
while wanted:
    name = wanted.pop()
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in done:
        continue
    done.add(key)
    try:
        dist = md.distribution(name)
    except md.PackageNotFoundError:
        print(f"  {name}: not installed, left out")
        continue
    size = 0
    for file in dist.files or []:
        source = Path(dist.locate_file(file))
        outside = file.is_absolute() if hasattr(file, "is_absolute") else False
        if outside or ".." in file.parts or "__pycache__" in file.parts or not source.is_file():
            continue
        if source.suffix == ".so":
            continue  # built for this machine only
        copy = target / Path(*file.parts)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        size += source.stat().st_size
    print(f"  {name} {dist.version}  ({size / 1024:.0f} KiB)")
    for requirement in dist.requires or []:
        text, _, marker = requirement.partition(";")
        # Extras and packages for old Pythons or other systems are not needed.
        if marker and ("extra" in marker or "python_version" in marker or "platform" in marker):
            continue
        match = re.match(r"[A-Za-z0-9._-]+", text)
        if match:
            wanted.append(match[0])
PY

libdir=""
for dir in "/usr/lib/$(gcc -print-multiarch 2>/dev/null || true)" /usr/lib64 /usr/lib; do
  [ -z "$libdir" ] && [ -d "$dir" ] && libdir="$dir"
done
if [ -f /usr/include/liburing.h ] && [ -f "$libdir/liburing.a" ]; then
  cp -r /usr/include/liburing /usr/include/liburing.h "$out/include/"
  cp "$libdir/liburing.a" "$out/lib/"
  say "offline-bundle: liburing (headers, static library)"
else
  warn "liburing is not installed here: the other machine reads with pread threads"
fi
if [ -d /usr/include/gtest ] && [ -f "$libdir/cmake/GTest/GTestConfig.cmake" ] && [ -f "$libdir/libgtest.a" ]; then
  # The same depth below the prefix as installed: GTestConfig.cmake finds itself relative to it.
  keep="$out/${libdir#/usr/}"
  mkdir -p "$keep/cmake"
  cp -r /usr/include/gtest "$out/include/"
  cp -r "$libdir/cmake/GTest" "$keep/cmake/"
  cp "$libdir"/libgtest.a "$libdir"/libgtest_main.a "$keep/"
  [ ! -d /usr/include/gmock ] || cp -r /usr/include/gmock "$out/include/"
  cp "$libdir"/libgmock*.a "$keep/" 2>/dev/null || true
  say "offline-bundle: GoogleTest (headers, static libraries)"
else
  warn "GoogleTest is not installed here: no C++ tests on the other machine"
fi

kib="$(du -sk "$out" | cut -f1)"
say "offline-bundle: offline/ has $(find "$out" -type f | wc -l) files, $((kib / 1024)).$((kib % 1024 * 10 / 1024)) MiB"
[ "$kib" -lt 20480 ] || die "offline/ is over 20 MiB"
