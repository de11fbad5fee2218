"""PyTorch's own DataLoader: as people write it, and at its best."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

_ENOUGH = 1.02  # times faster, or a larger number of workers brought nothing


class RawFolder(Dataset):
    """An ImageFolder-style data set without decoding: (bytes, class)."""

    def __init__(self, root: str) -> None:
        self.classes = sorted(e.name for e in os.scandir(root) if e.is_dir())
        self.samples: list[tuple[str, int]] = []
        for label, name in enumerate(self.classes):
            for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
                self.samples += [(os.path.join(folder, f), label) for f in sorted(files)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[bytes, int]:
        path, label = self.samples[i]
        with open(path, "rb") as file:
            return file.read(), label


class TensorFolder(RawFolder):
    """The same as tensors: they come from the workers through shared memory, not as pickles.

    A file is one open and one read: file.read() asks for the end, too, and a buffer that does not
    begin on a page takes slowfs one request more.
    """

    _buffer: mmap.mmap | None = None  # of this process

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        path, label = self.samples[i]
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if self._buffer is None or len(self._buffer) < size:
                self._buffer = mmap.mmap(-1, max(size, 1 << 20))
            view = memoryview(self._buffer)[:size]
            got = 0
            while got < size:
                read = file.readinto(view[got:])
                if not read:
                    raise OSError(f"{path}: {got} of {size} bytes")
                got += read
        return torch.frombuffer(view, dtype=torch.uint8).clone(), label


class OpenedFolder(RawFolder):
    """The same as tensors, by a plain ``open().read()``: what accelerate() understands."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        path, label = self.samples[i]
        with open(path, "rb") as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8), label


def as_list(items: list) -> list:
    """Collation that leaves the samples as they are."""
    return items


Joined = tuple[torch.Tensor, list[int], list[int]]


def joined(items: list[tuple[torch.Tensor, int]]) -> Joined:
    """One tensor for the whole batch, with the samples' lengths and labels: one block of shared
    memory, which the worker fills itself, as PyTorch's own collation does.
    """
    tensors = [data for data, _ in items]
    lengths = [len(data) for data in tensors]
    out = None
    if get_worker_info() is not None:
        storage = torch.empty(0, dtype=torch.uint8)._typed_storage()._new_shared(sum(lengths))
        out = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    return torch.cat(tensors, out=out), lengths, [label for _, label in items]


def samples_of(batch: Joined) -> Iterator[torch.Tensor]:
    """Views of the samples of a batch."""
    return iter(torch.split(batch[0], batch[1]))


def torch_loader(
    dataset: Dataset, batch_size: int, workers: int, seed: int
) -> tuple[DataLoader, DistributedSampler]:
    """As people write it: bytes, and new workers for every epoch."""
    sampler: DistributedSampler = DistributedSampler(
        dataset, num_replicas=1, rank=0, shuffle=True, seed=seed
    )
    loader = DataLoader(
        dataset, batch_size=batch_size, sampler=sampler, num_workers=workers, collate_fn=as_list
    )
    return loader, sampler


def best_loader(
    dataset: Dataset, batch_size: int, workers: int, seed: int, *, rank: int = 0, world: int = 1
) -> tuple[DataLoader, DistributedSampler]:
    """PyTorch at its best: persistent workers, one tensor a batch."""
    sampler: DistributedSampler = DistributedSampler(
        dataset, num_replicas=world, rank=rank, shuffle=True, seed=seed
    )
    loader = DataLoader(
        dataset, batch_size=batch_size, sampler=sampler, num_workers=workers, collate_fn=joined,
        persistent_workers=workers > 0,
    )  # fmt: skip
    return loader, sampler


def stop_workers(loader: DataLoader) -> None:
    """Ends persistent workers now, not when the loader happens to be collected."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        loader._iterator = None
        iterator._shutdown_workers()


def best_workers(
    trial: Callable[[int], float],
    say: Callable[[str], None],
    *,
    start: int = 2,
    most: int = 64,
    counts: Iterable[int] | None = None,
) -> int:
    """The number of workers with the least time: doubled until two larger ones bring nothing
    (2 % at least), or those given.
    """
    best, least, worse = 0, float("inf"), 0
    for count in counts or itertools.takewhile(lambda n: n <= most, _doubling(start)):
        seconds = trial(count)
        say(f"{count} PyTorch workers: {seconds:.3f} s")
        worse = 0 if seconds * _ENOUGH < least else worse + 1
        if seconds < least:
            best, least = count, seconds
        if worse == 2 and counts is None:
            break
    return best


def _doubling(start: int) -> Iterator[int]:
    return (start << i for i in itertools.count())
