"""Programs under the preloaded library that race: for one file, with writers, with a kill."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import seed_count
from transparent.under import LIBRARY, SERVICE, FileService, plain_environment

pytestmark = pytest.mark.skipif(
    not (os.access(SERVICE, os.X_OK) and LIBRARY.exists()),
    reason="this build has no forebayd or no libforebay_posix.so",
)

READER = """
import hashlib, sys
with open(sys.argv[1], "rb") as file:
    print(hashlib.md5(file.read()).hexdigest())
"""

# Rewrites its file in place, again and again; what it reads is what it wrote last.
WRITER = """
import sys
path, rounds = sys.argv[1], int(sys.argv[2])
for number in range(rounds):
    with open(path, "rb") as file:
        assert file.read() == bytes([number]) * 5000, (number, "before")
    with open(path, "r+b") as file:
        file.write(bytes([number + 1]) * 5000)
    print(number, flush=True)
    with open(path, "rb") as file:
        assert file.read() == bytes([number + 1]) * 5000, (number, "after")
"""

# Each version has one value in all of its bytes, and a size of its own.
WATCHER = """
import os, sys
folder, end = sys.argv[1:]
names = sorted(os.listdir(folder))
reads = 0
while not os.path.exists(end) or reads == 0:
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        assert data == data[:1] * len(data) and len(data) == 3000 + data[0], (name, len(data))
        reads += 1
"""


def start(code: str, environment: dict[str, str], *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(programs: list[subprocess.Popen[bytes]]) -> list[bytes]:
    said = []
    for program in programs:
        out, err = program.communicate(timeout=100)
        assert (program.returncode, err) == (0, b"")
        said.append(out)
    return said


@pytest.mark.parametrize("size", [100_000, 5_000_000])
def test_sixteen_processes_race_for_one_file(size: int, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "one").write_bytes(random.Random(1).randbytes(size))
    with FileService([data]) as service:
        said = finish([start(READER, service.environment(), data / "one") for _ in range(16)])
        assert len(set(said)) == 1
        assert said[0] == finish([start(READER, plain_environment(), data / "one")])[0]
        assert service.metric("forebay_source_read_bytes_total") == size


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(max(1, seed_count() // 5)))
def test_four_writers_read_what_they_wrote(number: int, tmp_path: Path) -> None:
    """A write goes on only after its file's copy is gone; the daemon dies between."""
    rng = random.Random(number)
    data = tmp_path / "data"
    data.mkdir()
    for each in range(4):
        (data / str(each)).write_bytes(bytes(5000))
    with FileService([data]) as service:
        writers = [start(WRITER, service.environment(), data / str(i), 60) for i in range(4)]
        assert writers[0].stdout is not None
        writers[0].stdout.readline()
        time.sleep(rng.uniform(0, 0.1))
        service.kill()
        finish(writers)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(max(1, seed_count() // 5)))
def test_no_torn_file_is_handed_out(number: int, tmp_path: Path) -> None:
    """Files are replaced while they are copied and read, by a program that says so and by one that
    knows nothing of the service; whoever opens one finds a whole version.
    """
    rng = random.Random(number)
    data = tmp_path / "data"
    data.mkdir()
    beside, end = tmp_path / "new", tmp_path / "end"
    for each in range(6):
        (data / str(each)).write_bytes(bytes(3000))
    with FileService([data]) as service:
        watchers = [start(WATCHER, service.environment(), data, end) for _ in range(3)]
        for version in range(1, 80):
            beside.write_bytes(bytes([version]) * (3000 + version))
            os.replace(beside, data / str(rng.randrange(6)))
            if version == 60 and number % 2:
                service.kill()
        end.touch()
        finish(watchers)
