"""A cache disk that hangs below an unmodified program: its reads, and its end, do not wait for it.

The disk begins to hang between two steps: no library can bring a program back that is inside the
kernel, in a read of a copy.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forebay import _forebay
from forebay._errors import MissingError
from forebay.commands import run as run_command
from forebay.slowfs import SlowFs

_usable, _reason = SlowFs.available()
pytestmark = pytest.mark.skipif(not _usable, reason=f"no mount here: {_reason}")
try:
    run_command.library()
    _missing = ""
except MissingError as error:
    _missing = str(error)
needs_library = pytest.mark.skipif(bool(_missing), reason=_missing)

FILES = 40
LONGEST_S = 4.0  # of one read, on a machine that is busy
USUAL_S = 0.5
PASSED_BY = 48  # in the table that programs look at

# A training loop: for each line it reads all files, and says of each how long that took, what it
# read, and whether it was of a copy. A line may name a file that is written first.
PROGRAM = """
import hashlib, json, os, sys, time
folder = sys.argv[1]
for line in sys.stdin:
    name, _, text = line.strip().partition("=")
    began = time.monotonic()
    if name:
        with open(os.path.join(folder, name), "wb") as file:
            file.write(text.encode())
    wrote = time.monotonic() - began
    said = []
    for name in sorted(os.listdir(folder)):
        began = time.monotonic()
        with open(os.path.join(folder, name), "rb") as file:
            path = os.path.realpath(f"/proc/self/fd/{file.fileno()}")
            read = file.read()
        took = time.monotonic() - began
        said.append([name, took, hashlib.sha256(read).hexdigest(), "/copies/" in path])
    print(json.dumps([wrote, said]), flush=True)
"""


def wait_until(holds: Callable[[], object], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def digests(data: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in data.iterdir()}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowFs]:
    """With pages in memory, as every disk has them. The table of files is mapped by all."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "mount").mkdir()
    with SlowFs(
        tmp_path / "disk", tmp_path / "mount", cache=True, writable_mb=0, in_memory="table"
    ) as slow:
        yield slow
        slow.set(stall_ms=0)  # nothing is left hanging when it ends


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(FILES):
        (folder / f"{i:03}.bin").write_bytes(os.urandom(100_000))
    time.sleep(3.2)  # files that were just written are not copied
    return folder


@needs_library
def test_a_program_goes_on_and_ends_while_the_disk_hangs(
    disk: SlowFs, data: Path, tmp_path: Path
) -> None:
    in_memory = set(os.listdir("/dev/shm"))
    runtime = tmp_path / "r"
    runtime.mkdir(mode=0o700)
    cache = disk.path / "cache"
    program = [sys.executable, "-c", PROGRAM, str(data)]
    run = subprocess.Popen(
        [sys.executable, "-m", "forebay.cli", "run", "--source", data, "--cache", cache,
         "--", *program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )  # fmt: skip
    assert run.stdin is not None and run.stdout is not None
    took: list[float] = []

    def step(text: str = "") -> int:
        """Of the program; returns how many files came from copies."""
        run.stdin.write(text + "\n")
        run.stdin.flush()
        wrote, said = json.loads(run.stdout.readline())
        assert {name: digest for name, _, digest, _ in said} == digests(data)
        took.extend([wrote, *(seconds for _, seconds, _, _ in said)])
        return sum(copy for _, _, _, copy in said)

    try:
        wait_until(lambda: step() == FILES, "files are not read from copies")
        socket = next(runtime.rglob("files-*.sock"))
        session = _forebay.FileSession.connect(str(socket), job=0)

        with open(cache / "run" / "table", "rb") as file:
            table = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
        disk.set(stall_ms="forever")
        began = time.monotonic()
        wait_until(lambda: table[PASSED_BY], "the disk is not left", LONGEST_S)
        took.clear()
        changes = 0
        while time.monotonic() - began < 12:
            changes += 1
            name = f"{changes:03}.bin" if changes < FILES else ""
            assert step(f"{name}=changed {changes}") == 0
            time.sleep(0.2)
        assert max(took) < LONGEST_S
        assert statistics.median(took) < USUAL_S
        assert changes > 10
        status = json.loads(session.status())
        assert status["metrics"]["forebay_files_changed_total"] >= min(changes, FILES - 1)
        del session
        _, said = run.communicate(timeout=20)
        assert run.returncode == 0
        assert f"the cache folder {cache} has not answered" in said
        assert "files copied to local disk" in said
        wait_until(lambda: not socket.exists(), "the daemon does not end", 30)
        assert set(os.listdir("/dev/shm")) <= in_memory
    finally:
        disk.set(stall_ms=0)
        run.kill()
        run.communicate()
