"""A cache disk that hangs below an unmodified program, by library or by mount: its reads, and its
end, do not wait for it.

The disk begins to hang between two steps: no library can bring a program back that is inside the
kernel, in a read of a copy.
"""

from __future__ import annotations

import hashlib
import json
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
from forebay.commands.mount import mounted_kind
from forebay.slowfs import SlowFs
from transparent.table import PASSED_BY, table_of

_usable, _reason = SlowFs.available()
pytestmark = pytest.mark.skipif(not _usable, reason=f"no mount here: {_reason}")
try:
    run_command.library()
    _missing = ""
except MissingError as error:
    _missing = str(error)
needs_library = pytest.mark.skipif(bool(_missing), reason=_missing)

FILES = 40
FOREBAY = [sys.executable, "-m", "forebay.cli"]
HANGS_S = 10.0  # for as long as that steps are taken
LONGEST_S = 4.0  # of one read, on a machine that is busy
USUAL_S = 0.5

# A training loop: for each line it reads all files of the folder that it names, and says of each
# how long that took, what it read, and whether it was of a copy. A line may name a file that is
# written first.
PROGRAM = """
import hashlib, json, os, sys, time
for line in sys.stdin:
    folder, _, line = line.partition(":")
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


def forebay(*words: object) -> None:
    command = [*FOREBAY, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def digests(data: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in data.iterdir()}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowFs]:
    """With pages in memory, as every disk has them."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "mount").mkdir()
    with SlowFs(tmp_path / "disk", tmp_path / "mount", cache=True, writable_mb=0) as slow:
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


class Steps:
    """The program, which takes a step for each line that it is given."""

    def __init__(self, command: list[str], data: Path, **variables: str) -> None:
        self.data = data
        self.took: list[float] = []
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **variables},
        )  # fmt: skip

    def take(self, folder: Path, line: str = "") -> int:
        """Returns how many files came from copies, as far as the program can tell."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{folder}:{line}\n")
        self.process.stdin.flush()
        wrote, said = json.loads(self.process.stdout.readline())
        assert {name: digest for name, _, digest, _ in said} == digests(self.data)
        self.took.extend([wrote, *(seconds for _, seconds, _, _ in said)])
        return sum(copy for _, _, _, copy in said)

    def check_took(self) -> None:
        assert max(self.took) < LONGEST_S
        assert statistics.median(self.took) < USUAL_S


class Disk:
    """What programs are told of the cache folder's disk."""

    def __init__(self, slow: SlowFs, service: Path) -> None:
        self.slow = slow
        self.table = table_of(service)

    def hang(self) -> None:
        self.slow.set(stall_ms="forever")
        wait_until(lambda: self.table[PASSED_BY], "the disk is not left", LONGEST_S)


@needs_library
def test_a_program_goes_on_and_ends_while_the_disk_hangs(
    disk: SlowFs, data: Path, tmp_path: Path
) -> None:
    in_memory = set(os.listdir("/dev/shm"))
    runtime = tmp_path / "r"
    runtime.mkdir(mode=0o700)
    cache = disk.path / "cache"
    run = Steps(
        [*FOREBAY, "run", "--source", str(data), "--cache", str(cache), "--"], data,
        XDG_RUNTIME_DIR=str(runtime),
    )  # fmt: skip
    try:
        wait_until(lambda: run.take(data) == FILES, "files are not read from copies")
        socket = next(runtime.rglob("files-*.sock"))
        session = _forebay.FileSession.connect(str(socket), job=0)
        Disk(disk, socket).hang()
        began = time.monotonic()
        run.took.clear()
        changes = 0
        while time.monotonic() - began < HANGS_S:
            changes += 1
            line = f"{changes:03}.bin=changed {changes}" if changes < FILES else ""
            assert run.take(data, line) == 0
            time.sleep(0.2)
        run.check_took()
        metrics = json.loads(session.status())["metrics"]
        assert metrics["forebay_files_changed_total"] >= min(changes, FILES - 1)
        del session
        _, said = run.process.communicate(timeout=20)
        assert run.process.returncode == 0
        assert f"the cache folder {cache} has not answered" in said
        assert "files copied to local disk" in said
        wait_until(lambda: not socket.exists(), "the daemon does not end", 30)
        assert set(os.listdir("/dev/shm")) <= in_memory
    finally:
        disk.set(stall_ms=0)
        run.process.kill()
        run.process.communicate()


def test_a_mount_goes_on_and_ends_while_the_disk_hangs(
    disk: SlowFs, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "r"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    cache, shown = disk.path / "cache", tmp_path / "shown"
    shown.mkdir()
    forebay("mount", data, shown, "--cache", cache)
    run = Steps([], data)
    try:
        run.take(shown)
        socket = next(runtime.rglob("files-*.sock"))
        session = _forebay.FileSession.connect(str(socket), job=0)
        metrics = json.loads(session.status())["metrics"]
        assert metrics["forebay_files_kept_total"] == FILES
        del session
        Disk(disk, socket).hang()
        began = time.monotonic()
        run.took.clear()
        while time.monotonic() - began < HANGS_S:
            run.take(shown)
            time.sleep(0.2)
        run.check_took()
        run.process.communicate(timeout=20)
        forebay("unmount", shown)
        wait_until(lambda: not socket.exists(), "the daemon does not end", 30)
    finally:
        disk.set(stall_ms=0)
        run.process.kill()
        run.process.communicate()
        if mounted_kind(shown):
            forebay("unmount", "--lazy", shown)


def test_a_new_mount_over_a_disk_that_hangs_shows_the_source(
    disk: SlowFs, data: Path, tmp_path: Path
) -> None:
    cache, shown = disk.path / "cache", tmp_path / "shown"
    shown.mkdir()
    disk.set(stall_ms="forever")
    command = [*FOREBAY, "mount", str(data), str(shown), "--cache", str(cache)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        check_told(done.stderr, cache)
        assert digests(shown) == digests(data)
    finally:
        disk.set(stall_ms=0)
        if mounted_kind(shown):
            forebay("unmount", shown)


@needs_library
def test_a_new_run_over_a_disk_that_hangs_goes_on_without_copies(disk: SlowFs, data: Path) -> None:
    cache, file = disk.path / "cache", data / "001.bin"
    disk.set(stall_ms="forever")
    words = ["run", "--source", data, "--cache", cache, "--", "cat", file]
    command = [*FOREBAY, *map(str, words)]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0
    assert done.stdout == file.read_bytes()
    check_told(done.stderr.decode(), cache)


def check_told(said: str, cache: Path) -> None:
    """Once, with the folder and what to do."""
    assert said.count("\n") == 1 and "WARNING: " in said, said
    assert f"the cache folder {cache} has not answered" in said
    assert "--cache" in said
