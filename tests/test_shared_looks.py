"""Ranks of one job that share a node's daemon look at the files once, for all of them."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import forebay
import pytest
from data_sets import written_long_ago
from forebay.slowfs import SlowFs
from test_daemon import run_folder  # noqa: F401 - a fixture

COUNT = 240
RANKS = 4
needs_slowfs = pytest.mark.skipif(not SlowFs.available()[0], reason=SlowFs.available()[1])

# Does what it is told, a line each, and answers with a line.
_RANK = """
import json, sys
import forebay

engine = forebay.SharedEngine(memory="64M", linger=0)
loader = None
for line in sys.stdin:
    command, *words = line.split()
    said = None
    if command == "open":
        loader = forebay.DataLoader(words[0], 16, rank=0, world_size=1, engine=engine,
                                    freshness=words[1], progress=False)
    elif command == "read":
        said = {}
        for batch in loader:
            for i, number in enumerate(batch.indices):
                data = batch[i].tobytes()
                said[loader.catalog.name(int(number))] = [len(data), data[0] if data else -1]
            batch.release()
    elif command == "list":
        from forebay.accelerate import _catalog_of
        import glob
        files = sorted(glob.glob(words[0] + "/*/*.bin"))
        catalog, _ = _catalog_of(files, engine)
        said = {name: [int(n)] for name, n in zip(files, catalog.lengths())}
    elif command == "write":
        import os
        with open(words[0], "r+b") as file:
            file.write(bytes([int(words[1])]) * 100)
        os.utime(words[0], ns=(int(words[2]),) * 2)
    elif command == "close":
        loader.close()
    print(json.dumps(said), flush=True)
"""


class Rank:
    def __init__(self, number: int, ranks: int = RANKS, **variables: str) -> None:
        environment = os.environ | {
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(ranks),
            "FOREBAY_JOB": "job",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_RANK)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | variables,
            text=True,
        )

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, list[int]]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the rank has ended"
        return json.loads(line)

    def do(self, *words: object) -> dict[str, list[int]]:
        self.tell(*words)
        return self.answer()

    def end(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def job(ranks: int = RANKS, **variables: str) -> Iterator[list[Rank]]:
    with ExitStack() as stack:
        made = []
        for number in range(ranks):
            rank = Rank(number, ranks, **variables)
            stack.callback(rank.end)
            made.append(rank)
        all_do(made, "nothing")  # they have started: a look is not offered for ever
        yield made


def all_do(ranks: Sequence[Rank], *words: object) -> list[dict[str, list[int]]]:
    for rank in ranks:
        rank.tell(*words)
    return [rank.answer() for rank in ranks]


class Files:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.now: dict[str, list[int]] = {}
        for i in range(COUNT):
            self.write(f"{i % 3}/{i:03d}.bin", i % 251)

    def write(self, name: str, value: int) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.now[name] = [100, value]
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.write(bytes([value]) * 100)
        written_long_ago(path)

    def check(self, read: dict[str, list[int]]) -> None:
        old = sorted(name for name, holds in self.now.items() if read.get(name) != holds)
        assert not old, f"not as they are now: {old}"
        assert read.keys() == self.now.keys()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "catalogs"))
    yield Files(tmp_path / "data")
    gc.collect()


class Daemon:
    """That all jobs share, and that tells what it did."""

    def __init__(self) -> None:
        self.engine: forebay.SharedEngine | None = forebay.SharedEngine(memory="64M", linger=0)


@pytest.fixture
def daemon(run_folder: Path) -> Iterator[Daemon]:  # noqa: F811
    made = Daemon()
    yield made
    made.engine = None
    gc.collect()


def looks(daemon: Daemon) -> tuple[int, int]:
    """Made for others, and taken."""
    assert daemon.engine is not None
    metrics = daemon.engine.metrics()
    return (
        metrics["forebay_daemon_looks_handed_in_total"],
        metrics["forebay_daemon_looks_taken_total"],
    )


def stats_of(mount: SlowFs) -> int:
    """Requests about names and attributes."""
    said = mount.stats()
    return int(said["lookup"] + said["getattr"])


@needs_slowfs
def test_one_look_a_job_and_node(files: Files, daemon: Daemon) -> None:
    with SlowFs(files.root, stat_ms=1) as mount:

        def cost(ranks: int, **variables: str) -> int:
            with job(ranks, **variables) as made:
                mount.reset()
                all_do(made, "open", mount.path, "job")
                spent = stats_of(mount)
                for read in all_do(made, "read"):
                    files.check(read)
            return spent

        with_listing = cost(RANKS)  # nothing is saved yet
        assert looks(daemon) == (1, RANKS - 1)
        one = cost(1)
        assert looks(daemon) == (1, RANKS - 1), "who is alone asks nobody"
        assert one >= COUNT
        all_of_them = cost(RANKS)
        assert looks(daemon) == (2, 2 * (RANKS - 1))
        nobody_knows_which = cost(RANKS, LOCAL_RANK="")
        assert looks(daemon) == (2, 2 * (RANKS - 1))
    assert all_of_them < 1.5 * one
    assert with_listing < 2 * one
    assert nobody_knows_which > (RANKS - 1) * one


@pytest.mark.parametrize("name", ["job", "another"])
def test_the_next_job_sees_what_was_written(name: str, files: Files, daemon: Daemon) -> None:
    for step in range(3):
        with job(FOREBAY_JOB=name if step == 2 else "job") as ranks:
            all_do(ranks, "open", files.root, "job")
            for read in all_do(ranks, "read"):
                files.check(read)
        files.write("1/001.bin", 200 + step)
    assert looks(daemon) == (3, 3 * (RANKS - 1))


def test_a_job_beside_another_looks_for_itself(files: Files, daemon: Daemon) -> None:
    with job(2) as first, job(2, FOREBAY_JOB="another") as second:
        all_do(first, "open", files.root, "job")
        files.write("1/001.bin", 200)
        all_do(second, "open", files.root, "job")
        for read in all_do(second, "read"):
            files.check(read)
    assert looks(daemon) == (2, 2)


def test_who_opens_again_sees_what_was_written(files: Files, daemon: Daemon) -> None:
    with job() as ranks:
        for step in range(3):
            all_do(ranks, "open", files.root, "job")
            for read in all_do(ranks, "read"):
                files.check(read)
            files.write("2/002.bin", 210 + step)
        assert looks(daemon) == (3, 3 * (RANKS - 1))
        # One of them alone, in the same process and in another.
        for step in range(2):
            ranks[1].do("open", files.root, "job")
            files.check(ranks[1].do("read"))
            files.write("2/005.bin", 220 + step)
            again = Rank(2)
            again.do("open", files.root, "job")
            files.check(again.do("read"))
            again.end()
            files.write("0/003.bin", 230 + step)


def test_a_rank_sees_what_it_wrote(files: Files, daemon: Daemon) -> None:
    with job(3) as ranks:
        ranks[0].do("open", files.root, "job")
        ranks[1].do("write", files.root / "1/004.bin", 240, time.time_ns() - 60 * 10**9)
        files.now["1/004.bin"] = [100, 240]
        for rank in ranks[1:]:  # the other one, too: the job's look is over
            rank.do("open", files.root, "job")
            files.check(rank.do("read"))
    assert looks(daemon) == (2, 1)


def test_ranks_see_what_a_rank_wrote_after_its_opening(files: Files, daemon: Daemon) -> None:
    with job(3) as ranks:
        for rank in ranks[:2]:
            rank.do("open", files.root, "job")
        ranks[1].do("write", files.root / "1/004.bin", 240, time.time_ns() - 60 * 10**9)
        files.now["1/004.bin"] = [100, 240]
        ranks[2].do("open", files.root, "job")
        files.check(ranks[2].do("read"))
    assert looks(daemon) == (2, 1)


def test_each_epoch_is_looked_at_once(files: Files, daemon: Daemon) -> None:
    with job(3) as ranks:
        all_do(ranks, "open", files.root, "epoch")
        for epoch in range(3):
            for read in all_do(ranks, "read"):
                files.check(read)
            assert looks(daemon) == (1 + epoch, 2 * (1 + epoch))
            files.write("0/006.bin", 241 + epoch)


def test_a_list_is_looked_at_once(files: Files, daemon: Daemon) -> None:
    """As `accelerate()` does."""
    for step in range(2):
        with job(3) as ranks:
            said = all_do(ranks, "list", files.root)
        assert said == [{str(files.root / name): [100] for name in sorted(files.now)}] * 3
        assert looks(daemon) == (1 + step, 2 * (1 + step))
        name = f"0/00{3 * step}.bin"
        files.now.pop(name)
        (files.root / name).unlink()


def test_never_asks_nobody(files: Files, daemon: Daemon) -> None:
    with job(2) as ranks:
        all_do(ranks, "open", files.root, "never")
        for read in all_do(ranks, "read"):
            files.check(read)
    assert looks(daemon) == (0, 0)


def test_ranks_whose_catalogs_lie_apart(files: Files, daemon: Daemon, tmp_path: Path) -> None:
    """What one has saved, the other cannot read."""
    apart = [{"FOREBAY_CACHE_DIR": str(tmp_path / f"catalogs{n}")} for n in range(2)]
    for step in range(2):
        ranks = [Rank(n, 2, **apart[n]) for n in range(2)]
        all_do(ranks, "open", files.root, "job")
        for read in all_do(ranks, "read"):
            files.check(read)
        for rank in ranks:
            rank.end()
        files.write("1/007.bin", 220 + step)
    assert looks(daemon)[1] == 0


@needs_slowfs
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_who_looks_holds_nobody(how: signal.Signals, files: Files, daemon: Daemon) -> None:
    with SlowFs(files.root) as mount:
        with job(1) as alone:  # saves the catalog
            alone[0].do("open", mount.path, "job")
        files.write("1/010.bin", 199)
        with job(3) as ranks:
            mount.set(stat_ms=200)
            mount.reset()
            ranks[0].tell("open", mount.path, "job")
            until = time.monotonic() + 60
            while stats_of(mount) < 30:  # threads are at the files, past the folders
                assert time.monotonic() < until
                time.sleep(0.01)
            for rank in ranks[1:]:
                rank.tell("open", mount.path, "job")
            os.kill(ranks[0].process.pid, how)
            mount.set(stat_ms=0)
            try:
                for rank in ranks[1:]:
                    assert rank.answer() is None
                    files.check(rank.do("read"))
            finally:
                if how == signal.SIGSTOP:
                    os.kill(ranks[0].process.pid, signal.SIGCONT)
            if how == signal.SIGSTOP:
                assert ranks[0].answer() is None
                files.check(ranks[0].do("read"))
