"""slowfs end to end: a real mount, real processes. Times are bounded only where a wrong design
would miss by an order of magnitude; what must be exact is read from the counters."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

try:
    from forebay.slowfs import SlowFs
except ImportError:
    # slowfs can be tested before the package is built: its module needs nothing but Python.
    _file = Path(__file__).resolve().parents[1] / "python" / "forebay" / "testing" / "slowfs.py"
    _spec = importlib.util.spec_from_file_location("forebay_testing_slowfs", _file)
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    SlowFs = _module.SlowFs  # type: ignore[misc]

_usable, _reason = SlowFs.available()
pytestmark = pytest.mark.skipif(not _usable, reason=f"slowfs cannot be tested here: {_reason}")

Mount = Callable[..., SlowFs]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def mount(source: Path, tmp_path: Path) -> Iterator[Mount]:
    mounted: list[SlowFs] = []

    def make(**settings: object) -> SlowFs:
        mountpoint = tmp_path / f"mount{len(mounted)}"
        mountpoint.mkdir()
        mounted.append(SlowFs(source, mountpoint, **settings))  # type: ignore[arg-type]
        return mounted[-1]

    yield make
    for slow in mounted:
        slow.close()
    for slow in mounted:
        assert not os.path.ismount(slow.path)


def read_once(path: Path, size: int = 1 << 20) -> bytes:
    """One open, one read, one close, and no attribute request (Python's open would ask for
    them).
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)


def counts(slow: SlowFs, *names: str) -> list[int]:
    stats = slow.stats()
    return [stats[name] for name in names]


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.01)


def test_random_tree_is_identical(source: Path, mount: Mount) -> None:
    rng = random.Random(7)
    folders = [source]
    for i in range(20):
        folder = rng.choice(folders) / f"folder {i}"
        folder.mkdir()
        folders.append(folder)
    for i in range(200):
        size = rng.choice([0, 1, 4095, 4096, 4097, 100_000, 1 << 20, (1 << 20) + 1, 3_000_001])
        (rng.choice(folders) / f"fïle{i}").write_bytes(rng.randbytes(size))
    (source / "link").symlink_to("folder 0")
    (source / "dangling").symlink_to("nowhere")
    os.link(next(path for path in sorted(source.rglob("f*")) if path.is_file()), source / "hard")

    for cache in (False, True):
        slow = mount(cache=cache, jitter=0.5, stat_ms=0.01, read_ms=0.01, open_ms=0.01)
        expected, found = _tree(source), _tree(slow.path)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert found[name] == value, name


def _tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below root: type, mode, size, times and contents."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = Path(folder, name)
            attr = path.lstat()
            content: object = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = path.read_bytes()
            key = str(path.relative_to(root))
            found[key] = (attr.st_mode, attr.st_size, attr.st_mtime_ns, attr.st_ino, content)
    return found


def test_reads_at_offsets(source: Path, mount: Mount) -> None:
    data = random.Random(1).randbytes(5_000_000)
    (source / "f").write_bytes(data)
    slow = mount()
    fd = os.open(slow.path / "f", os.O_RDONLY)
    try:
        rng = random.Random(2)
        for _ in range(200):
            offset, size = rng.randrange(5_100_000), rng.randrange(1, 2_500_000)
            assert os.pread(fd, size, offset) == data[offset : offset + size]
    finally:
        os.close(fd)


def test_source_that_is_not_in_memory(source: Path, mount: Mount) -> None:
    data = random.Random(3).randbytes(3_000_000)
    slow = mount(read_ms=1)
    for i in range(32):
        with open(source / str(i), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda i: (slow.path / str(i)).read_bytes(), range(32)):
            assert found == data


@pytest.mark.parametrize("cache", [False, True])
def test_lists_100k_entries(source: Path, mount: Mount, cache: bool) -> None:
    names = {f"{i:06d}" for i in range(100_000)}
    for name in names:
        os.mknod(source / name)
    slow = mount(cache=cache)
    listed = os.listdir(slow.path)
    assert len(listed) == len(names)
    assert set(listed) == names


def test_sleeping_requests_overlap(source: Path, mount: Mount) -> None:
    threads = 256
    (source / "f").write_bytes(b"x" * 4096)
    slow = mount()
    fd = os.open(slow.path / "f", os.O_RDONLY)
    barrier = threading.Barrier(threads)

    def read(_: int) -> bytes:
        barrier.wait()
        return os.pread(fd, 4096, 0)

    # A busy machine may need longer than a short read to start them all.
    for read_ms in (500, 4000):
        slow.set(read_ms=read_ms)
        slow.reset()
        start = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            assert all(data == b"x" * 4096 for data in pool.map(read, range(threads)))
        elapsed = time.monotonic() - start
        stats = slow.stats()
        if stats["in_flight_max"] >= 250:
            break
    os.close(fd)
    assert stats["read"] == threads
    assert stats["in_flight_max"] >= 250
    assert elapsed < threads * read_ms * 1e-3 / 4


def test_first_lookups_in_a_folder_overlap(source: Path, mount: Mount) -> None:
    threads = 32
    for i in range(threads):
        (source / str(i)).touch()
    for stat_ms in (500, 4000):
        slow = mount(stat_ms=stat_ms)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda i: os.stat(slow.path / str(i)), range(threads)))  # noqa: B023
        if slow.stats()["in_flight_max"] >= threads - 2:
            break
    assert slow.stats()["in_flight_max"] >= threads - 2


def test_every_access_costs_again_without_cache(source: Path, mount: Mount) -> None:
    (source / "f").write_bytes(b"x" * 110_000)
    slow = mount()
    for _ in range(3):
        read_once(slow.path / "f")
    assert counts(slow, "lookup", "open", "read", "bytes_read") == [3, 3, 3, 330_000]


def test_second_access_is_free_with_cache(source: Path, mount: Mount) -> None:
    (source / "f").write_bytes(b"x" * 110_000)
    slow = mount(cache=True)
    first = read_once(slow.path / "f")
    # A read makes the kernel doubt the access time, so this asks once more.
    os.stat(slow.path / "f")
    slow.reset()
    assert os.stat(slow.path / "f").st_size == 110_000
    assert read_once(slow.path / "f") == first
    assert counts(slow, "lookup", "getattr", "read", "bytes_read") == [0, 0, 0, 0]


def test_counters_are_exact(source: Path, mount: Mount) -> None:
    (source / "folder").mkdir()
    (source / "folder" / "f").write_bytes(b"x" * 1000)
    (source / "link").symlink_to("folder")
    slow = mount()
    slow.reset()
    fd = os.open(slow.path / "folder" / "f", os.O_RDONLY)
    assert len(os.pread(fd, 600, 0)) == 600
    assert len(os.pread(fd, 600, 600)) == 400
    assert os.pread(fd, 600, 1000) == b""
    os.close(fd)
    wait_for(lambda: counts(slow, "release") == [1])
    stats = slow.stats()
    expected = {"lookup": 2, "open": 1, "read": 3, "release": 1, "bytes_read": 1000, "getattr": 0}
    assert {name: stats[name] for name in expected} == expected

    slow.reset()
    with pytest.raises(FileNotFoundError):
        os.stat(slow.path / "missing")
    assert os.readlink(slow.path / "link") == "folder"
    os.statvfs(slow.path)
    assert os.listdir(slow.path / "folder") == ["f"]
    stats = slow.stats()
    assert (stats["lookup"], stats["readlink"], stats["opendir"]) == (3, 1, 1)
    assert stats["statfs"] >= 1
    assert stats["readdir"] >= 1


def test_large_reads_arrive_in_few_requests(source: Path, mount: Mount) -> None:
    (source / "f").write_bytes(b"x" * (1 << 20))
    slow = mount()
    assert len(read_once(slow.path / "f")) == 1 << 20
    # Two where the reader's buffer does not begin on a page.
    assert counts(slow, "read")[0] <= 2


def test_reset(source: Path, mount: Mount) -> None:
    (source / "f").write_bytes(b"x")
    slow = mount()
    read_once(slow.path / "f")
    slow.reset()
    wait_for(lambda: counts(slow, "in_flight") == [0])
    assert counts(slow, "lookup", "open", "read", "bytes_read", "in_flight_max") == [0] * 5


def test_bandwidth_limit(source: Path, mount: Mount) -> None:
    size, reads = 500_000, 40
    for i in range(reads):
        (source / str(i)).write_bytes(b"x" * size)
    slow = mount(bandwidth_mb=20, read_ms=5)
    start = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: read_once(slow.path / str(i)), range(reads)))
    elapsed = time.monotonic() - start
    assert counts(slow, "bytes_read") == [size * reads]
    limit_s = size * reads / 20e6
    # The lower bound is the model's promise; the upper one only tells a limit from a standstill.
    assert 0.95 * limit_s <= elapsed <= 20 * limit_s


def test_operations_limit(source: Path, mount: Mount) -> None:
    (source / "f").write_bytes(b"x")
    slow = mount(ops=200)
    start = time.monotonic()
    for _ in range(50):
        os.stat(slow.path / "f")
    assert time.monotonic() - start >= 49 / 200


def test_settings_change_while_mounted(source: Path, mount: Mount) -> None:
    (source / "f").write_bytes(b"x")
    slow = mount(read_ms=1, seed=5)
    assert slow.settings()["read_ms"] == "1"
    slow.set(read_ms=300, jitter=0.01)
    assert slow.settings()["read_ms"] == "300"
    assert slow.settings()["seed"] == "5"
    start = time.monotonic()
    read_once(slow.path / "f")
    assert time.monotonic() - start >= 0.29
    with pytest.raises(ValueError, match="jitter must lie in"):
        slow.set(jitter=3)
    with pytest.raises(ValueError, match="unknown setting 'colour'"):
        slow.set(colour=3)
    assert slow.settings()["jitter"] == "0.01"


def test_eio_injection(source: Path, mount: Mount) -> None:
    (source / "f").write_bytes(b"x")
    slow = mount(eio_rate=1)
    with pytest.raises(OSError) as caught:
        os.open(slow.path / "f", os.O_RDONLY)
    assert caught.value.errno == errno.EIO
    slow.set(eio_rate=0)
    fd = os.open(slow.path / "f", os.O_RDONLY)
    slow.set(eio_rate=0.5)
    slow.reset()
    failed = 0
    for _ in range(200):
        try:
            assert os.pread(fd, 1, 0) == b"x"
        except OSError as error:
            assert error.errno == errno.EIO
            failed += 1
    os.close(fd)
    stats = slow.stats()
    assert stats["eio_injected"] == failed
    assert stats["bytes_read"] == 200 - failed
    assert 60 <= failed <= 140


def test_stall_until_released(source: Path, mount: Mount) -> None:
    # One file each: the kernel asks once for a name that several threads look up together.
    for i in range(4):
        (source / str(i)).write_bytes(b"x")
    slow = mount()
    slow.set(stall_ms="forever")
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(read_once, slow.path / str(i)) for i in range(4)]
        try:
            wait_for(lambda: counts(slow, "in_flight") == [4])
            assert not any(read.done() for read in waiting)
        finally:
            slow.set(stall_ms=0)
        assert [read.result(timeout=20) for read in waiting] == [b"x"] * 4


def test_stall_for_a_time(source: Path, mount: Mount) -> None:
    (source / "f").write_bytes(b"x")
    slow = mount()
    slow.set(stall_ms=300)
    start = time.monotonic()
    assert read_once(slow.path / "f") == b"x"
    assert time.monotonic() - start >= 0.25
    assert slow.settings()["stall_ms"] == "0"


def test_close_answers_what_is_stalled(source: Path, mount: Mount) -> None:
    (source / "f").write_bytes(b"x")
    slow = mount()
    fd = os.open(slow.path / "f", os.O_RDONLY)
    slow.set(stall_ms="forever")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(os.pread, fd, 1, 0)
        wait_for(lambda: counts(slow, "in_flight") == [1])
        slow.close()
        assert waiting.result(timeout=20) == b"x"
    os.close(fd)


def test_is_read_only(source: Path, mount: Mount) -> None:
    (source / "f").write_bytes(b"x")
    slow = mount()
    attempts: list[Callable[[], object]] = [
        lambda: (slow.path / "f").write_bytes(b"y"),
        lambda: (slow.path / "new").write_bytes(b"y"),
        lambda: (slow.path / "f").unlink(),
        lambda: (slow.path / "folder").mkdir(),
        lambda: os.rename(slow.path / "f", slow.path / "g"),
        lambda: os.truncate(slow.path / "f", 0),
        lambda: os.chmod(slow.path / "f", 0),
    ]
    for attempt in attempts:
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno == errno.EROFS
    assert (source / "f").read_bytes() == b"x"


def test_can_be_written_to(source: Path, mount: Mount) -> None:
    slow = mount(writable_mb=0)
    data = os.urandom(3 << 20)
    (slow.path / "folder").mkdir()
    (slow.path / "folder" / "f").write_bytes(data)
    assert (source / "folder" / "f").read_bytes() == data
    with open(slow.path / "folder" / "f", "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"abc", 1 << 20)
        # An open file stays itself under another name.
        os.rename(slow.path / "folder" / "f", slow.path / "g")
        assert os.fstat(file.fileno()).st_nlink == 1
        os.pwrite(file.fileno(), b"def", 0)
        os.truncate(file.fileno(), 2 << 20)
    expected = bytearray(data[: 2 << 20])
    expected[:3], expected[1 << 20 : (1 << 20) + 3] = b"def", b"abc"
    assert (slow.path / "g").read_bytes() == bytes(expected)
    assert sorted(os.listdir(slow.path)) == ["folder", "g"]
    (slow.path / "folder").rmdir()
    (slow.path / "g").unlink()
    assert os.listdir(source) == []
    with pytest.raises(OSError):
        (slow.path / ".slowfs" / "new").write_bytes(b"x")


def test_further_names_and_extended_attributes(source: Path, mount: Mount) -> None:
    slow = mount(writable_mb=0)
    file, other = slow.path / "f", slow.path / "g"
    file.write_bytes(b"bytes")
    os.setxattr(file, "user.a", b"value")
    assert os.getxattr(file, "user.a") == b"value"
    assert "user.a" in os.listxattr(file)
    os.link(file, other)
    assert file.stat().st_ino == other.stat().st_ino
    file.unlink()
    assert (other.read_bytes(), os.getxattr(other, "user.a")) == (b"bytes", b"value")
    os.removexattr(other, "user.a")
    with pytest.raises(OSError) as caught:
        os.getxattr(other, "user.a")
    assert caught.value.errno == errno.ENODATA
    assert os.listdir(source) == ["g"]


def test_a_stall_holds_writes(source: Path, mount: Mount) -> None:
    slow = mount(writable_mb=100)
    slow.set(stall_ms="forever")
    with ThreadPoolExecutor() as pool:
        written = pool.submit((slow.path / "f").write_bytes, b"x")
        wait_for(lambda: slow.stats()["in_flight"] == 1)
        assert not written.done()
        slow.set(stall_ms=0)
        assert written.result(timeout=20) == 1


@pytest.mark.parametrize("what", ["cut", "make", "rename", "link", "remove", "attribute"])
def test_a_stall_holds_changes(source: Path, mount: Mount, what: str) -> None:
    slow = mount(writable_mb=100, cache=True)  # names that the kernel knows are not looked up
    (slow.path / "f").write_bytes(b"x")
    assert not (slow.path / "g").exists() and not (slow.path / "folder").exists()
    change: dict[str, Callable[[], object]] = {
        "cut": lambda: os.truncate(slow.path / "f", 0),
        "make": lambda: (slow.path / "folder").mkdir(),
        "rename": lambda: os.rename(slow.path / "f", slow.path / "g"),
        "link": lambda: os.link(slow.path / "f", slow.path / "g"),
        "remove": lambda: (slow.path / "f").unlink(),
        "attribute": lambda: os.setxattr(slow.path / "f", "user.a", b"value"),
    }
    slow.set(stall_ms="forever")
    with ThreadPoolExecutor() as pool:
        changed = pool.submit(change[what])
        wait_for(lambda: slow.stats()["in_flight"] == 1)
        assert not changed.done()
        slow.set(stall_ms=0)
        changed.result(timeout=20)


def test_control_files_are_hidden_and_never_delayed(source: Path, mount: Mount) -> None:
    slow = mount(open_ms=60_000, stat_ms=60_000, read_ms=60_000, readdir_ms=0)
    assert slow.stats()["lookup"] == 0
    slow.set(open_ms=0, stat_ms=0, read_ms=0)
    assert os.listdir(slow.path) == []


def test_errors_of_the_source_pass_through(source: Path, mount: Mount) -> None:
    (source / "folder").mkdir()
    (source / "f").write_bytes(b"x")
    slow = mount()
    with pytest.raises(FileNotFoundError):
        read_once(slow.path / "missing")
    with pytest.raises(NotADirectoryError):
        os.listdir(slow.path / "f")
    with pytest.raises(IsADirectoryError):
        read_once(slow.path / "folder")


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_unmounts_on_signal(source: Path, mount: Mount, kind: signal.Signals) -> None:
    slow = mount()
    assert os.path.ismount(slow.path)
    os.kill(slow.pid, kind)
    wait_for(lambda: not os.path.ismount(slow.path))


def _slowfs(*arguments: object) -> subprocess.CompletedProcess[str]:
    binary = SlowFs.find()
    assert binary is not None
    return subprocess.run(
        [binary, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def test_background_process_leaves_when_unmounted(source: Path, tmp_path: Path) -> None:
    (source / "f").write_bytes(b"x")
    mountpoint = tmp_path / "mount"
    mountpoint.mkdir()
    started = _slowfs(source, mountpoint)
    try:
        assert (started.returncode, started.stderr) == (0, "")
        assert (mountpoint / "f").read_bytes() == b"x"
        pid = json.loads((mountpoint / ".slowfs" / "stats").read_text())["pid"]
    finally:
        subprocess.run(["fusermount3", "-u", str(mountpoint)], check=True)
    wait_for(lambda: not _alive(pid))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_says_what_is_wrong(source: Path, tmp_path: Path, mount: Mount) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    full = tmp_path / "full"
    full.mkdir()
    (full / "f").touch()
    file = full / "f"
    inside = source / "inside"
    inside.mkdir()
    mounted = mount().path
    cases = [
        ((tmp_path / "none", empty), [str(tmp_path / "none"), "No such file"]),
        ((file, empty), [str(file), "not a folder"]),
        ((source, tmp_path / "none"), [str(tmp_path / "none"), "mkdir -p"]),
        ((source, full), [str(full), "not empty"]),
        ((source, file), [str(file), "not a folder"]),
        ((source, mounted), [str(mounted), "already mounted", "fusermount3 -u"]),
        ((source, inside), [str(inside), "lies in the source folder"]),
        ((source,), ["SOURCE_DIR and MOUNTPOINT", "--help"]),
        (("--colour", source, empty), ["--colour", "--help"]),
        (("--read-ms", "fast", source, empty), ["read_ms", "fast"]),
        (("--jitter", "7", source, empty), ["jitter"]),
        (("--threads", "0", source, empty), ["--threads"]),
        (("--seed",), ["--seed needs a value"]),
    ]
    for arguments, words in cases:
        result = _slowfs(*arguments)
        assert result.returncode == 2, arguments
        assert result.stdout == ""
        for word in words:
            assert word in result.stderr, (arguments, result.stderr)
    with pytest.raises(RuntimeError, match="not empty"):
        SlowFs(source, full)


def test_help() -> None:
    result = _slowfs("--help")
    assert result.returncode == 0
    assert "--bandwidth" in result.stdout
