"""A place that hangs beside a healthy source: how soon does training go on at the source's speed?

The cache disk stalls in the middle of an epoch, and in a job of two nodes one of them is stopped.
Beside each, in turn, the same job runs without the cache folder, or without peers. Every byte that
is delivered is checksummed, and compared with the files.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.engine import Engine
from forebay.loader import DataLoader
from forebay.slowfs import SlowFs
from forebay_testing.cluster import Cluster

from .data import catalogs_in, make_files
from .measure import Case, Outcome
from .peers_cluster import Oracle, Ranks
from .peers_node import Spec
from .run import Context

_USED_AGAIN_S = 120.0
_PARTS = ("disk", "peer")


@dataclass
class Arrival:
    """A batch: when it was there, of the monotonic clock, and how many samples it had."""

    at: float
    samples: int


def rate(arrivals: Sequence[Arrival], begin: float, end: float) -> float:
    """Samples a second that arrived in between."""
    got = sum(each.samples for each in arrivals if begin < each.at <= end)
    return got / (end - begin) if end > begin else 0.0


def recovery_s(
    arrivals: Sequence[Arrival],
    hung: float,
    end: float,
    wanted: float,
    window_s: float,
    gap_s: float,
) -> float:
    """How long after the hang samples come at `wanted` a second, for all of a window, and no batch
    keeps the consumer waiting for `gap_s` any more.
    """
    times = [hung, *(each.at for each in arrivals if hung < each.at < end), end]
    gaps = [b for a, b in zip(times, times[1:], strict=False) if b - a > gap_s]
    begin = gaps[-1] if gaps else hung
    for start in times:
        if start >= begin and rate(arrivals, start, start + window_s) >= wanted:
            return start - hung
    return end - hung


class _Bed:
    """The source, what it holds, and the jobs over it."""

    def __init__(self, ctx: Context, mount: SlowFs, root: str) -> None:
        self.ctx = ctx
        self.work = ctx.workload
        self.mount = mount
        self.oracle = Oracle(root, ctx.seed)
        self._runs = 0

    # ---- the cache disk

    def _batches(self, engine: Engine) -> Iterator[Arrival]:
        work = self.work
        crcs: dict[int, int] = {}
        with DataLoader(
            str(self.mount.path), work["batch"], shuffle=True, seed=self.ctx.seed, engine=engine,
            epochs=1 << 20, progress=False, timeout=_USED_AGAIN_S,
        ) as loader:  # fmt: skip
            while True:
                epoch = loader.epoch
                for number, batch in enumerate(loader):
                    now = time.monotonic()
                    samples = batch.indices.tolist()
                    key = hash((epoch, number))
                    if key not in crcs:
                        crcs[key] = self.oracle.checksum(samples)
                    if batch.checksum() != crcs[key]:
                        raise RuntimeError(f"wrong bytes in batch {number} of epoch {epoch}")
                    batch.release()
                    yield Arrival(now, len(samples))

    def _engine(self, cache: str | None) -> Engine:
        return Engine(memory=self.work["memory_bytes"], keep=False, cache_dir=cache, peers=False)

    def source_rate(self) -> float:
        """The same job without a cache folder."""
        arrivals: list[Arrival] = []
        for arrival in self._batches(self._engine(None)):
            arrivals.append(arrival)
            if arrival.at - arrivals[0].at > self.work["source_s"]:
                break
        return rate(arrivals, arrivals[0].at, arrivals[-1].at)

    def disk(self, source: float) -> tuple[float, float]:
        """(Recovery, rate after it over `source`)."""
        self._runs += 1
        under = os.path.join(self.ctx.scratch, f"disk{self._runs}")
        os.mkdir(under)
        with SlowFs(under, writable_mb=0, seed=self.ctx.seed) as disk:
            try:
                engine = self._engine(str(disk.path / "cache"))
                return self._disk(engine, disk, source)
            finally:
                disk.set(stall_ms=0)

    def _disk(self, engine: Engine, disk: SlowFs, source: float) -> tuple[float, float]:
        work = self.work
        files = len(self.oracle.files)
        arrivals: list[Arrival] = []
        hung = end = over = 0.0
        seen = 0
        for arrival in self._batches(engine):
            arrivals.append(arrival)
            seen += arrival.samples
            metrics = engine.metrics()
            if not hung:
                # All is copied, and it is the middle of an epoch.
                copied = metrics["forebay_tier_writes_total"] >= files
                if copied and seen % files > files / 2 and seen > 2 * files:
                    disk.set(stall_ms=round(work["stall_s"] * 1e3))
                    hung = time.monotonic()
                    end = hung + work["stall_s"]
            elif arrival.at > end and not over and not metrics["forebay_tier_passed_by"]:
                over = arrival.at
                hits = metrics["forebay_tier_hits_total"]
            elif over and metrics["forebay_tier_hits_total"] > hits + files / 4:
                break  # the folder is used again
            if hung and arrival.at > end + _USED_AGAIN_S:
                raise RuntimeError("the cache folder was not used again after its disk answered")
        return self._judge(arrivals, hung, end, source)

    def _judge(
        self, arrivals: list[Arrival], hung: float, end: float, source: float
    ) -> tuple[float, float]:
        wanted = self.work["recovered"] * source
        took = recovery_s(arrivals, hung, end, wanted, self.work["window_s"], self.work["gap_s"])
        return took, rate(arrivals, hung + took, end) / source

    # ---- a peer

    def _spec(self, rank: int, log: str) -> Spec:
        work = self.work
        tier = self.oracle.bytes // 2
        return Spec(
            root=str(self.mount.path), batch=work["batch"], rank=rank, world=2, seed=self.ctx.seed,
            memory=tier + work["memory_bytes"], memory_tier=tier, log=log,
        )  # fmt: skip

    def _logs(self) -> list[str]:
        self._runs += 1
        return [os.path.join(self.ctx.scratch, f"batches{self._runs}.{node}") for node in range(2)]

    def _arrivals(self, log: str) -> list[Arrival]:
        with open(log) as file:
            entries = [json.loads(line) for line in file if line.endswith("\n")]
        spec = self._spec(0, log)
        wanted: dict[int, list[list[int]]] = {}
        for epoch, number, _, _, crc, samples in entries:
            if epoch not in wanted:
                wanted[epoch] = self.oracle.batches(epoch, 0, 2, spec.batch)
            if samples != wanted[epoch][number] or crc != self.oracle.checksum(samples):
                raise RuntimeError(f"wrong samples in batch {number} of epoch {epoch}")
        return [Arrival(entry[2], len(entry[5])) for entry in entries]

    def _ranks(self, cluster: Cluster, specs: dict[int, Spec], **more: str) -> Ranks:
        secret = os.path.join(self.ctx.scratch, f"secret{self._runs}")
        variables = {node: {"FOREBAY_PEER_SECRET": secret, **more} for node in specs}
        return Ranks(cluster, specs, logs=self.ctx.scratch, variables=variables)

    def alone_rate(self) -> float:
        """One of two ranks, which reads for itself, from its second epoch on."""
        log = self._logs()[0]
        with Cluster(1) as cluster:
            with self._ranks(cluster, {0: self._spec(0, log)}, FOREBAY_PEERS="off") as ranks:
                ranks.ask(0, run=1)
                begin = time.monotonic()
                while time.monotonic() < begin + 2 * self.work["source_s"]:
                    time.sleep(0.05)
        arrivals = self._arrivals(log)
        return rate(arrivals, arrivals[-1].at - self.work["source_s"], arrivals[-1].at)

    def peer(self, source: float) -> tuple[float, float]:
        """The same with a peer that is stopped: (recovery, rate after it over `source`)."""
        work = self.work
        logs = self._logs()
        with Cluster(2, gbit=work["gbit"]) as cluster:
            specs = {node: self._spec(node, log) for node, log in enumerate(logs)}
            with self._ranks(cluster, specs) as ranks:
                for node in specs:
                    ranks.ask(node, run=1)
                # Peers serve each other, and it is the middle of an epoch.
                time.sleep(work["source_s"])
                ranks.signal(1, signal.SIGSTOP)
                hung = time.monotonic()
                try:
                    time.sleep(work["peer_stall_s"])
                finally:
                    end = time.monotonic()
                    ranks.signal(1, signal.SIGCONT)
                ranks.ask(0, stats=1)
                metrics: dict[str, Any] = ranks.answer(0)["metrics"]
        if metrics["forebay_peer_reads_total"] == 0:
            raise RuntimeError("the peers never served each other")
        return self._judge(self._arrivals(logs[0]), hung, end, source)


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    root = os.path.join(ctx.scratch, "files")
    ctx.say(f"making {work['files']} files")
    make_files(root, work["files"], work["mean_bytes"], ctx.seed)
    found: dict[str, list[tuple[float, float, float]]] = {part: [] for part in _PARTS}
    with (
        SlowFs(
            root, open_ms=work["latency_ms"], read_ms=work["latency_ms"], stat_ms=work["stat_ms"],
            readdir_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"],
            seed=ctx.seed,
        ) as mount,
        catalogs_in(os.path.join(ctx.scratch, "catalogs")),
    ):  # fmt: skip
        bed = _Bed(ctx, mount, root)
        ways = {"disk": (bed.source_rate, bed.disk), "peer": (bed.alone_rate, bed.peer)}
        for i in range(ctx.repeats):
            for part, (alone, hangs) in ways.items():
                source = alone()
                took, after = hangs(source)
                found[part].append((source, took, after))
                ctx.say(f"{part}: {source:.0f} samples/s without it, recovered after {took:.2f} s, "
                        f"then {after:.2f} of that ({i + 1}/{ctx.repeats})")  # fmt: skip
    for part, name, stall in (
        ("disk", "hang", work["stall_s"]),
        ("peer", "hang_peer", work["peer_stall_s"]),
    ):
        runs = found[part]
        out.median(f"{name}_recovery_s", [took for _, took, _ in runs])
        out.median(f"{name}_rate_vs_source", [after for _, _, after in runs])
        out.cases.append(
            Case(f"samples/s while the {part} hangs", "samples/s",
                 [source * after for source, _, after in runs],
                 limit=sum(source for source, _, _ in runs) / len(runs),
                 limit_name="without it", note=f"hangs for {stall:g} s; {work['files']} files")
        )  # fmt: skip
        out.cases.append(
            Case(f"seconds until then, {part}", "s", [took for _, took, _ in runs])
        )  # fmt: skip
    return out
