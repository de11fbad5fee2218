"""Large files that `bench large` makes: one for each way in which libraries read such files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_PIECE = 16 << 20

NEEDS = {
    "lmdb": "lmdb", "safetensors": "safetensors", "load_from_disk": "datasets", "hdf5": "h5py",
}  # fmt: skip
"""What a format's library is called, where it is not NumPy."""


def missing(name: str) -> str:
    """The library that a format lacks here; empty: none."""
    needed = NEEDS.get(name)
    return needed if needed and importlib.util.find_spec(needed) is None else ""


def _pieces(total: int, seed: int) -> Iterator[np.ndarray]:
    """Random bytes, so that nothing on the way can compress or leave them out."""
    rng = np.random.default_rng(seed)
    for at in range(0, total, _PIECE):
        yield np.frombuffer(rng.bytes(min(_PIECE, total - at)), np.uint8)


def make_raw(folder: str, part: dict[str, Any], seed: int) -> None:
    with open(os.path.join(folder, "data.bin"), "wb") as out:
        for piece in _pieces(part["bytes"], seed):
            out.write(piece.tobytes())


def _make_npy(folder: str, part: dict[str, Any], seed: int) -> None:
    array = np.lib.format.open_memmap(
        os.path.join(folder, "data.npy"), "w+", np.uint8, (part["bytes"],)
    )
    at = 0
    for piece in _pieces(part["bytes"], seed):
        array[at : at + len(piece)] = piece
        at += len(piece)
    array.flush()


def _samples(part: dict[str, Any], seed: int) -> Iterator[bytes]:
    rng = np.random.default_rng(seed)
    for _ in range(part["bytes"] // part["sample_bytes"]):
        yield rng.bytes(part["sample_bytes"])


def _make_lmdb(folder: str, part: dict[str, Any], seed: int) -> None:
    import lmdb

    environment = lmdb.open(folder, map_size=2 * part["bytes"] + (64 << 20))
    with environment.begin(write=True) as transaction:
        for i, sample in enumerate(_samples(part, seed)):
            transaction.put(b"%08d" % i, sample)
    environment.close()


def _make_safetensors(folder: str, part: dict[str, Any], seed: int) -> None:
    from safetensors.numpy import save_file

    tensors = {f"layer{i:04d}": np.frombuffer(sample, np.uint8)
               for i, sample in enumerate(_samples(part, seed))}  # fmt: skip
    save_file(tensors, os.path.join(folder, "model.safetensors"))


def _make_arrow(folder: str, part: dict[str, Any], seed: int) -> None:
    import datasets

    datasets.disable_progress_bars()
    columns = datasets.Features({"data": datasets.Value("binary")})
    rows = [{"data": sample} for sample in _samples(part, seed)]
    datasets.Dataset.from_list(rows, features=columns).save_to_disk(folder, num_shards=1)


def _make_hdf5(folder: str, part: dict[str, Any], seed: int) -> None:
    import h5py

    size = part["sample_bytes"]
    rows = part["bytes"] // size
    rng = np.random.default_rng(seed)
    each = max(1, _PIECE // size)
    with h5py.File(os.path.join(folder, "data.h5"), "w", libver="latest") as file:
        data = file.create_dataset("data", (rows, size), np.uint8, chunks=(1, size))
        for at in range(0, rows, each):
            count = min(each, rows - at)
            data[at : at + count] = np.frombuffer(rng.bytes(count * size), np.uint8).reshape(
                count, size
            )


MAKERS: dict[str, Callable[[str, dict[str, Any], int], None]] = {
    "lmdb": _make_lmdb,
    "safetensors": _make_safetensors,
    "load_from_disk": _make_arrow,
    "memmap": _make_npy,
    "load": _make_npy,
    "hdf5": _make_hdf5,
}


def make(name: str, folder: str, part: dict[str, Any], seed: int) -> None:
    """The data of a format, in a new folder."""
    os.makedirs(folder)
    MAKERS[name](folder, part, seed)
