"""Data sets with known bytes in the three formats, and PyTorch's order to compare with."""

from __future__ import annotations

import io
import os
import random
import struct
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import forebay
import torch.utils.data


@dataclass(frozen=True)
class Sample:
    """What a loader must hand out for one sample number."""

    name: str
    label: int
    data: bytes
    fields: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSet:
    root: Path
    samples: list[Sample]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def total_bytes(self) -> int:
        return sum(len(s.data) for s in self.samples)


def written_long_ago(path: Path) -> None:
    """Sets a file's time back: what was written a moment ago is compared with its copies first."""
    then = time.time_ns() - 60 * 10**9
    os.utime(path, ns=(then, then))


def make_folder(
    root: Path, *, classes: int = 3, files: int = 60, mean_bytes: int = 2000, seed: int = 1
) -> DataSet:
    """Class folders of files; sizes from empty to many times the mean."""
    rng = random.Random(seed)
    tree: dict[str, list[str]] = {f"class{c}": [] for c in range(classes)}
    for i in range(files):
        below = "deep/er/" if i % 7 == 3 else ""
        tree[f"class{i % classes}"].append(f"{below}{i:05d}.bin")
    for name, names in tree.items():
        for below in names:
            path = root / name / below
            path.parent.mkdir(parents=True, exist_ok=True)
            size = min(8 * mean_bytes, int(rng.lognormvariate(0, 0.7) * mean_bytes))
            if rng.random() < 0.1:
                size = rng.choice([0, 1, 4096])
            path.write_bytes(rng.randbytes(size))
            written_long_ago(path)
    return read_folder(root)


def image_folder(
    root: Path, extensions: tuple[str, ...] | None = None
) -> tuple[list[str], list[tuple[str, int]]]:
    """What torchvision's ``ImageFolder(root)`` documents: classes, and (path, class) in order."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    found = []
    for index, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
            for file in sorted(files):
                if extensions is None or file.lower().endswith(extensions):
                    found.append((os.path.join(folder, file), index))
    return classes, found


def read_folder(root: Path) -> DataSet:
    """Plain reads of every file, in ImageFolder's order."""
    return DataSet(
        root,
        [
            Sample(os.path.relpath(path, root), label, Path(path).read_bytes())
            for path, label in image_folder(root)[1]
        ],
    )


def write_tar(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> None:
    """One WebDataset shard: each sample's members next to each other, KEY.FIELD."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, fields in samples:
            for name, data in fields.items():
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def read_tar(path: Path) -> list[tuple[str, dict[str, bytes], bytes]]:
    """(key, fields, the bytes from the first member's to the end of the last) of each sample."""
    whole = path.read_bytes()
    out: list[tuple[str, dict[str, bytes], int, int]] = []
    with tarfile.open(path) as tar:
        for member in tar.getmembers():
            key, _, name = member.name.partition(".")
            begin, end = member.offset_data, member.offset_data + member.size
            if not out or out[-1][0] != key:
                out.append((key, {}, begin, end))
            fields = out[-1][1] | {name: whole[begin:end]}
            out[-1] = (key, fields, out[-1][2], end)
    return [(key, fields, whole[begin:end]) for key, fields, begin, end in out]


def make_webdataset(root: Path, *, shards: int = 3, per_shard: int = 17, seed: int = 2) -> DataSet:
    rng = random.Random(seed)
    root.mkdir(parents=True)
    samples = []
    for shard in range(shards):
        written = []
        for i in range(per_shard):
            fields = {
                "jpg": rng.randbytes(rng.choice([1, 511, 512, 513, 7000])),
                "cls": str(rng.randrange(1000)).encode(),
            }
            if i % 5 == 0:
                fields["json"] = b'{"i": %d}' % i
            written.append((f"{shard:02d}{i:04d}", fields))
        path = root / f"shard-{shard:03d}.tar"
        write_tar(path, written)
        for key, fields, span in read_tar(path):
            samples.append(Sample(f"{path.name}/{key}", int(fields["cls"]), span, fields))
    return DataSet(root, samples)


def masked_crc(data: bytes) -> int:
    """TFRecord's checksum: CRC-32C, rotated and offset."""
    import numpy as np

    crc = forebay.crc32c(np.frombuffer(data, np.uint8))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def write_tfrecord(path: Path, payloads: list[bytes]) -> list[int]:
    """Writes the records; where each payload begins."""
    offsets = []
    with path.open("wb") as out:
        for payload in payloads:
            length = struct.pack("<Q", len(payload))
            out.write(length + struct.pack("<I", masked_crc(length)))
            offsets.append(out.tell())
            out.write(payload + struct.pack("<I", masked_crc(payload)))
    return offsets


def make_tfrecord(root: Path, *, shards: int = 3, per_shard: int = 21, seed: int = 3) -> DataSet:
    rng = random.Random(seed)
    root.mkdir(parents=True)
    samples = []
    for shard in range(shards):
        path = root / f"part-{shard:05d}-of-{shards:05d}.tfrecord"
        payloads = [rng.randbytes(rng.choice([0, 1, 100, 5000])) for _ in range(per_shard)]
        offsets = write_tfrecord(path, payloads)
        for offset, payload in zip(offsets, payloads, strict=True):
            samples.append(Sample(f"{path.name}@{offset}", -1, payload))
    return DataSet(root, samples)


def torch_order(
    size: int, *, shuffle: bool, seed: int, epoch: int, rank: int, world: int, drop_last: bool
) -> list[int]:
    """What the installed PyTorch's DistributedSampler yields."""
    sampler = torch.utils.data.DistributedSampler(
        range(size),  # type: ignore[arg-type]
        num_replicas=world,
        rank=rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def batches_of(order: list[int], batch_size: int, drop_last: bool = False) -> Iterator[list[int]]:
    for begin in range(0, len(order), batch_size):
        batch = order[begin : begin + batch_size]
        if len(batch) == batch_size or not drop_last:
            yield batch


def check_batch(batch: forebay.Batch, expected: list[int], data: DataSet) -> None:
    """Order, bytes, names and labels of a batch are those of the data set's samples."""
    assert batch.indices.tolist() == expected
    assert [batch[i].tobytes() for i in range(len(batch))] == [
        data.samples[s].data for s in expected
    ]
    assert batch.labels.tolist() == [data.samples[s].label for s in expected]
    assert batch.paths == [data.samples[s].name for s in expected]
