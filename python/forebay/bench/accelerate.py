"""accelerate() on the user's own loader, against the same loader without it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable

import forebay

from ..engine import Engine
from ..testing.slowfs import SlowFs
from .data import make_files
from .measure import Case, Outcome, interleave, ratio_of_medians, timed
from .run import Context
from .torch_rival import RawFolder, torch_loader

_BATCH = 64


def _epoch(loader: Iterable, expected: int) -> float:
    got = 0

    def run() -> None:
        nonlocal got
        for batch in loader:
            got += sum(len(data) for data, _ in batch)

    seconds = timed(run)
    if got != expected:
        raise RuntimeError(f"{got} of {expected} bytes were delivered")
    return seconds


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    root = os.path.join(ctx.scratch, "files")
    paths = make_files(root, work["files"], work["mean_bytes"], ctx.seed)
    volume = sum(os.path.getsize(p) for p in paths)
    first_ratios, later_ratios = [], []
    with SlowFs(
        root, open_ms=work["latency_ms"], read_ms=work["latency_ms"], stat_ms=work["stat_ms"],
        readdir_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"],
        seed=ctx.seed,
    ) as mount:  # fmt: skip
        dataset = RawFolder(str(mount.path))
        for workers in work["workers"]:
            plain, _ = torch_loader(dataset, _BATCH, workers, ctx.seed)
            firsts: list[float] = []

            def fresh(plain=plain, firsts=firsts) -> float:
                """A new engine: its first epoch now, its second kept for the other figure."""
                engine = Engine(memory=2 * volume + (128 << 20))
                fast = forebay.accelerate(plain, engine=engine)
                if fast is plain:
                    raise RuntimeError("accelerate() left the loader unchanged")
                first = _epoch(fast, volume)
                firsts.append(first)
                return _epoch(fast, volume)

            times = interleave(
                {
                    f"forebay, {workers} workers": fresh,
                    f"plain, {workers} workers": lambda plain=plain: _epoch(plain, volume),
                },
                ctx.repeats,
                ctx.say,
            )
            later, base = times.values()
            first_ratios.append(ratio_of_medians(firsts, base))
            later_ratios.append(ratio_of_medians(later, base))
            rate = work["files"]
            for name, values in (("first", firsts), ("later", later)):
                out.cases.append(
                    Case(f"accelerate, {name} epoch, {workers} workers", "samples/s",
                         [rate / t for t in values],
                         rivals={"the same loader, plain": rate / statistics.median(base)})
                )  # fmt: skip
    out.figures["accelerate_first_vs_plain"] = min(first_ratios)
    out.figures["accelerate_later_vs_plain"] = min(later_ratios)
    out.notes.append(
        "the worst of the worker counts is the figure; making the catalog is not in the time"
    )
    return out
