"""The demo, small: both loaders, with a mount where that works and with the fallback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forebay.commands.demo import command, training  # noqa: E402
from forebay.slowfs import SlowFs  # noqa: E402

_usable, _reason = SlowFs.available()
needs_fuse = pytest.mark.skipif(not _usable, reason=f"no mount here: {_reason}")
KINDS = [pytest.param([], id="mount", marks=needs_fuse), pytest.param(["--no-fuse"], id="fallback")]


def demo(room: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The demo in a process of its own, with `room` for its temporary data."""
    room.mkdir()
    return subprocess.run(
        [sys.executable, "-m", "forebay.cli", "demo", *options],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "TMPDIR": str(room)},
    )  # fmt: skip


@pytest.mark.parametrize("options", KINDS)
def test_demo(options: list[str], tmp_path: Path, shared_memory_gone: Callable[[], None]) -> None:
    room, out = tmp_path / "tmp", tmp_path / "out"
    done = demo(room, "--files", "90", "--epochs", "2", "--out", str(out), *options)
    text = done.stdout
    assert done.returncode == 0, text + done.stderr
    assert done.stderr == ""
    assert "Check: both saw the same 180 samples in the same order" in text
    assert ("emulated inside the loaders" in text) == bool(options)
    # Files read by epoch: Forebay reads each file once, PyTorch once an epoch.
    reads = re.findall(r"^.* \d+ +[\d.]+ s +[\d.]+% +(\d+) ", text, re.MULTILINE)
    assert reads == ["90", "90", "90", "0"]
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "forebay doctor" in text
    assert os.listdir(room) == []
    shared_memory_gone()


def test_kept_data_stays(tmp_path: Path) -> None:
    room = tmp_path / "tmp"
    done = demo(
        room, "--files", "40", "--epochs", "1", "--keep", "--no-fuse", "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (kept,) = room.glob("forebay-demo-*/data")
    assert f"kept: {kept}" in done.stdout
    assert len(list(kept.glob("*/*.bin"))) == 40
    assert os.listdir(kept.parent) == ["data"]


def test_a_difference_is_found_and_fails() -> None:
    def run(order: list[int], checksums: list[int], losses: list[float]) -> training.Run:
        return training.Run("a", order=order, checksums=checksums, losses=losses)

    good = run([1, 2], [7], [0.5])
    assert command.same([good, run([1, 2], [7], [0.5])]) == []
    assert "order" in command.same([good, run([2, 1], [7], [0.5])])[0]
    assert "samples" in command.same([good, run([1], [7], [0.5])])[0]
    assert "bytes" in command.same([good, run([1, 2], [8], [0.5])])[0]
    assert "losses" in command.same([good, run([1, 2], [7], [0.6])])[0]


@pytest.mark.parametrize(
    ("options", "number"),
    [
        pytest.param([], signal.SIGTERM, id="mount-15", marks=needs_fuse),
        pytest.param(["--no-fuse"], signal.SIGINT, id="fallback-2"),
    ],
)
def test_nothing_stays_after_an_early_end(
    options: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    room = tmp_path / "tmp"
    room.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "forebay.cli", "demo", "--files", "300", "--epochs", "500",
         "--out", str(tmp_path / "out"), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(room)},
    )  # fmt: skip
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if "epoch 1 took" in line:
            break
    assert "epoch 1 took" in seen
    start = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal's Ctrl-C reaches workers and slowfs too
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number), err
    assert "Traceback" not in err, err
    assert time.monotonic() - start < 25
    assert os.listdir(room) == []
    assert str(room) not in Path("/proc/self/mounts").read_text()
