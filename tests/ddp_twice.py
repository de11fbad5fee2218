"""Trains the same model twice under torchrun: from PyTorch's loader, then from Forebay's.

torchrun ... ddp_twice.py FOLDER OUT

Every rank writes the losses of both to OUT.RANK, bit for bit, and what its engine read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator

import forebay
import torch
import torch.distributed as dist
from forebay_bench.torch_rival import RawFolder, as_list
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 3
BATCH = 16
SEED = 11
BYTES = 256  # of each sample, that the model looks at

Batch = tuple[torch.Tensor, torch.Tensor]


def inputs(samples: Iterable[tuple[object, int]]) -> Batch:
    pairs = list(samples)
    rows = [torch.frombuffer(bytearray(data)[:BYTES], dtype=torch.uint8) for data, _ in pairs]
    return torch.stack(rows).float() / 255, torch.tensor([label for _, label in pairs])


def plain(folder: str) -> Iterator[Batch]:
    dataset = RawFolder(folder)
    sampler = DistributedSampler(dataset, shuffle=True, seed=SEED)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=as_list)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            yield inputs(batch)


def ours(loader: forebay.DataLoader) -> Iterator[Batch]:
    for _ in range(EPOCHS):
        for batch in loader:
            yield inputs(zip(batch, batch.labels.tolist(), strict=True))


def losses(batches: Iterator[Batch], classes: int) -> list[str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(BYTES, 32), nn.ReLU(), nn.Linear(32, classes))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    out = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        out.append(float(mean).hex())
    return out


def main() -> None:
    folder, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    classes = len(RawFolder(folder).classes)
    without = losses(plain(folder), classes)
    engine = forebay.Engine(memory="64M")
    loader = forebay.DataLoader(folder, BATCH, shuffle=True, seed=SEED, engine=engine)
    having = losses(ours(loader), classes)
    metrics = engine.metrics()
    dist.barrier()  # nobody leaves while others may ask it
    with open(f"{out}.{rank}", "w") as file:
        json.dump(dict(without=without, having=having, metrics=metrics), file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
