"""Which daemon a run has: its own, that of its cache folder, or that of its job on this node."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from forebay import _forebay, files
from transparent.under import LIBRARY

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason="this build has no libforebay_posix.so"
)

FILES, BYTES = 24, 20_000
RUN = [sys.executable, "-m", "forebay.cli", "run"]

# Reads everything, says so, and again when it is told: from where each file came, and its sum.
TWICE = """
import hashlib, os, sys, time
folder, ready, go = sys.argv[1:4]
def read():
    sums, copies = [], 0
    for name in sorted(os.listdir(folder)):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        copies += "/copies/" in os.path.realpath(f"/proc/self/fd/{fd}")
        sums.append(hashlib.sha256(os.read(fd, 1 << 20)).hexdigest())
        os.close(fd)
    print(copies, hashlib.sha256("".join(sums).encode()).hexdigest(), flush=True)
read()
open(ready, "w").close()
end = time.monotonic() + 60
while not os.path.exists(go) and time.monotonic() < end:
    time.sleep(0.02)
read()
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "d"
    folder.mkdir()
    for i in range(FILES):
        (folder / f"{i:03}.bin").write_bytes(bytes([i]) * BYTES)
    time.sleep(3.2)  # files that have just changed are left alone
    return folder


def expected(data: Path) -> str:
    sums = [hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(data.iterdir())]
    return hashlib.sha256("".join(sums).encode()).hexdigest()


class Run:
    """A program under `forebay run` that reads the data, and waits to read it again."""

    begun: ClassVar[list[subprocess.Popen]] = []

    def __init__(self, data: Path, at: Path, *options: str, **variables: str) -> None:
        at.mkdir()
        self.at, self.go = at, at / "go"
        program = [sys.executable, "-c", TWICE, str(data), str(at / "ready"), str(self.go)]
        self.process = subprocess.Popen(
            [*RUN, "--source", str(data), *options, "--", *program],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.begun.append(self.process)

    def ready(self) -> Run:
        end = time.monotonic() + 60
        while not (self.at / "ready").exists():
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"it does not run: {self.process.communicate()}")
            time.sleep(0.02)
        return self

    def end(self) -> tuple[list[list[str]], str]:
        """(copies and sum of both readings, standard error)."""
        self.go.touch()
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return [line.split() for line in out.splitlines()], err


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sockets and folders for copies of the test's own."""
    for name, variable in (("r", "XDG_RUNTIME_DIR"), ("local", "TMPDIR")):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / name))
    for variable in list(os.environ):
        if variable.startswith(("SLURM_", "OMPI_", "PMI", "MPI_")):
            monkeypatch.delenv(variable)
    yield tmp_path
    for process in Run.begun:
        if process.poll() is None:  # the test has failed
            process.terminate()
            process.communicate(timeout=30)
    Run.begun.clear()


def daemons() -> dict[int, str]:
    """Of this test: process, and folder of its copies."""
    return {int(said["pid"]): str(said["cache"]) for said in files.running()}


def gone(folder: Path) -> None:
    end = time.monotonic() + 30
    while left := os.listdir(folder):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_a_kill_in_one_run_does_not_touch_another(data: Path, place: Path) -> None:
    runs = [Run(data, place / name).ready() for name in ("a", "b")]
    found = daemons()
    assert len(found) == len(set(found.values())) == 2
    os.kill(next(iter(found)), signal.SIGKILL)
    said = [run.end() for run in runs]
    for lines, _ in said:
        assert [total for _, total in lines] == [expected(data)] * 2
    # One has lost its daemon and says so; the other one has all its copies.
    lost = ["did not last" in err for _, err in said]
    assert sorted(lost) == [False, True]
    lines, err = said[lost.index(False)]
    assert lines[1][0] == str(FILES)
    assert "WARNING" not in err
    gone(place / "local")


def test_runs_of_one_cache_share_a_daemon_and_outlive_it(data: Path, place: Path) -> None:
    cache = str(place / "cache")
    runs = [Run(data, place / name, "--cache", cache).ready() for name in ("a", "b")]
    found = daemons()
    assert list(found.values()) == [cache]
    os.kill(next(iter(found)), signal.SIGKILL)
    for run in runs:
        lines, _ = run.end()
        assert [total for _, total in lines] == [expected(data)] * 2


def test_settings_that_differ_from_the_running_daemons_are_told(data: Path, place: Path) -> None:
    cache = str(place / "cache")
    first = Run(data, place / "a", "--cache", cache, "--cache-size", "64M").ready()
    same = Run(data, place / "b", "--cache", cache, "--cache-size", "64M", "--quiet").ready()
    differs = ("--cache-size", "32M", "--ahead", "16M")
    other = Run(data, place / "c", "--cache", cache, *differs).ready()
    errors = [run.end()[1] for run in (other, same, first)]
    warnings = [line for line in errors[0].splitlines() if "WARNING" in line]
    assert len(warnings) == 1, errors[0]
    both = ("--cache-size 32.0 MiB (it has 64.0 MiB)", "--ahead 16.0 MiB (it has")
    for part in (cache, *both, "use another folder"):
        assert part in warnings[0]
    assert "WARNING" not in errors[1] + errors[2]


SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prte-1@1",
}  # fmt: skip


def task(launcher: dict[str, str], number: int) -> dict[str, str]:
    names = ("SLURM_PROCID", "SLURM_LOCALID")
    if launcher is MPI:
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    return {**launcher, **dict.fromkeys(names, str(number))}


@pytest.mark.parametrize("launcher", [SLURM, MPI], ids=["srun", "mpirun"])
def test_tasks_of_a_job_on_a_node_share_a_daemon(
    data: Path, place: Path, launcher: dict[str, str]
) -> None:
    runs = [Run(data, place / f"{i}", **task(launcher, i)) for i in range(2)]
    for run in runs:
        run.ready()
    [cache] = daemons().values()
    assert cache.startswith(str(place / "local"))
    said = [run.end() for run in runs]
    for lines, _ in said:
        assert lines == [[str(FILES), expected(data)]] * 2
    # One of them says what was done on the node: each file was read once.
    assert said[0][1].count("\n") == 1 and said[1][1] == ""
    assert f"in {FILES} reads" in said[0][1]
    gone(place / "local")


def test_a_task_may_have_a_daemon_of_its_own(data: Path, place: Path) -> None:
    runs = [Run(data, place / f"{i}", "--private", **task(SLURM, i)).ready() for i in range(2)]
    assert len(daemons()) == 2
    for run in runs:
        lines, err = run.end()
        assert lines == [[str(FILES), expected(data)]] * 2
        assert err.count("\n") == 1 and f"{FILES} files copied" in err
    gone(place / "local")
    done = subprocess.run(
        [*RUN, "--private", "--cache", str(place / "c"), "--source", str(data), "--", "true"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "--private" in done.stderr and "--cache" in done.stderr


def test_copies_that_the_store_does_not_take_are_told(data: Path, place: Path) -> None:
    cache = place / "cache"
    lines, err = Run(data, place / "a", "--cache", str(cache)).ready().end()
    assert "WARNING" not in err
    gone(place / "r")  # the daemon is
    [group] = [path for path in cache.iterdir() if len(path.name) == 16]
    shutil.rmtree(group)
    (cache / "index.log").unlink()
    group.write_text("in the way of the copies")
    run = Run(data, place / "b", "--cache", str(cache)).ready()
    [log] = (place / "r").rglob("files-*.log")
    said = log.read_text()
    status = subprocess.run(
        [*RUN[:-1], "status"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    assert f"WARNING: the cache folder {cache} takes no more copies" in status
    again, err = run.end()
    assert again == lines  # this run has its copies
    warnings = [line for line in err.splitlines() if "WARNING" in line]
    assert len(warnings) == 1, err
    assert f"the cache folder {cache} takes no more copies" in warnings[0]
    assert "another folder" in warnings[0]
    assert said.count("WARNING") == 1 and str(cache) in said


LARGE = """
import os, sys, time
for name in sorted(os.listdir(sys.argv[1])):
    with open(os.path.join(sys.argv[1], name), "rb", buffering=0) as file:
        while file.read(1 << 22):
            pass
open(sys.argv[2], "w").close()
while not os.path.exists(sys.argv[3]):
    time.sleep(0.02)
"""


def test_memory_of_a_run_is_for_what_is_on_its_way(place: Path) -> None:
    folder = place / "large"
    folder.mkdir()
    for i in range(10):  # holes: the source takes no room
        with open(folder / f"{i}.bin", "wb") as file:
            file.truncate(80 << 20)
    time.sleep(3.2)
    ready, go = place / "ready", place / "go"
    program = [sys.executable, "-c", LARGE, str(folder), str(ready), str(go)]
    run = subprocess.Popen(
        [*RUN, "--source", str(folder), "--", *program],
        env=dict(os.environ), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    most = 0
    try:
        while run.poll() is None and not ready.exists():
            for pid in daemons():
                most = max(most, memory_of(pid))
            time.sleep(0.05)
        [pid] = daemons()
        most = max(most, memory_of(pid))
        said = json.loads(_forebay.SharedEngine.attach_running(engine_folder(), 4.0).describe())
    finally:
        go.touch()
        _, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert said["budget"] <= 512 << 20
    assert "10 files copied" in err
    # Whatever it copies, its memory, with what it shares, is the budget and the program itself.
    assert 0 < most < (512 << 20) + (96 << 20), f"{most >> 20} MiB"
    gone(place / "local")


def engine_folder() -> str:
    where = _forebay.SharedEngine.default_folder()
    [name] = [name for name in os.listdir(where) if name.startswith("run-")]
    return os.path.join(where, name)


def memory_of(pid: int) -> int:
    """Bytes of a process, shared memory included."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line and "kB" in line)
        return int(lines["Pss"].split()[0]) << 10
    except (OSError, KeyError):
        return 0
