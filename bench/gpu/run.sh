#!/usr/bin/env bash
# Builds Forebay from source into a scratch folder and runs `forebay bench gpu` there. For a machine
# with a GPU, PyTorch and torchvision, a compiler and CMake, and nothing else: no packages, no network.
#
#   bench/gpu/run.sh [options of forebay bench gpu, such as --quick --json FILE]
#
# PYTHON   the interpreter that has PyTorch (default: python3)
# SCRATCH  where to build and to make the data (default: a new folder in TMPDIR, removed afterwards)
# JOBS     parallel compilers (default: all cores)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-python3}"
scratch="${SCRATCH:-}"
if [ -z "$scratch" ]; then
  scratch="$(mktemp -d)"
  trap 'rm -rf "$scratch"' EXIT
fi
mkdir -p "$scratch/site" "$scratch/tmp"

# What `make offline-bundle` gathered, where the machine has no nanobind or rich of its own.
path="$scratch/site"
[ ! -d "$root/offline/python" ] || path="$path:$root/offline/python"

generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
start=$SECONDS
PYTHONPATH="$path" cmake -S "$root" -B "$scratch/build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
  -DFOREBAY_PYTHON=ON -DFOREBAY_STUBS=OFF -DFOREBAY_SLOWFS=OFF \
  -DPython_EXECUTABLE="$(command -v "$python")" >"$scratch/cmake.log" ||
  { cat "$scratch/cmake.log" >&2; exit 1; }
cmake --build "$scratch/build" -j "${JOBS:-$(nproc)}" >"$scratch/build.log" 2>&1 ||
  { tail -n 50 "$scratch/build.log" >&2; exit 1; }
cp -r "$root/python/forebay" "$scratch/site/"
rm -f "$scratch"/site/forebay/_forebay*.so
cmake --install "$scratch/build" --component python --prefix "$scratch/site" >>"$scratch/build.log"
echo "built in $((SECONDS - start)) s"

export PYTHONPATH="$path:$root/bench" PYTHONUNBUFFERED=1 TMPDIR="$scratch/tmp"
"$python" -c 'import sys; from forebay.cli import main; sys.exit(main(["bench", "gpu", *sys.argv[1:]]))' "$@"
