"""What runs on each node of bench peers and of the tests of faults: a rank that takes orders.

python -m forebay_bench.peers_node SPEC      (JSON)

Orders come as lines of JSON on standard input, answers go as lines of JSON to standard output:
``{"epochs": 2}`` runs two epochs without stopping between them, ``{"run": 1}`` goes on until
there is another order, ``{"stats": 1}`` tells what the engine counted (also in between, while it
runs), ``{"quit": 1}`` or the end of the input ends it. Every batch may also be written to a file,
as it is delivered.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import forebay
import numpy as np
from forebay import _forebay


@dataclass
class Spec:
    """What a rank does; travels as JSON."""

    root: str
    batch: int
    rank: int
    world: int
    seed: int = 1
    kind: str = "forebay"
    """Or ``"torch"``, ``"torch_bytes"``: DistributedSampler and DataLoader, from the source."""
    workers: int = 0
    """PyTorch's."""
    step_ms: float = 0.0
    """Of a batch, from when it was taken; the bytes are checksummed in it."""
    memory: int = 0
    memory_tier: int = 0
    keep: bool = True
    read_ahead: int = 0
    cache_dir: str = ""
    cache_bytes: int = 0
    locality: bool = False
    touch: bool = True
    """Checksum every byte."""
    knobs: dict[str, int] = field(default_factory=dict)
    later: bool = False
    """Forebay's first call is made when the first epoch is asked for."""
    log: str = ""
    """A file; a line for each batch: epoch, number, time, wait, checksum, samples."""


class Rank(Protocol):
    def epoch(self) -> Iterator[tuple[int, int, list[int], Callable[[], int]]]:
        """(epoch, bytes, samples, checksum) of each batch."""

    def stats(self) -> dict[str, Any]: ...


class ForebayRank:
    def __init__(self, spec: Spec) -> None:
        self._engine = forebay.Engine(
            memory=spec.memory or None, memory_tier=spec.memory_tier or None, keep=spec.keep,
            cache_dir=spec.cache_dir or None, cache_bytes=spec.cache_bytes or None,
            read_ahead=spec.read_ahead or None,
        )  # fmt: skip
        if spec.knobs:
            self._engine.set_knobs(spec.knobs)
        more: dict[str, Any] = {"locality": True} if spec.locality else {}
        self._loader = forebay.DataLoader(
            spec.root, spec.batch, shuffle=True, seed=spec.seed, rank=spec.rank,
            world_size=spec.world, engine=self._engine, progress=False, **more,
        )  # fmt: skip

    def epoch(self) -> Iterator[tuple[int, int, list[int], Callable[[], int]]]:
        number = self._loader.epoch
        for batch in self._loader:
            yield number, batch.nbytes, batch.indices.tolist(), batch.checksum

    def stats(self) -> dict[str, Any]:
        reports = [vars_of(report) for report in self._loader.stats()]
        return {
            "metrics": self._engine.metrics(),
            "epochs": reports,
            "report": self._loader.report(),
            "cluster": self._engine.cluster(),
        }


class TorchRank:
    """At its best: persistent workers, one tensor a batch. `torch_bytes`: as people write it, with
    pickled bytes and new workers every epoch.
    """

    def __init__(self, spec: Spec) -> None:
        from torch.utils.data import DataLoader, DistributedSampler

        from .torch_rival import RawFolder, TensorFolder, as_list, best_loader, samples_of

        self._sampler: Any
        self._loader: Any
        self._arrays: Callable[[Any], list[np.ndarray]]
        if spec.kind == "torch":
            self._loader, self._sampler = best_loader(
                TensorFolder(spec.root), spec.batch, spec.workers, spec.seed, rank=spec.rank,
                world=spec.world,
            )  # fmt: skip
            self._arrays = lambda batch: [data.numpy() for data in samples_of(batch)]
        else:
            dataset = RawFolder(spec.root)
            self._sampler = DistributedSampler(
                dataset, num_replicas=spec.world, rank=spec.rank, shuffle=True, seed=spec.seed
            )
            self._loader = DataLoader(
                dataset, batch_size=spec.batch, sampler=self._sampler, num_workers=spec.workers,
                collate_fn=as_list,
            )  # fmt: skip
            self._arrays = lambda batch: [np.frombuffer(data, np.uint8) for data, _ in batch]
        self._batch = spec.batch
        self._epoch = 0

    def epoch(self) -> Iterator[tuple[int, int, list[int], Callable[[], int]]]:
        number = self._epoch
        self._epoch += 1
        self._sampler.set_epoch(number)
        order = list(self._sampler)
        for i, batch in enumerate(self._loader):
            arrays = self._arrays(batch)
            samples = order[i * self._batch : (i + 1) * self._batch]

            def checksum(arrays: list[np.ndarray] = arrays) -> int:
                return [_forebay.crc32c(array) for array in arrays][-1]

            yield number, sum(a.nbytes for a in arrays), samples, checksum

    def stats(self) -> dict[str, Any]:
        return {}


def vars_of(report: Any) -> dict[str, Any]:
    """The plain values of an epoch's report."""
    named = {name: getattr(report, name) for name in getattr(report, "__dataclass_fields__", {})}
    return {k: v for k, v in named.items() if isinstance(v, int | float | str)}


class Orders:
    """Standard input by lines, which may also be looked at without waiting."""

    def __init__(self) -> None:
        self._text = b""

    def next(self, wait_s: float | None = None) -> dict[str, Any] | None:
        """None: there is none within that time. The end of the input is an order to quit."""
        while b"\n" not in self._text:
            if not select.select([0], [], [], wait_s)[0]:
                return None
            got = os.read(0, 1 << 16)
            if not got:
                return {"quit": 1}
            self._text += got
        line, self._text = self._text.split(b"\n", 1)
        return dict(json.loads(line))


class Program:
    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._orders = Orders()
        self._made: Rank | None = None
        self._opened = 0.0
        if not spec.later:
            self._rank()
        self._log = open(spec.log, "a") if spec.log else None  # noqa: SIM115

    def _rank(self) -> Rank:
        if self._made is None:
            self._opened = time.monotonic()
            forebay_kind = self._spec.kind == "forebay"
            self._made = ForebayRank(self._spec) if forebay_kind else TorchRank(self._spec)
        return self._made

    def main(self) -> None:
        _say({"ready": os.getpid()})
        while True:
            order = self._orders.next()
            assert order is not None
            if "epochs" in order:
                epochs = [self._epoch() for _ in range(order["epochs"])]
                _say({"epochs": epochs, "opened": self._opened})
            elif "run" in order:
                while self._epoch(attentive=True):
                    pass
                return
            elif "stats" in order:
                _say(self._rank().stats())
            else:
                return

    def _epoch(self, *, attentive: bool = False) -> dict[str, Any] | None:
        """None: it was told to quit. Attentive: takes orders between batches, keeps nothing."""
        step_s = self._spec.step_ms / 1e3
        batches: list[list[Any]] = []
        start = last = time.monotonic()
        total = number = count = 0
        for number, size, samples, checksum in self._rank().epoch():  # noqa: B007
            taken = time.monotonic()
            total += size
            crc = checksum() if self._spec.touch else 0
            entry = [number, count, taken, taken - last, crc, samples]
            count += 1
            if self._log is not None:
                print(json.dumps(entry), file=self._log, flush=True)
            if not attentive:
                batches.append(entry)
            elif (order := self._orders.next(0)) is not None:
                if "stats" not in order:
                    return None
                _say(self._rank().stats())
            if step_s:
                time.sleep(max(0.0, taken + step_s - time.monotonic()))
            last = time.monotonic()
        return {
            "epoch": number, "start": start, "end": time.monotonic(), "bytes": total,
            "batches": batches,
        }  # fmt: skip


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> int:
    spec = Spec(**json.loads(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr,
                        format=f"node {spec.rank}: %(message)s")  # fmt: skip
    Program(spec).main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
