"""Shards whose samples a cache folder holds, opened whole by a program."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path

import forebay
import pytest
from data_sets import write_tar, write_tfrecord
from forebay.slowfs import SlowFs
from test_mount import forebay as forebay_command
from test_run import needs_library, run

_usable, _reason = SlowFs.available()
pytestmark = [
    needs_library,
    pytest.mark.skipif(not _usable, reason=f"no mount here: {_reason}"),
]

SHARDS = 24
DIGESTS = """
import glob, hashlib, sys
for path in sorted(glob.glob(sys.argv[1] + "/*")):
    with open(path, "rb") as file:
        print(hashlib.sha256(file.read()).hexdigest())
"""


def _make(kind: str, root: Path) -> None:
    """Most are copied in one piece, a few in blocks."""
    rng = random.Random(5)
    root.mkdir()
    for shard in range(SHARDS):
        sizes = [rng.randrange(60_000, 200_000) for _ in range(40 if shard % 8 == 0 else 8)]
        if kind == "tar":
            fields = [{"jpg": rng.randbytes(size), "cls": b"7"} for size in sizes]
            write_tar(root / f"{shard:02}.tar", [(f"{i:03}", f) for i, f in enumerate(fields)])
        else:
            write_tfrecord(root / f"{shard:02}.tfrecord", [rng.randbytes(size) for size in sizes])
    time.sleep(3.2)  # younger files may still be being written


def _warm(how: str, cache: Path, data: Path) -> None:
    if how == "command":
        subprocess.run(
            [sys.executable, "-m", "forebay.cli", "cache", "warm", str(cache), str(data)],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        return
    with forebay.DataLoader(str(data), 16, memory="64M", cache_dir=cache, epochs=1) as loader:
        for batch in loader:
            batch.release()
        while loader.engine.metrics()["forebay_tier_copies_under_way"]:
            time.sleep(0.01)


@pytest.fixture
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int, list[str]]:
    """A folder of them, its bytes and the sums of its files."""
    data = tmp_path / "data"
    _make(getattr(request, "param", "tar"), data)
    files = sorted(data.iterdir())
    total = sum(path.stat().st_size for path in files)
    return data, total, [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


@pytest.fixture(autouse=True)
def catalogs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "catalogs"))


# Headers and padding are 1.1 % of these tars, and next to nothing of TFRecords.
FEW = 0.05


@pytest.mark.parametrize(
    ("shards", "how"),
    [("tar", "command"), ("tar", "loader"), ("tfrecord", "command")],
    indirect=["shards"],
)
def test_samples_that_are_held_are_not_read_again(
    shards: tuple[Path, int, list[str]], how: str, tmp_path: Path
) -> None:
    data, total, expected = shards
    cache = tmp_path / "cache"
    with SlowFs(data) as slow:
        _warm(how, cache, slow.path)
        read = []
        for _ in range(2):
            before = slow.stats()["bytes_read"]
            done = run(
                "--source", str(slow.path), "--cache", str(cache), "--cache-size", "1G", "--",
                sys.executable, "-c", DIGESTS, str(slow.path),
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert done.stdout.split() == expected
            read.append(slow.stats()["bytes_read"] - before)
    assert read[0] <= FEW * total, read[0] / total
    assert read[1] == 0


def test_over_a_mount(shards: tuple[Path, int, list[str]], tmp_path: Path) -> None:
    data, total, expected = shards
    cache, shown = tmp_path / "cache", tmp_path / "shown"
    shown.mkdir()
    with SlowFs(data) as slow:
        _warm("command", cache, slow.path)
        before = slow.stats()["bytes_read"]
        done = forebay_command("mount", slow.path, shown, "--cache", cache, "--cache-size", "1G")
        assert done.returncode == 0, done.stderr
        try:
            read = [
                hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(shown.iterdir())
            ]
        finally:
            assert forebay_command("unmount", shown).returncode == 0
        assert read == expected
        assert slow.stats()["bytes_read"] - before <= FEW * total
