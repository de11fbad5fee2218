"""forebay run: large files, each byte of the source once, however a program reads them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from forebay._errors import MissingError
from forebay.commands import run as run_command
from forebay.slowfs import SlowFs

numpy = pytest.importorskip("numpy")

RUN = [sys.executable, "-m", "forebay.cli", "run"]
BYTES = 48 << 20
try:
    run_command.library()
    _missing = "" if SlowFs.available()[0] else SlowFs.available()[1]
except MissingError as error:
    _missing = str(error)
pytestmark = pytest.mark.skipif(bool(_missing), reason=_missing)

# Reads in one way, three times: tells what it read, and waits for a line before it goes on. Before
# the second time it waits until the file has a copy.
PROGRAM = r"""
import ctypes, mmap, os, random, sys, time
import numpy

how, path = sys.argv[1:]
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.fread.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
kept = []


def some(take):
    places = random.Random(3)
    return sum(take(places.randrange(4096, (46 << 20))) for _ in range(40))


def records(data):
    return some(lambda at: int(data[at : at + 30000].sum()))


def by_map(write=False):
    with open(path, "rb") as file:
        flags = {"prot": mmap.PROT_READ | mmap.PROT_WRITE, "flags": mmap.MAP_PRIVATE}
        view = mmap.mmap(file.fileno(), 0, **(flags if write else {"prot": mmap.PROT_READ}))
    return numpy.frombuffer(view, dtype="u1")


def by_stream(piece):
    stream = libc.fopen(path.encode(), b"rb")
    buffer = ctypes.create_string_buffer(piece)
    total = 0
    while got := libc.fread(buffer, 1, piece, stream):
        total += int(numpy.frombuffer(buffer, dtype="u1", count=got).sum())
    libc.fclose(stream)
    return total


def by_pread():
    fd = os.open(path, os.O_RDONLY)
    total = some(lambda at: sum(os.pread(fd, 30000, at)))
    os.close(fd)
    return total


def by_kept_map():
    if not kept:
        kept.append(by_map())
    return records(kept[0])


def by_children():
    if not kept:
        kept.append(by_map())
    inside, outside = os.pipe()
    if os.fork() == 0:
        os.write(outside, str(int(kept[0].sum())).encode())
        os._exit(0)
    os.close(outside)
    total = int(os.read(inside, 100))
    os.close(inside)
    os.wait()
    return total


ways = {
    "load": lambda: int(numpy.load(path).sum()),
    "fromfile": lambda: int(numpy.fromfile(path, dtype="u1").sum()),
    "memmap": lambda: int(numpy.load(path, mmap_mode="r").sum()),
    "memmap at random": lambda: records(numpy.load(path, mmap_mode="r")),
    "private map": lambda: int(by_map(write=True).sum()),
    "kept map": by_kept_map,
    "kept map in children": by_children,
    "stream": lambda: by_stream(1 << 20),
    "stream in small pieces": lambda: by_stream(5000),
    "pread at random": by_pread,
    "read": lambda: int(numpy.frombuffer(open(path, "rb").read(), dtype="u1").sum()),
}


def copied():
    fd = os.open(path, os.O_RDONLY)
    name = os.readlink(f"/proc/self/fd/{fd}")
    os.close(fd)
    return "/copies/" in name


for number in range(3):
    print("begin", flush=True)
    sys.stdin.readline()
    print("end", ways[how](), flush=True)
    sys.stdin.readline()
    if number == 0:
        deadline = time.monotonic() + 60
        while os.environ.get("FOREBAY_FILES_CACHE") and not copied():
            if time.monotonic() > deadline:
                sys.exit("it was not copied")
            time.sleep(0.1)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
"""
WHOLE = ["load", "fromfile", "memmap", "private map", "kept map in children", "stream",
         "stream in small pieces", "read"]  # fmt: skip
IN_PART = ["memmap at random", "kept map", "pread at random"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "data"
    folder.mkdir()
    values = numpy.random.default_rng(1).integers(0, 255, BYTES, dtype="u1")
    numpy.save(folder / "a.npy", values)
    time.sleep(3.2)  # younger files may still be being written
    return folder


def passes(command: list[str], how: str, slow: SlowFs) -> list[tuple[str, int, int]]:
    """Of each time: what was read, the source's bytes in it, and those between it and the next."""
    program = subprocess.Popen(
        [*command, sys.executable, "-c", PROGRAM, how, str(slow.path / "a.npy")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None and program.stdout is not None
    marks = []
    for line in program.stdout:
        marks.append((line.strip(), slow.stats()["bytes_read"]))
        program.stdin.write("\n")
        program.stdin.flush()
    assert program.wait(timeout=60) == 0
    marks.append(("", slow.stats()["bytes_read"]))
    return [
        (marks[i + 1][0], marks[i + 1][1] - marks[i][1], marks[i + 2][1] - marks[i + 1][1])
        for i in range(0, len(marks) - 2, 2)
    ]


@pytest.mark.parametrize("how", WHOLE + IN_PART)
def test_no_byte_of_a_large_file_is_read_twice(
    how: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with SlowFs(data, read_ms=0.3, cache=True) as slow:
        plain = passes([], how, slow)
    with SlowFs(data, read_ms=0.3, cache=True) as slow:
        run = passes([*RUN, "--source", str(slow.path), "--"], how, slow)
    assert [text for text, _, _ in run] == [text for text, _, _ in plain]
    # Together with what was copied once nobody read any more.
    first = run[0][1] + run[0][2]
    assert first <= (BYTES if how in WHOLE else BYTES + plain[0][1]) * 1.05
    assert [read for _, read, _ in run[1:]] == [0, 0]
