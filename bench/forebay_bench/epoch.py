"""First and later epochs from slow storage, against plain threads and PyTorch's DataLoader.

Every contestant's consumer checksums every byte, so that nobody wins by not looking. PyTorch is at
its best: persistent workers, a tensor for each batch, more workers until they bring nothing. Beside
it stands PyTorch as people write it, with pickled bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from forebay import _forebay
from forebay.engine import Engine
from forebay.loader import DataLoader
from forebay.slowfs import SlowFs

from .data import catalogs_in, make_files
from .measure import Case, Outcome, best_of, interleave, timed
from .run import Context
from .torch_rival import (
    RawFolder,
    TensorFolder,
    best_loader,
    best_workers,
    samples_of,
    stop_workers,
    torch_loader,
)

_BATCH = 64


class Torch:
    """PyTorch's loader with workers that stay."""

    def __init__(self, setup: Setup, workers: int) -> None:
        self._bytes = setup.bytes
        self._loader, self._sampler = best_loader(setup.tensors, _BATCH, workers, setup.ctx.seed)
        self._epoch = 0

    def epoch(self) -> float:
        self._epoch += 1
        self._sampler.set_epoch(self._epoch)
        got = 0

        def consume() -> None:
            nonlocal got
            for batch in self._loader:
                for data in samples_of(batch):
                    got += len(data)
                    _forebay.crc32c(data.numpy())

        seconds = timed(consume)
        if got != self._bytes:
            raise RuntimeError(f"PyTorch delivered {got} of {self._bytes} bytes")
        return seconds

    def close(self) -> None:
        stop_workers(self._loader)


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
        self.tensors = TensorFolder(str(mount.path))
        self._plain_bytes = RawFolder(str(mount.path))
        self._epoch = 0

    def plain_threads(self, threads: int) -> float:
        """The limit: open, one pread, close."""
        seconds, got = _forebay.limit_read_files(self.paths, self.sizes, threads)
        if got != self.bytes:
            raise RuntimeError(f"plain threads read {got} of {self.bytes} bytes")
        return seconds

    def best_threads(self, counts: list[int]) -> int:
        return int(best_of({n: partial(self.plain_threads, n) for n in counts}, self.ctx.say))

    @contextlib.contextmanager
    def torch(self, workers: int) -> Iterator[Torch]:
        rival = Torch(self, workers)
        try:
            yield rival
        finally:
            rival.close()

    def torch_first(self, workers: int, *, listing: bool = False) -> float:
        """An epoch of new workers, from the making of the loader on; or from the listing on."""
        start = time.perf_counter()
        if listing:
            self.tensors = TensorFolder(str(self.mount.path))
        with self.torch(workers) as rival:
            rival.epoch()
            return time.perf_counter() - start

    def best_first(self, start: int, counts: list[int] | None) -> int:
        """The number of workers with which an epoch of new workers is the fastest."""
        return best_workers(self.torch_first, self.ctx.say, start=start, counts=counts)

    def best_later(self, counts: list[int] | None) -> int:
        """The same of workers that run already."""

        def trial(count: int) -> float:
            with self.torch(count) as rival:
                rival.epoch()
                return rival.epoch()

        return best_workers(trial, self.ctx.say, start=2, counts=counts)

    def torch_bytes(self, workers: int) -> float:
        """PyTorch as people write it: pickled bytes, new workers every epoch."""
        loader, sampler = torch_loader(self._plain_bytes, _BATCH, workers, self.ctx.seed)
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

    def first_call(self, cache: str, *, saved: bool) -> tuple[float, float]:
        """Seconds from the first call to the first batch, and to the end of the first epoch: a new
        engine, a path, its listing. `saved`: somebody has listed it before, into `cache`.

        The mount keeps nothing in the kernel, so that no run lists faster than the one before it.
        """
        if not saved:
            shutil.rmtree(cache, ignore_errors=True)
        got = 0
        with catalogs_in(cache):
            start = time.perf_counter()
            loader = DataLoader(
                str(self.mount.path), _BATCH, shuffle=True, seed=self.ctx.seed, rank=0,
                world_size=1, progress=False, engine=self.forebay_engine(),
            )  # fmt: skip
            first = 0.0
            for batch in loader:
                first = first or time.perf_counter() - start
                got += batch.nbytes
                batch.checksum()
            whole = time.perf_counter() - start
            loader.close()
        if got != self.bytes:
            raise RuntimeError(f"Forebay delivered {got} of {self.bytes} bytes")
        return first, whole


def _mount(ctx: Context, root: str, latency_ms: float, *, cache: bool = False) -> SlowFs:
    work = ctx.workload
    return SlowFs(
        root, open_ms=latency_ms, read_ms=latency_ms, stat_ms=work["stat_ms"],
        readdir_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"],
        seed=ctx.seed, cache=cache,
    )  # fmt: skip


def _cold(ctx: Context, out: Outcome, root: str, work: dict) -> None:
    """First epochs by a user's clock: it starts at the first call, the listing is on it."""
    cache = os.path.join(ctx.scratch, "catalogs")
    batches: dict[bool, list[float]] = {False: [], True: []}
    with _mount(ctx, root, 1.0) as mount:
        setup = Setup(ctx, mount, work["files"])
        threads = setup.best_threads(work["threads"])
        workers: int = work["workers"]

        def forebay(saved: bool) -> float:
            first, whole = setup.first_call(cache, saved=saved)
            batches[saved].append(first)
            ctx.say(f"first batch{', a saved list' if saved else ''}: {first:.3f} s")
            return whole

        times = interleave(
            {
                "forebay, listing included": lambda: forebay(False),
                "forebay, a saved list": lambda: forebay(True),
                f"plain threads ({threads})": lambda: setup.plain_threads(threads),
                f"torch ({workers} workers), listing included": lambda: setup.torch_first(
                    workers, listing=True
                ),
            },
            ctx.repeats,
            ctx.say,
        )
    cold, saved, plain, torch = times.values()
    out.median("first_batch_s", batches[False])
    out.speedup("first_cold_vs_limit", cold, plain)
    out.speedup("first_cold_vs_torch", cold, torch)
    out.median("first_saved_batch_s", batches[True])
    out.speedup("first_saved_vs_limit", saved, plain)
    rate = setup.bytes / 1e6
    limit: dict[str, Any] = dict(
        limit=rate / statistics.median(plain),
        limit_name=f"{threads} plain threads that know the paths",
    )
    rivals = {f"PyTorch, {workers} workers, listing included": rate / statistics.median(torch)}
    out.cases += [
        Case("first epoch, listing included", "MB/s", [rate / t for t in cold], rivals=rivals,
             note=f"{work['files']} files, 1 ms", **limit),
        Case("first epoch, a saved list", "MB/s", [rate / t for t in saved], **limit),
        Case("first batch, listing included", "s", batches[False]),
        Case("first batch, a saved list", "s", batches[True]),
    ]  # fmt: skip


def _first(ctx: Context, out: Outcome, root: str, latency: str, work: dict) -> None:
    """First epochs at one latency."""
    with _mount(ctx, root, float(latency)) as mount:
        setup = Setup(ctx, mount, work["files"])
        ctx.say(f"{latency} ms: looking for the best number of plain threads")
        threads = setup.best_threads(work["threads"])
        ctx.say(f"{latency} ms: looking for the best number of PyTorch workers")
        workers = setup.best_first(work.get("workers_from", 4), work.get("workers"))
        mount.reset()
        variants: dict[str, Callable[[], float]] = {
            f"forebay {latency} ms": setup.first_epoch,
            f"plain threads ({threads})": lambda: setup.plain_threads(threads),
            f"torch ({workers} workers)": lambda: setup.torch_first(workers),
        }
        with_bytes = work.get("workers_bytes")
        if with_bytes:
            variants[f"torch, bytes ({with_bytes} workers)"] = lambda: setup.torch_bytes(with_bytes)
        times = interleave(variants, ctx.repeats, ctx.say)
        stats = mount.stats()
        cpu = stats["cpu_user_s"] + stats["cpu_system_s"]
    ours, plain, torch, *as_bytes = times.values()
    suffix = "" if latency == "1" else f"_{latency}ms"
    out.speedup(f"first_vs_torch{suffix}", ours, torch)
    if latency == "1":
        out.speedup("first_vs_limit", ours, plain)
    rate = setup.bytes / 1e6
    rivals = {f"PyTorch, {workers} workers": rate / statistics.median(torch)}
    for values in as_bytes:
        out.speedup(f"first_vs_torch{suffix}_bytes", ours, values)
        rivals[f"PyTorch, {with_bytes} workers, bytes"] = rate / statistics.median(values)
    out.cases.append(
        Case(
            f"first epoch, {latency} ms", "MB/s", [rate / t for t in ours],
            limit=rate / statistics.median(plain), limit_name=f"{threads} plain threads",
            rivals=rivals,
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
        ctx.say("later epochs: looking for the best number of PyTorch workers")
        workers = setup.best_later(work.get("workers"))
        mount.reset()
        with setup.torch(workers) as rival:
            rival.epoch()
            times = interleave(
                {
                    "forebay later": lambda: setup.consume(loader),
                    f"torch later ({workers} workers)": rival.epoch,
                    "torch later, bytes (8 workers)": lambda: setup.torch_bytes(8),
                },
                ctx.repeats,
                ctx.say,
            )
        ours, torch, torch_8 = times.values()
        out.speedup("later_vs_torch", ours, torch)
        out.speedup("later_vs_torch_8_workers", ours, torch_8)

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
        with_steps, alone = step.values()
        out.figures["later_source_reads"] = mount.stats()["read"]
        out.figures["later_vs_step_only"] = statistics.median(with_steps) / statistics.median(alone)
        out.repeats["later_vs_step_only"] = [a / b for a, b in zip(with_steps, alone, strict=True)]
        reports = [loader.stats()[i] for i in marks]
        out.median("later_stall_share", (r.stall_share for r in reports))
        # The first batch's time is not one between batches.
        tails = []
        for report in reports:
            gaps = sorted(report.batch_seconds[1:])
            tails.append(gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))] / gaps[len(gaps) // 2])
        out.median("batch_p99_vs_median", tails)
        out.cases.append(
            Case("later epoch, no step", "samples/s", [work["files"] / t for t in ours],
                 rivals={f"PyTorch, {workers} workers": work["files"] / statistics.median(torch),
                         "PyTorch, 8 workers, bytes": work["files"] / statistics.median(torch_8)})
        )  # fmt: skip
        out.cases.append(
            Case(f"later epoch, step {work['step_ms']} ms a sample", "s", with_steps,
                 limit=statistics.median(alone), limit_name="step only")
        )  # fmt: skip
        out.cases.append(Case("batch p99 / median, each epoch", "ratio", tails))
        loader.close()

    with _mount(ctx, root, 1.0, cache=True) as mount:
        setup = Setup(ctx, mount, work["files"])
        ctx.say("cache mount: PyTorch warms it")
        setup.torch_first(4)
        workers = setup.best_later(work.get("cached_workers"))
        loader = setup.forebay()
        setup.consume(loader)
        with setup.torch(workers) as rival:
            rival.epoch()
            times = interleave(
                {
                    "forebay later": lambda: setup.consume(loader),
                    f"torch page cache ({workers} workers)": rival.epoch,
                },
                ctx.repeats,
                ctx.say,
            )
        ours, torch = times.values()
        out.speedup("later_vs_torch_cached", ours, torch)
        out.cases.append(
            Case("later epoch beside PyTorch on page cache", "samples/s",
                 [work["files"] / t for t in ours],
                 rivals={f"PyTorch, {workers} workers": work["files"] / statistics.median(torch)})
        )  # fmt: skip
        loader.close()


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    parts = [*work["first"].values(), work["later"], work["cold"]]
    most = max(part["files"] for part in parts)
    roots = {}
    for count in sorted({part["files"] for part in parts}):
        ctx.say(f"making {count} of at most {most} files")
        roots[count] = os.path.join(ctx.scratch, f"files{count}")
        make_files(roots[count], count, work["mean_bytes"], ctx.seed)
    _cold(ctx, out, roots[work["cold"]["files"]], work["cold"])
    ctx.save(out)
    for latency, first in work["first"].items():
        _first(ctx, out, roots[first["files"]], latency, first)
        ctx.save(out)
    _later(ctx, out, roots[work["later"]["files"]], work["later"])
    out.notes.append(
        "PyTorch: persistent workers, one tensor a batch, one open and one read a file; workers "
        "are doubled until two larger numbers bring nothing; 'bytes' is PyTorch as people write "
        "it: pickled bytes, new workers every epoch"
    )
    return out
