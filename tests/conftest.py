"""Data sets that tests share, seeds, and a check that no test leaves anything behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Descriptors that libraries open once and keep: /dev/urandom, a cached epoll, a resource tracker.
_FD_TOLERANCE = 4
_WAIT_S = 10.0
_HANGS_S = 200.0  # a test; the longest takes a minute
_LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS",
    "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS_PER_NODE",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "FOREBAY_NODES",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _no_state_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Daemons keep policies in the user's state folder; those of tests have one of their own."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def seed_count() -> int:
    return int(os.environ.get("FOREBAY_SEEDS", "20"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked `seeds` that take a `seed` run once for each of FOREBAY_SEEDS seeds."""
    if "seed" in metafunc.fixturenames and metafunc.definition.get_closest_marker("seeds"):
        metafunc.parametrize("seed", range(seed_count()), ids=lambda s: f"seed{s}")


# ---- a test that hangs


class _Watch:
    """Tells what the processes that a test waits for are doing, and ends them: the test fails with
    that, and the others run. Of this process itself pytest-timeout tells, later.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._until: float | None = None
        self._test = ""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def begin(self, test: str) -> None:
        with self._changed:
            self._test, self._until = test, time.monotonic() + _HANGS_S
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._until = None

    def _run(self) -> None:
        while True:
            with self._changed:
                left = _HANGS_S if self._until is None else self._until - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                self._until = None
                test = self._test
            pids = _descendants(os.getpid())
            said = f"\n{test} has not ended in {_HANGS_S:.0f} s; its processes:\n"
            os.write(2, (said + "".join(map(_doing, pids))).encode(errors="replace"))
            # Python's fault handler has them print their stacks first.
            for number, pause in ((signal.SIGABRT, 3.0), (signal.SIGKILL, 0.0)):
                for pid in pids:
                    with contextlib.suppress(OSError):
                        os.kill(pid, number)
                time.sleep(pause)


def _descendants(of: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [of]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _doing(pid: int) -> str:
    """A process: its command, and where its threads are."""
    out = ""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        out = f"{pid} {command.decode(errors='replace')[:300]}\n"
        for task in Path(f"/proc/{pid}/task").iterdir():
            state = (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
            where = (task / "wchan").read_text()
            call = (task / "syscall").read_text().split()[0]
            name = (task / "comm").read_text().strip()
            out += f"  {task.name} {name}: {state}, system call {call}, {where}\n"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        spy = [os.path.join(os.path.dirname(sys.executable), "py-spy"), "dump", "--pid", str(pid)]
        out += subprocess.run(spy, capture_output=True, text=True, timeout=20).stdout
    return out


_watch = pytest.StashKey[_Watch]()


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    config.stash[_watch] = _Watch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    watch = item.config.stash[_watch]
    watch.begin(item.nodeid)
    try:
        return (yield)
    finally:
        watch.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


_failed = pytest.StashKey[bool]()


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Catalogs are saved in a folder of this run; also by the processes that tests start."""
    before = os.environ.get("FOREBAY_CACHE_DIR")
    os.environ["FOREBAY_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["FOREBAY_CACHE_DIR"]
    else:
        os.environ["FOREBAY_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of the test run, if any, is not the launcher of the loaders."""
    for name in _LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Pulse:
    """Measures for how long this process could not run though it wanted to: a machine that stands
    still is no hang of ours. A context manager; ``longest`` is in seconds.
    """

    def __enter__(self) -> Pulse:
        self.longest = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()
        return self

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._end.wait(0.01):
            now = time.monotonic()
            self.longest = max(self.longest, now - last)
            last = now

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def forebay_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [name for name in names if name.startswith("forebay")]


def _children() -> list[str]:
    """Living children, less the resource tracker that multiprocessing keeps for good."""
    multiprocessing.active_children()  # reaps those that have ended
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if int(parent) == os.getpid() and state != "Z" and "resource_tracker" not in command:
            found.append(f"{entry.name} {command}")
    return found


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {p.name for p in folder.iterdir() if "forebay" in p.name} if folder.is_dir() else set()


def _descriptors() -> dict[str, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[entry] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue
    if any(target.startswith("/dev/nvidia") for target in found.values()):
        return {}  # CUDA opens and keeps descriptors as it likes
    return found


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that passed: no thread, child, descriptor or shared memory of ours remains."""
    descriptors = _descriptors()
    shared = _shared_memory()
    threads = len(forebay_threads())
    yield
    if request.node.stash.get(_failed, True):
        return  # its traceback keeps loaders alive

    def left() -> str:
        if names := forebay_threads()[threads:]:
            return f"threads {names}"
        if children := _children():
            return f"children {children}"
        if files := _shared_memory() - shared:
            return f"files in /dev/shm: {sorted(files)}"
        now = _descriptors()
        if len(now) > len(descriptors) + _FD_TOLERANCE:
            new = {n: to for n, to in now.items() if descriptors.get(n) != to}
            return f"{len(now) - len(descriptors)} descriptors: {new}"
        return ""

    request.node.funcargs.clear()  # pytest's own hold on an engine
    until = time.monotonic() + _WAIT_S
    if what := left():
        gc.collect()
    while what and time.monotonic() < until:
        time.sleep(0.01)
        what = left()
    assert not what, f"the test left behind {what}"


@pytest.fixture
def shared_memory_gone() -> Callable[[], None]:
    """Asserts that nothing stays in /dev/shm of what came since the test began. Other processes of
    the test run have files there, too, which come and go.
    """
    before = set(os.listdir("/dev/shm"))

    def check() -> None:
        left = set(os.listdir("/dev/shm")) - before
        until = time.monotonic() + _WAIT_S
        while left and time.monotonic() < until:
            time.sleep(0.01)
            left &= set(os.listdir("/dev/shm"))
        assert not left

    return check


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Waits for something that happens in another thread, with a bound."""

    def wait(condition: Callable[[], bool], seconds: float = 20.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "it did not happen in time"
            time.sleep(0.005)

    return wait


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """61 files in 3 classes, some empty, some deeper. 61 is prime: nothing divides it."""
    from data_sets import make_folder

    return make_folder(tmp_path_factory.mktemp("folder") / "train", files=61)


@pytest.fixture(scope="session")
def large_folder(tmp_path_factory: pytest.TempPathFactory):
    """Some 12 MB: more than the smallest budget holds."""
    from data_sets import make_folder

    data = make_folder(
        tmp_path_factory.mktemp("large") / "train", classes=5, files=211, mean_bytes=48_000
    )
    assert data.total_bytes > 8 << 20
    return data


@pytest.fixture(scope="session")
def webdataset(tmp_path_factory: pytest.TempPathFactory):
    """51 samples of two or three members in 3 tar shards."""
    from data_sets import make_webdataset

    return make_webdataset(tmp_path_factory.mktemp("tars") / "train")


@pytest.fixture(scope="session")
def tfrecord(tmp_path_factory: pytest.TempPathFactory):
    """63 records in 3 files."""
    from data_sets import make_tfrecord

    return make_tfrecord(tmp_path_factory.mktemp("records") / "train")


@pytest.fixture
def engine():
    """An engine of the test's own with the smallest comfortable budget."""
    import forebay

    return forebay.Engine(memory="64M")
