#!/usr/bin/env python3
"""Small data sets for the examples, for who has none at hand.

python make_data.py images /tmp/images          train/CLASS/*.jpg
python make_data.py tfrecords /tmp/tfrecords    train-00000.tfrecord, ...
"""

from __future__ import annotations

import io
import os
import struct
import sys
import tempfile

import numpy as np

CLASSES = 4


def picture(number: int, side: int = 64) -> tuple[bytes, int]:
    """A JPEG whose colour tells its class, and the class."""
    from PIL import Image

    label = number % CLASSES
    noise = np.random.default_rng(number).integers(0, 60, (side, side, 3), dtype=np.uint8)
    noise[:, :, label % 3] += np.uint8(60 * (1 + label // 3) + 60)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "JPEG", quality=90)
    return out.getvalue(), label


def images(folder: str | None = None, count: int = 256) -> str:
    """A folder as torchvision's ImageFolder reads it; a new one when none is named."""
    folder = folder or tempfile.mkdtemp(prefix="forebay-example-")
    for number in range(count):
        data, label = picture(number)
        place = os.path.join(folder, "train", f"class{label}")
        os.makedirs(place, exist_ok=True)
        with open(os.path.join(place, f"{number:05}.jpg"), "wb") as file:
            file.write(data)
    return folder


def tfrecords(folder: str | None = None, count: int = 256, shards: int = 4) -> str:
    """TFRecord shards; a record is the class in one byte, and a JPEG."""
    folder = folder or tempfile.mkdtemp(prefix="forebay-example-")
    os.makedirs(folder, exist_ok=True)
    for shard in range(shards):
        with open(os.path.join(folder, f"train-{shard:05}.tfrecord"), "wb") as file:
            for number in range(shard, count, shards):
                data, label = picture(number)
                write_record(file, bytes([label]) + data)
    return folder


def write_record(file: io.BufferedIOBase, data: bytes) -> None:
    import forebay

    def check(part: bytes) -> bytes:  # TFRecord's masked checksum
        crc = forebay.crc32c(part)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    file.write(length + check(length) + data + check(data))


if __name__ == "__main__":
    kinds = {"images": images, "tfrecords": tfrecords}
    if len(sys.argv) != 3 or sys.argv[1] not in kinds:
        sys.exit(__doc__)
    print(kinds[sys.argv[1]](sys.argv[2]))
