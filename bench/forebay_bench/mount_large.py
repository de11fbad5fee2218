"""A file that is larger than the cache, read at random through `forebay mount`."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from forebay.slowfs import SlowFs

from .large import SCRIPT, SETTLE_S
from .large_data import make_raw
from .measure import Case, Outcome
from .passes import await_end_of_daemons, await_quiet, drop_pages, one_pass, scripts_of
from .run import Context

_FOREBAY = [sys.executable, "-m", "forebay.cli"]


@contextlib.contextmanager
def _mounted(ctx: Context, source: str, cache_bytes: int) -> Iterator[str]:
    folder = os.path.join(ctx.scratch, "mnt")
    os.makedirs(folder, exist_ok=True)
    # The copies go with the bench's own files.
    runtime = os.path.join(ctx.scratch, "r")
    os.makedirs(runtime, mode=0o700, exist_ok=True)
    env = {**os.environ, "SLURM_TMPDIR": ctx.scratch, "XDG_RUNTIME_DIR": runtime}
    command = [*_FOREBAY, "mount", source, folder, "--cache-size", str(cache_bytes)]
    subprocess.run(command, env=env, check=True)
    try:
        yield folder
    finally:
        subprocess.run([*_FOREBAY, "unmount", folder], check=False)
        await_end_of_daemons([runtime])


class _Measured:
    """Every pass of one mount: bytes of the source, of the program, and MB/s."""

    def __init__(self, ctx: Context, slow: SlowFs) -> None:
        work = ctx.workload
        room = int(work["bytes"] * work["room"])
        self.source: list[int] = []
        self.read: list[int] = []
        self.rates: list[float] = []
        self.sums: set[int] = set()
        with _mounted(ctx, str(slow.path), room) as folder:
            command = [
                sys.executable, SCRIPT, "pread", folder, "--read-bytes", str(work["read_bytes"]),
                "--threads", str(work["threads"]), "--seed", str(ctx.seed),
            ]  # fmt: skip
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            with scripts_of([process]) as scripts:
                for _ in range(work["passes"]):
                    drop_pages(folder)
                    slow.reset()
                    (said,) = one_pass(scripts)
                    # What it goes on to read of its own is the pass's, too.
                    self.source.append(slow.stats()["bytes_read"] + await_quiet(slow))
                    self.read.append(said["bytes"])
                    self.rates.append(said["bytes"] / 1e6 / said["seconds"])
                    self.sums.add(said["checksum"])

    @property
    def share(self) -> float:
        """Of later passes."""
        return sum(self.source[1:]) / sum(self.read[1:])


def run(ctx: Context) -> Outcome:
    work = ctx.workload
    out = Outcome()
    data = os.path.join(ctx.scratch, "data")
    os.mkdir(data)
    ctx.say(f"making {work['bytes'] / 1e9:g} GB")
    make_raw(data, work, ctx.seed)
    time.sleep(SETTLE_S)
    runs: list[_Measured] = []
    with SlowFs(
        data, open_ms=work["latency_ms"], read_ms=work["latency_ms"], stat_ms=work["stat_ms"],
        bandwidth_mb=work["bandwidth_mb"], seed=ctx.seed,
    ) as slow:  # fmt: skip
        for repeat in range(ctx.repeats):
            one = _Measured(ctx, slow)
            runs.append(one)
            shares = [f"{a / b:.3f}" for a, b in zip(one.source, one.read, strict=True)]
            ctx.say(f"source bytes of each pass, of those read: {', '.join(shares)} "
                    f"({repeat + 1}/{ctx.repeats})")  # fmt: skip
    if len(set().union(*(one.sums for one in runs))) != 1:
        raise RuntimeError("wrong bytes: the checksums of the passes differ")
    out.median("mount_large_source_share", (one.share for one in runs))
    out.cases += [
        Case("source bytes of later passes / bytes read", "ratio", [one.share for one in runs],
             limit=1 - work["room"], limit_name="what does not fit, once a pass"),
        Case("source bytes of the first pass / bytes read", "ratio",
             [one.source[0] / one.read[0] for one in runs], limit=1.0, limit_name="all, once"),
        Case("first pass", "MB/s", [one.rates[0] for one in runs]),
        Case("later passes", "MB/s", [statistics.median(one.rates[1:]) for one in runs]),
    ]  # fmt: skip
    out.notes.append(
        f"{work['bytes'] / 1e9:g} GB of random bytes on a mount of {work['latency_ms']:g} ms and "
        f"{work['bandwidth_mb']:g} MB/s; a pass reads each {work['read_bytes']} B once, in the "
        f"same random order, with {work['threads']} threads; room for {work['room']:g} of it; the "
        "page cache of the mount is dropped before each pass, and a pass's source bytes are "
        "counted until the source has not been read for a second"
    )
    return out
