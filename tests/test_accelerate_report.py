"""What an accelerated loader says of its waits: the same table, with the same causes, as the native
loader's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import forebay  # noqa: E402
from data_sets import DataSet  # noqa: E402
from forebay._internal.worker_io import WorkerWaits  # noqa: E402
from forebay.views.report import CAUSES  # noqa: E402
from test_accelerate import Files, Unknown, accelerated, as_list, file_list  # noqa: E402
from test_accelerate_shared import Thinking  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

module: Any = importlib.import_module("forebay.accelerate")  # the package's name is the function
WORKERS = pytest.mark.parametrize("workers", [0, 2], ids=["here", "workers"])
NAMES = list(CAUSES)


def slowly(monkeypatch: pytest.MonkeyPatch, delay: str) -> None:
    """Data sets that are added from now on lie on storage with these delays."""
    real = forebay.Engine.dataset
    monkeypatch.setattr(forebay.Engine, "dataset", functools.partialmethod(real, delay=delay))


def stalls(engine: forebay.Engine) -> dict[str, float]:
    metrics = engine.metrics()
    return {c: metrics[f"forebay_stall_{c}_nanoseconds_total"] * 1e-9 for c in CAUSES}


# ---- one wait


class _Hub:
    """As much of a hub as a tally needs."""

    def __init__(self) -> None:
        self.waits = WorkerWaits()
        self.drawn_samples = self.drawn_bytes = 0
        self.told: list[list[float]] = []

    def metrics(self) -> dict[str, int]:
        return {}

    def stalled(self, waits: list[float]) -> None:
        self.told.append(list(waits))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def nanoseconds(**seconds: float) -> list[int]:
    return [int(seconds.get(name, 0) * 1e9) for name in NAMES]


def one_wait(clock: list[float], workers: int, iterator: Any, act: Callable[[_Hub], None]) -> Any:
    """What is charged for two seconds of waiting in which `act` happens."""
    hub = _Hub()
    hub.waits.add(1, nanoseconds(memory=7), 1)  # of earlier batches
    tally = module._Tally(hub, workers)  # type: ignore[arg-type]
    tally.ask(iterator)
    act(hub)
    clock[0] += 2
    tally.batch()
    assert tally.ended(asked=False)
    wait = tally.report(0).wait
    assert sum(wait.values()) == pytest.approx(2)
    assert [sum(c) for c in zip(*hub.told, strict=True)] == pytest.approx(list(wait.values()))
    return {name: pytest.approx(seconds) for name, seconds in wait.items() if seconds > 1e-6}


def test_the_causes_are_those_of_the_native_loader() -> None:
    assert list(module._CAUSES) == NAMES


def test_a_wait_is_split_as_the_worker_that_makes_the_batch_waited(clock: list[float]) -> None:
    iterator = SimpleNamespace(_task_info={5: (0,), 6: (1,)}, _rcvd_idx=6)

    def act(hub: _Hub) -> None:
        hub.waits.add(2, nanoseconds(source=0.5, peer=0.75), 3)
        hub.waits.add(2, nanoseconds(tier=0.25), 1)
        hub.waits.add(1, nanoseconds(share=2), 1)  # another worker's, which nobody waits for

    assert one_wait(clock, 2, iterator, act) == dict(source=0.5, peer=0.75, tier=0.25, decode=0.5)


def test_what_began_before_the_consumer_waited_counts_from_there_on(clock: list[float]) -> None:
    iterator = SimpleNamespace(_task_info={0: (0,)}, _rcvd_idx=0)
    act = lambda hub: hub.waits.add(1, nanoseconds(source=3, tier=1), 1)
    assert one_wait(clock, 2, iterator, act) == dict(source=1.5, tier=0.5)


def test_where_the_worker_is_not_known_it_is_a_mean_one(clock: list[float]) -> None:
    def act(hub: _Hub) -> None:
        hub.waits.add(1, nanoseconds(source=2), 1)
        hub.waits.add(2, nanoseconds(peer=1), 1)

    assert one_wait(clock, 2, object(), act) == dict(source=1, peer=0.5, decode=0.5)


def test_without_workers_the_wait_is_its_own(clock: list[float]) -> None:
    act = lambda hub: hub.waits.add(WorkerWaits.OWN, nanoseconds(source=1.5), 1)
    assert one_wait(clock, 0, object(), act) == dict(source=1.5, decode=0.5)


def test_more_workers_than_slots_are_not_counted() -> None:
    waits = WorkerWaits()
    waits.add(WorkerWaits._SLOTS, nanoseconds(source=1), 1)
    assert waits.waits(None) == waits.waits(3) == [0] * len(NAMES) and waits.samples() == 0


# ---- passes


@WORKERS
def test_waits_for_the_source(
    workers: int, folder: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, "open_ms=10")
    engine = forebay.Engine(memory="64M", in_flight=1)
    loader = DataLoader(Files(file_list(folder)), 4, num_workers=workers, collate_fn=as_list)
    fast = accelerated(loader, engine)
    assert fast.stats() == []
    list(fast)
    (report,) = fast.stats()
    assert report.main_cause == "source" and set(report.wait) == set(CAUSES)
    assert 0 < report.stall <= report.seconds
    assert (report.samples, report.batches) == (len(folder), len(fast))
    assert report.bytes == sum(len(s.data) for s in folder.samples)
    assert report.source_reads == len(folder)
    assert "% of it for reads from storage" in fast.report()
    # Those who look on are told the same.
    assert stalls(engine) == pytest.approx(report.wait, abs=1e-3)


@WORKERS
def test_waits_for_the_data_set_itself(
    workers: int, folder: DataSet, engine: forebay.Engine
) -> None:
    loader = DataLoader(Thinking(file_list(folder)), 4, num_workers=workers, collate_fn=as_list)
    fast = accelerated(loader, engine)
    for _ in range(2):
        list(fast)
    report = fast.stats()[-1]
    assert report.main_cause == "decode" and report.stall > 0
    # All of it is in memory by then.
    assert report.stall == report.wait["decode"]


@WORKERS
def test_waits_for_the_cache_folder(
    workers: int, folder: DataSet, tmp_path: Path, wait_until: Any
) -> None:
    engine = forebay.Engine(memory="64M", keep=False, cache_dir=tmp_path / "cache")
    loader = DataLoader(
        Files(file_list(folder)), 4, sampler=list(range(len(folder))), num_workers=workers,
        collate_fn=as_list,
    )  # fmt: skip
    # Nothing is read ahead for a sampler of one's own: each sample is waited for.
    fast = accelerated(loader, engine)
    list(fast)
    wait_until(lambda: engine.metrics()["forebay_tier_writes_total"] == len(folder))
    # A read may be over before anybody can wait for it, on some machines in all of a pass.
    for _ in range(50):
        list(fast)
        if workers or fast.stats()[-1].wait["tier"] > 0:
            break
    first, second, *_ = fast.stats()
    assert first.wait["tier"] == 0
    assert all(later.wait["source"] == 0 for later in fast.stats()[1:])
    # Two workers are ahead of the loop: it may never have waited.
    assert workers or fast.stats()[-1].wait["tier"] > 0
    assert (first.source_reads, second.source_reads) == (len(folder), 0)


@pytest.mark.parametrize("stay", [False, True], ids=["new workers", "workers that stay"])
def test_every_pass_has_its_row(stay: bool, folder: DataSet, engine: forebay.Engine) -> None:
    loader = DataLoader(
        Files(file_list(folder)), 4, num_workers=2, persistent_workers=stay, collate_fn=as_list
    )
    fast = accelerated(loader, engine)
    for _ in range(3):
        list(fast)
    assert [(r.epoch, r.samples, r.batches) for r in fast.stats()] == [
        (n, len(folder), len(fast)) for n in range(3)
    ]


def test_a_pass_is_not_charged_with_another_loaders(
    folder: DataSet, engine: forebay.Engine
) -> None:
    paths = file_list(folder)
    train = accelerated(DataLoader(Files(paths), 4, collate_fn=as_list), engine)
    valid = accelerated(DataLoader(Files(paths[:9]), 3, collate_fn=as_list), engine)
    for n, _ in enumerate(train):
        if n == 2:
            list(valid)
    assert (train.stats()[0].samples, valid.stats()[0].samples) == (len(folder), 9)
    assert valid.stats()[0].bytes == sum(len(s.data) for s in folder.samples[:9])


class WithStats(DataLoader):
    def stats(self) -> str:
        return "mine"


def test_a_loaders_own_stats_stay(folder: DataSet, engine: forebay.Engine) -> None:
    fast = accelerated(WithStats(Files(file_list(folder)), 4, collate_fn=as_list), engine)
    assert fast.stats() == "mine"


def test_an_unknown_sampler_is_reported_alike(folder: DataSet, engine: forebay.Engine) -> None:
    loader = DataLoader(
        Files(file_list(folder)), 4, sampler=Unknown(len(folder)), collate_fn=as_list
    )
    fast = accelerated(loader, engine)
    list(fast)
    assert fast.stats()[0].samples == len(folder)
