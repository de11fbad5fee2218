"""Ranks on the nodes of a test bed, and the check of what they delivered."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from forebay import _forebay
from forebay_testing.cluster import Cluster

from .peers_node import Spec

_ANSWER_S = 300.0


class NodeFailed(RuntimeError):
    """A node's process ended or did not answer."""


class Ranks:
    """One process on each node; ``with`` ends them."""

    def __init__(
        self,
        cluster: Cluster,
        specs: Mapping[int, Spec],
        *,
        logs: str = "",
        variables: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        self.cluster = cluster
        self.specs = dict(specs)
        self._logs = logs
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._buffers: dict[int, bytes] = {}
        try:
            for node in self.specs:
                self.start(node, **dict((variables or {}).get(node, {})))
            for node in self.specs:
                self.answer(node)
        except BaseException:
            self.close()
            raise

    def start(self, node: int, **variables: str) -> None:
        """The first word of it, that it is ready, is an answer of its own."""
        command = [sys.executable, "-m", "forebay_bench.peers_node",
                   json.dumps(asdict(self.specs[node]))]  # fmt: skip
        benches = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        path = os.pathsep.join([benches, *filter(None, [os.environ.get("PYTHONPATH")])])
        said = open(os.path.join(self._logs, f"node{node}.log"), "a") if self._logs else None  # noqa: SIM115
        try:
            self._processes[node] = self.cluster.start(
                node, command, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
            )  # fmt: skip
            self._buffers[node] = b""
        finally:
            if said is not None:
                said.close()

    def ask(self, node: int, **order: Any) -> None:
        stdin = self._processes[node].stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
        except OSError as error:
            raise NodeFailed(f"node {node} takes no orders: {self._end(node)}") from error

    def answer(self, node: int, wait_s: float = _ANSWER_S) -> dict[str, Any]:
        stdout = self._processes[node].stdout
        assert stdout is not None
        end = time.monotonic() + wait_s
        while b"\n" not in self._buffers[node]:
            left = end - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise NodeFailed(f"node {node} did not answer within {wait_s:g} s")
            got = os.read(stdout.fileno(), 1 << 20)
            if not got:
                raise NodeFailed(f"node {node} has ended: {self._end(node)}")
            self._buffers[node] += got
        line, self._buffers[node] = self._buffers[node].split(b"\n", 1)
        return dict(json.loads(line))

    def _end(self, node: int) -> str:
        process = self._processes[node]
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            return "it still runs"
        words = ""
        if self._logs:
            with open(os.path.join(self._logs, f"node{node}.log"), errors="replace") as log:
                words = log.read()[-2000:]
        return f"exit code {process.returncode} {words}"

    def all(self, nodes: Sequence[int] | None = None, **order: Any) -> dict[int, dict[str, Any]]:
        """The same order to every node at once; their answers."""
        nodes = list(self._processes) if nodes is None else nodes
        for node in nodes:
            self.ask(node, **order)
        return {node: self.answer(node) for node in nodes}

    def running(self) -> list[int]:
        """The nodes that have a process."""
        return list(self._processes)

    def epochs(self, count: int, **how: Any) -> dict[int, list[dict[str, Any]]]:
        return {node: said["epochs"] for node, said in self.all(epochs=count, **how).items()}

    def stats(self) -> dict[int, dict[str, Any]]:
        return self.all(stats=1)

    def signal(self, node: int, number: int) -> None:
        self._processes[node].send_signal(number)

    def kill(self, node: int) -> None:
        process = self._processes.pop(node, None)
        if process is None:
            return
        self.cluster.forget(node)

    def close(self) -> None:
        for process in self._processes.values():
            if process.stdin is not None:
                try:
                    process.stdin.close()  # all leave at once
                except OSError:
                    pass
        end = time.monotonic() + 20
        for process in self._processes.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        for node in list(self._processes):
            self.kill(node)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Oracle:
    """What every rank must get: the sampler's order, and the files' own bytes."""

    def __init__(self, root: str, seed: int) -> None:
        catalog = _forebay.Catalog.build(root)
        self.files = [np.fromfile(catalog.object_path(i), np.uint8) for i in range(len(catalog))]
        self.bytes = sum(file.nbytes for file in self.files)
        self._seed = seed
        self._orders: dict[int, np.ndarray] = {}

    def order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders[epoch] = _forebay.epoch_order(len(self.files), True, self._seed, epoch)
        return self._orders[epoch]

    def stream(self, epoch: int, rank: int, world: int) -> list[int]:
        """As DistributedSampler: padded from the front to a multiple of the ranks."""
        order = self.order(epoch).tolist()
        missing = -len(order) % world
        order += (order * (1 + missing // len(order)))[:missing]
        return order[rank::world]

    def batches(self, epoch: int, rank: int, world: int, batch: int) -> list[list[int]]:
        stream = self.stream(epoch, rank, world)
        return [stream[at : at + batch] for at in range(0, len(stream), batch)]

    def checksum(self, samples: Sequence[int]) -> int:
        return int(_forebay.crc32c(np.concatenate([self.files[i] for i in samples])))

    def check(self, spec: Spec, batches: Sequence[Sequence[Any]], epoch: int, *,
              bytes_too: bool = True) -> None:  # fmt: skip
        """All batches of one epoch of a rank: RuntimeError names the first that is wrong."""
        wanted = self.batches(epoch, spec.rank, spec.world, spec.batch)
        who = f"rank {spec.rank}, epoch {epoch}"
        if [entry[5] for entry in batches] != wanted:
            raise RuntimeError(f"{who}: another order than the sampler's")
        for _, number, _, _, crc, samples in batches if bytes_too else ():
            if crc != self.checksum(samples):
                raise RuntimeError(f"{who}: wrong bytes in batch {number}")


def cluster_seconds(epochs: Mapping[int, Sequence[Mapping[str, Any]]], which: int) -> float:
    """From the first rank's start of an epoch to the last one's end of it."""
    runs = [each[which] for each in epochs.values()]
    return float(max(run["end"] for run in runs) - min(run["start"] for run in runs))
