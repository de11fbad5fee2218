#!/usr/bin/env python3
"""A plain PyTorch script over a folder of images: train/CLASS/*.jpg.

python pytorch_imagefolder.py [FOLDER]                        one line makes it fast: accelerate()
forebay run -- python pytorch_imagefolder.py --plain FOLDER   no line: the same without it
"""

from __future__ import annotations

import argparse
import time

import torch
from make_data import images
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", nargs="?", help="folder with train/ (default: pictures of its own)")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--plain", action="store_true", help="without accelerate()")
args = parser.parse_args()

transform = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToTensor()])
dataset = ImageFolder(f"{args.data or images()}/train", transform)
loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=args.workers)
if not args.plain:
    import forebay

    loader = forebay.accelerate(loader)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
    nn.Linear(128, len(dataset.classes)),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for epoch in range(args.epochs):
    start, total = time.monotonic(), 0.0
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    rate = len(dataset) / (time.monotonic() - start)
    print(f"epoch {epoch}  loss {total / len(loader):.3f}  {rate:.0f} images/s", flush=True)
if not args.plain:
    print(loader.report())
