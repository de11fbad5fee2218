#!/usr/bin/env python3
"""Distributed training over a folder of images: train/CLASS/*.jpg.

torchrun --nproc-per-node 2 torchrun_ddp.py [FOLDER]

All ranks of a node, and their workers, share one engine: each file is read once.
"""

from __future__ import annotations

import argparse
import os

import forebay
import torch
import torch.distributed as dist
from make_data import images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import ImageFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", help="folder with train/ (default: its own pictures)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    data = [args.data or (images() if rank == 0 else "")]
    dist.broadcast_object_list(data, device=device)

    dataset = ImageFolder(f"{data[0]}/train", T.Compose([T.RandomResizedCrop(32), T.ToTensor()]))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=args.workers)
    loader = forebay.accelerate(loader)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(128, len(dataset.classes)),
    )  # fmt: skip
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}  loss {total / len(loader) / dist.get_world_size():.3f}")
    if rank == 0:
        print(loader.report())
    # PyTorch 2.13: where DDP's reducer is the group's last owner, its end can wait for a thread of
    # Gloo that waits for the interpreter.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
