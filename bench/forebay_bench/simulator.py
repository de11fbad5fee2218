"""The node simulator beside the engine: the same slow storage, simulated and mounted.

The simulator gets the set-up's own figures (settings of slowfs, sizes, memory, measured step) and
two of this machine, measured by plain threads in the same run: what an operation takes beside the
storage's latency, and how many files a second the processors can read at all.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from typing import Any

import numpy as np
from forebay import _forebay
from forebay.engine import Engine
from forebay.loader import DataLoader
from forebay.slowfs import SlowFs

from .data import make_files
from .measure import Case, Outcome, timed
from .run import Context

_OVERHEAD = 8 << 20  # of the engine, beside the memory for samples


def _settings(storage: dict[str, float], seed: int) -> str:
    return ",".join(f"{key}={value}" for key, value in {**storage, "seed": seed}.items())


def _calibrate(ctx: Context, root: str) -> dict[str, Any]:
    """What this machine adds: seconds an operation, operations a file, files a second at most."""
    work = ctx.workload["calibration"]
    latency = work["latency_ms"]
    with SlowFs(root, open_ms=latency, read_ms=latency, stat_ms=latency, seed=ctx.seed) as mount:
        catalog = _forebay.Catalog.build(str(mount.path))
        count = min(work["files"], len(catalog))
        paths = [catalog.object_path(i) for i in range(len(catalog))]
        sizes = catalog.lengths().tolist()
        mount.reset()
        seconds, _ = _forebay.limit_read_files(paths[:count], sizes[:count], 1)
        stats = mount.stats()
        operations = sum(stats[kind] for kind in ("lookup", "getattr", "open", "read"))
        extra = max(0.0, seconds - operations * latency / 1e3) / operations
        mount.set(open_ms=0, read_ms=0, stat_ms=0)
        seconds, _ = _forebay.limit_read_files(paths, sizes, work["threads"])
        return {
            "op_extra_s": extra,
            "reads_per_s": len(paths) / seconds,
            "lookups": round((stats["lookup"] + stats["getattr"]) / count),
            "opens": round(stats["open"] / count),
        }


def _quiet(mount: SlowFs) -> None:
    """Waits until slowfs has answered what an earlier loader had asked for ahead."""
    for _ in range(2000):
        if mount.stats()["in_flight"] == 0:
            return
        time.sleep(0.005)
    raise RuntimeError(f"{mount.path}: reads are under way although nobody reads")


def _step_seconds(step_ms: float, batches: int) -> float:
    """What a step of a sleeping consumer takes here."""
    if step_ms == 0:
        return 0.0

    def steps() -> None:
        for _ in range(batches):
            time.sleep(step_ms / 1e3)

    return timed(steps) / batches


def _one(ctx: Context, root: str, setup: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """One set-up, measured and then simulated: seconds and source bytes of every epoch."""
    epochs, batch, seed = setup["epochs"], setup["batch"], ctx.seed
    storage = setup["storage"]
    with SlowFs(root, **storage, seed=seed) as mount:
        catalog = _forebay.Catalog.build(str(mount.path))
        lengths = catalog.lengths()
        _quiet(mount)
        engine = Engine(memory=int(setup["memory_share"] * lengths.sum()) + _OVERHEAD)
        arena = engine.native.arena_bytes
        most_reads = engine.knobs()["source_reads_in_flight"][2]  # fewer in a small budget
        step = _step_seconds(setup["step_ms"], max(1, min(20, len(lengths) // batch)))
        measured: list[float] = []
        start = time.perf_counter()
        loader = DataLoader(
            catalog, batch, shuffle=True, seed=seed, rank=0, world_size=1, engine=engine
        )
        for _ in range(epochs):
            seen = 0
            for samples in loader:
                seen += samples.nbytes
                if setup["step_ms"]:
                    time.sleep(setup["step_ms"] / 1e3)
            del samples
            if seen != lengths.sum():
                raise RuntimeError(f"Forebay delivered {seen} of {lengths.sum()} bytes")
            measured.append(time.perf_counter() - start - sum(measured))
        read = [report.source_bytes for report in loader.stats()[:epochs]]
        loader.close()
    simulated = _forebay.simulate_node(
        np.ascontiguousarray(lengths, dtype=np.uint32), _settings(storage, seed), batch=batch,
        epochs=epochs, arena_bytes=arena, step_s=step, seed=seed,
        max_in_flight=most_reads, **machine,
    )  # fmt: skip
    return {
        "measured": measured,
        "measured_bytes": sum(read),
        "simulated": [epoch["seconds"] for epoch in simulated["epochs"]],
        "simulated_bytes": sum(epoch["source_bytes"] for epoch in simulated["epochs"]),
    }


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    root = os.path.join(ctx.scratch, "files")
    ctx.say(f"making {work['files']} files")
    make_files(root, work["files"], work["mean_bytes"], ctx.seed)
    setups = work["setups"]
    results: dict[str, list[dict[str, Any]]] = {setup["name"]: [] for setup in setups}
    machines = []
    for i in range(ctx.repeats):
        machine = _calibrate(ctx, root)
        machines.append(machine)
        for setup in setups:
            result = _one(ctx, root, {**work["common"], **setup}, machine)
            results[setup["name"]].append(result)
            seconds, virtual = sum(result["measured"]), sum(result["simulated"])
            ctx.say(
                f"{setup['name']}: {seconds:.3f} s, simulated {virtual:.3f} s"
                f" ({i + 1}/{ctx.repeats})"
            )
    ratios: dict[str, float] = {}
    every: list[float] = []
    for name, runs in results.items():
        each = [sum(r["simulated"]) / sum(r["measured"]) for r in runs]
        first = statistics.median(r["simulated"][0] / r["measured"][0] for r in runs)
        later = statistics.median(
            sum(r["simulated"][1:]) / max(1e-9, sum(r["measured"][1:])) for r in runs
        )
        ratios[name] = statistics.median(each)
        every += each
        volume = statistics.median(r["simulated_bytes"] / max(1, r["measured_bytes"]) for r in runs)
        out.cases.append(
            Case(
                f"simulated / measured: {name}", "ratio", each,
                note=f"first epoch {first:.3f}, later ones {later:.3f}, source bytes "
                f"{volume:.3f}; measured {sum(runs[-1]['measured']):.2f} s",
            )
        )  # fmt: skip
        out.cases.append(Case(f"measured: {name}", "s", [sum(r["measured"]) for r in runs]))
        out.cases.append(Case(f"simulated: {name}", "s", [sum(r["simulated"]) for r in runs]))
    out.figures["simulated_vs_measured"] = max(ratios.values(), key=lambda r: abs(math.log(r)))
    out.figures["simulated_vs_measured_min"] = min(ratios.values())
    out.figures["simulated_vs_measured_max"] = max(ratios.values())
    for figure in list(out.figures):
        out.repeats[figure] = every
    extra = statistics.median(m["op_extra_s"] for m in machines)
    rate = statistics.median(m["reads_per_s"] for m in machines)
    out.notes.append(
        f"this machine, by plain threads: {extra * 1e6:.0f} us an operation beside the storage's "
        f"latency, at most {rate:.0f} files a second"
    )
    return out
