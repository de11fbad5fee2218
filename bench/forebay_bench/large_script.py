"""Reads a large file as libraries do; knows nothing of Forebay. `bench large` runs it.

python large_script.py hdf5 FOLDER --share 0.1

It prints a line of JSON when it is ready. A pass begins when a line comes on standard input, opens
the file anew and makes the same reads in the same order as any other pass; a line of JSON tells of
it.
"""

import argparse
import concurrent.futures
import gc
import importlib
import json
import os
import sys
import time
import zlib

import numpy

LIBRARIES = {
    "lmdb": "lmdb", "safetensors": "safetensors", "load_from_disk": "datasets", "hdf5": "h5py",
}  # fmt: skip


def chosen(count, options):
    """Which of so many, at random; each at most once."""
    order = numpy.random.default_rng(options.seed).permutation(count)
    return order[: max(1, int(count * options.share))].tolist()


def read_lmdb(folder, options):
    import lmdb

    environment = lmdb.open(folder, readonly=True, lock=False)
    with environment.begin() as transaction:
        for i in chosen(environment.stat()["entries"], options):
            yield transaction.get(b"%08d" % i)
    environment.close()


def read_safetensors(folder, options):
    from safetensors import safe_open

    with safe_open(os.path.join(folder, "model.safetensors"), framework="numpy") as file:
        names = sorted(file.keys())
        for i in chosen(len(names), options):
            yield file.get_tensor(names[i])


def read_load_from_disk(folder, options):
    import datasets

    dataset = datasets.load_from_disk(folder, keep_in_memory=False)
    for i in chosen(len(dataset), options):
        yield dataset[i]["data"]


def read_memmap(folder, options):
    data = numpy.load(os.path.join(folder, "data.npy"), mmap_mode="r")
    for i in chosen(len(data) // options.read_bytes, options):
        yield data[i * options.read_bytes : (i + 1) * options.read_bytes].tobytes()


def read_load(folder, options):
    yield numpy.load(os.path.join(folder, "data.npy"))


def read_hdf5(folder, options):
    import h5py

    with h5py.File(os.path.join(folder, "data.h5"), "r") as file:
        data = file["data"]
        for i in chosen(len(data), options):
            yield data[i]


def read_pread(folder, options):
    """Several threads, as a loader with workers has them."""
    fd = os.open(os.path.join(folder, "data.bin"), os.O_RDONLY)
    size = options.read_bytes
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        order = chosen(os.fstat(fd).st_size // size, options)
        yield from pool.map(lambda i: os.pread(fd, size, i * size), order)
    os.close(fd)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("format")
    parser.add_argument("folder")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--read-bytes", type=int, default=131072)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.format in LIBRARIES:
        importlib.import_module(LIBRARIES[options.format])
    read = globals()[f"read_{options.format}"]
    print(json.dumps({"format": options.format}), flush=True)
    while sys.stdin.readline():
        start = time.monotonic()
        count = checksum = 0
        for data in read(options.folder, options):
            view = memoryview(data)
            count += view.nbytes
            checksum = zlib.crc32(view, checksum)
        seconds = time.monotonic() - start
        del data, view
        gc.collect()  # what is mapped goes
        print(json.dumps({"seconds": seconds, "bytes": count, "checksum": checksum}), flush=True)


if __name__ == "__main__":
    main()
