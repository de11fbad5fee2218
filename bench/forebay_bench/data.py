"""Data sets that benches make, in a folder that is removed afterwards."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator

import numpy as np
from forebay._forebay import crc32c


def socket_folder() -> str:
    """Where a daemon's socket may lie: its path must be short, whatever the scratch folder's is."""
    folder = os.environ.get("TMPDIR", "/tmp")
    return folder if len(folder) <= 40 else "/tmp"


@contextlib.contextmanager
def catalogs_in(folder: str) -> Iterator[None]:
    """Catalogs are saved there, and found there; also by processes that are started meanwhile."""
    before = os.environ.get("FOREBAY_CACHE_DIR")
    os.environ["FOREBAY_CACHE_DIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["FOREBAY_CACHE_DIR"]
        else:
            os.environ["FOREBAY_CACHE_DIR"] = before


def make_files(
    root: str, count: int, mean_bytes: int, seed: int, *, sigma: float = 0.3, classes: int = 10
) -> list[str]:
    """Files in class folders; sizes log-normal around `mean_bytes`, incompressible bytes. Written a
    minute ago, by their times: copies of files that were just written are compared once.
    """
    then = time.time_ns() - 60 * 10**9
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(np.log(mean_bytes), sigma, count)).astype(int).clip(16)
    noise = rng.integers(0, 256, int(sizes.max()) + 4096, dtype=np.uint8)
    paths = []
    for c in range(classes):
        os.makedirs(os.path.join(root, f"class{c:02d}"), exist_ok=True)
    for i, size in enumerate(sizes):
        path = os.path.join(root, f"class{i % classes:02d}", f"{i:06d}.bin")
        shift = int(rng.integers(0, 4096))
        with open(path, "wb") as out:
            out.write(struct.pack("<q", i))
            out.write(noise[shift : shift + int(size) - 8].tobytes())
        os.utime(path, ns=(then, then))
        paths.append(path)
    return paths


def masked_crc(data: np.ndarray) -> int:
    """The checksum of bytes as TFRecord files store it."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def make_tfrecords(root: str, count: int, sample_bytes: int, seed: int, *, shards: int = 4) -> None:
    """TFRecord files of equal records."""
    os.makedirs(root, exist_ok=True)
    rng = np.random.default_rng(seed)
    head = struct.pack("<Q", sample_bytes)
    head += struct.pack("<I", masked_crc(np.frombuffer(head, np.uint8)))
    for shard in range(shards):
        path = os.path.join(root, f"part-{shard:05d}-of-{shards:05d}.tfrecord")
        with open(path, "wb", buffering=1 << 20) as out:
            for _ in range(shard, count, shards):
                body = rng.integers(0, 256, sample_bytes, dtype=np.uint8)
                out.write(head)
                out.write(body.tobytes())
                out.write(struct.pack("<I", masked_crc(body)))
