"""Random breaks, resumes, world sizes and threads: decoded batches are always the same bits.

Each seed is one job, as in test_resume.py: a data set of small pictures, some of them corrupt, a
global batch, transforms, and several phases. A phase runs all ranks of some world size on a new
engine, from the state that the phase before saved. The order is that of PyTorch's sampler; every
sample's pixels are made anew in this thread from what PIL decodes."""

from __future__ import annotations

import io
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forebay
import numpy as np
import pytest
import torch
from data_sets import batches_of, torch_order, write_tar
from forebay import _forebay
from forebay import transforms as T
from PIL import Image
from test_transforms import pil_steps

_WIDE = 96 << 20
TRANSFORMS = [
    [T.RandomResizedCrop(16), T.RandomHorizontalFlip(), T.ToTensor(),
     T.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))],
    [T.Resize(20), T.CenterCrop((16, 12))],
    [T.RandomCrop(18, padding=2, pad_if_needed=True), T.ColorJitter(0.4, 0.4, 0.4, 0.1)],
    [T.RandAugment(), T.Resize((17, 15)), T.RandomVerticalFlip(), T.ToTensor()],
]  # fmt: skip


@dataclass
class Pictures:
    root: Path
    labels: list[int] = field(default_factory=list)
    pixels: list[np.ndarray | None] = field(default_factory=list)  # None: corrupt

    def __len__(self) -> int:
        return len(self.labels)

    def good(self, samples: list[int]) -> list[int]:
        return [s for s in samples if self.pixels[s] is not None]


def _picture(rng: np.random.Generator, i: int, low: int, high: int) -> tuple[str, bytes]:
    height, width = (int(n) for n in rng.integers(low, high, 2))
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8))
    form = "png" if i % 3 == 0 else "jpg"
    out = io.BytesIO()
    image.save(out, "PNG" if form == "png" else "JPEG")
    return form, out.getvalue()


def _rgb(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def make_pictures(
    root: Path, count: int, low: int, high: int, *, corrupt: bool = False, tar: bool = False
) -> Pictures:
    """A folder with three classes, or tar shards; `corrupt`: single ones, and a row of them."""
    rng = np.random.default_rng(count)
    made = Pictures(root)
    shards: list[list[tuple[str, dict[str, bytes]]]] = [[], []]
    for i in range(count):
        form, data = _picture(rng, i, low, high)
        bad = corrupt and (i % 9 == 4 or 10 <= i < 20)
        made.labels.append(3 * i // count)
        made.pixels.append(None if bad else _rgb(data))
        if bad:
            data = [b"", b"this is no picture", data[:20]][i % 3]
        if tar:
            members = {"cls": str(made.labels[-1]).encode(), form: data}
            shards[2 * i // count].append((f"{i:04}", members))
        else:
            folder = root / f"class{made.labels[-1]}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i:04}.{form}").write_bytes(data)
    if tar:
        root.mkdir()
        for number, samples in enumerate(shards):
            write_tar(root / f"shard-{number}.tar", samples)
    return made


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Pictures]:
    root = tmp_path_factory.mktemp("pictures")
    return [
        make_pictures(root / "small", 61, 12, 40),
        make_pictures(root / "large", 40, 150, 260),  # 3 MB: more than a tight budget keeps
        make_pictures(root / "one", 1, 20, 30),
        make_pictures(root / "broken", 61, 12, 40, corrupt=True),
        make_pictures(root / "tar", 47, 12, 40, tar=True),
        make_pictures(root / "broken_tar", 47, 12, 40, corrupt=True, tar=True),
    ]


@dataclass
class Job:
    """What stays the same in all phases."""

    data: Pictures
    global_batch: int
    shuffle: bool
    seed: int
    drop_last: bool
    sampler_drop_last: bool
    transform: list[T.Transform]
    dtype: str
    expected: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

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

    def sample(self, sample: int, epoch: int) -> torch.Tensor:
        """Channels first; numbers of two bytes as integers, so that bits are compared."""
        if (sample, epoch) not in self.expected:
            rgb = self.data.pixels[sample]
            spec = T.export(self.transform)
            key = dict(seed=self.seed, epoch=epoch, sample=sample)
            made = _forebay.apply_transforms(rgb, spec, dtype=self.dtype, **key)
            if self.dtype == "uint8" and (sample + epoch) % 4 == 0:
                steps = _forebay.transform_params(spec, rgb.shape[1], rgb.shape[0], **key)
                pil = np.asarray(pil_steps(Image.fromarray(rgb), steps))
                assert np.array_equal(made.transpose(1, 2, 0), pil)
            self.expected[sample, epoch] = bits(torch.from_numpy(_signed(made)))
        return self.expected[sample, epoch]

    def check(self, got: tuple[Any, Any], samples: list[int], epoch: int) -> None:
        images, labels = got
        assert labels.tolist() == [self.data.labels[s] for s in samples]
        images = bits(images)
        assert len(images) == len(samples)
        for image, sample in zip(images, samples, strict=True):
            assert torch.equal(image, self.sample(sample, epoch)), (sample, epoch)


def _signed(array: np.ndarray) -> np.ndarray:
    return array.view(np.int16) if array.dtype == np.uint16 else array


def bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
    return tensor.view(whole.get(tensor.dtype, tensor.dtype))


class Phase:
    """All ranks of one world size, in this process, sharing an engine."""

    def __init__(self, job: Job, rng: random.Random, state: str | None) -> None:
        self.job = job
        self.rng = rng
        self.world = rng.choice([w for w in (1, 2, 3, 4) if job.global_batch % w == 0])
        # The least: every pipeline has a MiB for each thread that decodes, and batches.
        self.tight = rng.random() < 0.5
        engine = forebay.Engine(
            memory=(7 + 2 * self.world) << 20 if self.tight else _WIDE,
            keep=rng.random() < 0.8,
            io=rng.choice(["auto", "threads"]),
            in_flight=rng.choice([0, 0, 1, 8]),
        )
        self.channels_last = [rng.random() < 0.5 for _ in range(self.world)]
        self.plain = [rng.random() < 0.3 for _ in range(self.world)]
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
                engine=engine,
                decode="image",
                transform=job.transform,
                dtype=job.dtype,
                channels_last=self.channels_last[rank],
                on_error="skip",
                decode_threads=rng.choice([None, 0, 1]),
                collate_fn=(lambda batch: batch) if self.plain[rank] else None,
            )
            for rank in range(self.world)
        ]
        self.epoch = 0
        self.consumed = [0] * self.world
        self.resumed = state is not None  # the next iter() goes on inside the epoch
        if state is not None:
            saved = json.loads(state)
            for loader in self.loaders:
                loader.load_state_dict(saved)
            consumed = saved["consumed"]
            total = len(job.order(saved["epoch"], 0, self.world)) * self.world
            if consumed >= min(total, saved["total"], len(job.data)):
                # The epoch was over; this world size may pad it to more samples, or drop fewer.
                consumed = max(total, -(-consumed // self.world) * self.world)
            self.epoch = saved["epoch"]
            self.consumed = [consumed] * self.world
        self.held: list[tuple[Any, list[int], int]] = []

    def run(self) -> str:
        """Some epochs, the last of them perhaps broken off; the state of some rank afterwards."""
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
        if self.rng.random() < 0.5:
            for loader in self.loaders:
                loader.close()
        for got, samples, epoch in self.held:
            self.job.check(got, samples, epoch)
        states = [loader.state_dict() for loader in self.loaders]
        for state, consumed in zip(states, self.consumed, strict=True):
            assert (state["epoch"], state["consumed"]) == (self.epoch, consumed)
        for loader in self.loaders:
            loader.close()
        return json.dumps(self.rng.choice(states))

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.set_epoch(epoch)
        if not (self.resumed and epoch == self.epoch):
            self.epoch, self.consumed, self.resumed = epoch, [0] * self.world, False

    def steps(self, count: int | None) -> None:
        """One iter() of each rank, for `count` batches, or to the end of the epoch."""
        if not self.resumed:
            self.consumed = [0] * self.world
        self.resumed = False
        iterators = [iter(loader) for loader in self.loaders]
        rests = [self.rest(rank) for rank in range(self.world)]
        for step in range(max(map(len, rests)) if count is None else count):
            for rank, rest in enumerate(rests):
                if step < len(rest):
                    self.consumed[rank], samples = rest[step]
                    self.step(rank, next(iterators[rank]), samples)
        if count is None:
            for iterator in iterators:
                assert next(iterator, None) is None, "a batch too many"
            self.epoch, self.consumed = self.epoch + 1, [0] * self.world

    def rest(self, rank: int) -> list[tuple[int, list[int]]]:
        """The rank's coming batches in this epoch: where each ends, and its samples. Batches of
        corrupt samples alone are left out.
        """
        order = self.job.order(self.epoch, rank, self.world)
        total = len(order) * self.world
        size = self.job.global_batch // self.world
        position = self.consumed[rank]
        rest = []
        for batch in batches_of(order[position // self.world :], size, self.job.drop_last):
            position = min(total, position + self.job.global_batch)
            if good := self.job.data.good(batch):
                rest.append((position, good))
        return rest

    def step(self, rank: int, got: Any, samples: list[int]) -> None:
        if self.plain[rank]:
            assert got.indices.tolist() == samples
            assert got.epoch == self.epoch
            images = got.torch()
            got = (images.permute(0, 3, 1, 2) if self.channels_last[rank] else images, got.labels)
        self.job.check(got, samples, self.epoch)
        # Some are held for long; in a tight budget they may leave no room for a batch.
        if self.rng.random() < 0.1 and not self.tight:
            self.held.append((got, samples, self.epoch))


@pytest.mark.seeds
def test_breaks_resumes_and_worlds_of_decoded_batches(seed: int, sets: list[Pictures]) -> None:
    rng = random.Random(seed)
    data = rng.choice(sets)
    transform = rng.choice(TRANSFORMS)
    floats = any(isinstance(op, T.ToTensor) for op in transform)
    job = Job(
        data,
        global_batch=rng.choice([4, 6, 12, 24, 120]),
        shuffle=rng.random() < 0.7,
        seed=rng.choice([0, rng.randrange(1000), rng.randrange(2**63)]),
        drop_last=rng.random() < 0.3,
        sampler_drop_last=rng.random() < 0.3,
        transform=transform,
        dtype=rng.choice(["float32", "float16", "bfloat16"]) if floats else "uint8",
    )
    print(f"seed {seed}: {data.root.name} {job.global_batch=} {job.shuffle=} {job.seed=}")
    state = None
    for number in range(rng.randint(2, 4)):
        phase = Phase(job, rng, state)
        print(f"phase {number}: world {phase.world}, tight {phase.tight}, from {state}")
        state = phase.run()
