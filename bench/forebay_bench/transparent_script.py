"""A PyTorch script as people write them: it knows nothing of Forebay. `bench transparent` runs it.

python transparent_script.py FOLDER --workers 2 --epochs 3

Prints one line of JSON an epoch; with --wait it goes on when a line comes on standard input.
"""

import argparse
import json
import os
import sys
import time
import zlib

import torch
from torch.utils.data import DataLoader, Dataset


class ImageFolder(Dataset):
    """Class folders with files in them; torchvision's, without needing torchvision."""

    def __init__(self, root, decode):
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.samples = []
        for label, name in enumerate(self.classes):
            for folder, _, files in sorted(os.walk(os.path.join(root, name))):
                self.samples += [(os.path.join(folder, file), label) for file in sorted(files)]
        self.decode = decode

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        if not self.decode:
            with open(path, "rb") as file:
                return file.read(), label
        import numpy
        from PIL import Image

        with open(path, "rb") as file:
            image = Image.open(file).convert("RGB").resize((224, 224))
        return torch.from_numpy(numpy.asarray(image).copy()), label


def collate(items):
    if torch.is_tensor(items[0][0]):
        return torch.stack([image for image, _ in items]), [label for _, label in items]
    return [data for data, _ in items], [label for _, label in items]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("--wait", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    start = time.perf_counter()
    loader = DataLoader(
        ImageFolder(options.folder, options.decode),
        batch_size=options.batch,
        shuffle=True,
        num_workers=options.workers,
        collate_fn=collate,
    )
    listing = time.perf_counter() - start
    for epoch in range(options.epochs):
        start = time.perf_counter()
        samples = count = checksum = 0
        for data, labels in loader:
            samples += len(labels)
            if torch.is_tensor(data):
                count += data.numel()
            else:
                count += sum(map(len, data))
            if options.checksum:
                # In the order of delivery: a sample in another place is an error, too.
                for item in data:
                    bytes_ = item.numpy().tobytes() if torch.is_tensor(item) else item
                    checksum = zlib.crc32(bytes_, checksum)
        seconds = time.perf_counter() - start
        print(
            json.dumps(
                {"epoch": epoch, "seconds": seconds, "samples": samples, "bytes": count,
                 "checksum": checksum, "listing": listing if epoch == 0 else 0.0}
            ),
            flush=True,
        )  # fmt: skip
        if options.wait:
            sys.stdin.readline()


if __name__ == "__main__":
    main()
