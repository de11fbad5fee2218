"""What a program waits in open() while a large data set is opened in the same daemon."""

from __future__ import annotations

import glob
import os
import struct
import subprocess
import sys
import time

import numpy as np
from forebay import _forebay
from forebay.commands.run import environment
from forebay.daemon import SharedEngine
from forebay.files import Service
from forebay.loader import DataLoader, open_catalog

from .data import catalogs_in, make_files
from .measure import Case, Outcome
from .run import Context

# Opens files that nobody has opened yet, in no order that could be foreseen, until it is told to
# stop; says how many, and what the worst took.
_LOOP = """
import os, random, sys, time
stop, *paths = sys.argv[1:]
random.Random(1).shuffle(paths)
print("ready", flush=True)
took = []
for path in paths:
    if os.path.exists(stop):
        break
    start = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    took.append(time.perf_counter() - start)
    os.close(fd)
    time.sleep(0.001)
print(len(took), max(took) * 1e3, flush=True)
"""


def _masked(data: bytes) -> int:
    crc = _forebay.crc32c(np.frombuffer(data, dtype=np.uint8))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def make(ctx: Context) -> list[list[str]]:
    """A TFRecord file of many tiny records, and files for the program: some for each repeat."""
    part = ctx.workload["opening"]
    length, data = struct.pack("<Q", 1), b"y"
    record = length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))
    os.mkdir(os.path.join(ctx.scratch, "records"))
    with open(os.path.join(ctx.scratch, "records", "a.tfrecord"), "wb") as file:
        for _ in range(part["samples"] // 100_000):
            file.write(record * 100_000)
    return [
        make_files(os.path.join(ctx.scratch, "opened", str(i)), part["files"], 4096, ctx.seed + i)
        for i in range(part["repeats"])
    ]


def _worst_ms(
    ctx: Context, service: Service, paths: list[str], number: int, records: str | None
) -> float:
    """The program's worst open(); meanwhile `records` are opened, up to the first batch."""
    stop = os.path.join(ctx.scratch, f"stop-{number}-{records is None}")
    env = environment(service.environment(), hook=False)
    loop = subprocess.Popen(
        [sys.executable, "-c", _LOOP, stop, *paths], env=env, stdout=subprocess.PIPE, text=True
    )
    assert loop.stdout
    loop.stdout.readline()
    if records is None:
        time.sleep(0.3)
    else:
        runtime = os.path.join(os.environ["XDG_RUNTIME_DIR"], "forebay", "run-*")
        (folder,) = glob.glob(runtime)
        engine = SharedEngine(folder=folder)
        with DataLoader(records, 32, shuffle=True, seed=number, engine=engine, rank=0,
                        world_size=1, progress=False) as loader:  # fmt: skip
            next(iter(loader))
    with open(stop, "w"):
        pass
    count, worst = loop.stdout.read().split()
    if loop.wait() != 0 or int(count) == len(paths):
        raise RuntimeError(f"{count} files were opened before the data set was")
    return float(worst)


def run(ctx: Context, out: Outcome, opened: list[list[str]]) -> None:
    part = ctx.workload["opening"]
    records = os.path.join(ctx.scratch, "records")
    beside, alone = [], []
    runtime = os.path.join(ctx.scratch, "r")
    os.mkdir(runtime, 0o700)
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = runtime
    try:
        with (
            catalogs_in(os.path.join(ctx.scratch, "catalogs")),
            Service.start(
                os.path.join(ctx.scratch, "opening-cache"), memory=part["memory_bytes"],
                sources=[os.path.join(ctx.scratch, "opened")], linger=1,
            ) as service,
        ):  # fmt: skip
            open_catalog(records, progress=False)  # saved: what comes is the daemon's part
            for i, paths in enumerate(opened):
                half = len(paths) // 2
                alone.append(_worst_ms(ctx, service, paths[:half], i, None))
                beside.append(_worst_ms(ctx, service, paths[half:], i, records))
                ctx.say(
                    f"open(): at worst {alone[-1]:.1f} ms alone, {beside[-1]:.1f} beside "
                    f"{part['samples']} samples being opened ({i + 1}/{len(opened)})"
                )
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
    out.median("open_beside_opening_ms", beside)
    out.cases.append(
        Case(f"worst open() while {part['samples']} samples are opened in its daemon", "ms", beside,
             limit=sorted(alone)[len(alone) // 2], limit_name="the worst when nothing is opened")
    )  # fmt: skip
