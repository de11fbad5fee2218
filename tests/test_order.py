"""The order is PyTorch's, bit for bit: frozen vectors, and the installed PyTorch."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import forebay
import numpy as np
import pytest
import torch.utils.data
from data_sets import DataSet, batches_of, check_batch, image_folder, torch_order
from forebay import _forebay

_CASES_PER_SEED = 200


def _order(size: int, seed: int, epoch: int, rank: int, world: int, drop_last: bool) -> np.ndarray:
    return _forebay.epoch_order(
        size, seed=seed, epoch=epoch, rank=rank, world=world, drop_last=drop_last
    )


# (size, seed, epoch, rank, world, drop_last), made with PyTorch 2.
_GOLDEN = [
    ((10, 0, 0, 0, 1, False), [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]),
    ((10, 0, 1, 0, 1, False), [5, 6, 1, 2, 0, 8, 9, 3, 7, 4]),
    ((10, 42, 0, 0, 1, False), [2, 6, 1, 8, 4, 5, 0, 9, 3, 7]),
    ((10, 2**32 + 42, 0, 0, 1, False), [2, 6, 1, 8, 4, 5, 0, 9, 3, 7]),
    ((11, 7, 3, 1, 4, False), [6, 3, 5]),
    ((11, 7, 3, 1, 4, True), [6, 3]),
    ((3, 1, 0, 6, 8, False), [1]),
    ((1, 5, 5, 0, 1, False), [0]),
]


@pytest.mark.parametrize(("spec", "expected"), _GOLDEN, ids=lambda v: str(v)[:40])
def test_golden_vectors(spec: tuple, expected: list[int]) -> None:
    assert _order(*spec).tolist() == expected


@pytest.mark.parametrize(
    ("spec", "count", "crc"),
    [
        ((100_000, 123, 4, 0, 1, False), 100_000, 1941719172),
        ((1_281_167, 0, 0, 3, 8, False), 160_146, 888732219),
    ],
    ids=["100k", "imagenet"],
)
def test_golden_checksums(spec: tuple, count: int, crc: int) -> None:
    order = _order(*spec)
    assert len(order) == count
    assert zlib.crc32(order.astype(np.int32).tobytes()) == crc


# From here on torch.randperm has another algorithm.
_MANY = 214_748_364


def test_golden_checksum_of_many_samples() -> None:
    order = _order(_MANY, 9, 0, 0, 1, False)
    assert order[:4].tolist() == [42849823, 142754008, 144913577, 165648139]
    assert _forebay.crc32c(order) == 3521843201


if "FOREBAY_SOAK" in os.environ:  # takes 3 GB and half a minute: make soak

    @pytest.mark.seeds
    def test_many_samples(seed: int) -> None:
        if seed >= 3:
            return
        size = _MANY - 1 + seed
        generator = torch.Generator().manual_seed(seed)
        expected = torch.randperm(size, generator=generator).numpy()
        assert np.array_equal(_order(size, seed, 0, 0, 1, False), expected)


@pytest.mark.seeds
def test_distributed_sampler(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(_CASES_PER_SEED):
        world = rng.randint(1, 64) if rng.random() < 0.8 else 1
        spec = dict(
            shuffle=rng.random() < 0.8,
            seed=rng.choice([rng.randrange(100), rng.randrange(2**33), rng.randrange(2**63)]),
            epoch=rng.choice([rng.randrange(5), rng.randrange(10**6)]),
            rank=rng.randrange(world),
            world=world,
            drop_last=rng.random() < 0.5,
        )
        size = rng.choice([rng.randint(1, 8), rng.randint(1, 300), rng.randint(1, 5000)])
        expected = torch_order(size, **spec)
        assert _forebay.epoch_order(size, **spec).tolist() == expected, (size, spec)
        assert _forebay.epoch_total(size, world, spec["drop_last"]) == len(expected) * world
        # Resuming: the same order from a global position on.
        steps = rng.randint(0, len(expected))
        rest = _forebay.epoch_order(size, **spec, start=steps * world)
        assert rest.tolist() == expected[steps:], (size, spec, steps)


@pytest.mark.parametrize("drop_last", [False, True])
def test_all_ranks_together_see_every_sample(drop_last: bool) -> None:
    size, world = 103, 8
    orders = [_order(size, 9, 2, rank, world, drop_last) for rank in range(world)]
    seen = np.bincount(np.concatenate(orders), minlength=size)
    expected = [torch_order(size, shuffle=True, seed=9, epoch=2, rank=r, world=world,
                            drop_last=drop_last) for r in range(world)]  # fmt: skip
    assert seen.tolist() == np.bincount(np.concatenate(expected), minlength=size).tolist()
    assert seen.max() == (1 if drop_last else 2)


def _state(generator: torch.Generator) -> np.ndarray:
    return generator.get_state().numpy().copy()


@pytest.mark.seeds
def test_random_sampler_from_generator_state(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator()
    for _ in range(_CASES_PER_SEED // 4):
        generator.manual_seed(rng.randrange(2**63))
        # Anything a training script may have drawn before; it leaves the state anywhere.
        for _ in range(rng.randrange(4)):
            count = rng.choice([1, 15, 16, 17, 623, 624, 625, rng.randrange(3000)])
            draw = rng.choice(["rand", "randn", "randint", "randperm", "double", "bernoulli"])
            if draw == "randint":
                torch.randint(10, (count,), generator=generator)
            elif draw == "randperm":
                torch.randperm(count, generator=generator)
            elif draw == "double":
                torch.rand(count, dtype=torch.float64, generator=generator)
            elif draw == "bernoulli":
                torch.bernoulli(torch.full((count,), 0.5), generator=generator)
            else:
                getattr(torch, draw)(count, generator=generator)
        size = rng.choice([1, rng.randint(1, 700), rng.randint(1, 2000)])
        count = rng.choice([size, rng.randint(1, size), rng.randint(1, 3 * size), 2 * size])
        replacement = rng.random() < 0.5
        state = _state(generator)
        sampler = torch.utils.data.RandomSampler(
            range(size),  # type: ignore[arg-type]
            replacement=replacement,
            num_samples=count,
            generator=generator,
        )
        ours = _forebay.random_sampler_order(state, size, count, replacement)
        assert ours.tolist() == list(sampler), (size, count, replacement)


def test_random_sampler_golden() -> None:
    generator = torch.Generator()
    generator.manual_seed(3)
    state = _state(generator)
    assert _forebay.random_sampler_order(state, 8, 19).tolist() == [
        2, 4, 3, 5, 1, 0, 6, 7, 5, 6, 3, 7, 2, 4, 0, 1, 2, 3, 5,
    ]  # fmt: skip
    assert _forebay.random_sampler_order(state, 8, 12, True).tolist() == [
        2, 0, 1, 3, 0, 0, 0, 5, 5, 3, 2, 3,
    ]  # fmt: skip


def test_a_damaged_generator_state_is_refused() -> None:
    state = _state(torch.Generator())
    with pytest.raises(forebay.ArgumentError, match="5056 bytes"):
        _forebay.random_sampler_order(state[:-1], 8, 8)
    state[8:12] = 255  # `left`
    with pytest.raises(forebay.ArgumentError, match="damaged"):
        _forebay.random_sampler_order(state, 8, 8)


class _Files(torch.utils.data.Dataset):
    """The user's own Dataset: plain reads in ImageFolder's order."""

    def __init__(self, root: Path) -> None:
        self.files = image_folder(root)[1]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[int, bytes, int]:
        path, label = self.files[index]
        return index, Path(path).read_bytes(), label


@pytest.mark.parametrize("world", [1, 2, 5, 7])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sampler_drop_last", [False, True])
def test_loader_yields_the_batches_of_torchs_loader(
    folder: DataSet,
    engine: forebay.Engine,
    world: int,
    drop_last: bool,
    sampler_drop_last: bool,
) -> None:
    files = _Files(folder.root)
    batch_size = {1: 8, 2: 7, 5: 4, 7: 3}[world]
    for rank in range(world):
        sampler: torch.utils.data.DistributedSampler = torch.utils.data.DistributedSampler(
            files, num_replicas=world, rank=rank, seed=11, drop_last=sampler_drop_last
        )
        theirs = torch.utils.data.DataLoader(
            files, batch_size, sampler=sampler, drop_last=drop_last, collate_fn=list
        )
        ours = forebay.DataLoader(
            folder.root,
            batch_size,
            shuffle=True,
            seed=11,
            drop_last=drop_last,
            sampler_drop_last=sampler_drop_last,
            rank=rank,
            world_size=world,
            engine=engine,
        )
        assert len(ours) == len(theirs)
        for epoch in (0, 3):
            sampler.set_epoch(epoch)
            ours.set_epoch(epoch)
            for batch, expected in zip(ours, theirs, strict=True):
                assert batch.indices.tolist() == [index for index, _, _ in expected]
                assert [b.tobytes() for b in batch] == [data for _, data, _ in expected]
                assert batch.labels.tolist() == [label for _, _, label in expected]


@pytest.mark.parametrize("world", [1, 4])
def test_without_shuffle_the_order_is_the_data_sets(
    folder: DataSet, engine: forebay.Engine, world: int
) -> None:
    for rank in range(world):
        loader = forebay.DataLoader(
            folder.root, 5, rank=rank, world_size=world, seed=3, engine=engine
        )
        order = torch_order(
            len(folder), shuffle=False, seed=3, epoch=0, rank=rank, world=world, drop_last=False
        )
        for batch, expected in zip(loader, batches_of(order, 5), strict=True):
            check_batch(batch, expected, folder)


def test_world_larger_than_the_data_set(tmp_path: Path, engine: forebay.Engine) -> None:
    (tmp_path / "a").mkdir()
    for i in range(3):
        (tmp_path / "a" / str(i)).write_bytes(b"x" * i)
    for rank in range(8):
        loader = forebay.DataLoader(
            tmp_path, 2, shuffle=True, rank=rank, world_size=8, engine=engine
        )
        expected = torch_order(
            3, shuffle=True, seed=0, epoch=0, rank=rank, world=8, drop_last=False
        )
        assert [i for batch in loader for i in batch.indices.tolist()] == expected
        none = forebay.DataLoader(
            tmp_path, 2, rank=rank, world_size=8, sampler_drop_last=True, engine=engine
        )
        assert len(none) == 0
        assert list(none) == []


# Names whose order as paths differs from their order as names, or that people forget about.
_NAMES = [
    "a", "a-b", "a.b", "a b", "ab", "A", "B", "_", ".hidden", "10", "9", "é", "日本", "z", "a~",
    "😀", "\ufb01",
]  # fmt: skip


def _grow(rng: random.Random, folder: Path, depth: int, made: list[Path]) -> None:
    for name in rng.sample(_NAMES, rng.randint(0, 6)):
        suffix = rng.choice(["", ".jpg", ".JPG", ".jpeg", ".png", ".txt", ".tar.jpg"])
        (folder / f"{name}{suffix}").write_bytes(rng.randbytes(rng.randrange(50)))
    for name in rng.sample(_NAMES, rng.randint(0, 3) if depth else 0):
        below = folder / f"{name}_d"
        if made and rng.random() < 0.15:
            target = rng.choice(made)
            # A link into a folder that holds the link would never end in os.walk.
            if target not in below.parents:
                below.symlink_to(target, target_is_directory=True)
                continue
        below.mkdir()
        _grow(rng, below, depth - 1, made)
        made.append(below)


@pytest.mark.seeds
def test_folder_order_is_image_folders(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    root = tmp_path / "root"
    root.mkdir()
    (root / "beside_the_classes.jpg").write_bytes(b"no sample")
    made: list[Path] = []
    for name in rng.sample(_NAMES, rng.randint(1, 5)):
        (root / name).mkdir()
        (root / name / "one.jpg").write_bytes(name.encode())
        _grow(rng, root / name, 3, made)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "linked.png").write_bytes(b"linked")
    (root / "link").symlink_to(outside)
    (root / "link_to_file").symlink_to(outside / "linked.png")
    for extensions in (None, forebay.IMG_EXTENSIONS):
        classes, files = image_folder(root, extensions)
        catalog = forebay.Catalog.build(str(root), "folder", list(extensions or []))
        assert catalog.classes == classes
        numbers = range(len(catalog))
        found = [(os.path.join(root, catalog.name(i)), catalog.label(i)) for i in numbers]
        assert found == files
        assert [catalog.length(i) for i in range(len(catalog))] == [
            os.path.getsize(path) for path, _ in files
        ]
