"""The node's daemon: how often jobs that share a data set read it, and what the daemon costs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from forebay import _forebay
from forebay.daemon import SharedEngine
from forebay.engine import Engine
from forebay.loader import DataLoader

from .data import catalogs_in, make_files, socket_folder
from .measure import Case, Outcome, interleave
from .run import Context

_CHILD_S = 300

# One job: a checksum and the order of each batch.
_JOB = """
import json, sys, time
import forebay
spec = json.loads(sys.argv[1])
begun = time.perf_counter()
engine = forebay.SharedEngine(spec["memory"], folder=spec["folder"])
loader = forebay.DataLoader(
    spec["root"], spec["batch"], shuffle=True, seed=spec["seed"], engine=engine,
    rank=0, world_size=1, _delay=spec["delay"])
seen, first = [], 0.0
for _ in range(spec["epochs"]):
    for batch in loader:
        seen.append((batch.checksum(), batch.indices.tolist()))
    first = first or time.perf_counter() - begun
print(json.dumps(dict(seen=seen, first=first, alone=engine.client() is None)))
"""

# One consumer that reads every byte, with its system calls counted.
_COUNTED = """
import json, os, sys
import forebay
from forebay import _forebay
spec = json.loads(sys.argv[1])
engine = forebay.SharedEngine(spec["memory"], folder=spec["folder"])
loader = forebay.DataLoader(
    spec["root"], spec["batch"], shuffle=True, seed=spec["seed"], engine=engine,
    rank=0, world_size=1)
for _ in range(3):
    for batch in loader:
        batch.checksum()
port, stream = engine.native, loader._feed.stream
try:
    calls = _forebay.count_system_calls()
except forebay.UnsupportedError as error:
    print(json.dumps(dict(error=str(error))), flush=True)
    os._exit(0)
ready = of_ready = others = of_others = 0
for _ in range(spec["epochs"]):
    iterator = iter(loader)
    while True:
        before, empty = calls.count, port.empty_rings(stream)
        batch = next(iterator, None)
        if batch is None:
            break
        batch.checksum()
        batch = None
        if port.empty_rings(stream) == empty:
            ready += 1
            of_ready += calls.count - before
        else:
            others += 1
            of_others += calls.count - before
print(json.dumps(dict(ready=ready, of_ready=of_ready, others=others, of_others=of_others)),
      flush=True)
os._exit(0)
"""


def _spawn(script: str, spec: dict[str, Any]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(spec)], stdout=subprocess.PIPE, text=True
    )


def _answer(child: subprocess.Popen) -> dict[str, Any]:
    try:
        said, _ = child.communicate(timeout=_CHILD_S)
    finally:
        child.kill()
    if child.returncode != 0:
        raise RuntimeError(f"a measured process failed: exit code {child.returncode}")
    return json.loads(said)


def _memory(catalog: _forebay.Catalog) -> int:
    """Room for all samples, twice: batches that are announced and held count, too."""
    return 2 * catalog.total_bytes + (256 << 20)


def _check(seen: list, files: list[np.ndarray], seed: int, batch: int, epochs: int) -> None:
    """The bytes and the order are those of the files and of the sampler."""
    expected = []
    for epoch in range(epochs):
        order = _forebay.epoch_order(len(files), True, seed, epoch).tolist()
        expected += [order[at : at + batch] for at in range(0, len(order), batch)]
    if [samples for _, samples in seen] != expected:
        raise RuntimeError(f"seed {seed}: another order than the sampler's")
    for crc, samples in seen:
        if crc != _forebay.crc32c(np.concatenate([files[i] for i in samples])):
            raise RuntimeError(f"seed {seed}: wrong bytes in the batch of samples {samples}")


def _source_reads(ctx: Context, place: str, out: Outcome) -> None:
    work = ctx.workload["sharing"]
    root = os.path.join(ctx.scratch, "shared")
    make_files(root, work["files"], work["mean_bytes"], ctx.seed)
    catalog = _forebay.Catalog.build(root)
    files = [np.fromfile(catalog.object_path(i), np.uint8) for i in range(len(catalog))]
    spec = dict(root=root, memory=_memory(catalog), batch=work["batch"], epochs=work["epochs"],
                delay=work["delay"])  # fmt: skip

    def measure(count: int, folder: str) -> tuple[float, float, float]:
        """Reads a sample, seconds of all, and of the first process's first epoch."""
        engine = SharedEngine(_memory(catalog), folder=folder, linger=0)
        engine.set_knobs({"hedge_one_in": 0})  # a second read on purpose; bench tiers has it
        start = time.perf_counter()
        children = []
        try:
            for seed in range(count):
                time.sleep(work["stagger_s"] if seed else 0)
                children.append(_spawn(_JOB, {**spec, "folder": folder, "seed": ctx.seed + seed}))
            answers = [_answer(child) for child in children]
        finally:
            for child in children:
                child.kill()
        took = time.perf_counter() - start
        for seed, said in enumerate(answers):
            if said["alone"]:
                raise RuntimeError("a job went on without the daemon")
            _check(said["seen"], files, ctx.seed + seed, work["batch"], work["epochs"])
        reads = engine.metrics()["forebay_source_reads_total"]
        ctx.say(f"{count} processes: {reads} reads of {work['files']} samples, {took:.1f} s")
        return reads / work["files"], took, answers[0]["first"]

    worst = 1.0
    first: dict[str, list[float]] = {"listing included": [], "a saved list": []}
    for count in work["processes"]:
        ratios, took = [], []
        for repeat in range(ctx.repeats):
            folder = os.path.join(place, f"{count}-{repeat}")
            # Nobody has listed the files; a process alone is then measured with the saved list.
            with catalogs_in(os.path.join(ctx.scratch, f"catalogs{count}-{repeat}")):
                for how in list(first)[: 2 if count == 1 else 1]:
                    ratio, seconds, of_first = measure(count, f"{folder}-{len(how)}")
                    ratios.append(ratio)
                    took.append(seconds)
                    if count == 1:
                        first[how].append(of_first)
        worst = max([worst, *ratios], key=lambda ratio: abs(ratio - 1))
        name = "1 process" if count == 1 else f"{count} processes"
        out.cases.append(Case(f"source reads / samples, {name}", "ratio", ratios, limit=1.0,
                              limit_name="every sample once",
                              note=f"{statistics.median(took):.1f} s"))  # fmt: skip
    out.cases += [
        Case(f"first epoch of a process alone, {how}", "s", seconds)
        for how, seconds in first.items()
        if seconds
    ]
    out.figures["source_reads_vs_dataset"] = worst
    out.notes.append(
        f"{work['epochs']} epochs each, seeds differ, starts {work['stagger_s']:g} s apart; a read "
        f"takes {work['delay'].split('=')[1]} ms; order and bytes of every batch were checked; "
        "hedging is off"
    )


def _consume(loader: DataLoader, epochs: int, read: bool) -> float:
    """Seconds."""
    start = time.perf_counter()
    for _ in range(epochs):
        for batch in loader:
            if read:
                batch.checksum()
    return time.perf_counter() - start


def _takes(loader: DataLoader, burn: int) -> list[float]:
    """Microseconds of each batch of an epoch, for a consumer that works between two of them."""
    took: list[float] = []
    iterator = iter(loader)
    while True:
        _forebay.burn(burn)
        start = time.perf_counter()
        batch = next(iterator, None)
        end = time.perf_counter()
        if batch is None:
            return took
        took.append((end - start) * 1e6)
        batch.release()


def _cost(ctx: Context, place: str, out: Outcome) -> None:
    work = ctx.workload["cost"]
    root = os.path.join(ctx.scratch, "resident")
    make_files(root, work["files"], work["bytes"], ctx.seed, sigma=0.0)
    catalog = _forebay.Catalog.build(root)
    folder = os.path.join(place, "cost")
    memory = _memory(catalog)
    shared = SharedEngine(memory, folder=folder, linger=0)
    loaders = {
        name: DataLoader(catalog, work["batch"], shuffle=True, seed=ctx.seed, engine=engine,
                         rank=0, world_size=1)
        for name, engine in (("daemon", shared), ("embedded", Engine(memory)))
    }  # fmt: skip
    for loader in loaders.values():
        _consume(loader, 2, True)
    epochs, many = work["epochs"], work["untouched_epochs"]
    variants: dict[str, Callable[[], float]] = {}
    for name, loader in loaders.items():
        variants[f"{name}, bytes read"] = partial(_consume, loader, epochs, True)
    for name, loader in loaders.items():
        variants[f"{name}, untouched"] = partial(_consume, loader, many, False)
    times = interleave(variants, ctx.repeats, ctx.say)
    out.speedup("daemon_vs_embedded", times["daemon, bytes read"], times["embedded, bytes read"])
    for kind, rounds in (("bytes read", epochs), ("untouched", many)):
        samples = work["files"] * rounds
        rates = {name: [samples / t for t in times[f"{name}, {kind}"]] for name in loaders}
        out.cases.append(
            Case(f"through the daemon, {kind}", "samples/s", rates["daemon"],
                 rivals={"embedded": statistics.median(rates["embedded"])})
        )  # fmt: skip
    added: list[float] = []
    medians: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(max(ctx.repeats, 3)):
        for name, loader in loaders.items():
            medians[name].append(statistics.median(_takes(loader, work["burn"])))
        added.append(medians["daemon"][-1] - medians["embedded"][-1])
    out.median("daemon_added_us", added)
    out.cases.append(Case("a batch that is ready, through the daemon", "us", medians["daemon"],
                          rivals={"embedded": statistics.median(medians["embedded"])}))  # fmt: skip
    out.notes.append(
        f"{work['files']} samples of {work['bytes']} B in memory, batches of {work['batch']}"
    )
    for loader in loaders.values():
        loader.close()
    calls: list[float] = []
    counted: dict[str, Any] = {}
    for _ in range(ctx.repeats):
        spec = dict(root=root, folder=folder, memory=memory, batch=work["batch"], seed=ctx.seed,
                    epochs=epochs)  # fmt: skip
        counted = _answer(_spawn(_COUNTED, spec))
        if "error" in counted:
            out.notes.append(f"system calls cannot be counted here: {counted['error']}")
            return
        calls.append(counted["of_ready"] / max(counted["ready"], 1))
    out.figures["syscalls_per_ready_batch"] = max(calls)
    out.cases.append(Case("system calls for a batch that is ready", "calls", calls))
    out.notes.append(
        f"of the last {counted['ready'] + counted['others']} batches, all bytes read, "
        f"{counted['ready']} were ready; the others took {counted['of_others']} system calls"
    )


def run(ctx: Context) -> Outcome:
    out = Outcome()
    # A socket's path is short, whatever the scratch folder's is.
    with tempfile.TemporaryDirectory(prefix="forebay-", dir=socket_folder()) as place:
        _source_reads(ctx, place, out)
        _cost(ctx, place, out)
    return out
