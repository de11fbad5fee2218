"""Random early breaks, resumes and world sizes: order and bytes are PyTorch's, always.

Each seed is one job: a data set, a global batch, and several phases. A phase runs all ranks of some
world size in lock step, from the state that the phase before saved, for some batches or epochs;
then the job "crashes". What every rank gets is compared with PyTorch's sampler and plain reads."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import forebay
import pytest
from data_sets import DataSet, batches_of, check_batch, torch_order

_TIGHT = 8 << 20  # the smallest budget; large_folder does not fit


@dataclass
class Job:
    """What stays the same in all phases."""

    data: DataSet
    global_batch: int
    shuffle: bool
    seed: int
    drop_last: bool
    sampler_drop_last: bool

    def order(self, epoch: int, rank: int, world: int) -> list[int]:
        return torch_order(
            len(self.data),
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=epoch,
            rank=rank,
            world=world,
            drop_last=self.sampler_drop_last,
        )


class Phase:
    """All ranks of one world size, in this process, sharing an engine."""

    def __init__(self, job: Job, rng: random.Random, state: str | None) -> None:
        self.job = job
        self.rng = rng
        worlds = [w for w in (1, 2, 3, 4, 6) if job.global_batch % w == 0]
        self.world = rng.choice(worlds)
        self.tight = rng.random() < 0.5
        engine = forebay.Engine(
            memory=_TIGHT if self.tight else 64 << 20,
            keep=rng.random() < 0.8,
            io=rng.choice(["auto", "threads"]),
            in_flight=rng.choice([0, 0, 1, 8]),
            verify=rng.random() < 0.2,
        )
        self.loaders = [
            forebay.DataLoader(
                job.data.root,
                job.global_batch // self.world,
                shuffle=job.shuffle,
                seed=job.seed,
                drop_last=job.drop_last,
                sampler_drop_last=job.sampler_drop_last,
                rank=rank,
                world_size=self.world,
                layout=rng.choice(["views", "contiguous"]),
                engine=engine,
            )
            for rank in range(self.world)
        ]
        self.epoch, self.consumed = 0, 0
        self.resumed = state is not None  # the next iter() goes on inside the epoch
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(json.loads(state))
            saved = json.loads(state)
            self.epoch, self.consumed = saved["epoch"], saved["consumed"]
            total = len(job.order(self.epoch, 0, self.world)) * self.world
            if self.consumed >= min(total, saved["total"], len(job.data)):
                # The epoch was over; this world size may pad it to more samples, or drop fewer.
                self.consumed = max(total, -(-self.consumed // self.world) * self.world)
        self.held: list[tuple[forebay.Batch, list[int]]] = []

    def run(self) -> str:
        """Some epochs, the last of them perhaps broken off; the state afterwards."""
        for _ in range(self.rng.randint(1, 3)):
            what = self.rng.random()
            if what < 0.2:
                self.steps(self.rng.randint(0, 4))  # then a break: the epoch starts over
            elif what < 0.3:
                self.set_epoch(self.rng.randrange(20))
            elif what < 0.5:
                self.set_epoch(self.epoch)
            if self.rng.random() < 0.5:
                self.steps(None)
            else:
                self.steps(self.rng.randint(0, 8))
                break
        for batch, expected in self.held:
            check_batch(batch, expected, self.job.data)
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states), states
        assert (states[0]["epoch"], states[0]["consumed"]) == (self.epoch, self.consumed)
        return json.dumps(states[0])

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.set_epoch(epoch)
        if not (self.resumed and epoch == self.epoch):
            self.epoch, self.consumed, self.resumed = epoch, 0, False

    def steps(self, count: int | None) -> None:
        """One iter() of each rank, for `count` batches, or to the end of the epoch."""
        if not self.resumed:
            self.consumed = 0
        self.resumed = False
        orders = [self.job.order(self.epoch, rank, self.world) for rank in range(self.world)]
        size = self.job.global_batch // self.world
        first = self.consumed // self.world
        rest = [list(batches_of(order[first:], size, self.job.drop_last)) for order in orders]
        iterators = [iter(loader) for loader in self.loaders]
        for step in range(len(rest[0]) if count is None else min(count, len(rest[0]))):
            for iterator, batches in zip(iterators, rest, strict=True):
                batch = next(iterator)
                check_batch(batch, batches[step], self.job.data)
                assert batch.epoch == self.epoch
                # Some are held for long. In the smallest budget they may leave no hole for a batch.
                if self.rng.random() < 0.1 and not self.tight and len(self.held) < 4:
                    self.held.append((batch, batches[step]))
            total = len(orders[0]) * self.world
            self.consumed = min(total, self.consumed + self.job.global_batch)
        if count is None:
            for iterator in iterators:
                assert next(iterator, None) is None, "a batch too many"
            self.epoch, self.consumed = self.epoch + 1, 0


@pytest.mark.seeds
def test_breaks_resumes_and_worlds(seed: int, request: pytest.FixtureRequest) -> None:
    rng = random.Random(seed)
    data: DataSet = request.getfixturevalue(
        rng.choice(["folder", "large_folder", "large_folder", "webdataset", "tfrecord"])
    )
    job = Job(
        data,
        global_batch=rng.choice([4, 6, 12, 24]),
        shuffle=rng.random() < 0.85,
        seed=rng.choice([0, rng.randrange(1000), rng.randrange(2**63)]),
        drop_last=rng.random() < 0.4,
        sampler_drop_last=rng.random() < 0.4,
    )
    print(f"seed {seed}: {data.root.parent.name} {job.global_batch=} {job.shuffle=} {job.seed=}")
    state = None
    for number in range(rng.randint(2, 5)):
        phase = Phase(job, rng, state)
        print(f"phase {number}: world {phase.world}, from {state}")
        state = phase.run()


@pytest.mark.parametrize("sampler_drop_last", [False, True])
def test_a_finished_epoch_is_finished_at_any_world_size(
    folder: DataSet, engine: forebay.Engine, sampler_drop_last: bool
) -> None:
    """The state after the last, short batch is no multiple of other world sizes."""

    def loader(world: int) -> forebay.DataLoader:
        return forebay.DataLoader(
            folder.root,
            12 // world,
            shuffle=True,
            world_size=world,
            rank=0,
            sampler_drop_last=sampler_drop_last,
            engine=engine,
        )

    for first in (1, 2, 3, 4, 6, 12):
        source = loader(first)
        for step, _ in enumerate(source):
            if step + 1 == len(source):
                break
        state = source.state_dict()
        assert state["epoch"] == 0
        for second in (1, 2, 3, 4, 6, 12):
            resumed = loader(second)
            resumed.load_state_dict(json.loads(json.dumps(state)))
            total = len(torch_order(61, shuffle=True, seed=0, epoch=0, rank=0, world=second,
                                    drop_last=sampler_drop_last)) * second  # fmt: skip
            assert list(resumed) == []
            assert resumed.epoch == 1
            assert sum(len(batch) for batch in resumed) == total // second


def test_states_that_do_not_fit_are_refused(folder: DataSet, engine: forebay.Engine) -> None:
    loader = forebay.DataLoader(folder.root, 4, shuffle=True, seed=5, engine=engine)
    next(iter(loader))
    state = loader.state_dict()
    three = forebay.DataLoader(
        folder.root, 2, shuffle=True, seed=5, rank=0, world_size=3, engine=engine
    )
    with pytest.raises(forebay.ArgumentError, match="4 samples were consumed.*same global batch"):
        three.load_state_dict(state)
    for change in ({"seed": 6}, {"shuffle": False}, {"size": 60}):
        with pytest.raises(forebay.ArgumentError, match="another loader"):
            loader.load_state_dict(state | change)
    with pytest.raises(forebay.ArgumentError, match="version 99"):
        loader.load_state_dict(state | {"version": 99})
    for wrong in ({}, None, {"epoch": 1}):
        with pytest.raises(forebay.ArgumentError, match="no state of a forebay.DataLoader"):
            loader.load_state_dict(wrong)  # type: ignore[arg-type]


def test_a_state_of_another_data_set_warns(
    folder: DataSet, engine: forebay.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    loader = forebay.DataLoader(folder.root, 4, engine=engine)
    loader.load_state_dict(loader.state_dict() | {"fingerprint": 1})
    assert str(folder.root) in caplog.text


def test_resuming_does_not_disturb_what_was_handed_out(
    folder: DataSet, engine: forebay.Engine
) -> None:
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, engine=engine)
    order = torch_order(61, shuffle=True, seed=0, epoch=0, rank=0, world=1, drop_last=False)
    held = next(iter(loader))
    state = loader.state_dict()
    for _ in range(3):
        loader.load_state_dict(state)
        loader.set_epoch(0)  # the usual loop does; it must not throw the position away
        check_batch(next(iter(loader)), order[8:16], folder)
    check_batch(held, order[:8], folder)


def test_the_index_goes_on_after_a_resume(folder: DataSet) -> None:
    """As fb_batch_index() does."""
    engine = forebay.Engine(memory="64M")
    first = forebay.DataLoader(folder.root, 4, shuffle=True, engine=engine)
    batches = iter(first)
    assert [next(batches).index for _ in range(3)] == [0, 1, 2]
    second = forebay.DataLoader(folder.root, 4, shuffle=True, engine=engine)
    second.load_state_dict(first.state_dict())
    assert [(b.epoch, b.index) for b in second][:2] == [(0, 3), (0, 4)]
    assert [(b.epoch, b.index) for b in second][:2] == [(1, 0), (1, 1)]
