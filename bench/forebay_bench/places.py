"""Which place serves what; the first batch of large samples; what a small budget keeps.

All are read off slow mounts. Places: the source and a cache folder that has everything, each of
some speed; the engine's choice beside fixed splits of the reads between the two. Large samples:
seconds beside plain threads that read the same files. Small budget: the bytes that a later epoch
no longer asks for. Every byte that is handed out is checksummed.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forebay import _forebay
from forebay.engine import Engine
from forebay.loader import DataLoader
from forebay.slowfs import SlowFs

from .data import catalogs_in, make_files
from .measure import Case, Outcome
from .peers_cluster import Oracle
from .run import Context

_SPLITS = (0.0, 0.25, 0.5, 0.75, 1.0)
_OPEN = 2


class Folder:
    """A slow mount over files of one size."""

    def __init__(self, ctx: Context, mount: SlowFs, count: int) -> None:
        self.ctx = ctx
        self.mount = mount
        catalog = _forebay.Catalog.build(str(mount.path))
        self.sizes: list[int] = catalog.lengths().tolist()
        self.paths = [catalog.object_path(i) for i in range(count)]
        self.total = sum(self.sizes)

    def plain(self, files: list[int], threads: int) -> float:
        wanted = [self.sizes[i] for i in files]
        paths = [self.paths[i] for i in files]
        seconds, got = _forebay.limit_read_files(paths, wanted, threads)
        if got != sum(wanted):
            raise RuntimeError(f"plain threads read {got} of {sum(wanted)} bytes")
        return float(seconds)

    def epochs(self, batch: int, memory: int, epochs: int) -> tuple[float, list[int], list[float]]:
        """Seconds from the first call to the first batch, and what each epoch read and took."""
        catalogs = os.path.join(self.ctx.scratch, "catalogs")
        first, read, took = 0.0, [], []
        with catalogs_in(catalogs):
            start = time.perf_counter()
            loader = DataLoader(
                str(self.mount.path), batch, shuffle=True, seed=self.ctx.seed, rank=0,
                world_size=1, engine=Engine(memory=memory), progress=False,
            )  # fmt: skip
            for epoch in range(epochs):
                loader.set_epoch(epoch)
                before, began, samples = self.mount.stats()["bytes_read"], time.perf_counter(), 0
                for each in loader:
                    first = first or time.perf_counter() - start
                    each.checksum()
                    samples += len(each)
                if samples != len(self.sizes):
                    raise RuntimeError(f"{samples} samples of {len(self.sizes)} were handed out")
                read.append(self.mount.stats()["bytes_read"] - before)
                took.append(time.perf_counter() - began)
            loader.close()
        shutil.rmtree(catalogs, ignore_errors=True)
        return first, read, took


def _large(ctx: Context, out: Outcome) -> None:
    work = ctx.workload["large"]
    root = os.path.join(ctx.scratch, "large")
    ctx.say(f"making {work['files']} files of {work['bytes'] / 1e6:.0f} MB")
    make_files(root, work["files"], work["bytes"], ctx.seed, sigma=0)
    firsts, pipes = [], []
    with SlowFs(root, seed=ctx.seed, **ctx.workload["storage"]) as mount:
        folder = Folder(ctx, mount, work["files"])
        for i in range(ctx.repeats):
            begin = i * work["batch"] % (work["files"] - work["batch"])
            files = list(range(begin, begin + work["batch"]))
            pipes.append(folder.plain(files, work["batch"]))
            first, _, took = folder.epochs(work["batch"], work["memory"], 1)
            firsts.append(first)
            ctx.say(
                f"large samples: first batch {first:.3f} s, the pipe {pipes[-1]:.3f} s, epoch "
                f"{took[0]:.1f} s ({i + 1}/{ctx.repeats})"
            )
    shutil.rmtree(root)
    out.median("large_first_batch_vs_pipe", [a / b for a, b in zip(firsts, pipes, strict=True)])
    out.cases.append(
        Case(
            f"first batch of {work['batch']} samples of {work['bytes'] / 1e6:.0f} MB", "s", firsts,
            limit=sorted(pipes)[len(pipes) // 2], limit_name="plain threads, the same bytes",
        )
    )  # fmt: skip


def _small_budget(ctx: Context, out: Outcome) -> None:
    work = ctx.workload["small_budget"]
    root = os.path.join(ctx.scratch, "small")
    ctx.say(f"making {work['files']} files")
    make_files(root, work["files"], work["bytes"], ctx.seed)
    kept, times = [], []
    with SlowFs(root, seed=ctx.seed, **ctx.workload["storage"]) as mount:
        folder = Folder(ctx, mount, work["files"])
        for i in range(ctx.repeats):
            _, read, took = folder.epochs(work["batch"], work["memory"], work["epochs"])
            # Look-ahead crosses the end of an epoch, so the last two are taken together.
            later = sum(read[-2:]) / 2
            kept.append((folder.total - later) / work["memory"])
            times.append(took[-1])
            ctx.say(f"small budget: {kept[-1]:.3f} of it kept ({i + 1}/{ctx.repeats})")
    shutil.rmtree(root)
    out.median("kept_share_small_budget", kept)
    megabytes = work["memory"] / 1e6
    out.cases += [
        Case(f"kept of a budget of {megabytes:.0f} MB", "of it", kept),
        Case(f"its last epoch, {work['files']} samples", "s", times),
    ]


@contextmanager
def _split(share: float | None) -> Iterator[None]:
    """Engines that are made inside read this share of what the folder has from the source."""
    if share is not None:
        os.environ["FOREBAY_PLACE_SPLIT"] = str(share)
    try:
        yield
    finally:
        os.environ.pop("FOREBAY_PLACE_SPLIT", None)


class TwoPlaces:
    """A source and a cache disk, both slow mounts; the disk has a copy of everything."""

    def __init__(self, ctx: Context, source: SlowFs, disk: SlowFs, oracle: Oracle) -> None:
        self.work = ctx.workload["places"]
        self.seed = ctx.seed
        self.source = source
        self.disk = disk
        self.oracle = oracle
        self.crcs: dict[tuple[int, int], int] = {}

    def set(self, setup: dict[str, Any]) -> None:
        idle = {"read_ms": 0, "bandwidth_mb": 0}
        self.source.set(**{**idle, **setup.get("source", {})})
        self.disk.set(**{**idle, **setup.get("disk", {})})

    def read(
        self, epochs: int, done: Callable[[int, Engine], None] = lambda n, engine: None
    ) -> float:
        """Seconds from the first batch to the last."""
        engine = Engine(
            memory=self.work["memory"], keep=False, cache_dir=str(self.disk.path / "cache"),
            peers=False,
        )  # fmt: skip
        engine.set_knob("source_extra", _OPEN)
        samples = 0
        begin = end = 0.0
        with DataLoader(
            str(self.source.path), self.work["batch"], shuffle=True, seed=self.seed, rank=0,
            world_size=1, engine=engine, progress=False,
        ) as loader:  # fmt: skip
            for epoch in range(epochs):
                loader.set_epoch(epoch)
                for number, batch in enumerate(loader):
                    end = time.perf_counter()
                    begin = begin or end
                    indices = batch.indices.tolist()
                    if (epoch, number) not in self.crcs:
                        self.crcs[epoch, number] = self.oracle.checksum(indices)
                    if batch.checksum() != self.crcs[epoch, number]:
                        raise RuntimeError(f"wrong bytes in batch {number} of epoch {epoch}")
                    batch.release()
                    samples += len(indices)
                    done(samples, engine)
        if samples != epochs * len(self.oracle.files):
            raise RuntimeError(f"{samples} samples were handed out")
        return end - begin

    def fill(self) -> None:
        """Until the folder has everything."""
        self.set({})
        wanted, copied = len(self.oracle.files), 0

        def note(_: int, engine: Engine) -> None:
            nonlocal copied
            copied = engine.metrics()["forebay_tier_writes_total"]

        # What is still to be written when a run ends the next one copies.
        for _ in range(5):
            with _split(0):
                self.read(self.work["epochs"], note)
            if copied == 0:
                return
        raise RuntimeError(f"the cache folder does not take all of {wanted} files")

    def measure(self, setup: dict[str, Any], share: float | None) -> float:
        self.set(setup)
        whole = self.work["epochs"] * len(self.oracle.files)
        changes = [(whole * (i + 1) // 3, then) for i, then in enumerate(setup.get("then", []))]

        def change(samples: int, _: Engine) -> None:
            if changes and samples >= changes[0][0]:
                self.set({**setup, **changes.pop(0)[1]})

        with _split(share):
            return self.read(self.work["epochs"], change)


def _places(ctx: Context, out: Outcome) -> None:
    work = ctx.workload["places"]
    root, under = os.path.join(ctx.scratch, "places"), os.path.join(ctx.scratch, "disk")
    os.mkdir(under)
    ctx.say(f"making {work['files']} files")
    make_files(root, work["files"], work["bytes"], ctx.seed)
    oracle = Oracle(root, ctx.seed)
    megabytes = work["epochs"] * oracle.bytes / 1e6
    ratios: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    with (
        SlowFs(root, seed=ctx.seed) as source,
        SlowFs(under, writable_mb=0, seed=ctx.seed) as disk,
        catalogs_in(os.path.join(ctx.scratch, "catalogs")),
    ):
        places = TwoPlaces(ctx, source, disk, oracle)
        places.fill()
        for i in range(work["repeats"]):
            for name, setup in work["setups"].items():
                took = {share: places.measure(setup, share) for share in _SPLITS}
                own = places.measure(setup, None)
                ratios.setdefault(name, []).append(own / min(took.values()))
                rates.setdefault(name, []).append(megabytes / own)
                alone = 1 / took[0] + 1 / took[1]
                if "then" not in setup:
                    beside.setdefault(name, []).append(1 / own / alone)
                told = ", ".join(f"{share:.2f}: {s:.2f} s" for share, s in took.items())
                ctx.say(f"{name}: {own:.2f} s; splits {told} ({i + 1}/{work['repeats']})")
    shutil.rmtree(root)
    for values in ratios.values():
        out.worst_median("place_vs_oracle", values)
    out.figures["parallel_places"] = min(statistics.median(values) for values in beside.values())
    out.repeats["parallel_places"] = [value for values in beside.values() for value in values]
    for name, values in rates.items():
        out.cases.append(Case(f"places: {name}", "MB/s", values))


def run(ctx: Context) -> Outcome:
    out = Outcome()
    _places(ctx, out)
    _large(ctx, out)
    _small_budget(ctx, out)
    return out
