"""The first batch of large samples, and what a small budget keeps.

Both are read off the mount: seconds beside plain threads that read the same files, and the bytes
that a later epoch no longer asks for. Every byte that is handed out is checksummed.
"""

from __future__ import annotations

import os
import shutil
import time

from forebay import _forebay
from forebay.engine import Engine
from forebay.loader import DataLoader
from forebay.slowfs import SlowFs

from .data import catalogs_in, make_files
from .measure import Case, Outcome
from .run import Context


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


def run(ctx: Context) -> Outcome:
    out = Outcome()
    _large(ctx, out)
    _small_budget(ctx, out)
    return out
