"""What looking at files before their copies are used costs a job, beside one that trusts them.

All files are in the cache folder when a job starts, and its catalog is saved. Each job is a process
of its own: it takes its epochs at the pace of a training loop, or a single one as fast as it can.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from forebay.slowfs import SlowFs

from .data import catalogs_in, make_files
from .measure import Case, Outcome
from .run import Context

_CHILD_S = 300
_MODES = ("never", "job")

_JOB = """
import json, sys, time
import forebay
spec = json.loads(sys.argv[1])
begun, cpu = time.perf_counter(), time.process_time()
engine = forebay.Engine(memory=spec["memory"], cache_dir=spec["cache"], keep=False)
loader = forebay.DataLoader(spec["root"], spec["batch"], shuffle=True, seed=spec["seed"],
                            engine=engine, epochs=spec["epochs"], rank=0, world_size=1,
                            freshness=spec["mode"])
first = samples = 0
start = None
for _ in range(spec["epochs"]):
    for batch in loader:
        first = first or time.perf_counter() - begun
        start = start or time.perf_counter()
        batch.checksum()
        samples += len(batch)
        if spec["rate"]:
            left = start + samples / spec["rate"] - time.perf_counter()
            if left > 0:
                time.sleep(left)
        batch.release()
print(json.dumps(dict(first=first, seconds=time.perf_counter() - begun, samples=samples,
                      cpu=time.process_time() - cpu,
                      reads=engine.metrics()["forebay_source_reads_total"])))
"""


def _job(spec: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _JOB, json.dumps(spec)],
        capture_output=True, text=True, timeout=_CHILD_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"a measured process failed: {done.stderr[-2000:]}")
    said = json.loads(done.stdout)
    if said["samples"] != spec["files"] * spec["epochs"]:
        raise RuntimeError(f"{said['samples']} samples came of {spec['files']} files")
    return said


def run(ctx: Context) -> Outcome:
    work = ctx.workload
    root = os.path.join(ctx.scratch, "data")
    make_files(root, work["files"], work["mean_bytes"], ctx.seed)
    ms = work["latency_ms"]
    paced: dict[str, list[dict]] = {mode: [] for mode in _MODES}
    single: dict[str, list[dict]] = {mode: [] for mode in _MODES}
    with (
        catalogs_in(os.path.join(ctx.scratch, "catalogs")),
        SlowFs(root, open_ms=ms, read_ms=ms, stat_ms=ms, readdir_ms=ms, seed=ctx.seed) as mount,
    ):
        base = dict(
            root=str(mount.path), cache=os.path.join(ctx.scratch, "cache"), memory=work["memory"],
            batch=work["batch"], seed=ctx.seed, files=work["files"], epochs=1, rate=0, mode="job",
        )  # fmt: skip
        ctx.say("filling the cache folder")
        _job(base)
        for repeat in range(ctx.repeats):
            # In turns, and each first every other time.
            for mode in _MODES if repeat % 2 == 0 else reversed(_MODES):
                spec = {**base, "mode": mode}
                single[mode].append(_job(spec))
                paced[mode].append(
                    _job({**spec, "epochs": work["epochs"], "rate": work["samples_per_s"]})
                )
                for said in (single[mode][-1], paced[mode][-1]):
                    if said["reads"] != 0:
                        raise RuntimeError(f"{said['reads']} files were read from the source")
    outcome = Outcome()

    def ratios(runs: dict[str, list[dict]], what: str) -> list[float]:
        return [a[what] / b[what] for a, b in zip(runs["job"], runs["never"], strict=True)]

    outcome.median("freshness_cost", [r - 1 for r in ratios(paced, "seconds")])
    outcome.median("freshness_first_batch", ratios(paced, "first"))
    outcome.median("freshness_single_epoch", ratios(single, "seconds"))
    cpu = [
        (a["cpu"] - b["cpu"]) * 1e6 / work["files"]
        for a, b in zip(single["job"], single["never"], strict=True)
    ]
    outcome.median("statx_cpu_us", cpu)
    for name, runs in (("paced", paced), ("single", single)):
        for mode in _MODES:
            for what in ("seconds", "first"):
                values = [said[what] for said in runs[mode]]
                outcome.cases.append(Case(f"{name} {mode} {what}", "s", values))
    ideal = work["files"] * work["epochs"] / work["samples_per_s"]
    took = statistics.median(said["seconds"] for said in paced["job"])
    outcome.notes.append(f"the pace alone takes {ideal:.1f} s of the job's {took:.1f} s")
    return outcome
