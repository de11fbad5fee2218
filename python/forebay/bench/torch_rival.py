"""PyTorch's own DataLoader, as a user writes it."""

from __future__ import annotations

import os

from torch.utils.data import DataLoader, Dataset, DistributedSampler


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


def as_list(items: list) -> list:
    """Collation that leaves the samples as they are."""
    return items


def torch_loader(
    dataset: Dataset, batch_size: int, workers: int, seed: int
) -> tuple[DataLoader, DistributedSampler]:
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=seed)
    loader = DataLoader(
        dataset, batch_size=batch_size, sampler=sampler, num_workers=workers, collate_fn=as_list
    )
    return loader, sampler
