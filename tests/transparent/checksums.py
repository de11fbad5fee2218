"""Reads every file below a folder in 16 threads and some forked children, in many ways, and prints
each file's checksum, or the error that it gives.

    checksums.py FOLDER [ROUNDS] [PAUSE_MS]
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable

THREADS = 16
CHILDREN = 3


def whole(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def unbuffered(path: str) -> bytes:
    parts = []
    with open(path, "rb", buffering=0) as file:
        while part := file.read(50_000):
            parts.append(part)
    return b"".join(parts)


def positioned(path: str) -> bytes:
    """The second half first, through a duplicate."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        other = os.dup(fd)
        late = b""
        while part := os.pread(other, size, size // 2 + len(late)):
            late += part
        os.close(other)
        early = b""
        while len(early) < size // 2 and (part := os.read(fd, size // 2 - len(early))):
            early += part
        return early + late
    finally:
        os.close(fd)


def mapped(path: str) -> bytes:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            return view[:]


def into_vectors(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while True:
            first, second = bytearray(777), bytearray(33_000)
            got = os.preadv(fd, [first, second], len(data))
            data += bytes(first + second)[:got]
            if got == 0:
                return data
    finally:
        os.close(fd)


def by_child(path: str) -> bytes:
    """A forked child reads with the descriptor of its parent."""
    fd = os.open(path, os.O_RDONLY)
    into, out = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            while part := os.read(fd, 1 << 16):
                while part:
                    part = part[os.write(out, part) :]
        finally:
            os._exit(0)
    os.close(out)
    os.close(fd)
    with os.fdopen(into, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return data


WAYS: list[Callable[[str], bytes]] = [whole, unbuffered, positioned, mapped, into_vectors]


def checksum(way: Callable[[str], bytes], path: str) -> str:
    try:
        size = os.stat(path).st_size
        data = way(path)
    except OSError as error:
        return f"errno {error.errno}"
    said = hashlib.sha256(data).hexdigest()[:16]
    return said if len(data) == size else f"{said} of {len(data)} bytes, stat says {size}"


def work(
    paths: list[str], seed: int, rounds: int, pause_s: float, found: dict[str, set[str]]
) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        order = paths[:]
        rng.shuffle(order)
        for path in order:
            found[path].add(checksum(rng.choice(WAYS), path))
            time.sleep(pause_s)


def in_threads(paths: list[str], seed: int, rounds: int, pause_s: float) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {path: set() for path in paths}
    threads = [
        threading.Thread(target=work, args=(paths, seed * 100 + i, rounds, pause_s, found))
        for i in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main() -> None:
    folder = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    pause_s = float(sys.argv[3]) / 1000 if len(sys.argv) > 3 else 0.0
    paths = sorted(os.path.join(base, f) for base, _, files in os.walk(folder) for f in files)
    children = []
    for i in range(CHILDREN):
        into, out = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(into)
            with os.fdopen(out, "w") as pipe:
                for path, said in in_threads(paths, i + 1, rounds, pause_s).items():
                    print(path, *sorted(said), sep="\t", file=pipe)
            os._exit(0)
        os.close(out)
        children.append((child, os.fdopen(into)))
    found = in_threads(paths, 0, rounds, pause_s)
    for path in paths[:20]:
        found[path].add(checksum(by_child, path))
    for child, pipe in children:
        for line in pipe:
            path, *said = line.rstrip("\n").split("\t")
            found[path] |= set(said)
        pipe.close()
        os.waitpid(child, 0)
    for path in paths:
        print(os.path.relpath(path, folder), *sorted(found[path]))


if __name__ == "__main__":
    main()
