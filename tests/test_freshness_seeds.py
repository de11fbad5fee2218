"""Jobs one after another and side by side, over files that another process changes: no sample is
older than its mode allows.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import struct
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import forebay
import pytest
from forebay._errors import MissingError
from forebay.commands import run as run_command
from test_daemon import run_folder  # noqa: F401 - a fixture
from test_peers import _ports as free_ports

try:
    from torch.utils import data as torch_data
except ImportError:
    torch_data = None
try:
    run_command.library()
    _no_run = ""
except MissingError as error:
    _no_run = str(error)

COUNT = 12
WORDS = 100
# What accelerate() shares with workers comes out of this; Python never gives it back.
multiprocessing.RawArray("B", 2 << 20)

# Changes one file for each line that it is told, and answers. Before it changes one it lets the
# kernel's clock tick: within a tick a file's time does not move.
_WRITER = """
import os, struct, sys, time
for line in sys.stdin:
    kind, path, version = line.split()
    time.sleep(0.01)
    old = os.path.getsize(path) // 8
    words = {"append": old + 7, "truncate": max(1, old - 9), "other": old + 3}.get(kind, old)
    data = struct.pack("<Q", int(version)) * words
    if kind == "rename":
        with open(path + ".new", "wb") as file:
            file.write(data)
        os.rename(path + ".new", path)
    elif kind == "link":
        target = path + "." + version
        with open(target, "wb") as file:
            file.write(data)
        os.symlink(target, path + ".new")
        os.rename(path + ".new", path)
    else:
        was = os.stat(path)
        with open(path, "r+b") as file:
            file.write(data)
            file.truncate()
        if kind == "put_back":
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    print("done", flush=True)
"""
_ALL = ["same", "other", "append", "truncate", "rename", "link", "put_back"]


class Changing:
    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.rng = root, rng
        self.version: dict[str, int] = {}
        self.shown: dict[str, int] = {}  # the last one that size or modification time tells of
        for i in range(COUNT):
            (root / f"{i:02d}.bin").write_bytes(struct.pack("<Q", 1) * WORDS)
            self.version[f"{i:02d}.bin"] = self.shown[f"{i:02d}.bin"] = 1
        self._writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def change(self, kinds: list[str]) -> None:
        for _ in range(self.rng.randint(1, 4)):
            name = self.rng.choice(sorted(self.version))
            self.version[name] += 1
            kind = self.rng.choice(kinds)
            if kind != "put_back":
                self.shown[name] = self.version[name]
            assert self._writer.stdin and self._writer.stdout
            self._writer.stdin.write(f"{kind} {self.root / name} {self.version[name]}\n")
            self._writer.stdin.flush()
            assert self._writer.stdout.readline() == "done\n"

    def oldest(self, change_times: bool) -> dict[str, int]:
        """What who looks now may not get anything older than."""
        return dict(self.version if change_times else self.shown)

    def check(self, name: str, data: bytes, oldest: dict[str, int]) -> None:
        found = {v for (v,) in struct.iter_unpack("<Q", data)}
        assert found and min(found) >= oldest[name], (name, found, oldest)
        assert max(found) <= self.version[name]

    def close(self) -> None:
        self._writer.communicate(timeout=20)


class Job:
    """A loader, and the versions that its samples may not be older than."""

    def __init__(self, files: Changing, engine: forebay.Engine, mode: str) -> None:
        self.files = files
        self.oldest = files.oldest(change_times=True)
        self.loader = forebay.DataLoader(
            files.root, 5, shuffle=True, engine=engine, freshness=mode, extensions=[".bin"]
        )

    def epoch(self) -> None:
        if self.loader.freshness == "epoch" and self.loader.epoch > 0:
            shown = self.files.oldest(change_times=True)
            self.oldest = {name: max(v, shown[name]) for name, v in self.oldest.items()}
        try:
            for batch in self.loader:
                for i, number in enumerate(batch.indices):
                    name = self.loader.catalog.name(int(number))
                    self.files.check(name, batch[i].tobytes(), self.oldest)
                batch.release()
        except forebay.ChangedError as error:  # its size changed after this job looked at it
            assert ".bin" in str(error)

    def close(self) -> None:
        self.loader.close()


class OwnLoader:
    """The user's own loop, by accelerate()."""

    def __init__(self, files: Changing, engine: forebay.Engine) -> None:
        self.files = files
        self.oldest = files.oldest(change_times=True)
        paths = [str(files.root / name) for name in sorted(files.version)]
        loader = torch_data.DataLoader(_Paths(paths), batch_size=None, shuffle=True)
        self.loader = forebay.accelerate(loader, engine=engine)

    def epoch(self) -> None:
        for name, data in self.loader:
            self.files.check(name, data, self.oldest)

    def close(self) -> None:
        self.loader = None


class _Paths:
    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[str, bytes]:
        with open(self.paths[i], "rb") as file:
            return os.path.basename(self.paths[i]), file.read()


_READ = """
import glob, os, sys
for path in glob.glob(sys.argv[1] + "/*.bin"):
    with open(path, "rb") as file:
        print(os.path.basename(path), file.read().hex())
"""


def _run(files: Changing, cache: Path) -> None:
    """One `forebay run`; the cache folder is that of earlier ones."""
    oldest = files.oldest(change_times=True)
    runtime = cache.with_suffix(".runtime")  # its daemon stays a while: not among those of the test
    runtime.mkdir(mode=0o700, exist_ok=True)
    said = subprocess.run(
        [sys.executable, "-m", "forebay.cli", "run", "--cache", str(cache),
         "--source", str(files.root), "--", sys.executable, "-c", _READ, str(files.root)],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert len(lines) == COUNT
    for line in lines:
        name, data = line.split()
        files.check(name, bytes.fromhex(data), oldest)


@pytest.mark.seeds
def test_no_sample_is_older_than_its_mode_allows(
    seed: int,
    tmp_path: Path,
    run_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(seed)
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "catalogs"))
    (tmp_path / "data").mkdir()
    files = Changing(tmp_path / "data", rng)
    caches = [tmp_path / "cache", None]
    with ExitStack() as end:
        end.callback(files.close)
        engines: list[forebay.Engine] = []
        jobs: list[Job | OwnLoader] = []
        for _ in range(8):
            files.change(_ALL)
            if len(jobs) == 4 or (jobs and rng.random() < 0.4):  # one ends
                jobs.pop(rng.randrange(len(jobs))).close()
            kind = rng.choice(["engine", "engine", "daemon", "same", "accelerate"])
            if kind == "same" and engines:
                engine = rng.choice(engines)
            elif kind == "daemon":
                engine = forebay.SharedEngine(memory="16M", linger=0, cache_dir=tmp_path / "daemon")
            else:
                engine = forebay.Engine(memory="16M", cache_dir=rng.choice(caches))
                engines = [*engines[-2:], engine]
            mode = rng.choice(["job", "job", "epoch"])
            job: Job | OwnLoader = (
                OwnLoader(files, engine)
                if kind == "accelerate" and torch_data is not None
                else Job(files, engine, mode)
            )
            end.callback(job.close)
            jobs.append(job)
            for _ in range(rng.randint(1, 3)):
                rng.choice(jobs).epoch()
                # Whole files only: a job is reading.
                if rng.random() < 0.5:
                    files.change(["rename", "link"])
            job.epoch()
            del engine, job
        jobs.clear()
        engines.clear()
        if not _no_run:
            for _ in range(2):
                files.change(_ALL)
                _run(files, tmp_path / "run")
    gc.collect()
    assert not [n for n in os.listdir(tmp_path / "data") if n.endswith(".new")]


_NODE = """
import json, struct, sys
import forebay
node, nodes, data, cache = json.loads(sys.argv[1])
engine = forebay.Engine(memory="16M", peers=nodes, cache_dir=cache)
loader = None
for line in sys.stdin:
    found = {}
    if line == "open\\n":
        loader = forebay.DataLoader(data, 3, shuffle=True, rank=node, world_size=2, engine=engine,
                                    extensions=[".bin"])
    elif line == "close\\n":
        loader.close()
    else:
        try:
            for batch in loader:
                for i, number in enumerate(batch.indices):
                    found[loader.catalog.name(int(number))] = batch[i].tobytes().hex()
                batch.release()
        except forebay.ChangedError as error:
            assert ".bin" in str(error)
    print(json.dumps(found), flush=True)
print(json.dumps(engine.metrics()["forebay_peer_reads_total"]), flush=True)
"""


@pytest.mark.seeds
def test_nor_from_another_node(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes that take each other's samples; with the time put back, only the writer's own node
    could see it, and peers are told sizes and modification times only.
    """
    rng = random.Random(seed)
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "catalogs"))
    monkeypatch.setenv("FOREBAY_PEER_SECRET", str(tmp_path / "secret"))
    (tmp_path / "data").mkdir()
    files = Changing(tmp_path / "data", rng)
    peers = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    with ExitStack() as end:
        end.callback(files.close)
        nodes = []
        for node in range(2):
            cache = str(tmp_path / f"cache{node}") if rng.random() < 0.7 else None
            what = json.dumps([node, peers, str(files.root), cache])
            nodes.append(
                subprocess.Popen(
                    [sys.executable, "-c", _NODE, what], stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, text=True,
                    env={**os.environ, "FOREBAY_NODE": str(node), "FOREBAY_PEER_LEASE": "20",
                         "FOREBAY_PEER_WAIT": "20"},
                )
            )  # fmt: skip
            end.callback(nodes[-1].kill)

        def tell(words: str) -> dict[str, str]:
            said: dict[str, str] = {}
            for node in nodes:
                assert node.stdin
                node.stdin.write(f"{words}\n")
                node.stdin.flush()
            for node in nodes:
                assert node.stdout
                said |= json.loads(node.stdout.readline())
            return said

        for _ in range(3):
            files.change([kind for kind in _ALL if kind != "put_back"])
            oldest = files.oldest(change_times=False)
            tell("open")
            for _ in range(rng.randint(2, 3)):
                for name, data in tell("epoch").items():
                    files.check(name, bytes.fromhex(data), oldest)
                if rng.random() < 0.5:
                    files.change(["rename", "link"])
            tell("close")
        from_peers = 0
        for node in nodes:
            said_last, _ = node.communicate(timeout=60)
            assert node.returncode == 0
            from_peers += json.loads(said_last)
        assert from_peers > 0, "each read everything itself"
