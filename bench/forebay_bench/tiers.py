"""Tiers smaller than the data set: how full they are, what is still read, what an epoch takes.

Every point of the workload gives the tiers (memory and a cache folder together) a share of the
data. The consumer checksums every byte and then waits until its step is over, as it would for a
GPU. Some points are measured again beside busy loops, which take the processors, and with the
folder on a disk that writes slowly.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from forebay import _forebay
from forebay.engine import Engine
from forebay.loader import DataLoader, open_catalog
from forebay.slowfs import SlowFs

from .data import catalogs_in, make_files
from .measure import Case, Outcome, best_of, timed
from .page_cache import CachedReader, memory_group
from .run import Context
from .torch_rival import TensorFolder, best_loader, best_workers, samples_of, stop_workers

# What a cache folder counts for each sample beside its bytes.
_FOLDER_BYTES_A_SAMPLE = 40
# How long to wait for a further copy of a finished epoch to arrive in the folder.
_COPIES_S = 10.0

# Ends with its parent, and by itself.
_BUSY_LOOP = """
import os, time
parent, end = os.getppid(), time.monotonic() + 1800
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(100_000):
        pass
"""


@dataclass
class Point:
    """One run over all epochs with tiers of one size."""

    seconds: list[float] = field(default_factory=list)
    """Of each epoch; the first one's clock starts when the files are listed."""
    listing_s: float = 0.0
    """Of the first call, which lists the files, before that."""
    saved_s: float = 0.0
    """The same with a saved list."""
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


@contextlib.contextmanager
def _busy_loops(count: int) -> Iterator[None]:
    """So many processes that compute and do nothing else."""
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


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
        self.torch_files = TensorFolder(str(mount.path))
        self.batch: int = self.work["batch"]
        self.step_s: float = self.work["step_ms"] / 1e3
        self._torch_epoch = 0
        self._folders = 0
        self.disk = ctx.scratch
        """Where cache folders are made."""

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
        return os.path.join(self.disk, f"cache{self._folders}")

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
        made = time.perf_counter() - start
        point.listing_s, point.saved_s = self._list(engine)
        start = time.perf_counter() - made
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

    def _list(self, engine: Engine) -> tuple[float, float]:
        """Seconds for the list of files that the loader starts with: made, and found."""
        catalogs = os.path.join(self.ctx.scratch, "catalogs")
        root = str(self.mount.path)
        with catalogs_in(catalogs):
            took = [
                timed(lambda: open_catalog(root, progress=False, engine=engine)) for _ in range(2)
            ]
        shutil.rmtree(catalogs, ignore_errors=True)
        return took[0], took[1]

    def first_epoch(self, *, fill: bool) -> tuple[float, float]:
        """Seconds of the first epoch, with or without a cache folder that takes everything, and
        the share of the samples that it copied.
        """
        folder = self.new_folder() if fill else None
        start = time.perf_counter()
        engine = Engine(
            memory=self.work["fill_memory_bytes"], keep=False, cache_dir=folder,
            cache_bytes=2 * self.bytes if fill else None,
        )  # fmt: skip
        with self._loader(engine, 1, shuffle=True) as loader:
            self._epoch(loader)
            seconds = time.perf_counter() - start
            copied = self._copied(engine) if folder else 0.0
        del loader, engine
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        return seconds, copied

    def _copied(self, engine: Engine) -> float:
        """The share of the samples that an epoch has copied; the last of them are on their way."""
        before, end = -1, 0.0
        while True:
            now = engine.metrics()
            copies = now["forebay_tier_writes_total"]
            if copies != before:
                before, end = copies, time.monotonic() + _COPIES_S
            if not now["forebay_tier_copies_under_way"] or time.monotonic() > end:
                return copies / len(self.sizes)
            time.sleep(0.01)

    def torch(self, workers: int) -> float:
        """An epoch of PyTorch at its best, its workers being there already."""
        loader, sampler = best_loader(self.torch_files, self.batch, workers, self.ctx.seed)

        def batches() -> Iterable[tuple[int, int, Callable[[], Any]]]:
            for batch in loader:
                arrays = [data.numpy() for data in samples_of(batch)]
                yield len(arrays), batch[0].nbytes, functools.partial(_checksum, arrays)

        try:
            seconds = 0.0
            for _ in range(2):
                self._torch_epoch += 1
                sampler.set_epoch(self._torch_epoch)
                seconds = self._consume(batches(), self.bytes)
            return seconds
        finally:
            stop_workers(loader)

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
    filled, bare = [], []
    for i in range(ctx.workload["fill_repeats"]):
        filled.append(setup.first_epoch(fill=True))
        bare.append(setup.first_epoch(fill=False)[0])
        ctx.say(
            f"first epoch: {filled[-1][0]:.3f} s with {filled[-1][1]:.1%} copied, {bare[-1]:.3f} s "
            f"without a folder ({i + 1}/{ctx.workload['fill_repeats']})"
        )
    copied = [share for _, share in filled]
    whole = [seconds for seconds, share in filled if share >= 1]
    out.figures["copied_share"] = min(copied)
    if whole:
        cost = statistics.median(whole) / statistics.median(bare) - 1
        out.figures["nvme_fill_cost"] = cost
        out.repeats["nvme_fill_cost"] = [
            seconds / other - 1
            for (seconds, share), other in zip(filled, bare, strict=True)
            if share >= 1
        ]
        out.cases.append(
            Case("first epoch while the cache folder fills", "s", whole,
                 limit=statistics.median(bare), limit_name="the same without a folder",
                 note=f"without: {min(bare):.3f} to {max(bare):.3f} s")
        )  # fmt: skip
    else:
        out.notes.append("nvme_fill_cost: no first epoch copied everything")
    if len(whole) < len(filled):
        out.notes.append(
            f"{len(filled) - len(whole)} of {len(filled)} first epochs copied less than "
            f"everything; they do not count in nvme_fill_cost"
        )
    out.cases.append(
        Case("share of the samples copied by its end", "ratio", copied, limit=1.0,
             limit_name="all")
    )  # fmt: skip


@dataclass
class Judged:
    """What the runs of one point come to."""

    limits: list[float]
    """Seconds that each epoch takes at least."""
    over_limit: list[float]
    """Each epoch over its limit, median of the repetitions."""
    over_limit_worst: list[float]
    over_bound: list[float]
    """Source bytes over the least, by repetition."""


def _judge_point(
    setup: Setup, percent: float, runs: list[Point], step_s: float, source_s: float
) -> Judged:
    """`source_s`: seconds of one epoch of plain threads."""
    epochs = setup.work["epochs"]
    left = max(0, setup.bytes - setup.tier_bytes(percent)) / setup.bytes
    limits = [max(step_s, source_s)] + [max(step_s, left * source_s)] * (epochs - 1)
    each = [[run.seconds[e] / limits[e] for run in runs] for e in range(epochs)]
    least = setup.least_bytes(percent, epochs)
    return Judged(
        limits,
        [statistics.median(ratios) for ratios in each],
        [max(ratios) for ratios in each],
        [run.source_bytes / least for run in runs],
    )


def _measure_again(
    ctx: Context, out: Outcome, setup: Setup, prefix: str, threads: int, beside: str,
    timed: bool = True,
) -> None:  # fmt: skip
    """Points of the workload under other conditions: its keys and figures are named `prefix`."""
    work = ctx.workload
    points: dict[float, list[Point]] = {percent: [] for percent in work[f"{prefix}_percent"]}
    plain, steps, filled = [], [], []
    repeats = work[f"{prefix}_repeats"]
    for i in range(repeats):
        plain.append(setup.plain_threads(threads))
        steps.append(setup.step_only())
        for percent, runs in points.items():
            runs.append(setup.forebay(percent))
            ctx.say(f"{beside}, {percent:g} %: {_shown(runs[-1].seconds)} ({i + 1}/{repeats})")
        plain.append(setup.plain_threads(threads))
        filled.append(setup.first_epoch(fill=True))
        ctx.say(f"{beside}, first epoch: {filled[-1][0]:.2f} s, {filled[-1][1]:.1%} copied")
    judged = {
        percent: _judge_point(setup, percent, runs, statistics.median(steps),
                              statistics.median(plain))
        for percent, runs in points.items()
    }  # fmt: skip
    for percent, point in judged.items():
        ratios = ", ".join(f"{r:.3f}" for r in point.over_limit)
        out.cases += [
            Case(f"{work['epochs']} epochs {beside}, tiers {percent:g} %", "s",
                 [sum(run.seconds) for run in points[percent]], limit=sum(point.limits),
                 limit_name="steps or source, whichever is longer",
                 note=f"each epoch over its limit: {ratios}; of the last repetition "
                 f"{_shown(points[percent][-1].seconds)}"),
            Case(f"source bytes / least {beside}, tiers {percent:g} %", "ratio", point.over_bound,
                 limit=1.0, limit_name="D + (E - 1) max(0, D - C)"),
        ]  # fmt: skip
    copied = [share for _, share in filled]
    out.cases += [
        Case(f"first epoch {beside} while the folder fills", "s", [s for s, _ in filled]),
        Case(f"share of the samples copied by its end {beside}", "ratio", copied, limit=1.0,
             limit_name="all"),
    ]  # fmt: skip
    out.figures[f"source_bytes_vs_bound_{prefix}"] = max(max(j.over_bound) for j in judged.values())
    out.figures[f"copied_share_{prefix}"] = min(copied)
    if timed:
        figure = f"epoch_vs_limit_{prefix}"
        out.figures[figure] = max(max(j.over_limit) for j in judged.values())
        out.figures[f"{figure}_worst"] = max(max(j.over_limit_worst) for j in judged.values())


def _judge(
    ctx: Context, out: Outcome, setup: Setup, points: dict[float, list[Point]],
    rivals: dict[float, dict[str, float]], notes: dict[float, str], step_s: float, source_s: float,
) -> None:  # fmt: skip
    """Figures and cases of all points. `source_s`: seconds of one epoch of plain threads."""
    epochs = ctx.workload["epochs"]
    efficiency, over_bound, over_limit, over_limit_worst = [], [], [], []
    reads = hedged = 0
    for percent, runs in points.items():
        configured = setup.tier_bytes(percent)
        held = [run.held_bytes / configured for run in runs]
        if configured < setup.bytes:
            efficiency += held
        judged = _judge_point(setup, percent, runs, step_s, source_s)
        limits, ratios, read = judged.limits, judged.over_limit, judged.over_bound
        over_bound += read
        over_limit += ratios
        out.repeats.setdefault("epoch_vs_limit", []).extend(
            run.seconds[e] / limits[e] for run in runs for e in range(epochs)
        )
        over_limit_worst += judged.over_limit_worst
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
    out.figures["epoch_vs_limit_worst"] = max(over_limit_worst)
    out.figures["hedged_share"] = hedged / reads
    _judge_first_call(out, setup, points, max(step_s, source_s))


def _judge_first_call(
    out: Outcome, setup: Setup, points: dict[float, list[Point]], limit: float
) -> None:
    """First epochs by a user's clock: the listing is on it, or opening a saved list."""
    runs = [run for each in points.values() for run in each]
    for how in ("cold", "saved"):
        took = [run.seconds[0] + (run.listing_s if how == "cold" else run.saved_s) for run in runs]
        out.median(f"epoch_{how}_vs_limit", [seconds / limit for seconds in took])
        out.cases.append(
            Case("first epoch, " + ("listing included" if how == "cold" else "a saved list"), "s",
                 took, limit=limit, limit_name="steps or source, whichever is longer",
                 note=f"{len(setup.sizes)} files, all sizes of tiers")
        )  # fmt: skip


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
        fixed = work.get("workers")
        workers = fixed[0] if fixed and len(fixed) == 1 else 0
        workers = workers or best_workers(setup.torch, ctx.say, start=4, counts=fixed)
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
        again = Outcome()
        if loops := work["busy_loops"]:
            with _busy_loops(loops):
                _measure_again(ctx, again, setup, "busy", threads, f"beside {loops} busy loops")
        disk = os.path.join(ctx.scratch, "disk")
        os.mkdir(disk)
        speed = work["slow_disk_mb"]
        with SlowFs(disk, writable_mb=speed, seed=ctx.seed) as slow:
            setup.disk = str(slow.path)
            _measure_again(ctx, again, setup, "slow_disk", threads,
                           f"with a disk that writes {speed:g} MB/s", timed=False)  # fmt: skip
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
    out.figures |= again.figures
    out.repeats |= again.repeats
    out.cases += again.cases
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
