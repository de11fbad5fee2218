"""A page cache of a given size: a child process reads files inside a memory cgroup of its own.

The kernel keeps what the child has read (on a mount that allows it) until the group is full. The
group's limit is the cache's size plus what the child itself takes, measured before it reads.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from forebay._forebay import crc32c


def _memory_roots() -> list[tuple[str, int]]:
    """Folders below which a memory cgroup may be made, with the version of the cgroups."""
    mounts: list[tuple[str, int]] = []
    with open("/proc/self/mounts") as file:
        for line in file:
            _, where, kind, options = line.split()[:4]
            if kind == "cgroup" and "memory" in options.split(","):
                mounts.append((where, 1))
            elif kind == "cgroup2":
                mounts.append((where, 2))
    own: dict[int, str] = {}
    with open("/proc/self/cgroup") as file:
        for line in file:
            number, parts, path = line.rstrip("\n").split(":", 2)
            if "memory" in parts.split(","):
                own[1] = path
            elif number == "0":
                own[2] = path
    roots = []
    for where, version in mounts:
        for path in (own.get(version, "/"), "/"):
            root = os.path.normpath(where + path)
            if os.path.isdir(root) and (root, version) not in roots:
                roots.append((root, version))
    return roots


class MemoryGroup:
    """A memory cgroup; OSError where none can be made. Remove it when its processes have ended."""

    def __init__(self) -> None:
        failure = "no memory cgroup is mounted"
        for root, version in _memory_roots():
            folder = os.path.join(root, f"forebay-bench-{os.getpid()}")
            self._limit = "memory.limit_in_bytes" if version == 1 else "memory.max"
            self._usage = "memory.usage_in_bytes" if version == 1 else "memory.current"
            try:
                os.mkdir(folder)
            except OSError as error:
                failure = f"{folder}: {error.strerror}"
                continue
            self.folder = folder
            if os.path.exists(os.path.join(folder, self._limit)):
                return
            failure = f"{root} does not pass the memory controller on"
            os.rmdir(folder)
        raise OSError(failure)

    def usage(self) -> int:
        with open(os.path.join(self.folder, self._usage)) as file:
            return int(file.read())

    def limit(self, size: int) -> None:
        with open(os.path.join(self.folder, self._limit), "w") as file:
            file.write(str(size))

    @property
    def members(self) -> str:
        """Write a process id here."""
        return os.path.join(self.folder, "cgroup.procs")

    def remove(self) -> None:
        # The kernel lets go of a group a moment after its last process.
        for _ in range(50):
            try:
                os.rmdir(self.folder)
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.02)


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    group = MemoryGroup()
    try:
        yield group
    finally:
        group.remove()


# What the kernel charges to the group beside the cached pages: requests of the mount, page tables.
_KERNEL_BYTES = 4 << 20


class CachedReader:
    """The child; epochs are read one at a time, so that the caller can look at the mount between.

    Takes what `_serve` wants to know; RuntimeError when the child fails.
    """

    def __init__(self, group: MemoryGroup, cache_bytes: int, **told: Any) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            self._ask({**told, "members": group.members})
            group.limit(group.usage() + cache_bytes + _KERNEL_BYTES)
        except BaseException:
            self.close()
            raise

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin and self._child.stdout
        try:
            self._child.stdin.write(json.dumps(what) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # the empty answer tells
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait()
            why = "the limit left it no room" if code == -signal.SIGKILL else f"exit code {code}"
            raise RuntimeError(f"the reader in a memory cgroup failed: {why}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def epoch(self, seed: int) -> tuple[float, int]:
        """Seconds and bytes of one epoch in the order of that seed."""
        answer = self._ask({"seed": seed})
        return answer["seconds"], answer["bytes"]

    def close(self) -> None:
        assert self._child.stdin and self._child.stdout
        self._child.stdin.close()
        self._child.stdout.close()
        try:
            self._child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


class _Reader:
    """Threads that read samples in order into buffers that exist from the start."""

    def __init__(self, paths: list[str], largest: int, batch: int, threads: int) -> None:
        self._paths = paths
        self._batch = batch
        # Filled: memory that was never touched would be charged when it is first read into.
        self._buffers = [bytearray(b"\1") * (largest + 1) for _ in range(4 * batch)]
        self._ready: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in self._buffers]
        self._to_read: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            slot, path = self._to_read.get()
            with open(path, "rb", buffering=0) as file:
                self._ready[slot].put(file.readinto(self._buffers[slot]) or 0)

    def epoch(self, seed: int, step_s: float) -> tuple[float, int]:
        start = time.perf_counter()
        order = np.random.default_rng(seed).permutation(len(self._paths)).tolist()
        slots = len(self._buffers)
        total = asked = 0
        for first in range(0, len(order), self._batch):
            last = min(first + self._batch, len(order))
            while asked < min(first + slots, len(order)):
                self._to_read.put((asked % slots, self._paths[order[asked]]))
                asked += 1
            sizes = [self._ready[at % slots].get() for at in range(first, last)]
            begun = time.perf_counter()
            for at, size in zip(range(first, last), sizes, strict=True):
                total += size
                crc32c(np.frombuffer(self._buffers[at % slots], np.uint8, size))
            time.sleep(max(0.0, begun + step_s * (last - first) - time.perf_counter()))
        return time.perf_counter() - start, total


def _serve() -> None:
    told = json.loads(sys.stdin.readline())
    reader = _Reader(told["paths"], told["largest"], told["batch"], told["threads"])
    # What was touched before is charged elsewhere: the group holds little but the page cache.
    with open(told["members"], "w") as file:
        file.write(str(os.getpid()))
    print("{}", flush=True)
    for line in sys.stdin:
        seconds, total = reader.epoch(json.loads(line)["seed"], told["step_s"])
        print(json.dumps({"seconds": seconds, "bytes": total}), flush=True)


if __name__ == "__main__":
    _serve()
