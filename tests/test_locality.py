"""Locality-preserving assignment: the same global batches, most of them read where they live."""

from __future__ import annotations

import json

import forebay
import numpy as np
import pytest
from data_sets import DataSet, batches_of, check_batch, torch_order
from forebay import _forebay

# 24 samples a step, on any of these.
_WORLDS = (2, 3, 4)
_STEP = 24


def _loaders(data: DataSet, world: int, **more: object) -> list[forebay.DataLoader]:
    options: dict = {"engine": forebay.Engine(memory="64M"), **more}
    return [
        forebay.DataLoader(
            data.root,
            _STEP // world,
            shuffle=True,
            seed=5,
            rank=rank,
            world_size=world,
            locality=True,
            **options,
        )
        for rank in range(world)
    ]


def _global(size: int, epoch: int, world: int, start: int = 0) -> list[list[int]]:
    """The sorted global batches of PyTorch's sampler from a global position on."""
    ranks = [
        torch_order(
            size, shuffle=True, seed=5, epoch=epoch, rank=rank, world=world, drop_last=False
        )[start // world :]
        for rank in range(world)
    ]
    steps = zip(*(batches_of(order, _STEP // world) for order in ranks), strict=True)
    return [sorted(sum(step, [])) for step in steps]


@pytest.mark.parametrize("world", _WORLDS)
def test_global_batches_are_those_of_pytorch(folder: DataSet, world: int) -> None:
    loaders = _loaders(folder, world)
    plain = [
        torch_order(
            len(folder), shuffle=True, seed=5, epoch=1, rank=rank, world=world, drop_last=False
        )
        for rank in range(world)
    ]
    for epoch in range(2):
        got, orders = [], [[] for _ in loaders]
        for step in zip(*loaders, strict=True):
            for rank, batch in enumerate(step):
                check_batch(batch, batch.indices.tolist(), folder)
                orders[rank] += batch.indices.tolist()
            got.append(sorted(sum((b.indices.tolist() for b in step), [])))
        assert got == _global(len(folder), epoch, world)
    assert orders != plain  # somebody got something else
    assert [len(o) for o in orders] == [len(o) for o in plain]


def test_goes_on_in_the_middle_at_another_world_size(folder: DataSet) -> None:
    four = _loaders(folder, 4)
    expected = _global(len(folder), 0, 4)
    running = [iter(loader) for loader in four]
    first = sorted(sum((next(it).indices.tolist() for it in running), []))
    assert first == expected[0]
    state = json.loads(json.dumps(four[0].state_dict()))
    assert state["locality"] is True and state["consumed"] == _STEP
    for world in _WORLDS:
        resumed = _loaders(folder, world)
        for loader in resumed:
            loader.load_state_dict(state)
        got = [
            sorted(sum((b.indices.tolist() for b in step), []))
            for step in zip(*resumed, strict=True)
        ]
        assert got == _global(len(folder), 0, world, _STEP)
        assert got[0] == expected[1]


def test_the_daemon_gives_the_same_order(
    folder: DataSet, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own = [b.indices.tolist() for b in _loaders(folder, 4)[2]]
    engine = forebay.SharedEngine(memory="64M", linger=0)
    assert [b.indices.tolist() for b in _loaders(folder, 4, engine=engine)[2]] == own
    assert engine.client() is not None


def test_ranks_of_one_node_share_its_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    size, batch, world = 6000, 64, 4

    def share(ranks_per_node: int, exchange: int) -> float:
        homes = _forebay.homes(size, world // ranks_per_node)
        local = [
            homes[
                _forebay.epoch_order(
                    size, rank=r, world=world, exchange=exchange, ranks_per_node=ranks_per_node
                )
            ]
            == r // ranks_per_node
            for r in range(world)
        ]
        return float(np.mean(np.concatenate(local)))

    assert 0.2 < share(1, 0) < 0.3
    assert share(1, batch) > 0.8
    assert share(2, batch) > share(1, batch)
    assert share(4, batch) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    sampler = forebay.LocalitySampler(range(size), batch, num_replicas=world, rank=1)
    assert sampler.ranks_per_node == 2
    monkeypatch.setenv("FOREBAY_NODES", "4")
    sampler = forebay.LocalitySampler(range(size), batch, num_replicas=world, rank=1)
    assert sampler.ranks_per_node == 1


def test_the_sampler_for_pytorch_has_the_loaders_order(folder: DataSet) -> None:
    torch = pytest.importorskip("torch")
    world, rank = 4, 3
    loader = _loaders(folder, world)[rank]
    sampler = forebay.LocalitySampler(
        folder.samples, _STEP // world, num_replicas=world, rank=rank, seed=5
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        theirs = torch.utils.data.DataLoader(
            range(len(folder)), batch_size=_STEP // world, sampler=sampler
        )
        assert [b.tolist() for b in theirs] == [b.indices.tolist() for b in loader]
    assert len(sampler) == len(list(sampler))
    sampler.set_epoch(1, start=_STEP)
    assert list(sampler) == loader_order(folder, world, rank, 1)[_STEP // world :]
    assert len(sampler) == len(list(sampler))
    with pytest.raises(forebay.ArgumentError, match="start"):
        sampler.set_epoch(1, start=3)
    with pytest.raises(forebay.ArgumentError, match="batch_size"):
        forebay.LocalitySampler(folder.samples, 0)


def loader_order(data: DataSet, world: int, rank: int, epoch: int) -> list[int]:
    loader = _loaders(data, world)[rank]
    loader.set_epoch(epoch)
    return [i for batch in loader for i in batch.indices.tolist()]


def test_accelerate_foresees_the_sampler(folder: DataSet) -> None:
    pytest.importorskip("torch")
    from forebay._internal.foresight import next_epoch, replay
    from torch.utils.data import BatchSampler

    sampler = forebay.LocalitySampler(folder.samples, 6, num_replicas=4, rank=1)
    foreseen = replay(BatchSampler(sampler, 6, drop_last=True), batched=True)
    assert foreseen is not None and foreseen.repeats
    assert foreseen.draw() == list(sampler)[: len(sampler) // 6 * 6]
    assert next_epoch(foreseen.sampler)
    sampler.set_epoch(1)
    assert foreseen.draw() == list(sampler)[: len(sampler) // 6 * 6]
