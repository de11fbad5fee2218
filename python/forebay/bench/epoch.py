"""First and later epochs from slow storage, against plain threads and PyTorch's DataLoader.

Every contestant's consumer checksums every byte, so that nobody wins by not looking.
"""

from __future__ import annotations

import os
import statistics

import numpy as np

from .. import _forebay
from ..engine import Engine
from ..loader import DataLoader
from ..testing.slowfs import SlowFs
from .data import make_files
from .measure import Case, Outcome, best_of, interleave, ratio_of_medians, timed
from .run import Context
from .torch_rival import RawFolder, torch_loader

_BATCH = 64


class Setup:
    """One mount, the data below it, and every contestant over it."""

    def __init__(self, ctx: Context, mount: SlowFs, count: int) -> None:
        self.ctx = ctx
        self.mount = mount
        self.catalog = _forebay.Catalog.build(str(mount.path))
        if len(self.catalog) != count:
            raise RuntimeError(f"{mount.path} shows {len(self.catalog)} files of {count}")
        lengths = self.catalog.lengths()
        self.sizes = lengths.tolist()
        self.bytes = int(lengths.sum())
        self.paths = [self.catalog.object_path(i) for i in range(count)]
        self.dataset = RawFolder(str(mount.path))
        self._epoch = 0

    def plain_threads(self, threads: int) -> float:
        """The limit: open, one pread, close."""
        seconds, got = _forebay.limit_read_files(self.paths, self.sizes, threads)
        if got != self.bytes:
            raise RuntimeError(f"plain threads read {got} of {self.bytes} bytes")
        return seconds

    def torch(self, workers: int) -> float:
        loader, sampler = torch_loader(self.dataset, _BATCH, workers, self.ctx.seed)
        self._epoch += 1
        sampler.set_epoch(self._epoch)
        got = 0

        def epoch() -> None:
            nonlocal got
            for batch in loader:
                for data, _ in batch:
                    got += len(data)
                    _forebay.crc32c(np.frombuffer(data, np.uint8))

        seconds = timed(epoch)
        if got != self.bytes:
            raise RuntimeError(f"PyTorch delivered {got} of {self.bytes} bytes")
        return seconds

    def forebay_engine(self) -> Engine:
        return Engine(memory=2 * self.bytes + (128 << 20))

    def forebay(self, engine: Engine | None = None) -> DataLoader:
        return DataLoader(
            self.catalog, _BATCH, shuffle=True, seed=self.ctx.seed, rank=0, world_size=1,
            engine=engine or self.forebay_engine(),
        )  # fmt: skip

    def consume(self, loader: DataLoader) -> float:
        got = 0

        def epoch() -> None:
            nonlocal got
            for batch in loader:
                got += batch.nbytes
                batch.checksum()

        seconds = timed(epoch)
        if got != self.bytes:
            raise RuntimeError(f"Forebay delivered {got} of {self.bytes} bytes")
        return seconds

    def first_epoch(self) -> float:
        """A new engine each time: nothing is in memory. The loader reads ahead from its making on,
        so it is made inside the time."""
        loader: list[DataLoader] = []

        def epoch() -> None:
            loader.append(self.forebay())
            self.consume(loader[0])

        seconds = timed(epoch)
        loader[0].close()
        return seconds


def _mount(ctx: Context, root: str, latency_ms: float, *, cache: bool = False) -> SlowFs:
    work = ctx.workload
    return SlowFs(
        root, open_ms=latency_ms, read_ms=latency_ms, stat_ms=work["stat_ms"],
        readdir_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"],
        seed=ctx.seed, cache=cache,
    )  # fmt: skip


def _first(ctx: Context, out: Outcome, root: str, latency: str, work: dict) -> None:
    """First epochs at one latency."""
    with _mount(ctx, root, float(latency)) as mount:
        setup = Setup(ctx, mount, work["files"])
        ctx.say(f"{latency} ms: looking for the best number of plain threads")
        threads = best_of({n: lambda n=n: setup.plain_threads(n) for n in work["threads"]}, ctx.say)
        ctx.say(f"{latency} ms: looking for the best number of PyTorch workers")
        workers = best_of({n: lambda n=n: setup.torch(n) for n in work["workers"]}, ctx.say)
        mount.reset()
        times = interleave(
            {
                f"forebay {latency} ms": setup.first_epoch,
                f"plain threads ({threads})": lambda: setup.plain_threads(threads),
                f"torch ({workers} workers)": lambda: setup.torch(workers),
            },
            ctx.repeats,
            ctx.say,
        )
        stats = mount.stats()
        cpu = stats["cpu_user_s"] + stats["cpu_system_s"]
    ours, plain, torch = times.values()
    suffix = "" if latency == "1" else f"_{latency}ms"
    out.figures[f"first_vs_torch{suffix}"] = ratio_of_medians(ours, torch)
    if latency == "1":
        out.figures["first_vs_limit"] = ratio_of_medians(ours, plain)
    rate = setup.bytes / 1e6
    out.cases.append(
        Case(
            f"first epoch, {latency} ms", "MB/s", [rate / t for t in ours],
            limit=rate / statistics.median(plain), limit_name=f"{threads} plain threads",
            rivals={f"PyTorch, {workers} workers": rate / statistics.median(torch)},
            note=f"{work['files']} files; slowfs used {cpu:.1f} s of CPU for all, answers "
            f"{stats['late_us_mean']:.0f} us late on average",
        )
    )  # fmt: skip


def _later(ctx: Context, out: Outcome, root: str, work: dict) -> None:
    """Later epochs with memory for everything, without a step and with one."""
    rounds_per_s = 20_000_000 / timed(lambda: _forebay.burn(20_000_000))
    with _mount(ctx, root, 1.0) as mount:
        setup = Setup(ctx, mount, work["files"])
        loader = setup.forebay()
        setup.consume(loader)
        mount.reset()
        times = interleave(
            {
                "forebay later": lambda: setup.consume(loader),
                "torch later": lambda: setup.torch(work["workers_best"]),
            },
            ctx.repeats,
            ctx.say,
        )
        out.figures["later_vs_torch"] = ratio_of_medians(
            times["forebay later"], times["torch later"]
        )

        mount.reset()
        rounds = int(rounds_per_s * work["step_ms"] / 1e3 * _BATCH)
        batches = len(loader)
        marks: list[int] = []

        def with_step() -> float:
            marks.append(len(loader.stats()))

            seen = 0

            def epoch() -> None:
                nonlocal seen
                for batch in loader:
                    seen += batch.nbytes
                    _forebay.burn(rounds)

            seconds = timed(epoch)
            if seen != setup.bytes:
                raise RuntimeError(f"Forebay delivered {seen} of {setup.bytes} bytes")
            return seconds

        def step_only() -> float:
            return timed(lambda: [_forebay.burn(rounds) for _ in range(batches)])

        step = interleave(
            {"forebay + step": with_step, "step only": step_only}, ctx.repeats, ctx.say
        )
        out.figures["later_source_reads"] = mount.stats()["read"]
        out.figures["later_vs_step_only"] = statistics.median(
            step["forebay + step"]
        ) / statistics.median(step["step only"])
        reports = [loader.stats()[i] for i in marks]
        out.figures["later_stall_share"] = statistics.median(r.stall_share for r in reports)
        # The first batch's time is not one between batches.
        tails = []
        for report in reports:
            gaps = sorted(report.batch_seconds[1:])
            tails.append(gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))] / gaps[len(gaps) // 2])
        out.figures["batch_p99_vs_median"] = statistics.median(tails)
        out.cases.append(
            Case("later epoch, no step", "samples/s",
                 [work["files"] / t for t in times["forebay later"]],
                 rivals={f"PyTorch, {work['workers_best']} workers": work["files"]
                         / statistics.median(times["torch later"])})
        )  # fmt: skip
        out.cases.append(
            Case(f"later epoch, step {work['step_ms']} ms a sample", "s", step["forebay + step"],
                 limit=statistics.median(step["step only"]), limit_name="step only")
        )  # fmt: skip
        out.cases.append(Case("batch p99 / median, each epoch", "ratio", tails))
        loader.close()

    with _mount(ctx, root, 1.0, cache=True) as mount:
        setup = Setup(ctx, mount, work["files"])
        ctx.say("cache mount: PyTorch warms it")
        setup.torch(4)
        workers = best_of({n: lambda n=n: setup.torch(n) for n in work["cached_workers"]}, ctx.say)
        loader = setup.forebay()
        setup.consume(loader)
        times = interleave(
            {
                "forebay later": lambda: setup.consume(loader),
                "torch page cache": lambda: setup.torch(workers),
            },
            ctx.repeats,
            ctx.say,
        )
        out.figures["later_vs_torch_cached"] = ratio_of_medians(
            times["forebay later"], times["torch page cache"]
        )
        out.cases.append(
            Case("later epoch beside PyTorch on page cache", "samples/s",
                 [work["files"] / t for t in times["forebay later"]],
                 rivals={f"PyTorch, {workers} workers": work["files"]
                         / statistics.median(times["torch page cache"])})
        )  # fmt: skip
        loader.close()


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    most = max(w["files"] for w in [*work["first"].values(), work["later"]])
    roots = {}
    for count in sorted({w["files"] for w in [*work["first"].values(), work["later"]]}):
        ctx.say(f"making {count} of at most {most} files")
        roots[count] = os.path.join(ctx.scratch, f"files{count}")
        make_files(roots[count], count, work["mean_bytes"], ctx.seed)
    for latency, first in work["first"].items():
        _first(ctx, out, roots[first["files"]], latency, first)
    _later(ctx, out, roots[work["later"]["files"]], work["later"])
    return out
