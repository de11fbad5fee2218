"""What a run takes of memory: what is on its way, and each file's pages once."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from forebay import _forebay
from test_run_daemons import LIBRARY, RUN, daemons, engine_folder, memory_of, place

__all__ = ["place"]  # a fixture

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason="this build has no libforebay_posix.so"
)

STAGING = 160 << 20

READ = """
import os, sys, time
folder, ready, go = sys.argv[1:4]
for name in sorted(os.listdir(folder)):
    with open(os.path.join(folder, name), "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
open(ready, "w").close()
end = time.monotonic() + 60
while not os.path.exists(go) and time.monotonic() < end:
    time.sleep(0.02)
"""


def cached(paths: Iterable[Path]) -> int:
    """Bytes of files that lie in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for path in paths:
        size = path.stat().st_size
        if size == 0:
            continue
        with open(path, "rb") as file:
            mapped = mmap.mmap(
                file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        there = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert libc.mincore(address, ctypes.c_size_t(size), there) == 0
        total += sum(page & 1 for page in there) * mmap.PAGESIZE
        del start
        mapped.close()
    return total


def forget_pages(paths: Iterable[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def test_memory_and_page_cache_of_a_run(place: Path) -> None:  # noqa: F811
    folder, cache = place / "data", place / "cache"
    folder.mkdir()
    for i in range(400):
        (folder / f"{i:03}.bin").write_bytes(os.urandom(100_000))
    for i in range(40):
        (folder / f"large{i:03}.bin").write_bytes(os.urandom(5 << 20))
    sources = sorted(folder.iterdir())
    total = sum(path.stat().st_size for path in sources)
    time.sleep(3.2)  # younger files may still be being written
    for path in sources:
        path.read_bytes()
    plain = cached(sources)  # what a program takes without Forebay
    forget_pages(sources)
    if plain < total or cached(sources) > total // 20:
        pytest.skip("pages of files do not leave memory here")
    ready, go = place / "ready", place / "go"
    program = [sys.executable, "-c", READ, str(folder), str(ready), str(go)]
    run = subprocess.Popen(
        [*RUN, "--source", str(folder), "--cache", str(cache), "--", *program],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while run.poll() is None and not ready.exists():
            time.sleep(0.02)
        [pid] = daemons()
        memory = memory_of(pid)
        said = json.loads(_forebay.SharedEngine.attach_running(engine_folder(), 4.0).describe())
        source_pages = cached(sources)
        copy_pages = cached((cache / "run" / "copies").iterdir())
    finally:
        go.touch()
        _, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert "440 files copied" in err
    held = {tier["name"]: tier for tier in said["tiers"]}["memory"]
    # All has landed in the folder, and left memory.
    assert held["kept"] == 0
    assert held["used"] < 16 << 20
    # What was in it on the way is far less than the data: 82 MiB of 238.
    assert 0 < memory < STAGING, f"{memory >> 20} MiB of {total >> 20}"
    assert source_pages < total // 10, f"{source_pages >> 20} MiB"
    assert memory + source_pages + copy_pages < plain + STAGING
