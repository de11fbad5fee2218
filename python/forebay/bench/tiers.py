"""Tiers smaller than the data set: how full they are, what is still read, what an epoch takes.

Every point of the workload gives the tiers (memory and a cache folder together) a share of the
data. The consumer checksums every byte and then waits until its step is over, as it would for a
GPU.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _forebay
from ..engine import Engine
from ..loader import DataLoader
from ..testing.slowfs import SlowFs
from .data import make_files
from .measure import Case, Outcome, best_of, interleave
from .page_cache import CachedReader, memory_group
from .run import Context
from .torch_rival import RawFolder, torch_loader

# What a cache folder counts for each sample beside its bytes.
_FOLDER_BYTES_A_SAMPLE = 32


@dataclass
class Point:
    """One run over all epochs with tiers of one size."""

    seconds: list[float] = field(default_factory=list)
    source_bytes: int = 0
    held_bytes: int = 0
    """Distinct bytes that the tiers had at the end: what a further epoch did not read."""
    metrics: dict[str, int] = field(default_factory=dict)


def _mount(ctx: Context, root: str, *, cache: bool = False) -> SlowFs:
    work = ctx.workload
    return SlowFs(
        root, open_ms=work["latency_ms"], read_ms=work["latency_ms"], stat_ms=work["stat_ms"],
        readdir_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"],
        seed=ctx.seed, cache=cache,
    )  # fmt: skip


class Setup:
    """One mount, the data below it, and every contestant over it."""

    def __init__(self, ctx: Context, mount: SlowFs) -> None:
        self.ctx = ctx
        self.work = ctx.workload
        self.mount = mount
        self.catalog = _forebay.Catalog.build(str(mount.path))
        lengths = self.catalog.lengths()
        if len(lengths) != self.work["files"]:
            raise RuntimeError(f"{mount.path} shows {len(lengths)} files of {self.work['files']}")
        self.sizes = lengths.tolist()
        self.bytes = int(lengths.sum())
        self.paths = [self.catalog.object_path(i) for i in range(len(lengths))]
        self.torch_files = RawFolder(str(mount.path))
        self.batch: int = self.work["batch"]
        self.step_s: float = self.work["step_ms"] / 1e3
        self.copied: list[float] = []
        """Share of the samples that were in the folder when a first epoch with one ended."""
        self._torch_epoch = 0
        self._folders = 0

    # ---- limits

    def plain_threads(self, threads: int) -> float:
        """Open, one pread, close, by C++ threads that do nothing else."""
        seconds, got = _forebay.limit_read_files(self.paths, self.sizes, threads)
        if got != self.bytes:
            raise RuntimeError(f"plain threads read {got} of {self.bytes} bytes")
        return float(seconds)

    def step_only(self) -> float:
        full, rest = divmod(len(self.sizes), self.batch)
        sizes = [self.batch] * full + ([rest] if rest else [])
        return self._consume([(n, 0, _nothing) for n in sizes], expected=0)

    def tier_bytes(self, percent: float) -> int:
        return int(self.bytes * percent / 100)

    def least_bytes(self, percent: float, epochs: int) -> int:
        """No policy reads less from the source: each sample is used once an epoch."""
        return self.bytes + (epochs - 1) * max(0, self.bytes - self.tier_bytes(percent))

    # ---- contestants

    def _consume(
        self, batches: Iterable[tuple[int, int, Callable[[], Any]]], expected: int
    ) -> float:
        """Takes (samples, bytes, checksum) batch by batch, with a step for each."""
        start = time.perf_counter()
        got = 0
        for samples, size, checksum in batches:
            begun = time.perf_counter()
            got += size
            checksum()
            time.sleep(max(0.0, begun + self.step_s * samples - time.perf_counter()))
        seconds = time.perf_counter() - start
        if got != expected:
            raise RuntimeError(f"{got} of {expected} bytes were delivered")
        return seconds

    def _loader(self, engine: Engine, epochs: int, **how: Any) -> DataLoader:
        return DataLoader(
            self.catalog, self.batch, seed=self.ctx.seed, rank=0, world_size=1, engine=engine,
            epochs=epochs, **how,
        )  # fmt: skip

    def _epoch(self, loader: DataLoader) -> float:
        return self._consume(((len(b), b.nbytes, b.checksum) for b in loader), self.bytes)

    def new_folder(self) -> str:
        self._folders += 1
        return os.path.join(self.ctx.scratch, f"cache{self._folders}")

    def forebay(self, percent: float) -> Point:
        """All epochs with a new engine and an empty folder; then one look at what is held."""
        total = self.tier_bytes(percent)
        memory = int(total * self.work["memory_share"])
        folder = self.new_folder()
        point = Point()
        self.mount.reset()
        start = time.perf_counter()
        engine = Engine(
            memory=memory + self.work["staging_bytes"], memory_tier=memory, cache_dir=folder,
            cache_bytes=total - memory,
        )  # fmt: skip
        with self._loader(engine, self.work["epochs"], shuffle=True) as loader:
            self._epoch(loader)
            # The loader reads ahead from its making on, so that is inside the first epoch.
            point.seconds.append(time.perf_counter() - start)
            for _ in range(1, self.work["epochs"]):
                point.seconds.append(self._epoch(loader))
        point.source_bytes = self.mount.stats()["bytes_read"]
        point.metrics = engine.metrics()
        if engine.cache_status:
            raise RuntimeError(f"the cache folder takes no copies: {engine.cache_status}")
        # What a further epoch reads is what neither tier holds, however they share the rest.
        self.mount.reset()
        with self._loader(engine, 1) as loader:
            got = sum(batch.nbytes for batch in loader)
        point.held_bytes = got - self.mount.stats()["bytes_read"]
        del loader, engine
        shutil.rmtree(folder, ignore_errors=True)
        return point

    def first_epoch(self, *, fill: bool) -> float:
        """The first epoch, with or without a cache folder that takes everything."""
        folder = self.new_folder() if fill else None
        start = time.perf_counter()
        engine = Engine(
            memory=self.work["fill_memory_bytes"], keep=False, cache_dir=folder,
            cache_bytes=2 * self.bytes if fill else None,
        )  # fmt: skip
        with self._loader(engine, 1, shuffle=True) as loader:
            self._epoch(loader)
        seconds = time.perf_counter() - start
        metrics = engine.metrics()
        del loader, engine
        if folder:
            self.copied.append(metrics["forebay_tier_writes_total"] / len(self.sizes))
            shutil.rmtree(folder, ignore_errors=True)
        return seconds

    def torch(self, workers: int) -> float:
        loader, sampler = torch_loader(self.torch_files, self.batch, workers, self.ctx.seed)
        self._torch_epoch += 1
        sampler.set_epoch(self._torch_epoch)

        def batches() -> Iterable[tuple[int, int, Callable[[], Any]]]:
            for batch in loader:
                arrays = [np.frombuffer(data, np.uint8) for data, _ in batch]
                size = sum(a.nbytes for a in arrays)
                yield len(arrays), size, functools.partial(_checksum, arrays)

        return self._consume(batches(), self.bytes)

    def page_cache(self, root: str, percent: float, threads: int) -> tuple[list[float], list[int]]:
        """Seconds and source bytes of each epoch with the kernel's page cache as the only tier."""
        seconds, source = [], []
        with memory_group() as group, _mount(self.ctx, root, cache=True) as mount:
            paths = [
                os.path.join(mount.path, os.path.relpath(p, self.mount.path)) for p in self.paths
            ]
            reader = CachedReader(
                group, self.tier_bytes(percent), paths=paths, largest=max(self.sizes),
                batch=self.batch, threads=threads, step_s=self.step_s,
            )  # fmt: skip
            try:
                for epoch in range(self.work["epochs"]):
                    mount.reset()
                    took, got = reader.epoch(self.ctx.seed + epoch)
                    if got != self.bytes:
                        raise RuntimeError(f"the page cache gave {got} of {self.bytes} bytes")
                    seconds.append(took)
                    source.append(mount.stats()["bytes_read"])
            finally:
                reader.close()
        return seconds, source


def _nothing() -> None:
    pass


def _checksum(arrays: list[np.ndarray]) -> None:
    for array in arrays:
        _forebay.crc32c(array)


def _shown(seconds: list[float]) -> str:
    return ", ".join(f"{s:.2f}" for s in seconds) + " s"


def _fill_cost(ctx: Context, out: Outcome, setup: Setup) -> None:
    times = interleave(
        {
            "first epoch, filling": lambda: setup.first_epoch(fill=True),
            "first epoch, no folder": lambda: setup.first_epoch(fill=False),
        },
        ctx.workload["fill_repeats"],
        ctx.say,
    )
    filling, bare = times.values()
    out.figures["nvme_fill_cost"] = statistics.median(filling) / statistics.median(bare) - 1
    out.repeats["nvme_fill_cost"] = [a / b - 1 for a, b in zip(filling, bare, strict=True)]
    out.cases += [
        Case("first epoch while the cache folder fills", "s", filling,
             limit=statistics.median(bare), limit_name="the same without a folder",
             note=f"without: {min(bare):.3f} to {max(bare):.3f} s"),
        Case("share of the samples copied by its end", "ratio", setup.copied, limit=1.0,
             limit_name="all"),
    ]  # fmt: skip
    if min(setup.copied) < 0.99:
        out.notes.append(
            f"nvme_fill_cost is of epochs that copied no more than {min(setup.copied):.0%} of the "
            f"samples: what was skipped cost nothing"
        )


def _judge(
    ctx: Context, out: Outcome, setup: Setup, points: dict[float, list[Point]],
    rivals: dict[float, dict[str, float]], notes: dict[float, str], step_s: float, source_s: float,
) -> None:  # fmt: skip
    """Figures and cases of all points. `source_s`: seconds of one epoch of plain threads."""
    epochs = ctx.workload["epochs"]
    efficiency, over_bound, over_limit = [], [], []
    reads = hedged = 0
    for percent, runs in points.items():
        configured = setup.tier_bytes(percent)
        held = [run.held_bytes / configured for run in runs]
        if configured < setup.bytes:
            efficiency += held
        least = setup.least_bytes(percent, epochs)
        read = [run.source_bytes / least for run in runs]
        over_bound += read
        left = max(0, setup.bytes - configured) / setup.bytes
        limits = [max(step_s, source_s)] + [max(step_s, left * source_s)] * (epochs - 1)
        ratios = [
            statistics.median(run.seconds[e] for run in runs) / limits[e] for e in range(epochs)
        ]
        over_limit += ratios
        out.repeats.setdefault("epoch_vs_limit", []).extend(
            run.seconds[e] / limits[e] for run in runs for e in range(epochs)
        )
        reads += sum(run.metrics["forebay_source_reads_total"] for run in runs)
        hedged += sum(run.metrics.get("forebay_source_hedged_reads_total", 0) for run in runs)
        last = runs[-1].metrics
        folder = last["forebay_tier_used_bytes"]
        folder -= _FOLDER_BYTES_A_SAMPLE * last["forebay_tier_writes_total"]
        out.cases += [
            Case(f"{epochs} epochs, tiers {percent:g} %", "s", [sum(run.seconds) for run in runs],
                 limit=sum(limits), limit_name="steps or source, whichever is longer",
                 rivals=rivals[percent],
                 note=f"each epoch over its limit: {', '.join(f'{r:.3f}' for r in ratios)}"
                 + notes[percent]),
            Case(f"source bytes / least, tiers {percent:g} %", "ratio", read, limit=1.0,
                 limit_name="D + (E - 1) max(0, D - C)"),
            Case(f"distinct bytes held / configured, tiers {percent:g} %", "ratio", held,
                 limit=min(1.0, setup.bytes / configured), limit_name="full, or everything",
                 note=f"memory {last['forebay_stage_kept_bytes']} and folder {folder} bytes of "
                 f"{configured}; {last['forebay_tier_skipped_writes_total']} copies skipped, "
                 f"{last['forebay_stage_evicted_samples_total']} samples evicted from memory"),
        ]  # fmt: skip
    out.figures["tier_efficiency"] = min(efficiency)
    out.figures["source_bytes_vs_bound"] = max(over_bound)
    out.figures["epoch_vs_limit"] = max(over_limit)
    out.figures["hedged_share"] = hedged / reads


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    root = os.path.join(ctx.scratch, "files")
    ctx.say(f"making {work['files']} files")
    make_files(root, work["files"], work["mean_bytes"], ctx.seed)
    with _mount(ctx, root) as mount:
        setup = Setup(ctx, mount)
        ctx.say("looking for the best number of plain threads, and of PyTorch workers")
        threads = best_of(
            {n: functools.partial(setup.plain_threads, n) for n in work["threads"]}, ctx.say
        )
        workers = best_of({n: functools.partial(setup.torch, n) for n in work["workers"]}, ctx.say)
        percents = work["percent"]
        points: dict[float, list[Point]] = {percent: [] for percent in percents}
        cached: dict[float, tuple[list[float], list[int]]] = {}
        plain, steps, torch = [], [], []
        no_group = ""
        late = []
        for i in range(ctx.repeats):
            plain.append(setup.plain_threads(threads))
            steps.append(setup.step_only())
            for number, percent in enumerate(percents):
                points[percent].append(setup.forebay(percent))
                took = _shown(points[percent][-1].seconds)
                ctx.say(f"tiers {percent:g} %: {took} ({i + 1}/{ctx.repeats})")
                # The page cache runs once for each point, in turn with the others.
                if number % ctx.repeats == i and not no_group:
                    try:
                        cached[percent] = setup.page_cache(root, percent, work["cache_threads"])
                        ctx.say(f"page cache {percent:g} %: {_shown(cached[percent][0])}")
                    except (OSError, RuntimeError) as error:
                        no_group = str(error)
            late.append(mount.stats()["late_us_mean"])
            plain.append(setup.plain_threads(threads))
            torch.append(setup.torch(workers))
            ctx.say(f"PyTorch, {workers} workers: {torch[-1]:.2f} s an epoch")
        _fill_cost(ctx, out, setup)
        late.append(mount.stats()["late_us_mean"])

    torch_s = statistics.median(torch)
    rivals: dict[float, dict[str, float]] = {}
    notes: dict[float, str] = {}
    for percent in percents:
        rivals[percent] = {f"PyTorch, {workers} workers": work["epochs"] * torch_s}
        notes[percent] = ""
        if percent in cached:
            seconds, source = cached[percent]
            rivals[percent]["page cache of that size"] = sum(seconds)
            hits = 1 - statistics.mean(source[1:]) / setup.bytes
            notes[percent] = (
                f"; the page cache had {hits:.0%} of the bytes in later epochs and read "
            )
            notes[percent] += (
                f"{sum(source) / setup.least_bytes(percent, work['epochs']):.2f} x least"
            )
    _judge(ctx, out, setup, points, rivals, notes, statistics.median(steps),
           statistics.median(plain))  # fmt: skip
    rate = setup.bytes / 1e6
    out.cases.append(
        Case("plain threads, all of the data", "MB/s", [rate / s for s in plain],
             note=f"{threads} threads, {work['files']} files, {setup.bytes} bytes; answers of "
             f"slowfs were at most {max(late):.0f} us late on average")
    )  # fmt: skip
    out.cases.append(Case(f"PyTorch, {workers} workers, one epoch", "s", torch))
    out.notes.append(
        f"PyTorch keeps nothing on this mount: its {work['epochs']} epochs are as many times the "
        f"median of {len(torch)}"
    )
    if no_group:
        out.notes.append(f"the page cache was not measured: {no_group}")
    elif cached:
        out.notes.append(
            f"page cache: {work['cache_threads']} Python threads in a memory cgroup, on a mount "
            f"with --cache; once for each point"
        )
    return out
