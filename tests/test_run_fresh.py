"""forebay run --cache: a run gets what the source holds when it begins, also while the service of
an earlier or parallel one lives and has copies of what the files were.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forebay
import pytest
from forebay._errors import MissingError
from forebay.commands import run as run_command

RUN = [sys.executable, "-m", "forebay.cli", "run"]
try:
    run_command.library()
    _missing = ""
except MissingError as error:
    _missing = str(error)
pytestmark = pytest.mark.skipif(bool(_missing), reason=_missing)

LARGE = 20 << 20  # copied in blocks


def _same_size(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"new")


def _other_size(path: Path) -> None:
    path.write_bytes(b"new" * (path.stat().st_size // 4))


def _replaced(path: Path) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(b"new" + path.read_bytes()[3:])
    beside.rename(path)


def _appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"new")


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def _time_put_back(path: Path) -> None:
    before = path.stat()
    _same_size(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _link_moved(path: Path) -> None:
    other = path.with_suffix(".other")
    beside = path.with_suffix(".link")
    beside.symlink_to(other)
    beside.rename(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "same_size": _same_size,
    "other_size": _other_size,
    "replaced": _replaced,
    "appended": _appended,
    "truncated": _truncated,
    "time_put_back": _time_put_back,
    "link_moved": _link_moved,
}

# Prints what each file is, by path and by descriptor; then waits to be told to end.
LOOK = """
import hashlib, json, os, sys
how, head, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
out = {}
for path in paths:
    named = os.stat(path)
    with open(path, "rb", buffering=0) as file:
        held = os.fstat(file.fileno())
        digest = hashlib.sha256()
        left = head or held.st_size + 1
        while left > 0:
            got = file.read(min(left, 1 << 20))
            if not got:
                break
            left -= len(got)
            digest.update(got)
    out[path] = [[s.st_size, s.st_mtime_ns, s.st_ino] for s in (named, held)] + [digest.hexdigest()]
print(json.dumps(out), flush=True)
if how == "wait":
    sys.stdin.read()
"""


def _start(cache: Path, data: Path, how: str, head: int, paths: list[Path]) -> subprocess.Popen:
    program = [sys.executable, "-c", LOOK, how, str(head), *map(str, paths)]
    return subprocess.Popen(
        [*RUN, "--cache", str(cache), "--source", str(data), "--", *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wrong(found: dict[str, list], paths: list[Path]) -> list[str]:
    """Files that were shown otherwise than they are."""
    out = []
    for path in paths:
        stat = path.stat()
        attributes = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if found[str(path)] != [attributes, attributes, digest]:
            out.append(path.name)
    return out


def _finish(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


def _make(data: Path) -> list[Path]:
    data.mkdir()
    paths = []
    for size in (5000, LARGE):
        for name in CHANGES:
            path = data / f"{name}-{size}"
            if name == "link_moved":
                path.with_suffix(".other").write_bytes(b"other" * (size // 5))
                path.with_suffix(".first").write_bytes(b"first" * (size // 5))
                path.symlink_to(path.with_suffix(".first"))
            else:
                path.write_bytes(os.urandom(1000) * (size // 1000))
            paths.append(path)
    time.sleep(3.2)  # younger files may still be being written
    return paths


# Just changed, files are too young to be copied anew; a little later they are not.
@pytest.mark.parametrize("pause", [0.0, 3.2], ids=["at_once", "later"])
def test_a_run_beside_another_one(tmp_path: Path, pause: float) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    paths = _make(data)
    # Small files as a whole, so that they are copied; a part of each large one.
    first = _start(cache, data, "wait", 1 << 20, paths)
    try:
        assert first.stdout is not None
        before = json.loads(first.stdout.readline())
        assert len(before) == len(paths)
        for path in paths:
            CHANGES[path.name.rpartition("-")[0]](path)
        time.sleep(pause)
        second = _start(cache, data, "end", 0, paths)
        found = json.loads(_finish(second)[0])
        assert _wrong(found, paths) == []
    finally:
        _, said = first.communicate("", timeout=60)
    assert "files copied" in said


def test_a_run_after_another_one(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    paths = _make(data)
    _finish(_start(cache, data, "end", 0, paths))
    for path in paths:
        CHANGES[path.name.rpartition("-")[0]](path)
    # The service of the first lives on for a moment.
    found = json.loads(_finish(_start(cache, data, "end", 0, paths))[0])
    assert _wrong(found, paths) == []


# Opens each file until it is a copy, and prints what each open gave: a copy or not, and its digest.
CLOCKS = """
import hashlib, json, os, sys, time
end = time.monotonic() + float(sys.argv[1])
out = {}
for path in sys.argv[2:]:
    looks = []
    while True:
        with open(path, "rb", buffering=0) as file:
            copy = os.path.realpath(f"/proc/self/fd/{file.fileno()}") != path
            looks.append([copy, hashlib.sha256(file.read()).hexdigest()])
        if copy or time.monotonic() > end:
            break
        time.sleep(0.1)
    out[path] = looks
print(json.dumps(out), flush=True)
"""


def test_files_of_other_clocks(tmp_path: Path) -> None:
    """Another node's clock is ahead of this one's, or far behind."""
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    ahead, behind, epoch = paths = [data / name for name in ("ahead", "behind", "epoch")]
    seconds = {ahead: time.time() + 3600, behind: time.time() - 20 * 365 * 86400, epoch: 0}
    for path in paths:
        path.write_bytes(os.urandom(5000))
        os.utime(path, ns=(0, int(seconds[path] * 1e9) + 7))
    time.sleep(3.2)  # the change's own time cannot be chosen

    def run(wait: int) -> dict[Path, list]:
        done = subprocess.run(
            [*RUN, "--cache", str(cache), "--source", str(data), "--", sys.executable, "-c",
             CLOCKS, str(wait), *map(str, paths)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = {Path(path): looks for path, looks in json.loads(done.stdout).items()}
        for path in paths:
            truth = hashlib.sha256(path.read_bytes()).hexdigest()
            assert {digest for _, digest in found[path]} == {truth}, path
        return found

    found = run(60)
    assert [found[path][0][0] for path in paths] == [False, True, True]
    assert [found[path][-1][0] for path in paths] == [True, True, True], "never copied"
    # The service of that run lives on for a moment, with its copies.
    for path in paths:
        _time_put_back(path)
    run(0)


@pytest.mark.parametrize("first", ["loader", "run"])
def test_copies_of_the_other_way_in(first: str, tmp_path: Path) -> None:
    """A loader and a run have one cache folder. Since the one has copied them, files were written
    and their times put back.
    """
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    paths = [data / f"{i}.bin" for i in range(4)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * (8 << 10 if i < 2 else 400 << 10))  # packed, and files

    def load() -> list[str]:
        engine = forebay.Engine(memory="64M", cache_dir=cache)
        with forebay.DataLoader(data, 1, engine=engine, progress=False) as loader:
            return [hashlib.sha256(batch[0]).hexdigest() for batch in loader]

    def run() -> list[str]:
        found = json.loads(_finish(_start(cache, data, "end", 0, paths))[0])
        return [found[str(path)][-1] for path in paths]

    for way in (load, run) if first == "loader" else (run, load):
        time.sleep(3.2)  # younger files are left to the source
        assert way() == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
        _time_put_back(paths[1])
        _time_put_back(paths[3])
