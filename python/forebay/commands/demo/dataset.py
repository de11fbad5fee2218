"""The demo's data: files that a small model can learn to tell apart, and how PyTorch reads them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

CLASSES = 10
WINDOW = 16 * 1024
"""Bytes of each file that the model looks at; no file is shorter."""
FEATURES = 256
SEED = 2024

_MEDIAN = 110 * 1024
_SIGMA = 0.35
_WAVE = 2  # of a byte's 255: so faint that the model needs all three epochs


def make_files(folder: Path, files: int, progress: Callable[[int], None]) -> int:
    """Writes the data set, one folder a class; returns its bytes.

    Each byte is noise plus, faintly, a wave of its class: no single byte gives the class away.
    """
    rng = np.random.default_rng(SEED)
    noise = rng.integers(0, 224, size=4 << 20, dtype=np.uint8)
    at = np.arange(WINDOW // FEATURES * FEATURES) // (WINDOW // FEATURES)
    waves = [
        np.round(_WAVE + _WAVE * np.sin(2 * np.pi * (c + 1) * at / FEATURES + rng.uniform(0, 6)))
        for c in range(CLASSES)
    ]
    sizes = np.clip(rng.lognormal(np.log(_MEDIAN), _SIGMA, files), WINDOW, 8 * _MEDIAN).astype(int)
    for c in range(CLASSES):
        (folder / f"class_{c}").mkdir(parents=True)
    total = 0
    for i, size in enumerate(sizes):
        label = i % CLASSES
        start = int(rng.integers(0, len(noise) - size))
        content = noise[start : start + size].copy()
        content[:WINDOW] += waves[label].astype(np.uint8)
        (folder / f"class_{label}" / f"{i:06}.bin").write_bytes(content.tobytes())
        total += int(size)
        progress(i + 1)
    return total


class SharedPipe:
    """The emulated storage for PyTorch where there is no FUSE: the figures that Forebay's gets too.

    One open and one read a file, and one pipe of bytes that all worker processes share.
    """

    def __init__(self, open_s: float, read_s: float, bytes_per_s: float) -> None:
        self._open_s, self._read_s, self._bytes_per_s = open_s, read_s, bytes_per_s
        self._free_at = multiprocessing.Value("d", 0.0)
        self._reads = multiprocessing.Value("q", 0)

    def wait(self, size: int) -> None:
        time.sleep(self._open_s)
        now = time.monotonic()
        with self._free_at.get_lock():
            free_at = max(now, self._free_at.value) + size / self._bytes_per_s
            self._free_at.value = free_at
        with self._reads.get_lock():
            self._reads.value += 1
        left = max(now + self._read_s, free_at) - time.monotonic()
        if left > 0:
            time.sleep(left)

    @property
    def reads(self) -> int:
        return int(self._reads.value)


Item = tuple[int, int, torch.Tensor]
Collated = tuple[list[int], torch.Tensor, torch.Tensor, list[int]]


class Files(torch.utils.data.Dataset[Item]):
    """What a user writes: one folder a class, in torchvision's ImageFolder order."""

    def __init__(self, root: str, pipe: SharedPipe | None = None) -> None:
        self.samples = [
            (entry.path, label)
            for label, folder in enumerate(_sorted(root))
            for entry in _sorted(folder.path)
        ]
        self.pipe = pipe

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Item:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            content = bytearray(file.read())
        if self.pipe is not None:
            self.pipe.wait(len(content))
        return index, label, torch.frombuffer(content, dtype=torch.uint8)


def _sorted(folder: str) -> list[os.DirEntry[str]]:
    return sorted(os.scandir(folder), key=lambda entry: entry.name)


def collate(items: list[Item]) -> Collated:
    """One tensor for all bytes: the cheapest way from a worker to the training process."""
    return (
        [index for index, _, _ in items],
        torch.tensor([label for _, label, _ in items]),
        torch.cat([content for _, _, content in items]),
        [len(content) for _, _, content in items],
    )
