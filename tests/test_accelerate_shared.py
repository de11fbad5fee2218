"""accelerate() on the node's daemon: ranks and their workers share its memory and its reads, and go
on without it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import forebay  # noqa: E402
from data_sets import DataSet  # noqa: E402
from test_accelerate import Files, as_list, file_list, run, warned  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

READS = "forebay_source_reads_total"
SERVED = "forebay_stage_samples_total"


class Thinking(Files):
    """One that takes its time."""

    def __getitem__(self, i: int) -> tuple:
        time.sleep(0.005)
        return super().__getitem__(i)


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any) -> Iterator[Path]:
    """A place for a daemon of this test's own; it must be gone at the end, and leave nothing."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    where = tmp_path / "forebay"
    yield where
    wait_until(lambda: not where.exists())
    assert not [name for name in os.listdir("/dev/shm") if "forebay" in name]


def shared(**options: Any) -> forebay.SharedEngine:
    return forebay.SharedEngine(**{"memory": "64M", "linger": 0, **options})


@pytest.mark.parametrize("workers", [0, 2], ids=["here", "workers"])
def test_the_same_as_without(
    workers: int, folder: DataSet, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Files(file_list(folder))
    make = lambda: DataLoader(dataset, 4, shuffle=True, num_workers=workers, collate_fn=as_list)
    plain = run(make, None, broken=1)
    engine = shared()
    assert engine.client() is not None
    assert run(make, engine, broken=1) == plain
    metrics = engine.metrics()
    assert metrics[READS] == len(folder)
    # All of the first and the last pass, and some of the one that was broken off.
    assert 2 * len(folder) < metrics[SERVED] <= 3 * len(folder)
    assert warned(caplog) == []


_RANK = """
import hashlib, json, sys
sys.path.insert(0, sys.argv[1])
import torch, forebay
forebay.SharedEngine.__init__.__kwdefaults__["linger"] = 0  # the test waits for its end
from test_accelerate import Files, as_list
from torch.utils.data import DataLoader, DistributedSampler
rank, paths = int(sys.argv[2]), sys.argv[3:]
sampler = DistributedSampler(paths, num_replicas=2, rank=rank, seed=5)
loader = DataLoader(Files(paths), 4, sampler=sampler, num_workers=2, collate_fn=as_list)
fast = forebay.accelerate(loader, memory="64M")
out = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    out.append([(i, hashlib.sha256(data).hexdigest()) for b in fast for i, data, _ in b])
print(json.dumps(out), flush=True)
sys.stdin.readline()  # the other rank has ended, too
engine = fast._forebay.engine
print(json.dumps([type(engine).__name__, engine.metrics()]), flush=True)
sys.stdin.readline()
"""


def test_two_ranks_of_two_workers_read_each_file_once(folder: DataSet, run_folder: Path) -> None:
    import hashlib

    here = os.path.dirname(__file__)
    paths = file_list(folder)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, here, str(rank), *paths],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        drawn = [json.loads(p.stdout.readline()) for p in started]  # type: ignore[union-attr]
        for p in started:
            p.stdin.write("\n")  # type: ignore[union-attr]
            p.stdin.flush()  # type: ignore[union-attr]
        said = [json.loads(p.stdout.readline()) for p in started]  # type: ignore[union-attr]
    finally:
        for p in started:
            p.communicate("\n\n", timeout=60)
    hashes = [hashlib.sha256(s.data).hexdigest() for s in folder.samples]
    for rank, epochs in enumerate(drawn):
        for epoch, items in enumerate(epochs):
            sampler = DistributedSampler(paths, num_replicas=2, rank=rank, seed=5)
            sampler.set_epoch(epoch)
            assert items == [[i, hashes[i]] for i in sampler]
    (kind, metrics), _ = said
    assert kind == "SharedEngine"
    assert metrics[READS] == len(folder)  # of both ranks, and of all epochs
    assert metrics[SERVED] == sum(len(items) for epochs in drawn for items in epochs)


@pytest.mark.parametrize("workers", [0, 2], ids=["here", "workers"])
def test_a_killed_daemon_changes_nothing_but_the_time(
    workers: int,
    folder: DataSet,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("forebay.daemon._RETURN_S", (600.0,))  # on a slow machine, too
    engine = shared()
    client = engine.client()
    assert client is not None
    loader = DataLoader(
        Files(file_list(folder) * 4), 2, num_workers=workers, collate_fn=as_list,
        persistent_workers=workers > 0,
    )  # fmt: skip
    fast = forebay.accelerate(loader, engine=engine)
    assert fast is not loader
    expected = [(i, folder.samples[i % len(folder)].data) for i in range(4 * len(folder))]
    got = []
    for n, batch in enumerate(fast):
        got += [(i, data) for i, data, _ in batch]
        if n == 10:
            os.kill(client.pid, signal.SIGKILL)
    assert got == expected
    assert engine.client() is None  # in the middle of the pass
    assert engine.metrics()[SERVED] > 0  # and the workers have come to the engine of this process
    assert [(i, data) for b in fast for i, data, _ in b] == expected
    assert any("without the node's daemon" in line for line in warned(caplog))
    assert fast.report().startswith("Epoch ")


def test_workers_come_back_to_a_new_daemon(
    folder: DataSet, run_folder: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setattr("forebay.daemon._RETURN_S", (0.1,) * 20)
    engine = shared()
    client = engine.client()
    assert client is not None
    loader = DataLoader(
        Files(file_list(folder)), 4, num_workers=2, collate_fn=as_list, persistent_workers=True
    )
    fast = forebay.accelerate(loader, engine=engine)
    expected = [(i, s.data) for i, s in enumerate(folder.samples)]
    passed = lambda: [(i, data) for b in fast for i, data, _ in b]
    assert passed() == expected
    os.kill(client.pid, signal.SIGKILL)
    assert passed() == expected
    wait_until(lambda: engine.client() is not None)
    assert engine.metrics()[SERVED] == 0
    assert passed() == expected
    assert engine.metrics()[SERVED] == len(folder)


@pytest.mark.parametrize("workers", [0, 2], ids=["here", "workers"])
def test_the_daemon_shows_what_an_accelerated_job_waits_for(
    workers: int, folder: DataSet, run_folder: Path
) -> None:
    engine = shared()
    client = engine.client()
    assert client is not None
    loader = DataLoader(Thinking(file_list(folder)), 4, num_workers=workers, collate_fn=as_list)
    fast = forebay.accelerate(loader, engine=engine)
    list(fast)
    (report,) = fast.stats()
    (stream,) = [s for c in json.loads(client.describe())["clients"] for s in c["streams"]]
    assert stream["samples_total"] == report.samples == len(folder)
    assert stream["bytes_total"] == report.bytes
    told = {cause: ns * 1e-9 for cause, ns in stream["stall_ns"].items()}
    assert told == pytest.approx(report.wait, abs=1e-3) and report.wait["decode"] > 0
