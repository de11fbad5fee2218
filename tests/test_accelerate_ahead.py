"""An accelerated loader reads ahead across the end of a pass, where the next order is known, and
moves no generator for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import forebay  # noqa: E402
from data_sets import DataSet  # noqa: E402
from test_accelerate import (  # noqa: E402
    READS,
    SAMPLERS,
    Caching,
    Files,
    accelerated,
    as_list,
    file_list,
    read_plain,
    run,
    warned,
)
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402


@pytest.fixture(autouse=True)
def _believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first pass is told at once, and not only when a worker has asked for a sample."""
    module = importlib.import_module("forebay.accelerate")  # its name is also the function's
    monkeypatch.setattr(module, "_BATCHES_UNPROVEN", 1_000_000)


class Seen:
    """An engine that notes what it is told."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.seeks = 0
        self.declared: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def seek(self, *place: int) -> None:
        self.seeks += 1
        self._native.seek(*place)

    def declare(self, stream: int, epoch: int, order: Any) -> None:
        self.declared.append(order.tolist())
        self._native.declare(stream, epoch, order)


def watched(loader: DataLoader, engine: forebay.Engine) -> tuple[DataLoader, Seen]:
    fast = accelerated(loader, engine)
    seen = fast._forebay.native = Seen(fast._forebay.native)
    return fast, seen


def passes(fast: DataLoader, count: int, set_epoch: bool = True) -> list[list[int]]:
    """The order of each."""
    out = []
    for epoch in range(count):
        if set_epoch and isinstance(fast.sampler, DistributedSampler):
            fast.sampler.set_epoch(epoch)
        out.append([item[0] for batch in fast for item in batch])
    return out


KNOWN = (
    "sequential",
    "random, loader's generator",
    "random, own generator",
    "replacement",
    "distributed",
    "subset, tensor",
)


@pytest.mark.parametrize("stay", [False, True], ids=["new workers", "workers that stay"])
@pytest.mark.parametrize("sampler", KNOWN)
def test_the_next_pass_is_told_before_this_one_ends(
    sampler: str, stay: bool, folder: DataSet, engine: forebay.Engine, caplog: Any
) -> None:
    dataset = Files(file_list(folder))
    options = SAMPLERS[sampler](dataset)
    loader = DataLoader(
        dataset, num_workers=2, persistent_workers=stay, collate_fn=as_list, **options
    )
    fast, seen = watched(loader, engine)
    torch.manual_seed(5)
    orders = passes(fast, 3)
    # The one after the last is told, too: nobody knows that it will not come.
    assert seen.declared[:3] == orders and len(seen.declared) == 4
    assert seen.seeks == 1
    assert warned(caplog) == []


@pytest.mark.parametrize("workers", [0, 2], ids=["here", "workers"])
def test_nothing_is_told_of_an_order_that_the_program_may_still_change(
    workers: int, folder: DataSet, engine: forebay.Engine
) -> None:
    """PyTorch's global generator: whatever draws from it until then decides."""
    dataset = Files(file_list(folder))
    loader = DataLoader(dataset, 4, shuffle=True, num_workers=workers, collate_fn=as_list)
    fast, seen = watched(loader, engine)
    orders = passes(fast, 3)
    assert seen.declared == orders and seen.seeks == 3


def test_a_wrong_guess_is_made_once(folder: DataSet, engine: forebay.Engine, caplog: Any) -> None:
    """A program that forgets set_epoch() has the same order in each pass."""
    dataset = Files(file_list(folder))
    loader = DataLoader(dataset, collate_fn=as_list, **SAMPLERS["distributed"](dataset))
    fast, seen = watched(loader, engine)
    first, *others = passes(fast, 4, set_epoch=False)
    assert others == [first] * 3
    right = [order == first for order in seen.declared]
    assert right == [True, False, True, True, True, True] and seen.seeks == 2
    assert warned(caplog) == []


def test_a_generator_that_the_program_moves(
    folder: DataSet, engine: forebay.Engine, caplog: Any
) -> None:
    """No guess is right; the order and the generator are those of the plain loader all the same."""
    dataset = Files(file_list(folder))

    def orders(fast: DataLoader) -> list:
        out = []
        for _ in range(4):
            out += [[item[0] for batch in fast for item in batch], fast.generator.initial_seed()]
            torch.rand(3, generator=fast.generator)
        return [*out, fast.generator.get_state().tolist()]

    def make() -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(dataset, 4, shuffle=True, generator=generator, collate_fn=as_list)

    fast, seen = watched(make(), engine)
    assert orders(fast) == orders(make())
    assert seen.seeks == 4 and warned(caplog) == []


@pytest.mark.parametrize("broken", [0, 1])
def test_after_a_pass_that_was_broken_off(
    broken: int, folder: DataSet, engine: forebay.Engine
) -> None:
    dataset = Files(file_list(folder))
    make = lambda: DataLoader(dataset, 4, num_workers=2, collate_fn=as_list)
    assert run(make, engine, broken=broken) == run(make, None, broken=broken)


def read_twice(path: str) -> bytes:
    return read_plain(path)[:0] + read_plain(path)


@pytest.mark.parametrize("make", [lambda p: Files(p, read_twice), Caching], ids=["twice", "never"])
def test_a_data_set_that_reads_more_or_less_than_its_items(
    make: Callable[[list], Any], folder: DataSet, engine: forebay.Engine
) -> None:
    """What was told is then not where the reader is: each pass begins anew."""
    fast, seen = watched(DataLoader(make(file_list(folder)), 4, collate_fn=as_list), engine)
    for _ in range(3):
        assert sum(len(batch) for batch in fast) == len(folder)
    # The first pass of one that keeps what it has read was like any other.
    assert seen.seeks == (2 if isinstance(fast.dataset, Caching) else 3)


def test_the_engine_reads_the_next_pass(folder: DataSet, wait_until: Any) -> None:
    engine = forebay.Engine(memory="64M", keep=False)
    fast = accelerated(DataLoader(Files(file_list(folder)), 4, collate_fn=as_list), engine)
    expected = [s.data for s in folder.samples]
    passed = lambda: [item[1] for batch in fast for item in batch]
    assert passed() == expected
    # Of those that were in memory no more; nobody has asked for them again yet.
    wait_until(lambda: engine.metrics()[READS] > len(folder))
    assert [passed(), passed()] == [expected] * 2
    assert engine.metrics()[READS] <= 4 * len(folder)
