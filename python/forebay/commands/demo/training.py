"""The demo's training run: the same model, step and clock for either loader."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from ... import Engine, crc32c
from ..._forebay import Batch, Catalog
from ...loader import DataLoader
from ...views.report import EpochReport
from .dataset import CLASSES, FEATURES, SEED, WINDOW, Files, collate

BATCH = 32


@dataclass
class Epoch:
    """One epoch as the training loop saw it."""

    seconds: float = 0.0
    waited: float = 0.0
    loss: float = 0.0
    files_read: int = 0
    bytes_read: int = 0


@dataclass
class Run:
    """One loader's run."""

    name: str
    epochs: list[Epoch] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    correct: float = 0.0  # share of the last epoch's samples that were told right
    in_flight: int = 0  # requests that the storage had at once, at most


@dataclass
class Step:
    """What the training step takes, whichever loader it comes from."""

    indices: Sequence[int]
    labels: torch.Tensor
    views: list[np.ndarray]  # each sample's bytes
    checksum: int


class Trainer:
    """A small network on the waves in the files; the same seed gives the same start."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        width = 512
        self._model = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, width), torch.nn.ReLU(),
            torch.nn.Linear(width, width), torch.nn.ReLU(),
            torch.nn.Linear(width, CLASSES),
        )  # fmt: skip
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._loss = torch.nn.CrossEntropyLoss()

    def step(self, step: Step) -> tuple[float, int]:
        """Loss of the batch, and how many it told right before learning from it."""
        piece = WINDOW // FEATURES
        sums = np.stack([
            v[:WINDOW].reshape(FEATURES, piece).sum(axis=1, dtype=np.uint32) for v in step.views
        ])  # fmt: skip
        features = torch.from_numpy((sums.astype(np.float32) / piece - 120.0) / 12.0)
        answer = self._model(features)
        loss = self._loss(answer, step.labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item(), int((answer.argmax(1) == step.labels).sum())


Counters = Callable[[], tuple[int, int]]
"""(files, bytes) read from the storage so far."""


class Watcher(Protocol):
    """Who is told how training goes."""

    def batch(self, epoch: int, samples: int, loss: float) -> None: ...

    def epoch(self, number: int, epoch: Epoch) -> None: ...


def train(
    run: Run,
    epochs: int,
    begin: Callable[[int], Iterator[Any]],
    unpack: Callable[[Any], Step],
    counters: Counters,
    watcher: Watcher,
) -> None:
    """Trains; an epoch's clock runs from `begin` to its last step."""
    trainer = Trainer()
    files_before, bytes_before = counters()
    for number in range(epochs):
        epoch = Epoch()
        right = done = 0
        losses = []
        start = time.perf_counter()
        batches = begin(number)
        while True:
            asked = time.perf_counter() if done else start
            batch = next(batches, None)
            epoch.waited += time.perf_counter() - asked
            if batch is None:
                break
            step = unpack(batch)
            loss, correct = trainer.step(step)
            right += correct
            done += len(step.indices)
            losses.append(loss)
            run.order.extend(step.indices)
            run.checksums.append(step.checksum)
            del batch, step
            watcher.batch(number, done, loss)
        epoch.seconds = time.perf_counter() - start
        epoch.loss = float(np.mean(losses))
        files, count = counters()
        epoch.files_read, epoch.bytes_read = files - files_before, count - bytes_before
        files_before, bytes_before = files, count
        run.losses += losses
        run.correct = right / done
        run.epochs.append(epoch)
        watcher.epoch(number, epoch)


# ---- PyTorch


def _ignore_interrupt(_: int) -> None:
    # Ctrl-C reaches every process of the terminal; the main one stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _torch_loader(
    files: Files, workers: int, sampler: Iterable[int]
) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(
        files,
        batch_size=BATCH,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=True,
        collate_fn=collate,
        worker_init_fn=_ignore_interrupt,
    )


def _end_workers(loader: torch.utils.data.DataLoader[Any] | None) -> None:
    # Not left to the garbage collector: an exception keeps the iterator alive to the end of the
    # process, and a worker that is killed then leaves its temporary folder behind.
    end = getattr(getattr(loader, "_iterator", None), "_shutdown_workers", None)
    if end is not None:
        end()


class _Some:
    """A sampler whose samples can be exchanged between passes."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def try_workers(files: Files, workers: int, samples: int) -> float:
    """Samples a second that this many workers load, once they have started; no training step."""
    some = _Some()
    order = np.random.default_rng(SEED).permutation(len(files)).tolist()
    some.indices = order[: min(len(order), 2 * workers * 4)]
    loader = _torch_loader(files, workers, some)
    try:
        for _ in loader:
            pass
        some.indices = order[:samples]
        start = time.perf_counter()
        for _ in loader:
            pass
        return len(some.indices) / (time.perf_counter() - start)
    finally:
        _end_workers(loader)


def _unpack_torch(batch: Any) -> Step:
    indices, labels, content, lengths = batch
    whole = content.numpy()
    ends = np.cumsum(lengths)
    views = [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return Step(indices, labels, views, crc32c(whole))


def train_torch(
    files: Files, workers: int, epochs: int, counters: Counters, watcher: Watcher
) -> Run:
    """Trains from PyTorch's DataLoader with DistributedSampler, as one rank of one."""
    run = Run(f"PyTorch, {workers} workers")
    sampler: torch.utils.data.DistributedSampler[Any] = torch.utils.data.DistributedSampler(
        files, num_replicas=1, rank=0, shuffle=True, seed=SEED
    )
    loader: torch.utils.data.DataLoader[Any] | None = None

    def begin(epoch: int) -> Iterator[Any]:
        nonlocal loader
        if loader is None:
            loader = _torch_loader(files, workers, sampler)
        sampler.set_epoch(epoch)
        return iter(loader)

    try:
        train(run, epochs, begin, _unpack_torch, counters, watcher)
    finally:
        _end_workers(loader)
    run.in_flight = workers
    return run


# ---- Forebay


def _unpack_forebay(batch: Batch) -> Step:
    return Step(
        batch.indices.tolist(),
        torch.from_numpy(batch.labels),
        [batch[i] for i in range(len(batch))],
        batch.checksum(),
    )


def train_forebay(
    catalog: Catalog,
    memory: int,
    delay: str,
    epochs: int,
    counters: Counters | None,
    watcher: Watcher,
) -> tuple[Run, list[EpochReport], str]:
    """Trains from forebay.DataLoader; also gives its own account of each epoch, and its report."""
    run = Run("Forebay")
    loader: DataLoader | None = None

    def open_loader() -> DataLoader:
        return DataLoader(
            catalog,
            batch_size=BATCH,
            shuffle=True,
            seed=SEED,
            rank=0,
            world_size=1,
            epochs=epochs,
            engine=Engine(memory=memory),
            _delay=delay,
        )

    def begin(_: int) -> Iterator[Any]:
        nonlocal loader
        if loader is None:
            # Inside the first epoch's time: it begins to read at once.
            loader = open_loader()
        return iter(loader)

    def own_counters() -> tuple[int, int]:
        if loader is None:
            return 0, 0
        metrics = loader.engine.metrics()
        return metrics["forebay_source_reads_total"], metrics["forebay_source_read_bytes_total"]

    try:
        train(run, epochs, begin, _unpack_forebay, counters or own_counters, watcher)
        assert loader is not None
        accounts, report = loader.stats(), loader.report()
        run.in_flight = loader.engine.metrics()["forebay_source_in_flight_limit_reads"]
    finally:
        if loader is not None:
            loader.close()
    return run, accounts, report
