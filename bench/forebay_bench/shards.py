"""The first epoch over tar and TFRecord shards that nobody has listed before.

The clock starts at the first call: listing is part of it. The limit is the same shards read from
end to end by plain threads, as many as do best. Every byte that is handed out is checksummed.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import struct
import tarfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from forebay import _forebay
from forebay.engine import Engine
from forebay.loader import DataLoader
from forebay.slowfs import SlowFs

from .data import catalogs_in, masked_crc
from .measure import Case, Outcome, best_of
from .run import Context

_BATCH = 64


def _bodies(count: int, mean_bytes: int, seed: int) -> list[np.ndarray]:
    """Sizes log-normal around the mean, incompressible bytes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(np.log(mean_bytes), 0.3, count)).astype(int).clip(16)
    noise = rng.integers(0, 256, int(sizes.max()) + 4096, dtype=np.uint8)
    shifts = rng.integers(0, 4096, count)
    return [noise[a : a + n] for a, n in zip(shifts, sizes, strict=True)]


def make_tars(root: str, count: int, mean_bytes: int, seed: int, shards: int) -> int:
    """WebDataset shards of KEY.jpg and KEY.cls, with DALI's index of each in a folder beside."""
    os.makedirs(root)
    os.makedirs(root + ".index")
    bodies = _bodies(count, mean_bytes, seed)
    total = 0
    for shard in range(shards):
        path = os.path.join(root, f"part-{shard:05d}.tar")
        lines = []
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(shard, count, shards):
                line = []
                for field, data in (("jpg", bodies[i].tobytes()), ("cls", b"%d" % (i % 1000))):
                    info = tarfile.TarInfo(f"{i:08d}.{field}")
                    info.size = len(data)
                    line.append(f"{field} {tar.offset + 512} {len(data)} {info.name}")
                    tar.addfile(info, io.BytesIO(data))
                lines.append(" ".join(line))
        total += os.path.getsize(path)
        with open(os.path.join(root + ".index", f"part-{shard:05d}.idx"), "w") as out:
            out.write(f"v1.2 {len(lines)}\n" + "".join(line + "\n" for line in lines))
    return total


def make_records(root: str, count: int, mean_bytes: int, seed: int, shards: int) -> int:
    """TFRecord shards, with DALI's index of each in a folder beside them."""
    os.makedirs(root)
    os.makedirs(root + ".index")
    bodies = _bodies(count, mean_bytes, seed)
    total = 0
    for shard in range(shards):
        path = os.path.join(root, f"part-{shard:05d}.tfrecord")
        lines = []
        with open(path, "wb", buffering=1 << 20) as out:
            for i in range(shard, count, shards):
                head = struct.pack("<Q", len(bodies[i]))
                start = out.tell()
                out.write(head)
                out.write(struct.pack("<I", masked_crc(np.frombuffer(head, np.uint8))))
                out.write(bodies[i].tobytes())
                out.write(struct.pack("<I", masked_crc(bodies[i])))
                lines.append(f"{start} {out.tell() - start}")
        total += os.path.getsize(path)
        with open(os.path.join(root + ".index", f"part-{shard:05d}.idx"), "w") as index:
            index.write("".join(line + "\n" for line in lines))
    return total


class Shards:
    """One mount over the shards of one format."""

    def __init__(self, ctx: Context, mount: SlowFs, total: int, count: int) -> None:
        self.ctx = ctx
        self.mount = mount
        self.total = total
        self.count = count
        root = str(mount.path)
        names = sorted(n for n in os.listdir(root) if n.startswith("part-") and "idx" not in n)
        self.paths = [os.path.join(root, n) for n in names]
        self.sizes = [os.path.getsize(p) for p in self.paths]

    def plain_threads(self, threads: int) -> float:
        seconds, got = _forebay.limit_read_files(self.paths, self.sizes, threads)
        if got != self.total:
            raise RuntimeError(f"plain threads read {got} of {self.total} bytes")
        return seconds

    def epoch(self, memory: int, saved: str | None = None) -> dict[str, float]:
        """From the first call: seconds to the first batch and to the epoch's end, and what the
        storage gave. `saved`: a folder with the catalog."""
        catalogs = saved or os.path.join(self.ctx.scratch, "catalogs")
        self.mount.reset()
        with catalogs_in(catalogs):
            start = time.perf_counter()
            loader = DataLoader(
                str(self.mount.path), _BATCH, shuffle=True, seed=self.ctx.seed, rank=0,
                world_size=1, engine=Engine(memory=memory), progress=False,
            )  # fmt: skip
            first = 0.0
            samples = 0
            for batch in loader:
                if not first:
                    first = time.perf_counter() - start
                samples += len(batch)
                batch.checksum()
            seconds = time.perf_counter() - start
            loader.close()
        if saved is None:
            shutil.rmtree(catalogs, ignore_errors=True)
        if samples != self.count:
            raise RuntimeError(f"{samples} samples of {self.count} were handed out")
        stats = self.mount.stats()
        return {
            "first_batch_s": first,
            "seconds": seconds,
            "bytes": stats["bytes_read"] / self.total,
            "reads": float(stats["read"]),
        }


_MAKERS: dict[str, Callable[..., int]] = {"tar": make_tars, "TFRecord": make_records}


def _measure(ctx: Context, shards: Shards, name: str, work: dict[str, Any]) -> dict[str, list]:
    """Every variant beside the limit, in turn."""
    trials: dict[int, Callable[[], float]] = {
        n: functools.partial(shards.plain_threads, n) for n in work["threads"]
    }
    threads = best_of(trials, ctx.say)
    whole = 2 * shards.total + (128 << 20)
    saved = os.path.join(ctx.scratch, f"saved {name}")
    shards.epoch(whole, saved)  # makes the saved catalog, which the epochs below may take
    variants: dict[str, Callable[[], dict[str, float]]] = {
        "cold": lambda: shards.epoch(whole),
        "saved": lambda: shards.epoch(whole, saved),
        "quarter": lambda: shards.epoch(shards.total // 4 + (32 << 20)),
    }
    runs: dict[str, list] = {key: [] for key in (*variants, "limit")}
    for repeat in range(ctx.repeats):
        runs["limit"].append(shards.plain_threads(threads))
        for key, run in variants.items():
            runs[key].append(run())
            last = runs[key][-1]
            ctx.say(
                f"{name}, {key}: first batch {last['first_batch_s']:.3f} s, epoch "
                f"{last['seconds']:.2f} s, {last['bytes']:.3f} of the data set read "
                f"({repeat + 1}/{ctx.repeats})"
            )
    return runs


def _indexed(ctx: Context, shards: Shards, name: str, source: str) -> list[dict[str, float]]:
    """With the index files beside the shards."""
    index = source + ".index"
    for entry in os.listdir(index):
        shutil.copy(os.path.join(index, entry), os.path.join(source, entry))
    runs = [shards.epoch(2 * shards.total + (128 << 20)) for _ in range(ctx.repeats)]
    for entry in os.listdir(index):
        os.unlink(os.path.join(source, entry))
    best = min(run["first_batch_s"] for run in runs)
    ctx.say(f"{name}, with index files: first batch {best:.3f} s at best")
    return runs


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    found: dict[str, dict[str, list[float]]] = {}

    def note(figure: str, name: str, values: list[float]) -> None:
        found.setdefault(figure, {})[name] = values

    for kind, make in _MAKERS.items():
        source = os.path.join(ctx.scratch, kind)
        ctx.say(f"making {work['samples']} samples in {work['shards']} {kind} shards")
        total = make(source, work["samples"], work["mean_bytes"], ctx.seed, work["shards"])
        for latency in work["latencies"]:
            name = f"{kind} {latency} ms"
            suffix = "" if latency == "1" else f"_{latency}ms"
            with SlowFs(
                source, open_ms=float(latency), read_ms=float(latency), stat_ms=work["stat_ms"],
                readdir_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"],
                jitter=work["jitter"], seed=ctx.seed,
            ) as mount:  # fmt: skip
                shards = Shards(ctx, mount, total, work["samples"])
                runs = _measure(ctx, shards, name, work)
                indexed = _indexed(ctx, shards, name, source)
            limit = runs["limit"]
            for key, tag in (("cold", ""), ("saved", "_saved"), ("quarter", "_quarter")):
                shares = [a / b["seconds"] for a, b in zip(limit, runs[key], strict=True)]
                note(f"shard_first_vs_limit{suffix}{tag}", kind, shares)
                note(f"shard_source_bytes{tag}", name, [r["bytes"] for r in runs[key]])
            first = [r["first_batch_s"] for r in runs["cold"]]
            note(f"shard_first_batch_s{suffix}", kind, first)
            note(
                f"shard_first_batch_s{suffix}_indexed", kind, [r["first_batch_s"] for r in indexed]
            )
            rate = total / 1e6
            out.cases.append(
                Case(
                    f"first epoch, {name}", "MB/s", [rate / r["seconds"] for r in runs["cold"]],
                    limit=rate / min(limit), limit_name="plain threads over whole shards",
                    note=f"{work['samples']} samples in {work['shards']} shards, nothing saved; "
                    f"first batch after {min(first):.3f} s, "
                    f"{min(r['first_batch_s'] for r in runs['saved']):.3f} s with a saved catalog",
                )
            )  # fmt: skip
    # The worse of the formats, by medians.
    for figure, by_name in found.items():
        larger_is_worse = "_vs_" not in figure
        medians = {name: float(np.median(values)) for name, values in by_name.items()}
        pick = max(medians, key=medians.__getitem__) if larger_is_worse else min(
            medians, key=medians.__getitem__
        )  # fmt: skip
        out.median(figure, by_name[pick])
        every = [value for values in by_name.values() for value in values]
        out.repeats[figure] = every
        out.notes.append(
            f"{figure}: " + ", ".join(f"{name} {value:.3f}" for name, value in medians.items())
        )
    return out
