"""What Forebay itself costs: memory-resident samples to Python, against memcpy in C++."""

from __future__ import annotations

import os

import numpy as np
from forebay import _forebay
from forebay.engine import Engine
from forebay.loader import DataLoader

from .data import make_files, make_tfrecords
from .measure import Case, Outcome, interleave, timed
from .run import Context


def _consume(loader: DataLoader, epochs: int) -> int:
    samples = 0
    for _ in range(epochs):
        for batch in loader:
            batch.checksum()
            samples += len(batch)
    return samples


def _resident(catalog: _forebay.Catalog, batch: int, seed: int, layout: str) -> DataLoader:
    """A loader whose samples have all been read once."""
    engine = Engine(memory=2 * catalog.total_bytes + (256 << 20), copy_threads=1)
    loader = DataLoader(catalog, batch, shuffle=True, seed=seed, engine=engine, layout=layout)
    _consume(loader, 1)
    return loader


def _large(ctx: Context, out: Outcome) -> None:
    work = ctx.workload["large"]
    count, size, batch, epochs = (work[k] for k in ("samples", "bytes", "batch", "epochs"))
    root = os.path.join(ctx.scratch, "large")
    make_files(root, count, size, ctx.seed, sigma=0.0)
    catalog = _forebay.Catalog.build(root)
    views = _resident(catalog, batch, ctx.seed, "views")
    contiguous = _resident(catalog, batch, ctx.seed, "contiguous")
    orders = np.concatenate([_forebay.epoch_order(count, True, ctx.seed, e) for e in range(epochs)])
    order = orders.tolist()

    def plain(threads: int) -> float:
        return _forebay.limit_copy_and_checksum(count, size, batch, threads, order)

    times = interleave(
        {
            "forebay": lambda: timed(lambda: _consume(views, epochs)),
            "memcpy 1 thread": lambda: plain(1),
            "forebay contiguous": lambda: timed(lambda: _consume(contiguous, epochs)),
            "memcpy 2 threads": lambda: plain(2),
        },
        ctx.repeats,
        ctx.say,
    )
    volume = count * size * epochs / 1e9
    rates = {name: [volume / t for t in values] for name, values in times.items()}
    out.speedup("memory_vs_memcpy", times["forebay"], times["memcpy 1 thread"])
    for name, rival in (("forebay", "memcpy 1 thread"), ("forebay contiguous", "memcpy 2 threads")):
        limit = Case(rival, "GB/s", rates[rival]).value
        out.cases.append(
            Case(f"{name}: {size >> 10} KiB samples, batches of {batch}", "GB/s", rates[name],
                 limit=limit, limit_name=f"C++ memcpy + checksum, {rival.split(' ', 1)[1]}")
        )  # fmt: skip
    out.notes.append(
        "layout='views' hands samples out where they lie: one thread, no copy; 'contiguous' "
        "copies on one "
        "more thread, so it stands beside two"
    )


def _small(ctx: Context, out: Outcome) -> None:
    work = ctx.workload["small"]
    count, size, batch, epochs = (work[k] for k in ("samples", "bytes", "batch", "epochs"))
    root = os.path.join(ctx.scratch, "small")
    make_tfrecords(root, count, size, ctx.seed)
    catalog = _forebay.Catalog.build(root)
    loader = _resident(catalog, batch, ctx.seed, "views")
    order = np.concatenate(
        [_forebay.epoch_order(count, True, ctx.seed, e) for e in range(epochs)]
    ).tolist()
    times = interleave(
        {
            "forebay small": lambda: timed(lambda: _consume(loader, epochs)),
            "memcpy small": lambda: _forebay.limit_copy_and_checksum(count, size, batch, 1, order),
        },
        ctx.repeats,
        ctx.say,
    )
    rate = [count * epochs / t for t in times["forebay small"]]
    limit = Case("", "", [count * epochs / t for t in times["memcpy small"]]).value
    case = Case(f"{size} B samples, batches of {batch}", "samples/s", rate,
                limit=limit, limit_name="C++ memcpy + checksum, 1 thread")  # fmt: skip
    out.cases.append(case)
    out.median("small_samples_per_s", rate)


def run(ctx: Context) -> Outcome:
    out = Outcome()
    _large(ctx, out)
    _small(ctx, out)
    return out
