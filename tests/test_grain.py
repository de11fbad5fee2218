"""forebay.grain.Source under Grain's own loaders."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

grain = pytest.importorskip("grain", reason="grain is not installed")

import forebay  # noqa: E402
import forebay.grain  # noqa: E402
from data_sets import DataSet  # noqa: E402

READS = "forebay_source_reads_total"


@pytest.fixture(scope="module", autouse=True)
def _grains_own() -> None:
    """What Grain opens with its first worker, and keeps, is not ours."""
    data = grain.MapDataset.range(2).to_iter_dataset()
    list(data.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[forebay.SharedEngine]:
    """A daemon of this test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = [forebay.SharedEngine(memory="64M", linger=0)]
    yield made[0]
    made.clear()


def sampler(data: Any, **options: Any) -> Any:
    options = {"num_epochs": 2, "shuffle": True, "seed": 3, **options}
    shard = options.pop("shard", grain.sharding.NoSharding())
    return grain.samplers.IndexSampler(len(data), shard_options=shard, **options)


def expected(folder: DataSet, index: int) -> dict:
    sample = folder.samples[index]
    return {"data": sample.data, "label": sample.label}


def test_samples_by_number(folder: DataSet, engine: forebay.SharedEngine) -> None:
    source = forebay.grain.Source(folder.root, engine=engine)
    assert len(source) == len(folder)
    for i in range(len(folder)):
        assert source[i] == expected(folder, i)
    assert source[-1] == expected(folder, len(folder) - 1)
    for wrong in (len(folder), -len(folder) - 1):
        with pytest.raises(IndexError):
            source[wrong]
    other = pickle.loads(pickle.dumps(source))
    assert other[5] == expected(folder, 5)
    assert "61 samples" in repr(source)
    assert engine.metrics()[READS] == len(folder)


def test_threads(folder: DataSet, engine: forebay.SharedEngine) -> None:
    source = forebay.grain.Source(folder.root, engine=engine)
    wanted = list(range(len(folder))) * 4
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(source.__getitem__, wanted)) == [expected(folder, i) for i in wanted]
    assert engine.metrics()[READS] == len(folder)


@pytest.mark.parametrize(
    ("workers", "follow"), [(0, False), (0, True), (2, True)], ids=["asked", "followed", "workers"]
)
def test_under_grains_loader(
    workers: int, follow: bool, folder: DataSet, engine: forebay.SharedEngine
) -> None:
    source = forebay.grain.Source(folder.root, engine=engine)
    order = sampler(source)
    if follow:
        source.follow(order)
    loader = grain.DataLoader(data_source=source, sampler=order, worker_count=workers)
    got = list(loader)
    wanted = [order[i].record_key for i in range(2 * len(folder))]
    assert got == [expected(folder, i) for i in wanted]
    assert engine.metrics()[READS] == len(folder)


def test_the_order_is_read_ahead(
    folder: DataSet, engine: forebay.SharedEngine, wait_until: Any
) -> None:
    source = forebay.grain.Source(folder.root, engine=engine)
    source.follow(sampler(source))
    wait_until(lambda: engine.metrics()[READS] == len(folder))  # nothing was asked for
    assert engine.metrics()["forebay_stage_samples_total"] == 0
    with pytest.raises(TypeError, match="sampler of Grain"):
        source.follow(3)


def test_a_shard_reads_its_own(folder: DataSet, engine: forebay.SharedEngine) -> None:
    source = forebay.grain.Source(folder.root, engine=engine)
    shard = grain.sharding.ShardOptions(shard_index=1, shard_count=3, drop_remainder=True)
    order = sampler(source, shard=shard, num_epochs=1)
    loader = grain.DataLoader(data_source=source, sampler=order, shard_options=shard)
    numbers = list(forebay.grain.numbers_of(order))
    assert list(loader) == [expected(folder, i) for i in numbers]
    assert len(numbers) == len(folder) // 3


def test_a_map_dataset(folder: DataSet, engine: forebay.SharedEngine) -> None:
    source = forebay.grain.Source(folder.root, engine=engine)
    numbers = list(grain.MapDataset.range(len(source)).shuffle(seed=4))
    source.follow(numbers)
    data = grain.MapDataset.source(source).shuffle(seed=4)
    read = data.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=16))
    assert list(read) == [expected(folder, i) for i in numbers]


@pytest.mark.parametrize("workers", [0, 2], ids=["here", "workers"])
def test_a_killed_daemon(workers: int, folder: DataSet, engine: forebay.SharedEngine) -> None:
    source = forebay.grain.Source(folder.root, engine=engine)
    order = sampler(source)
    source.follow(order)
    client = engine.client()
    assert client is not None
    got = []
    loader = grain.DataLoader(data_source=source, sampler=order, worker_count=workers)
    for n, record in enumerate(loader):
        got.append(record)
        if n == 20:
            os.kill(client.pid, signal.SIGKILL)
    assert got == [expected(folder, order[i].record_key) for i in range(2 * len(folder))]


def test_without_a_daemon(folder: DataSet) -> None:
    source = forebay.grain.Source(folder.root, engine=forebay.Engine("64M"))
    order = sampler(source, num_epochs=1)
    source.follow(order)
    got = list(grain.DataLoader(data_source=source, sampler=order))
    assert got == [expected(folder, order[i].record_key) for i in range(len(folder))]
