"""``forebay plan``: what Forebay would gain on a user's own data set, and what more room would buy.

The data set's sizes come from its catalog, the source's figures from a few seconds of reads or from
the user; the rest is simulated (docs/simulator.md). Nothing is written but the catalog's own file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import _forebay
from .._errors import ArgumentError
from .._forebay import Catalog, SimScenario, SimTier, Simulation
from .._internal.units import format_bytes, parse_bytes
from ..views.progress import counting

_MB = 1 << 20
_UNBOUND = 1e9  # MB/s of what is no limit here
_STAGING = 64 << 20  # the engine's least
_READS = 64  # that a rank of Forebay keeps in flight; the engine finds its own number
_NODE_ACCESSES = 3_000_000  # beyond them the cluster's simulator is the quicker one
_CLUSTER_ACCESSES = 6_000_000
_GAIN = 0.02  # what is worth a word
_MEASURE_S = 6  # at most, or about that


@dataclass(frozen=True)
class Source:
    """The storage as all nodes see it together."""

    latency_s: float  # of one sample's first byte
    bytes_per_s: float
    curve: tuple[tuple[float, float], ...]  # (reads at a time, MB/s)
    measured: bool
    note: str


@dataclass(frozen=True)
class Job:
    """What is trained on what; sizes are in bytes, of a node where they are of tiers."""

    lengths: np.ndarray
    nodes: int
    ranks: int  # of a node
    memory: int
    nvme: int
    workers: int  # of PyTorch, a rank
    batch: int  # of a rank
    epochs: int
    sample_s: float  # of compute; 0: loading alone
    memory_mb_per_s: float
    nvme_mb_per_s: float
    network_mb_per_s: float

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())

    @property
    def mean(self) -> float:
        return self.bytes / len(self.lengths)

    @property
    def staging(self) -> float:
        """Memory of a node that holds what is about to be used, as the engine divides it."""
        return self.ranks * max(_STAGING, 4 * self.batch * self.mean)

    @property
    def least_memory(self) -> int:
        """The tables, the batch that is held and the next one."""
        needed = self.ranks * max(_STAGING, 3 * self.batch * int(self.lengths.max()))
        return needed + 80 * len(self.lengths)

    @property
    def simulated(self) -> int:
        """Epochs: one that fills, two that show what remains."""
        return min(self.epochs, 3)


@dataclass(frozen=True)
class Forecast:
    """One line of a table."""

    name: str
    memory: int
    nvme: int
    first_s: float
    later_s: float
    job_s: float
    wait_share: float | None  # None: no compute was named
    source_bytes: float  # of a later epoch, all nodes together

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "memory_bytes": self.memory,
            "nvme_bytes": self.nvme,
            "first_epoch_s": self.first_s,
            "later_epoch_s": self.later_s,
            "job_s": self.job_s,
            "wait_share": self.wait_share,
            "source_bytes_per_epoch": self.source_bytes,
        }


# ---- the source


def _given_curve(latency_s: float, bytes_per_s: float, mean: float) -> list[tuple[float, float]]:
    """One read at a time gets what latency and transfer leave; enough of them the whole rate."""
    alone = mean / (latency_s + mean / bytes_per_s)
    knee = max(1.0, bytes_per_s / alone)
    curve = [(1.0, alone / _MB)]
    if knee > 1.001:
        curve.append((knee, bytes_per_s / _MB))
    return curve


def _measure(catalog: Catalog, job: Job, latency_ms: float | None) -> Source:
    from .doctor import measure

    start = time.monotonic()
    with counting("measuring the storage") as update, ThreadPoolExecutor(1) as pool:
        running = pool.submit(measure, catalog)
        while not wait([running], timeout=0.1).done:
            update(int(time.monotonic() - start), _MEASURE_S)
        measured = running.result()
    alone = statistics.median(measured.plain)
    best = max(measured.trials, key=lambda trial: trial.bytes_per_s)
    rate = max(best.bytes_per_s, 1.0)
    transfer = measured.mean_read / rate
    latency = latency_ms / 1e3 if latency_ms is not None else max(1e-6, alone - transfer)
    if latency_ms is None:
        points = {
            float(trial.threads): trial.bytes_per_s / _MB
            for trial in measured.trials
            if trial.bytes_per_s > 0
        }
    else:
        points = dict(_given_curve(latency, rate, job.mean))
    curve = [(n * job.nodes, mb * job.nodes) for n, mb in sorted(points.items())]
    note = f"measured with up to {measured.trials[-1].threads} reads at a time"
    if measured.cached is not None and measured.cached > 0.5:
        note += "; most of the files were in the page cache, so cold storage will be slower"
    if job.nodes > 1:
        note += f"; {job.nodes} nodes are taken to get {job.nodes} times as much"
    return Source(latency, rate * job.nodes, tuple(curve), True, note)


def _source(catalog: Catalog, job: Job, bandwidth: int, latency_ms: float | None) -> Source:
    if not bandwidth:
        return _measure(catalog, job, latency_ms)
    latency = (1.0 if latency_ms is None else latency_ms) / 1e3
    curve = _given_curve(latency, bandwidth, job.mean)
    note = "as given" if latency_ms is not None else "bandwidth as given, latency assumed"
    return Source(latency, float(bandwidth), tuple(curve), False, note)


# ---- forecasts


def _scenario(job: Job, source: Source, threads: int, tiers: list[SimTier]) -> SimScenario:
    s = SimScenario()
    s.nodes, s.ranks_per_node, s.tiers = job.nodes, job.ranks, tiers
    s.staging_mb = max(_STAGING, 4 * job.batch * job.mean) / _MB
    s.staging_mb_per_s = s.preprocess_mb_per_s = _UNBOUND
    s.staging_threads = threads
    s.network_mb_per_s = job.network_mb_per_s
    s.source = list(source.curve)
    s.samples = len(job.lengths)
    s.sample_mb = job.mean / _MB
    s.sample_sigma_mb = float(job.lengths.std()) / _MB
    s.compute_mb_per_s = s.sample_mb / job.sample_s if job.sample_s else _UNBOUND
    s.batch, s.epochs, s.seed = job.batch, job.epochs, 1
    s.max_accesses = max(job.simulated * s.samples, _CLUSTER_ACCESSES)
    return s


def _forecast(
    job: Job, name: str, epochs: list[float], bound: float, source_bytes: float
) -> Forecast:
    first, later = epochs[0], epochs[-1]
    total = sum(epochs) + (job.epochs - len(epochs)) * later
    share = max(0.0, 1 - bound / total) if job.sample_s and total > 0 else None
    return Forecast(name, job.memory, job.nvme, first, later, total, share, source_bytes)


def _bound(job: Job) -> float:
    """Seconds of compute alone."""
    ranks = job.nodes * job.ranks
    return math.ceil(len(job.lengths) / ranks) * job.sample_s * job.epochs


def _cluster(
    job: Job, source: Source, name: str, policy: str, threads: int, tiers: list[SimTier],
    progress: Callable[[int, int], None],
) -> Forecast:  # fmt: skip
    simulation = Simulation(_scenario(job, source, threads, tiers))
    out = simulation.run(policy, progress)
    epochs = out["epoch_seconds"]
    later_mb = max(0.0, out["source_mb"] - job.bytes / _MB) / max(1, len(epochs) - 1)
    return _forecast(job, name, epochs, _bound(job), later_mb * _MB)


def today(job: Job, source: Source, progress: Callable[[int, int], None]) -> Forecast:
    """PyTorch's DataLoader: two batches ahead, the node's memory as a page cache."""
    name = f"PyTorch, {job.workers} worker{'s' if job.workers > 1 else ''}"
    tiers = [SimTier("page cache", job.memory / _MB, job.memory_mb_per_s, 1)]
    out = _cluster(job, source, name, "lru", job.workers, tiers, progress)
    return replace(out, nvme=0)


def forebay(job: Job, source: Source, progress: Callable[[int, int], None]) -> Forecast:
    """One rank runs under the engine's own scheduler, with every size of its tiers, so that they
    compare; the rest is the cluster's."""
    accesses = len(job.lengths) * job.simulated
    if job.nodes * job.ranks == 1 and accesses <= _NODE_ACCESSES:
        nvme = job.nvme_mb_per_s * _MB
        out = _forebay.simulate_node(
            job.lengths,
            f"read_ms={source.latency_s * 1e3},bandwidth_mb={source.bytes_per_s / 1e6}",
            batch=job.batch, epochs=job.simulated, arena_bytes=job.memory, opens=0,
            read_bytes=1 << 32, sample_step_s=job.sample_s, seed=1, progress=progress,
            folder_bytes=job.nvme, folder_read_bytes_per_s=nvme, folder_write_bytes_per_s=nvme,
            folder_buffer_bytes=_STAGING,
        )  # fmt: skip
        # The consumer touches every byte, wherever it lay.
        least = job.bytes / (job.memory_mb_per_s * _MB)
        epochs = [max(least, epoch["seconds"]) for epoch in out["epochs"]]
        read = out["epochs"][-1]["source_bytes"] if len(epochs) > 1 else 0
        return _forecast(job, "Forebay", epochs, _bound(job), read)
    tiers = [SimTier("memory", max(0.0, job.memory - job.staging) / _MB, job.memory_mb_per_s, 1)]
    if job.nvme:
        tiers.append(SimTier("nvme", job.nvme / _MB, job.nvme_mb_per_s, 1))
    return _cluster(job, source, "Forebay", "forebay", _READS, tiers, progress)


def fits_at(job: Job) -> int:
    """NVMe of a node that, beside its memory, holds the node's part of the data set; 0: fits."""
    missing = job.bytes / job.nodes * 1.01 - max(0.0, job.memory - job.staging)
    return 0 if missing <= 0 else _round_up(missing)


def _round_up(size: float) -> int:
    """To two digits in its unit: nobody buys 137.4 GiB."""
    unit = 1 << max(0, (int(size).bit_length() - 1) // 10 * 10)
    count = size / unit
    step = 10 ** max(0, math.floor(math.log10(count)) - 1)
    return int(math.ceil(count / step) * step) * unit


def variants(job: Job) -> list[tuple[str, Job]]:
    """Other sizes that one might have: smaller, larger, and where everything fits."""
    fits = fits_at(job)
    memory = {job.memory // 2} | ({2 * job.memory} if fits > job.nvme else set())
    nvme = {0, job.nvme // 2} if job.nvme else set()
    if fits > job.nvme:
        nvme |= {2 * job.nvme} if job.nvme else {_round_up(fits * s) for s in (0.25, 0.5)}
    out = [(f"memory {format_bytes(size)}", replace(job, memory=size)) for size in sorted(memory)]
    for size in sorted(nvme - {job.nvme}):
        if size < max(fits, job.nvme):
            name = f"NVMe {format_bytes(size)}" if size else "no NVMe"
            out.append((name, replace(job, nvme=size)))
    if fits > job.nvme:
        out.append((f"NVMe {format_bytes(fits)}: all fits", replace(job, nvme=fits)))
    return out


# ---- what is said


def recommend(job: Job, now: Forecast, ours: Forecast, more: list[Forecast]) -> str:
    """The closing sentence."""
    gain = now.job_s / ours.job_s if ours.job_s > 0 else 1.0
    said = (
        f"Forebay would do the job in {_time(ours.job_s)} instead of {_time(now.job_s)}"
        if gain >= 1 + _GAIN
        else f"Forebay would hardly change the job's {_time(now.job_s)}"
    )
    larger = [f for f in more if f.memory > job.memory or f.nvme > job.nvme]
    better = [f for f in larger if f.job_s < ours.job_s * (1 - _GAIN)]
    if ours.wait_share is not None and ours.wait_share <= _GAIN:
        return f"{said}; compute is then the limit, and more memory or NVMe buys nothing."
    if not better:
        return f"{said}; more memory or NVMe buys less than {_GAIN:.0%} of it."
    # Of those about as good as the best, the one with the least to buy.
    best = min(f.job_s for f in better)
    pick = min(
        (f for f in better if f.job_s <= best * (1 + _GAIN)),
        key=lambda f: max(0, f.memory - job.memory) * 20 + max(0, f.nvme - job.nvme),
    )
    what = "memory" if pick.memory > job.memory else "NVMe"
    size = format_bytes(pick.memory if what == "memory" else pick.nvme)
    later = ours.later_s / pick.later_s if pick.later_s > 0 else math.inf
    faster = f", later epochs {later:.1f} times as fast" if 1 + _GAIN < later < 1000 else ""
    return f"{said}; with {size} of {what} a node {_time(pick.job_s)}{faster}."


def _time(seconds: float) -> str:
    from .doctor import _time as text

    return text(seconds)


def _print(
    job: Job, source: Source, now: Forecast, ours: Forecast, more: list[Forecast], said: str,
    about: str, path: str,
) -> None:  # fmt: skip
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    # Files and pipes have no width of their own.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(path, markup=False)
    console.print(f"  {about}", markup=False)
    console.print(
        f"  source: {format_bytes(source.bytes_per_s)}/s, {_time(source.latency_s)} a read "
        f"({source.note})",
        markup=False,
    )
    tiers = f"{format_bytes(job.memory)} memory" + (
        f", {format_bytes(job.nvme)} NVMe" if job.nvme else ", no NVMe"
    )
    ranks = f"{job.ranks} rank{'s' if job.ranks > 1 else ''}"
    console.print(
        f"  {job.nodes} node{'s' if job.nodes > 1 else ''} of {ranks}, {tiers}; batches of "
        f"{job.batch}, {job.epochs} epochs"
        + ("" if job.sample_s else "; no compute named: loading alone"),
        markup=False,
    )

    def table(title: str, rows: list[Forecast], versus: Forecast | None) -> None:
        grid = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
        grid.add_column("", no_wrap=True)
        names = ["first epoch", "later epochs", f"{job.epochs} epochs", "GPU waits", "source/epoch"]
        for column in names + (["against given"] if versus else []):
            grid.add_column(column, justify="right")
        for row in rows:
            share = "–" if row.wait_share is None else f"{row.wait_share:.0%}"
            cells = [row.name, _time(row.first_s), _time(row.later_s), _time(row.job_s), share,
                     format_bytes(row.source_bytes)]  # fmt: skip
            if versus:
                cells.append(f"{row.job_s / versus.job_s:.2f} ×" if versus.job_s > 0 else "–")
            grid.add_row(*cells)
        console.print(grid)

    table("The job", [now, ours], None)
    if more:
        table("What more, or less, would buy (Forebay, sizes of a node)", more, ours)
    console.print(
        f"All of it fits the tiers from {format_bytes(fits)} of NVMe a node on."
        if (fits := fits_at(job)) > job.nvme
        else "All of it fits the tiers.",
        markup=False,
    )
    console.print(said, markup=False)


def _positive(value: float | None, name: str) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ArgumentError(f"{name} is {value:g}; it must be a number above 0")


def _job(arguments: argparse.Namespace, catalog: Catalog) -> Job:
    _positive(arguments.step_ms, "--step-ms")
    _positive(arguments.samples_per_second, "--samples-per-second")
    if arguments.step_ms and arguments.samples_per_second:
        raise ArgumentError("--step-ms and --samples-per-second say the same; give one of them")
    sample_s = 0.0
    if arguments.step_ms:
        sample_s = arguments.step_ms / 1e3 / arguments.batch_size
    elif arguments.samples_per_second:
        sample_s = 1 / arguments.samples_per_second
    if arguments.memory:
        memory = parse_bytes(arguments.memory, "--memory")
    else:
        memory = _forebay.memory_limit()[0] // 2
    rate = {
        name: parse_bytes(getattr(arguments, name), f"--{name.replace('_', '-')}")
        for name in ("memory_bandwidth", "nvme_bandwidth", "network_bandwidth")
    }
    for name, value in rate.items():
        if value == 0:
            raise ArgumentError(f"--{name.replace('_', '-')} is 0; it must be above 0")
    job = Job(
        lengths=np.ascontiguousarray(catalog.lengths(), dtype=np.uint32),
        nodes=arguments.nodes,
        ranks=arguments.ranks_per_node,
        memory=memory,
        nvme=parse_bytes(arguments.nvme, "--nvme"),
        workers=arguments.workers,
        batch=arguments.batch_size,
        epochs=arguments.epochs,
        sample_s=sample_s,
        memory_mb_per_s=rate["memory_bandwidth"] / _MB,
        nvme_mb_per_s=min(rate["nvme_bandwidth"], rate["memory_bandwidth"]) / _MB,
        network_mb_per_s=rate["network_bandwidth"] / _MB,
    )
    if job.bytes == 0:
        raise ArgumentError(f"{arguments.path}: every sample is empty; there is nothing to plan")
    if job.memory < job.least_memory:
        raise ArgumentError(
            f"--memory is {format_bytes(job.memory)}; a node needs at least "
            f"{format_bytes(job.least_memory)} for {len(job.lengths):,} samples in batches of "
            f"{job.batch}: give more, or a smaller --batch-size"
        )
    return job


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; errors of input are raised as ForebayError."""
    from ..loader import open_catalog
    from .index import describe, parse_extensions

    latency = arguments.source_latency
    if latency is not None and not (math.isfinite(latency) and latency >= 0):
        raise ArgumentError(f"--source-latency is {latency:g}; give milliseconds, such as 2.5")
    bandwidth = parse_bytes(arguments.source_bandwidth, "--source-bandwidth")
    catalog = open_catalog(
        arguments.path, format=arguments.format, extensions=parse_extensions(arguments.extensions)
    )
    if len(catalog) == 0:
        raise ArgumentError(f"{arguments.path} has no samples; check the path and --extensions")
    job = _job(arguments, catalog)
    source = _source(catalog, job, bandwidth, latency)
    others = variants(job)
    with counting("simulating") as update:
        steps = 2 + len(others)
        at = 0

        def tick(done: int, total: int) -> None:
            update(int(1000 * (at + done / max(1, total))), 1000 * steps)

        now = today(job, source, tick)
        at += 1
        ours = forebay(job, source, tick)
        more = []
        for name, other in others:
            at += 1
            if other.memory >= job.least_memory:
                more.append(replace(forebay(other, source, tick), name=name))
    said = recommend(job, now, ours, more)
    if arguments.json:
        document = {
            "path": catalog.root,
            "samples": len(catalog),
            "bytes": job.bytes,
            "nodes": job.nodes,
            "ranks_per_node": job.ranks,
            "source": {
                "bytes_per_s": source.bytes_per_s,
                "latency_s": source.latency_s,
                "measured": source.measured,
                "note": source.note,
            },
            "today": now.to_json(),
            "forebay": ours.to_json(),
            "more": [row.to_json() for row in more],
            "all_fits_nvme_bytes": fits_at(job),
            "recommendation": said,
        }
        if arguments.json == "-":
            json.dump(document, sys.stdout, indent=1)
            print()
            return 0
        try:
            with open(arguments.json, "w", encoding="utf-8") as out:
                json.dump(document, out, indent=1)
                out.write("\n")
        except OSError as error:
            raise ArgumentError(f"--json {arguments.json}: {error.strerror}") from error
    _print(job, source, now, ours, more, said, describe(catalog), str(catalog.root))
    return 0
