"""A PyTorch script of several nodes as people write them: it knows nothing of Forebay.

RANK=0 WORLD_SIZE=2 python run_cluster_script.py FOLDER --workers 2

`bench run_cluster` runs it. A pass is an epoch of DistributedSampler, or, with --whole, of all
files in an order of the rank's own. It prints a line of JSON when it is ready and after each pass.
A pass begins when a line comes on standard input; with --epochs N all of them by themselves.
"""

import argparse
import json
import os
import sys
import time
import zlib

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from transparent_script import ImageFolder, collate


def passes(epochs):
    """Numbers of the passes."""
    epoch = 0
    while epoch < epochs if epochs else sys.stdin.readline():
        yield epoch
        epoch += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dataset = ImageFolder(options.folder, decode=False)
    split: DistributedSampler = DistributedSampler(
        dataset, world, rank, shuffle=True, seed=options.seed
    )
    generator = torch.Generator().manual_seed(options.seed * world + rank)
    sampler = RandomSampler(dataset, generator=generator) if options.whole else split
    loader = DataLoader(
        dataset, batch_size=options.batch, sampler=sampler, num_workers=options.workers,
        collate_fn=collate, persistent_workers=True,
    )  # fmt: skip
    print(json.dumps({"files": len(dataset)}), flush=True)
    for epoch in passes(options.epochs):
        split.set_epoch(epoch)
        start = time.monotonic()
        samples = count = checksum = 0
        for data, labels in loader:
            samples += len(labels)
            for item in data:
                count += len(item)
                # In the order of delivery: a sample in another place is an error, too.
                checksum = zlib.crc32(item, checksum)
        print(
            json.dumps(
                {"epoch": epoch, "rank": rank, "start": start, "end": time.monotonic(),
                 "samples": samples, "bytes": count, "checksum": checksum}
            ),
            flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
