"""The file service: started, found, killed, and what Python sees of it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import forebay
import pytest
from forebay import files

_PATIENCE_S = 20.0


def _await(condition, what: str) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def _gone(pid: int) -> bool:
    """Whether the process has ended; whoever inherits it may not have looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _is_free(lock: str) -> bool:
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for i in range(8):
        path = folder / f"class{i % 2}" / f"{i}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i]) * 5000)
    return folder


@pytest.fixture
def place() -> Iterator[str]:
    """A folder for the socket, with a short path."""
    with tempfile.TemporaryDirectory(prefix="fb") as folder:
        yield os.path.join(folder, "run")


@pytest.fixture
def started(data: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[files.Service]:
    service = files.Service.start(sources=[data], folder=place, young_ms=0, linger=0)
    for name, value in service.environment().items():
        monkeypatch.setenv(name, value)
    yield service
    cache, pid = service.cache, service.status()["pid"]
    service.close()
    _await(lambda: not os.path.exists(cache), "the folder of a run stays after it")
    _await(lambda: _gone(pid), "the service stays after its last session")
    assert not os.path.exists(place)


def _read(path: Path) -> tuple[bytes, bool]:
    """The bytes, and whether they came from a copy."""
    fd = files.open_fd(path)
    try:
        where = os.readlink(f"/proc/self/fd/{fd}")
        return os.pread(fd, 1 << 20, 0), where != os.fspath(path)
    finally:
        os.close(fd)


def test_files_are_opened_by_their_copies(data: Path, started: files.Service) -> None:
    for path in sorted(data.rglob("*.bin")):
        assert _read(path) == (path.read_bytes(), True)
    assert started.status()["metrics"]["forebay_files_kept_total"] == 8
    assert _read(Path(__file__).resolve()) == (Path(__file__).read_bytes(), False)
    with pytest.raises(FileNotFoundError):
        files.open_fd(data / "none")
    # Written by a program that says so.
    path = data / "class1" / "1.bin"
    started.changed(path)
    path.write_bytes(b"new")
    assert _read(path) == (b"new", False)


def test_knobs_are_set_together_or_not_at_all(data: Path, started: files.Service) -> None:
    rate = "source_bytes_per_second"
    started.set_knobs({"files_reads_in_flight": 3, rate: 20_000})
    knobs = {knob["name"]: knob["value"] for knob in started.status()["knobs"]}
    assert (knobs["files_reads_in_flight"], knobs[rate]) == (3, 20_000)
    with pytest.raises(forebay.ArgumentError, match="files_reads_in_flight"):
        started.set_knobs({"files_ahead_bytes": 5, "files_reads_in_flight": 0})
    with pytest.raises(forebay.ArgumentError, match="no_such_knob"):
        started.set_knobs({"no_such_knob": 5})
    assert {k["name"]: k["value"] for k in started.status()["knobs"]} == knobs
    # 15,000 bytes at 20,000 a second, less what is let through at once.
    begin = time.monotonic()
    for path in sorted(data.rglob("*.bin"))[:3]:
        assert _read(path)[1]
    assert time.monotonic() - begin > 0.2
    started.set_knobs({rate: 0})


def test_a_stream_has_files_copied_ahead(data: Path, started: files.Service) -> None:
    stream = started.stream()
    paths = sorted(data.rglob("*.bin"))
    stream.names(paths)
    stream.order(0, list(range(len(paths))))
    _await(
        lambda: started.status()["metrics"]["forebay_files_kept_total"] == len(paths),
        "nothing is copied ahead",
    )
    with pytest.raises(forebay.ArgumentError):
        stream.order(0, [len(paths)])
    stream.at(3)
    stream.close()
    _await(lambda: started.status()["streams"] == 0, "the stream does not end")


def test_status_shows_it(started: files.Service, place: str) -> None:
    (said,) = files.running(place)
    assert said["cache"] == started.cache and said["sessions"] == 1
    shown = subprocess.run(
        [sys.executable, "-m", "forebay.cli", "status", "--folder", place],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert "file services" in shown.stdout and started.cache in shown.stdout


def test_every_metric_and_knob_is_in_the_documentation(started: files.Service) -> None:
    text = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    said = started.status()
    named = [*said["metrics"], *(knob["name"] for knob in said["knobs"])]
    assert [name for name in named if f"`{name}`" not in text] == []


def test_a_killed_service_is_replaced(data: Path, place: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    options = dict(cache=cache, sources=[data], folder=place, young_ms=0, linger=0)
    first = files.Service.start(**options)
    client = files._forebay.FileClient(
        *[os.fsencode(first.environment()[v]) for v in (files.CACHE, files.SOCKET, files.SOURCES)]
    )
    path = data / "class0" / "0.bin"
    fd = client.open(os.fsencode(path))
    assert os.pread(fd, 10, 0) == bytes(10)
    os.close(fd)
    (cache / "run" / "copies" / "half.tmp").write_bytes(b"x")
    pid = first.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    _await(lambda: _gone(pid), "it cannot be killed")
    # Without it all is the source's: what the client knows is not kept up to date any more.
    assert not client.on
    assert client.open(os.fsencode(path)) == -1
    with files.Service.start(**options) as second:
        assert not client.on
        assert not (cache / "run" / "copies" / "half.tmp").exists()
        with pytest.raises(forebay.StorageError):
            first.status()
        # The engine's store has them, and programs once they ask.
        assert second.status()["metrics"]["forebay_files_kept_bytes"] == 0
        pid = second.status()["pid"]
    _await(lambda: _gone(pid), "the service stays")
    # Only the store's name is left.
    assert not (cache / "run").exists()
    assert len(list(cache.rglob("*.bin"))) == 1
    first.close()


def test_leftovers_of_killed_runs_are_removed(
    data: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", os.fspath(tmp_path))
    killed = files.Service.start(sources=[data], folder=place)
    pid = killed.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    _await(lambda: _gone(pid), "it cannot be killed")
    _await(lambda: _is_free(os.path.join(killed.view, "lock")), "its last thread keeps the lock")
    lives = files.Service.start(sources=[data], folder=place, linger=0)
    assert os.path.dirname(lives.cache) == os.fspath(tmp_path)
    assert not os.path.exists(killed.cache)
    assert os.path.exists(lives.cache)
    os.kill(lives.status()["pid"], signal.SIGTERM)
    _await(lambda: not os.path.exists(lives.cache), "SIGTERM leaves the folder")


def test_wrong_arguments_are_named(
    data: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", os.fspath(tmp_path))
    with pytest.raises(forebay.MissingError, match="nowhere"):
        files.Service.start(sources=[tmp_path / "nowhere"], folder=place)
    with pytest.raises(forebay.ArgumentError, match="cache_bytes"):
        files.Service.start(sources=[data], folder=place, cache_bytes="many")
    with pytest.raises(forebay.ArgumentError, match="no_such_thing"):
        files.Service.start(sources=[data], folder=place, no_such_thing=1)
    assert os.listdir(tmp_path) == ["data"]
    with pytest.raises(forebay.ForebayError, match="extended attributes"):
        _without_attributes(data, place)
    assert not os.path.exists(place)


def _without_attributes(data: Path, place: str) -> None:
    """A cache on a file system that has no extended attributes, if there is one."""
    for folder in ("/dev/shm", "/sys/fs/cgroup", "/proc"):
        try:
            path = os.path.join(folder, f"forebay-test-{os.getpid()}")
            os.mkdir(path)
        except OSError:
            continue
        try:
            os.setxattr(path, "user.forebay.try", b"x")
        except OSError:
            try:
                files.Service.start(cache=path, sources=[data], folder=place)
            finally:
                subprocess.run(["rm", "-rf", path], check=True)
        else:
            os.rmdir(path)
    raise forebay.ForebayError("every file system here has extended attributes")
