"""accelerate() on the user's own loader, against the same loader without it.

The loader is a good one: persistent workers, one tensor a batch. Beside the numbers of workers that
people have stands the number that is PyTorch's best on this storage.
"""

from __future__ import annotations

import os
import statistics
import time

import forebay
from forebay.engine import Engine
from forebay.slowfs import SlowFs

from .data import make_files
from .measure import Case, Outcome, interleave, timed
from .run import Context
from .torch_rival import OpenedFolder, best_loader, best_workers, stop_workers

_BATCH = 64


class Setup:
    def __init__(self, ctx: Context, mount: SlowFs, volume: int) -> None:
        self.ctx = ctx
        self.root = str(mount.path)
        self.volume = volume
        self.dataset = OpenedFolder(self.root)

    def loader(self, workers: int):  # type: ignore[no-untyped-def]
        return best_loader(self.dataset, _BATCH, workers, self.ctx.seed)[0]

    def epoch(self, loader) -> float:  # type: ignore[no-untyped-def]
        got = 0

        def run() -> None:
            nonlocal got
            for data, lengths, _ in loader:
                got += len(data)
                assert sum(lengths) == len(data)

        seconds = timed(run)
        if got != self.volume:
            raise RuntimeError(f"{got} of {self.volume} bytes were delivered")
        return seconds

    def plain(self, workers: int) -> tuple[float, float]:
        """Seconds of the first epoch, from the listing on, and of one with workers that run."""
        start = time.perf_counter()
        self.dataset = OpenedFolder(self.root)
        loader = self.loader(workers)
        try:
            self.epoch(loader)
            first = time.perf_counter() - start
            return first, self.epoch(loader)
        finally:
            stop_workers(loader)

    def forebay(self, workers: int) -> tuple[float, float]:
        """The same of a loader that accelerate() took, with a new engine."""
        start = time.perf_counter()
        self.dataset = OpenedFolder(self.root)
        plain = self.loader(workers)
        engine = Engine(memory=2 * self.volume + (128 << 20))
        fast = forebay.accelerate(plain, engine=engine)
        if fast is plain:
            raise RuntimeError("accelerate() left the loader unchanged")
        try:
            self.epoch(fast)
            first = time.perf_counter() - start
            return first, self.epoch(fast)
        finally:
            stop_workers(plain)
            del fast


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    root = os.path.join(ctx.scratch, "files")
    paths = make_files(root, work["files"], work["mean_bytes"], ctx.seed)
    volume = sum(os.path.getsize(p) for p in paths)
    with SlowFs(
        root, open_ms=work["latency_ms"], read_ms=work["latency_ms"], stat_ms=work["stat_ms"],
        readdir_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"],
        seed=ctx.seed,
    ) as mount:  # fmt: skip
        setup = Setup(ctx, mount, volume)
        best = best_workers(
            lambda n: setup.plain(n)[1], ctx.say, start=8, counts=work.get("best_workers")
        )
        for workers in dict.fromkeys([*work["workers"], best]):
            firsts: dict[str, list[float]] = {"forebay": [], "plain": []}

            def forebay_later(workers: int = workers, firsts: dict = firsts) -> float:
                first, later = setup.forebay(workers)
                firsts["forebay"].append(first)
                return later

            def plain_later(workers: int = workers, firsts: dict = firsts) -> float:
                first, later = setup.plain(workers)
                firsts["plain"].append(first)
                return later

            times = interleave(
                {
                    f"forebay, {workers} workers": forebay_later,
                    f"plain, {workers} workers": plain_later,
                },
                ctx.repeats,
                ctx.say,
            )
            later, base = times.values()
            pairs = {"first": (firsts["forebay"], firsts["plain"]), "later": (later, base)}
            for name, (ours, theirs) in pairs.items():
                figure = f"accelerate_{name}_vs_plain"
                if workers == best:
                    out.speedup(f"accelerate_{name}_vs_best", ours, theirs)
                if workers in work["workers"]:
                    # The worst number of workers is the figure.
                    value, repeats = out.figures.get(figure), out.repeats.get(figure, [])
                    out.speedup(figure, ours, theirs)
                    out.repeats[figure] += repeats
                    if value is not None:
                        out.figures[figure] = min(value, out.figures[figure])
                out.cases.append(
                    Case(f"accelerate, {name} epoch, {workers} workers", "samples/s",
                         [work["files"] / t for t in ours],
                         rivals={"the same loader, plain": work["files"]
                                 / statistics.median(theirs)})
                )  # fmt: skip
    out.notes.append(
        f"the worst of {work['workers']} workers is the figure, _vs_best is with {best}, PyTorch's "
        "best; first epochs are from the listing on, PyTorch's workers and Forebay's engine "
        "included; later ones with workers that run"
    )
    return out
