"""accelerate(): the user's own loader computes the same with it and without, and reads less."""

from __future__ import annotations

import builtins
import functools
import gc
import gzip
import io
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import forebay  # noqa: E402
from data_sets import DataSet, image_folder  # noqa: E402
from forebay.slowfs import SlowFs  # noqa: E402
from PIL import Image  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

_usable, _reason = SlowFs.available()
needs_fuse = pytest.mark.skipif(not _usable, reason=f"no mount here: {_reason}")
WORKERS = pytest.mark.parametrize("workers", [0, 2], ids=["here", "workers"])
REAL_OPEN = builtins.open
SERVED = "forebay_stage_samples_total"
READS = "forebay_source_reads_total"


# ---- data sets as users write them; at the top, so that spawn can send them


def read_plain(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


class Files(Dataset):
    """One path an item, read by `read`; every source of randomness goes into the item."""

    def __init__(self, paths: list, read: Callable[[Any], Any] = read_plain) -> None:
        self.paths = paths
        self.read = read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple:
        drawn = torch.rand(()).item(), random.random(), np.random.random()
        return int(i), self.read(self.paths[i]), drawn


class Folder(Files):
    """torchvision's: `samples` are (path, class)."""

    def __init__(self, root: Path) -> None:
        self.classes, self.samples = image_folder(root)
        self.read = read_plain

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple:
        path, label = self.samples[i]
        return int(i), self.read(path), label, torch.rand(()).item()


def as_list(items: list) -> list:
    return items


def file_list(data: DataSet) -> list[str]:
    return [str(data.root / s.name) for s in data.samples]


# ---- with and without


def warned(log: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in log.records if r.name == "forebay" and r.levelno >= logging.WARNING
    ]


def accelerated(loader: DataLoader, engine: forebay.Engine) -> DataLoader:
    fast = forebay.accelerate(loader, engine=engine)
    assert fast is not loader
    return fast


def seeded() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def length(loader: DataLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def run(
    make: Callable[[], DataLoader],
    engine: forebay.Engine | None,
    epochs: int = 3,
    broken: int | None = None,
) -> list:
    """Items of some epochs, with the generators' states after each; epoch `broken` ends early."""
    seeded()
    loader = make()
    if engine is not None:
        loader = accelerated(loader, engine)
    out: list = []
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        batches = []
        for n, batch in enumerate(loader):
            batches.append(batch)
            if epoch == broken and n == 2:
                break
        states = [
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ]
        for owner in (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            if getattr(owner, "generator", None) is not None:
                states.append(owner.generator.get_state().tolist())
        out.append((length(loader), batches, states))
    return out


def same_with_and_without(
    make: Callable[[], DataLoader], engine: forebay.Engine, **options: Any
) -> list:
    """The plain run, after the check that the accelerated one is like it and was served by us."""
    plain = run(make, None, **options)
    before = engine.metrics()[SERVED]
    fast = run(make, engine, **options)
    assert fast == plain
    assert engine.metrics()[SERVED] > before
    assert builtins.open is io.open is REAL_OPEN
    return plain


class Unknown(Sampler):
    """Draws from the global generator while it runs; yields numpy's integers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.size):
            yield np.int64(torch.randint(self.size, ()).item())


class Ragged(Sampler):
    """Batches of 1, 2, 3, ... as tuples, from `epoch` on."""

    epoch = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        at, length = self.epoch, 1
        while at < self.size:
            yield tuple(range(at, min(self.size, at + length)))
            at, length = at + length, length + 1


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS: dict[str, Callable[[Dataset], dict[str, Any]]] = {
    "sequential": lambda d: {"batch_size": 4},
    "sequential sampler": lambda d: {"batch_size": 4, "sampler": SequentialSampler(d)},
    "random": lambda d: {"batch_size": 4, "shuffle": True},
    "random, loader's generator": lambda d: {
        "batch_size": 4, "shuffle": True, "generator": generator(), "drop_last": True,
    },
    "random, own generator": lambda d: {
        "batch_size": 4, "sampler": RandomSampler(d, generator=generator()),
    },
    "replacement": lambda d: {
        "batch_size": 4,
        "sampler": RandomSampler(d, replacement=True, num_samples=90, generator=generator()),
    },
    "more than there is": lambda d: {"batch_size": 4, "sampler": RandomSampler(d, num_samples=100)},
    "distributed": lambda d: {
        "batch_size": 4, "sampler": DistributedSampler(d, num_replicas=3, rank=1, seed=5),
    },
    "subset": lambda d: {"batch_size": 4, "sampler": SubsetRandomSampler(range(5, 40))},
    "subset, tensor": lambda d: {
        "batch_size": 4, "sampler": SubsetRandomSampler(torch.arange(5, 40), generator=generator()),
    },
    "weighted": lambda d: {
        "batch_size": 4, "sampler": WeightedRandomSampler([1.0 + i for i in range(len(d))], 50),
    },
    "unknown sampler": lambda d: {"batch_size": 4, "sampler": Unknown(len(d))},
    "batch sampler": lambda d: {"batch_sampler": BatchSampler(RandomSampler(d), 7, True)},
    "unknown batch sampler": lambda d: {"batch_sampler": Ragged(len(d))},
    "one by one": lambda d: {"batch_size": None, "shuffle": True},
    "one by one, unknown": lambda d: {"batch_size": None, "sampler": Unknown(len(d))},
}  # fmt: skip


@WORKERS
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_items_order_and_generators_are_those_of_the_plain_loader(
    sampler: str, workers: int, folder: DataSet, engine: forebay.Engine, caplog: Any
) -> None:
    dataset = Files(file_list(folder))

    def make() -> DataLoader:
        options = SAMPLERS[sampler](dataset)
        return DataLoader(dataset, num_workers=workers, collate_fn=as_list, **options)

    plain = same_with_and_without(make, engine, epochs=3, broken=1)
    assert all(batches for _, batches, _ in plain)
    assert warned(caplog) == []


def parts(paths: list[str]) -> dict[str, Dataset]:
    whole = Files(paths)
    return {
        "subset": Subset(whole, [40, 3, 3, 17, 60]),
        "subset of a subset": Subset(Subset(whole, list(range(10, 30))), np.arange(19, 4, -2)),
        "split": random_split(whole, [20, 41], generator())[1],
        "concat": ConcatDataset([Files(paths[50:]), Subset(whole, [1, 2, 55]), Files(paths[:9])]),
        "array of names": Files(np.array(paths)),  # type: ignore[arg-type]
        "each twice": Files(paths[:9] * 2),
    }


@pytest.mark.parametrize("part", parts(["x"] * 61))
def test_parts_of_data_sets(part: str, folder: DataSet, engine: forebay.Engine) -> None:
    dataset = parts(file_list(folder))[part]
    make = lambda: DataLoader(dataset, 3, shuffle=True, num_workers=2, collate_fn=as_list)
    same_with_and_without(make, engine, epochs=2)
    assert engine.metrics()[SERVED] == 2 * len(dataset)  # type: ignore[arg-type]


# ---- ways to read


def as_array(image: Image.Image) -> list:
    return [image.mode, image.size, image.tobytes()]


def write_array(path: Path, i: int) -> None:
    with open(path, "wb") as out:
        np.save(out, np.arange(i * 100, dtype=np.int32).reshape(-1, 4))


def write_image(path: Path, i: int, kind: str) -> None:
    pixels = np.random.default_rng(i).integers(0, 256, (17 + i, 16), dtype=np.uint8)
    Image.fromarray(pixels).save(path, kind)


def write_text(path: Path, i: int) -> None:
    path.write_bytes("".join(f"línea {i} {k}\r\n" for k in range(i)).encode())


def read_number(path: str) -> tuple:
    with open(path, "rb") as file:
        file.seek(5)
        return os.pread(file.fileno(), 7, 3), os.fstat(file.fileno()).st_size, file.read(2)


def probe(path: str) -> list:
    """Whatever programs ask of a file."""
    out: list = []
    with open(path, "rb") as f:
        out += [f.name, f.mode, f.readable(), f.writable(), f.seekable(), f.isatty(), f.closed]
        out += [f.tell(), f.read(3), f.peek(1)[:1], f.read1(2), f.tell(), f.seek(1), f.readline(9)]
        buffer = bytearray(6)
        out += [f.readinto(buffer), bytes(buffer), f.seek(-4, os.SEEK_END), f.read(), f.read()]
        for call in (lambda: f.write(b"x"), lambda: f.writelines([b"x"]), lambda: f.truncate(1)):
            try:
                call()
            except Exception as error:  # noqa: BLE001 - it is compared
                out.append(type(error))
    out.append(f.closed)
    with open(Path(path)) as f:
        out += [str(f.name), type(f.name), f.mode, f.encoding, f.errors, f.line_buffering, list(f)]
    with open(path, buffering=1, newline="", encoding="latin-1") as f:
        out += [f.read(), f.newlines, f.line_buffering]
    for wrong in ({"mode": "rb", "encoding": "utf-8"}, {"mode": "r", "buffering": 0},
                  {"closefd": False}, {"mode": "rb", "newline": ""}, {"mode": "rz"}):  # fmt: skip
        try:
            open(path, **wrong).close()
        except Exception as error:  # noqa: BLE001 - it is compared
            out.append((type(error), str(error)))
    with open(path, "rb", buffering=0) as f:
        out.append(type(f))
    with open(os.fsencode(path), "rb") as f:
        out.append(f.read())
    return out


WAYS: dict[str, tuple[Callable[[Path, int], Any], Callable[[Any], Any]]] = {
    "Path.read_bytes": (write_text, lambda p: Path(p).read_bytes()),
    "Path.read_text": (write_text, lambda p: Path(p).read_text(encoding="utf-8")),
    "text": (write_text, lambda p: list(open(p, encoding="utf-8"))),
    "io.open": (write_text, lambda p: io.open(p, "br").read()),  # noqa: UP020
    "keywords": (write_text, lambda p: open(mode="rb", file=p).read()),
    "np.load": (write_array, lambda p: np.load(p).tolist()),
    "np.load, mapped": (write_array, lambda p: np.load(p, mmap_mode="r").tolist()),
    "np.fromfile": (write_array, lambda p: np.fromfile(p, np.uint8).tolist()),
    "np.fromfile of a file": (write_array, lambda p: np.fromfile(open(p, "rb"), np.uint8).tolist()),
    "torch.load": (
        lambda p, i: torch.save(torch.arange(i), p), lambda p: torch.load(p).tolist(),
    ),
    "gzip": (lambda p, i: p.write_bytes(gzip.compress(b"g" * i)), lambda p: gzip.open(p).read()),
    "PIL, PNG": (functools.partial(write_image, kind="PNG"), lambda p: as_array(Image.open(p))),
    "PIL, mapped BMP": (
        functools.partial(write_image, kind="BMP"), lambda p: as_array(Image.open(p)),
    ),
    "PIL, from a file": (
        functools.partial(write_image, kind="PNG"), lambda p: as_array(Image.open(open(p, "rb"))),
    ),
    "fileno": (write_text, read_number),
    "forebay.open": (write_text, lambda p: forebay.open(p).read()),
    "forebay.open, text": (write_text, lambda p: forebay.open(p, "r", encoding="utf-8").read()),
    "every question": (write_text, probe),
}  # fmt: skip


@WORKERS
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_read(
    way: str, workers: int, tmp_path: Path, engine: forebay.Engine, caplog: Any
) -> None:
    write, read = WAYS[way]
    paths: list = []
    for i in range(1, 13):
        paths.append(tmp_path / f"{i}.dat")
        write(paths[-1], i)
    # PIL tells formats by their content; pathlib's objects are paths as well.
    dataset = Files(paths if way.startswith("Path") else [str(p) for p in paths], read)
    make = lambda: DataLoader(dataset, 4, shuffle=True, num_workers=workers, collate_fn=as_list)
    same_with_and_without(make, engine, epochs=2)
    assert engine.metrics()[READS] == 12
    assert warned(caplog) == []


def test_a_folder_as_torchvisions(folder: DataSet, engine: forebay.Engine) -> None:
    dataset = Folder(folder.root)
    make = lambda: DataLoader(dataset, 8, shuffle=True, num_workers=2)  # with torch's collation
    (_, batches, _), *_ = run(lambda: DataLoader(dataset, 8, collate_fn=as_list), None, 1)
    assert [item[1] for b in batches for item in b] == [s.data for s in folder.samples]
    plain, fast = run_ids(make(), None), run_ids(make(), engine)
    assert fast == plain


def run_ids(loader: DataLoader, engine: forebay.Engine | None) -> list:
    seeded()
    fast = loader if engine is None else accelerated(loader, engine)
    return [(i.tolist(), data, labels.tolist()) for i, data, labels, _ in fast]


def test_forebay_open_elsewhere_is_open(folder: DataSet) -> None:
    path = file_list(folder)[4]
    with forebay.open(path) as file:
        assert isinstance(file, io.BufferedReader)
        assert file.read() == folder.samples[4].data
    with pytest.raises(FileNotFoundError, match="nowhere"):
        forebay.open("nowhere")


def reads_and_writes(path: str, out: str) -> tuple:
    """Reads a file beside its own, and keeps its result in another one."""
    data = read_plain(path)
    with open(os.path.join(out, "other"), encoding="utf-8") as file:
        other = file.read()
    result = os.path.join(out, f"{os.path.basename(path)}.result")
    with open(result, "wb") as file:
        file.write(data[:50])
    with open(result, "ab+") as file:
        file.write(b"end")
    return data, other, Path(result).read_bytes()


@WORKERS
def test_other_files_pass_through(
    workers: int, folder: DataSet, tmp_path: Path, engine: forebay.Engine
) -> None:
    (tmp_path / "other").write_text("shared by all items")
    dataset = Files(file_list(folder), functools.partial(reads_and_writes, out=str(tmp_path)))
    make = lambda: DataLoader(dataset, 4, num_workers=workers, collate_fn=as_list)
    same_with_and_without(make, engine, epochs=2)
    assert engine.metrics()[SERVED] == 2 * len(folder)
    assert len(list(tmp_path.glob("*.result"))) == len(folder)


# ---- workers


def say_hello(worker: int, folder: str) -> None:
    with open(os.path.join(folder, f"worker{worker}"), "a") as file:
        file.write(f"{os.getpid()} {torch.utils.data.get_worker_info().id}\n")


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_persistent_workers_and_the_users_worker_init_fn(
    context: str, workers: int, folder: DataSet, tmp_path: Path, engine: forebay.Engine
) -> None:
    paths = file_list(folder)

    def make() -> DataLoader:
        return DataLoader(
            Files(paths), 4, shuffle=True, num_workers=workers, persistent_workers=True,
            multiprocessing_context=context, collate_fn=as_list,
            worker_init_fn=functools.partial(say_hello, folder=str(tmp_path)),
        )  # fmt: skip

    same_with_and_without(make, engine, epochs=3, broken=1)
    assert engine.metrics()[READS] == len(folder)
    for worker in range(workers):
        calls = [line.split() for line in (tmp_path / f"worker{worker}").read_text().splitlines()]
        assert len(calls) == 2  # the plain loader's and the accelerated one's, once each
        assert all(int(n) == worker and int(pid) != os.getpid() for pid, n in calls)


def failing_init(_: int) -> None:
    raise KeyError("the user's own")


def test_an_error_of_worker_init_fn_is_shown(folder: DataSet, engine: forebay.Engine) -> None:
    loader = DataLoader(
        Files(file_list(folder)), 61, num_workers=1, worker_init_fn=failing_init, collate_fn=as_list
    )
    said = ""
    try:
        list(accelerated(loader, engine))
    except KeyError as error:  # not pytest.raises: its traceback would keep the worker alive
        said = str(error)
    assert "the user's own" in said


def test_a_killed_worker_is_pytorchs_error_and_its_leases_end(
    folder: DataSet, engine: forebay.Engine, wait_until: Any
) -> None:
    fast = accelerated(
        DataLoader(Files(file_list(folder)), 2, num_workers=2, collate_fn=as_list), engine
    )
    iterator = iter(fast)
    next(iterator)
    # A worker gives a sample back with its next request: between requests it holds one.
    wait_until(lambda: engine.metrics()["forebay_stage_leases"] > 0)
    # PyTorch raises from its SIGCHLD handler, wherever the main thread is by then.
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        for process in iterator._workers:
            os.kill(process.pid, signal.SIGKILL)
        for _ in iterator:
            pass
    del iterator
    wait_until(lambda: engine.metrics()["forebay_stage_leases"] == 0)
    assert sum(len(b) for b in fast) == len(folder)


@WORKERS
def test_a_lost_server_is_replaced_by_the_source(
    workers: int, folder: DataSet, engine: forebay.Engine, capfd: Any
) -> None:
    dataset = Files(file_list(folder))
    make = lambda: DataLoader(dataset, 4, num_workers=workers, collate_fn=as_list)
    (_, expected, _), (_, again, _) = run(make, None, epochs=2)
    seeded()
    fast = accelerated(make(), engine)
    got = []
    for n, batch in enumerate(fast):
        got.append(batch)
        if n == 2:
            engine.__dict__["_server"].close()
    assert got == expected
    assert engine.metrics()[SERVED] < len(folder)
    assert list(fast) == again
    assert engine.metrics()["forebay_stage_leases"] == 0
    assert builtins.open is io.open is REAL_OPEN


# ---- what the storage sees


@WORKERS
def test_each_file_is_read_once(workers: int, folder: DataSet, engine: forebay.Engine) -> None:
    loader = DataLoader(
        Files(file_list(folder)), 4, shuffle=True, num_workers=workers, collate_fn=as_list
    )
    fast = accelerated(loader, engine)
    reads = []
    for _ in range(3):
        before = engine.metrics()[READS]
        assert sum(len(b) for b in fast) == len(folder)
        reads.append(engine.metrics()[READS] - before)
    assert reads == [len(folder), 0, 0]
    assert engine.metrics()[SERVED] == 3 * len(folder)


@needs_fuse
def test_the_mount_sees_each_file_once(folder: DataSet, engine: forebay.Engine) -> None:
    with SlowFs(folder.root, open_ms=0.2, read_ms=0.2) as slow:
        dataset = Files([str(slow.path / s.name) for s in folder.samples])
        make = lambda: DataLoader(dataset, 4, shuffle=True, num_workers=2, collate_fn=as_list)
        expected = [
            sorted(item[:2] for b in batches for item in b) for _, batches, _ in run(make, None)
        ]
        fast = accelerated(make(), engine)
        opens = []
        for epoch in range(3):
            slow.reset()
            assert sorted(item[:2] for b in fast for item in b) == expected[epoch]
            opens.append(slow.stats()["open"])
        assert opens == [len(folder), 0, 0]


@WORKERS
def test_a_budget_smaller_than_the_data(workers: int, large_folder: DataSet) -> None:
    engine = forebay.Engine(memory=8 << 20)
    dataset = Files(file_list(large_folder))
    make = lambda: DataLoader(dataset, 16, shuffle=True, num_workers=workers, collate_fn=as_list)
    same_with_and_without(make, engine, epochs=2, broken=0)
    assert engine.metrics()["forebay_stage_arena_peak_bytes"] <= 8 << 20


@WORKERS
def test_a_vanished_file_is_the_plain_error(
    workers: int, tmp_path: Path, engine: forebay.Engine
) -> None:
    paths = [tmp_path / str(i) for i in range(12)]
    for path in paths:
        path.write_bytes(path.name.encode() * 100)
    loader = DataLoader(Files([str(p) for p in paths]), 2, num_workers=workers, collate_fn=as_list)
    fast = accelerated(loader, engine)
    paths[7].unlink()
    for each in (loader, fast):
        iterator = iter(each)
        for _ in range(3):
            next(iterator)
        with pytest.raises(FileNotFoundError, match=str(paths[7])):
            next(iterator)
        # PyTorch's iterators go on after an error; programs that skip bad items rely on it.
        assert [item[0] for batch in iterator for item in batch] == [8, 9, 10, 11]


@WORKERS
def test_a_file_of_another_size_is_read_anew(
    workers: int, tmp_path: Path, engine: forebay.Engine
) -> None:
    paths = [tmp_path / str(i) for i in range(12)]
    for path in paths:
        path.write_bytes(path.name.encode() * 100)
    dataset = Files([str(p) for p in paths])
    make = lambda: DataLoader(dataset, 2, num_workers=workers, collate_fn=as_list)
    fast = accelerated(make(), engine)
    paths[3].write_bytes(b"shorter")
    paths[8].write_bytes(b"longer" * 1000)
    paths[9].write_bytes(b"")
    for _ in range(2):
        got = [item[1] for batch in fast for item in batch]
        assert got == [p.read_bytes() for p in paths]


# ---- what the program does with loader and data set


@WORKERS
def test_a_data_set_whose_list_changes(
    workers: int, folder: DataSet, engine: forebay.Engine
) -> None:
    paths = file_list(folder)
    dataset = Files(list(paths))
    fast = accelerated(DataLoader(dataset, 4, num_workers=workers, collate_fn=as_list), engine)
    dataset.paths.reverse()
    assert [i[1] for b in fast for i in b] == [s.data for s in reversed(folder.samples)]
    dataset.paths = paths + paths[:5]  # longer than what the engine knows
    assert [i[1] for b in fast for i in b] == [s.data for s in folder.samples + folder.samples[:5]]
    dataset.paths = paths[7:20]
    assert [i[1] for b in fast for i in b] == [s.data for s in folder.samples[7:20]]
    assert engine.metrics()[SERVED] == 2 * len(folder) + 5 + 13


class Pairs(Files):
    def __init__(self, images: list[str], masks: list[str]) -> None:
        self.images = images
        self.masks = masks

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple:
        image = self.images[i]
        return (read_plain(image) if os.path.exists(image) else None), read_plain(self.masks[i])


@WORKERS
def test_two_lists_and_the_first_file_gone(
    workers: int, tmp_path: Path, engine: forebay.Engine
) -> None:
    for i in range(20):
        (tmp_path / f"image{i}").write_bytes(b"image %d" % i)
        (tmp_path / f"mask{i}").write_bytes(b"mask  %d" % i)
    dataset = Pairs(*[[str(tmp_path / f"{k}{i}") for i in range(20)] for k in ("image", "mask")])
    fast = accelerated(DataLoader(dataset, 4, num_workers=workers, collate_fn=as_list), engine)
    (tmp_path / "image0").unlink()
    got = [item for batch in fast for item in batch]
    assert got == [(b"image %d" % i if i else None, b"mask  %d" % i) for i in range(20)]


def test_relative_paths_and_another_folder(
    tmp_path: Path, engine: forebay.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for i in range(8):
            (tmp_path / name / str(i)).write_text(f"{name} {i}")
    monkeypatch.chdir(tmp_path / "one")
    fast = accelerated(DataLoader(Files([str(i) for i in range(8)]), collate_fn=as_list), engine)
    assert [b[0][1] for b in fast] == [b"one %d" % i for i in range(8)]
    assert engine.metrics()[SERVED] == 8
    monkeypatch.chdir(tmp_path / "two")
    assert [b[0][1] for b in fast] == [b"two %d" % i for i in range(8)]


class Sized(Files):
    """Items are asked for as (index, length), or by name."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return read_plain(self.paths[int(key)])
        index, length = key
        return read_plain(self.paths[index])[:length]


def odd_batches(size: int) -> dict[str, list]:
    return {
        "pairs": [[(i, 5), (i + 1, 9)] for i in range(0, size - 1, 2)],
        "names": [[str(i)] for i in range(size)],
        "mixed": [[(1, 2), "3"], []],
    }


@WORKERS
@pytest.mark.parametrize("kind", odd_batches(0))
def test_indices_that_are_not_numbers(
    kind: str, workers: int, folder: DataSet, engine: forebay.Engine
) -> None:
    dataset = Sized(file_list(folder))
    make = lambda: DataLoader(
        dataset, batch_sampler=odd_batches(61)[kind], num_workers=workers, collate_fn=as_list
    )
    same_with_and_without(make, engine, epochs=2)


class Lazy(Sampler):
    """Batches that can be read only once."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for begin in range(0, self.size, 3):
            yield iter(range(begin, min(begin + 3, self.size)))


def test_batches_that_are_iterators(folder: DataSet, engine: forebay.Engine) -> None:
    dataset = Files(file_list(folder))
    make = lambda: DataLoader(dataset, batch_sampler=Lazy(61), collate_fn=as_list)
    same_with_and_without(make, engine)


def test_an_index_out_of_range_is_the_plain_error(folder: DataSet, engine: forebay.Engine) -> None:
    loader = DataLoader(Files(file_list(folder)), sampler=[3, -61, 61], collate_fn=as_list)
    for each in (loader, accelerated(loader, engine)):
        iterator = iter(each)
        assert next(iterator)[0][1] == folder.samples[3].data
        assert next(iterator)[0][1] == folder.samples[0].data
        with pytest.raises(IndexError, match="list index out of range"):
            next(iterator)


def test_attributes_reach_the_users_batch_sampler(folder: DataSet, engine: forebay.Engine) -> None:
    sampler = Ragged(len(folder))
    loader = DataLoader(Files(file_list(folder)), batch_sampler=sampler, collate_fn=as_list)
    fast = accelerated(loader, engine)
    fast.batch_sampler.epoch = 50
    assert sampler.epoch == fast.batch_sampler.epoch == 50
    assert [item[0] for batch in fast for item in batch] == list(range(50, 61))


@WORKERS
def test_generators_move_when_they_do_without(
    workers: int, folder: DataSet, engine: forebay.Engine
) -> None:
    loader = DataLoader(
        Files(file_list(folder)), 4, shuffle=True, num_workers=workers, collate_fn=as_list
    )

    def steps(loader: DataLoader) -> list:
        seeded()
        iterator = iter(loader)
        first = torch.rand(3).tolist()
        return [len(iterator), first, next(iterator), torch.rand(3).tolist(), next(iterator)]

    assert steps(accelerated(loader, engine)) == steps(loader)


@WORKERS
def test_two_passes_at_once(workers: int, folder: DataSet, engine: forebay.Engine) -> None:
    dataset = Files(file_list(folder))
    make = lambda: DataLoader(dataset, 8, shuffle=True, num_workers=workers, collate_fn=as_list)
    seeded()
    expected = list(zip(*[make()] * 2, strict=True))
    seeded()
    assert list(zip(*[accelerated(make(), engine)] * 2, strict=True)) == expected


def test_training_and_validation_share_an_engine(folder: DataSet, engine: forebay.Engine) -> None:
    paths = file_list(folder)
    train = accelerated(DataLoader(Files(paths[:40]), 4, num_workers=1, collate_fn=as_list), engine)
    valid = accelerated(DataLoader(Files(paths[40:]), 4, collate_fn=as_list), engine)
    for _ in range(2):
        for n, batch in enumerate(train):
            assert [i[1] for i in batch] == [folder.samples[i[0]].data for i in batch]
            if n == 4:
                got = [i[1] for b in valid for i in b]
                assert got == [s.data for s in folder.samples[40:]]
    assert engine.metrics()[READS] == len(folder)


class OwnIteration(DataLoader):
    """As users write it, to prefetch or to move batches."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            assert builtins.open is REAL_OPEN
            yield ("moved", batch)


@WORKERS
def test_a_subclass_with_its_own_iteration(
    workers: int, folder: DataSet, engine: forebay.Engine
) -> None:
    dataset = Files(file_list(folder))
    make = lambda: OwnIteration(dataset, 4, shuffle=True, num_workers=workers, collate_fn=as_list)
    same_with_and_without(make, engine)
    assert isinstance(accelerated(make(), engine), OwnIteration)


@WORKERS
def test_open_is_the_real_one_in_the_program(
    workers: int, folder: DataSet, engine: forebay.Engine
) -> None:
    fast = accelerated(
        DataLoader(Files(file_list(folder)), 4, num_workers=workers, collate_fn=as_list), engine
    )
    assert builtins.open is io.open is REAL_OPEN
    first = []
    for batch in fast:
        assert builtins.open is io.open is REAL_OPEN
        first.append(batch)
        break
    iterator = iter(fast)
    next(iterator)
    assert builtins.open is io.open is REAL_OPEN
    assert first[0][0][1] == folder.samples[0].data


class Meeting(Files):
    """Its items wait for each other."""

    def __init__(self, paths: list[str], inside: threading.Event, leave: threading.Event) -> None:
        super().__init__(paths)
        self.inside, self.leave = inside, leave

    def __getitem__(self, i: int) -> bytes:
        self.inside.set()
        assert self.leave.wait(20)
        return read_plain(self.paths[i])


def test_threads_leave_the_real_open_behind(folder: DataSet, engine: forebay.Engine) -> None:
    paths = file_list(folder)[:1]
    events = [threading.Event() for _ in range(4)]
    loaders = [
        accelerated(DataLoader(Meeting(paths, *events[k : k + 2]), collate_fn=as_list), engine)
        for k in (0, 2)
    ]
    got: list = []
    threads = [threading.Thread(target=lambda each=each: got.extend(each)) for each in loaders]
    for thread, inside in zip(threads, events[::2], strict=True):
        thread.start()
        assert inside.wait(20)
    # The first to come is the first to go.
    for thread, leave in zip(threads, events[1::2], strict=True):
        leave.set()
        thread.join(20)
    assert got == [[folder.samples[0].data]] * 2
    assert builtins.open is io.open is REAL_OPEN


def test_what_somebody_else_puts_in_the_place_of_open_stays(
    folder: DataSet, engine: forebay.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def theirs(file: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(str(file))
        return REAL_OPEN(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", theirs)
    other = str(folder.root / ".." / "other")
    Path(other).write_bytes(b"other")
    dataset = Files(file_list(folder), lambda p: read_plain(p) + read_plain(other))
    got = [b[0][1] for b in accelerated(DataLoader(dataset, collate_fn=as_list), engine)]
    assert got == [s.data + b"other" for s in folder.samples]
    assert builtins.open is theirs and seen.count(other) == len(folder)


def test_accelerating_twice_changes_nothing(folder: DataSet, engine: forebay.Engine) -> None:
    fast = accelerated(DataLoader(Files(file_list(folder)), 4, collate_fn=as_list), engine)
    assert forebay.accelerate(fast, engine=engine) is fast
    assert sum(len(b) for b in fast) == len(folder)


def test_the_plain_loader_stays_plain(folder: DataSet, engine: forebay.Engine) -> None:
    loader = DataLoader(Files(file_list(folder)), 4, num_workers=2, persistent_workers=True,
                        collate_fn=as_list)  # fmt: skip
    plain = sum(len(b) for b in loader)
    fast = accelerated(loader, engine)
    assert sum(len(b) for b in fast) == plain == sum(len(b) for b in loader)
    assert engine.metrics()[SERVED] == len(folder)
    assert type(loader) is DataLoader and len(fast) == len(loader)


@WORKERS
def test_a_loader_made_anew_with_another_sampler(
    workers: int, folder: DataSet, engine: forebay.Engine, caplog: Any
) -> None:
    """As Lightning does it, to have a DistributedSampler."""
    dataset = Files(file_list(folder))
    fast = accelerated(
        DataLoader(dataset, 4, shuffle=True, num_workers=workers, collate_fn=as_list), engine
    )
    sampler = DistributedSampler(dataset, num_replicas=3, rank=1, seed=5)
    again = type(fast)(
        dataset, num_workers=workers, collate_fn=as_list, worker_init_fn=fast.worker_init_fn,
        batch_sampler=type(fast.batch_sampler)(sampler, batch_size=4, drop_last=False),
    )  # fmt: skip
    del fast
    for epoch in range(2):
        again.batch_sampler.sampler.set_epoch(epoch)
        assert [item[0] for b in again for item in b] == list(sampler)
    assert engine.metrics()[SERVED] == 2 * len(sampler)
    assert again.report().startswith("Epoch 1") and warned(caplog) == []


def test_the_report(folder: DataSet, engine: forebay.Engine) -> None:
    fast = accelerated(DataLoader(Files(file_list(folder)), 4, collate_fn=as_list), engine)
    assert fast.report() == "No epoch has been read to its end yet."
    for _ in range(2):
        list(fast)
    said = fast.report().splitlines()
    assert len(said) == 4 and said[0].startswith(f"Epoch 1: {len(folder)} samples")


def test_the_shared_engine_by_default(folder: DataSet) -> None:
    make = lambda: DataLoader(Files(file_list(folder)), 4, collate_fn=as_list)
    train, valid = forebay.accelerate(make(), memory="64M"), forebay.accelerate(make())
    assert train._forebay.engine is valid._forebay.engine
    assert train._forebay.engine.budget == 64 << 20
    assert sum(len(b) for b in train) == len(folder)


# ---- what is not covered is named, once


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class NoLength(Dataset):
    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, i: int) -> int:
        return i


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Stream(), "Stream is an IterableDataset"),
        (list(range(9)), "list has no list of paths"),
        (NoLength(), "NoLength has no list of paths"),
        (Files([]), "Files has no list of paths"),
        (Files(["not a file of this machine"] * 5), "Files has no list of paths"),
        (ConcatDataset([Files([__file__]), list(range(5))]), "ConcatDataset has no list of paths"),
        (Files([__file__, "/nowhere/at/all"]), "/nowhere/at/all"),
        (Files([os.path.dirname(__file__)]), os.path.dirname(__file__)),
    ],
    ids=lambda value: value.replace("/", "_") if isinstance(value, str) else type(value).__name__,
)
def test_a_loader_that_cannot_be_fast_comes_back(
    dataset: Any, reason: str, engine: forebay.Engine, caplog: Any
) -> None:
    sampler = None if isinstance(dataset, IterableDataset) else [0, 1]
    loader = DataLoader(dataset, sampler=sampler)
    assert forebay.accelerate(loader, engine=engine) is loader
    (line,) = warned(caplog)
    assert "runs unchanged" in line and reason in line and "\n" not in line
    assert reason in loader.report()


def test_only_loaders(engine: forebay.Engine) -> None:
    with pytest.raises(TypeError, match="takes a torch.utils.data.DataLoader, not list"):
        forebay.accelerate([1, 2], engine=engine)  # type: ignore[arg-type]


def read_by_number(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


@WORKERS
def test_reads_that_are_not_covered(
    workers: int, folder: DataSet, engine: forebay.Engine, caplog: Any
) -> None:
    dataset = Files(file_list(folder), read_by_number)
    make = lambda: DataLoader(dataset, 4, shuffle=True, num_workers=workers, collate_fn=as_list)
    assert run(make, engine) == run(make, None)
    (line,) = warned(caplog)
    assert "not covered" in line and "forebay.open" in line
    assert engine.metrics()[SERVED] == 0


@WORKERS
@pytest.mark.parametrize("foreseen", [True, False])
def test_what_is_not_covered_is_not_read_twice(
    workers: int, foreseen: bool, folder: DataSet, engine: forebay.Engine
) -> None:
    dataset = Files(file_list(folder), read_by_number)
    order = None if foreseen else Unknown(len(dataset))
    loader = DataLoader(
        dataset, 2, shuffle=foreseen, sampler=order, num_workers=workers, collate_fn=as_list
    )
    fast = forebay.accelerate(loader, engine=engine)
    for _ in range(3):
        assert sum(len(batch) for batch in fast) == len(dataset)
    # Only what the first pass began with, before a batch came that nobody had asked us for.
    assert engine.metrics()[READS] <= 2 * max(2 * workers, 4)
    assert len(dataset) > 20
    assert fast.report().startswith(f"Epoch 2: {len(dataset)} samples")


def test_what_is_covered_later_is_read_ahead(folder: DataSet, engine: forebay.Engine) -> None:
    # The second pass reads through us, the first does not.
    dataset = Files(file_list(folder), read_by_number)
    fast = forebay.accelerate(DataLoader(dataset, 2, collate_fn=as_list), engine=engine)
    list(fast)
    dataset.read = read_plain
    list(fast)
    assert engine.metrics()[SERVED] == len(dataset)


class Caching(Files):
    def __getitem__(self, i: int) -> bytes:
        kept = self.__dict__.setdefault("kept", {})
        if i not in kept:
            kept[i] = read_plain(self.paths[i])
        return kept[i]


def test_no_false_alarm(folder: DataSet, engine: forebay.Engine, caplog: Any) -> None:
    paths = file_list(folder)
    # All batches are given out before a worker has read anything.
    few = accelerated(DataLoader(Files(paths[:6]), 2, num_workers=2, collate_fn=as_list), engine)
    # The data set keeps everything itself: its second pass reads nothing.
    kept = accelerated(DataLoader(Caching(paths), 4, collate_fn=as_list), engine)
    for fast in (few, kept):
        for _ in range(2):
            list(fast)
        for _ in fast:
            break
    assert warned(caplog) == []


# ---- nothing stays


def test_nothing_stays_on_the_machine(
    folder: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any,
    shared_memory_gone: Callable[[], None],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    fast = accelerated(
        DataLoader(Files(file_list(folder)), 4, num_workers=2, collate_fn=as_list),
        forebay.Engine(memory="64M"),
    )
    assert Path(fast._forebay.socket).is_relative_to(tmp_path)
    assert Path(fast._forebay.socket).is_socket()
    for _ in fast:
        break
    iterator = iter(fast)
    next(iterator)
    del fast, iterator, _
    gc.collect()
    wait_until(lambda: not any(p.is_socket() for p in tmp_path.rglob("*")))
    assert list(tmp_path.rglob("*")) == []
    shared_memory_gone()


_ENDS = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import forebay, torch
from test_accelerate import Files, DataLoader, as_list
paths = sys.argv[3:]
loader = DataLoader(Files(paths), 2, num_workers=2, collate_fn=as_list)
fast = forebay.accelerate(loader, memory="64M")
iterator = iter(fast)
next(iterator)
print("ready", flush=True)
if sys.argv[2] == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    list(fast)
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("interrupt", -signal.SIGINT)])
def test_nothing_stays_after_the_program(
    how: str, code: int, folder: DataSet, tmp_path: Path, shared_memory_gone: Callable[[], None]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS, os.path.dirname(__file__), how, *file_list(folder)],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stdout == "ready\n"
    assert ("KeyboardInterrupt" in done.stderr) == (how == "interrupt")
    assert how != "end" or done.stderr == ""
    assert list(tmp_path.rglob("*")) == []
    shared_memory_gone()


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forebay")
