"""What planning a large cluster takes: time on one core, memory kept, memory at the peak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from .measure import Case, Outcome
from .run import Context

# A process of its own, so that its peak is that of one plan.
_CHILD = """
import json, os, sys, time
import numpy as np
from forebay import _forebay

work = json.loads(sys.argv[1])
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

samples, nodes = work["samples"], work["nodes"]
draw = np.random.default_rng(work["seed"])
mean = work["bytes"]
lengths = draw.integers(mean // 2, mean * 3 // 2, samples, dtype=np.uint32)
total = int(lengths.sum(dtype=np.uint64))
fast = int(total * work["memory_share"])
room = [(fast // nodes, (total - fast) // nodes)] * nodes
trial = min(work["epochs"], work["trial_epochs"])
start = time.perf_counter()
for epoch in range(trial):
    _forebay.epoch_order(samples, True, work["seed"], epoch)
orders = (time.perf_counter() - start) / trial * work["epochs"]
bare = memory("VmRSS")
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")
start, cpu = time.perf_counter(), time.process_time()
plan = _forebay.plan_placement(
    lengths, room, world=work["ranks"], ranks_per_node=work["ranks"] // nodes,
    epochs=work["epochs"], seed=work["seed"], rule=work["rule"],
)
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
peak, kept = memory("VmHWM"), memory("VmRSS")
codes = plan.pop("codes")
assert len(codes) == samples
plan.pop("used")
print(json.dumps({
    **plan, "seconds": seconds, "cpu": cpu, "orders": orders,
    "resident_peak": peak - bare + lengths.nbytes, "resident_kept": kept - bare,
}))
"""


def _plan(work: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-c", _CHILD, json.dumps(work)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"the measured process failed: exit code {done.returncode}")
    return json.loads(done.stdout)


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    samples = work["samples"]
    keys = ("samples", "ranks", "epochs", "bytes", "memory_share", "trial_epochs")
    runs: list[list[dict[str, Any]]] = [[] for _ in work["clusters"]]
    for i in range(ctx.repeats):
        for cluster, each in zip(work["clusters"], runs, strict=True):
            task = {key: work[key] for key in keys} | cluster | {"seed": ctx.seed + i}
            each.append(_plan(task))
            ctx.say(
                f"{cluster['nodes']} nodes, {each[-1]['rule']}: {each[-1]['seconds']:.1f} s "
                f"({i + 1}/{ctx.repeats})"
            )
    for cluster, each in zip(work["clusters"], runs, strict=True):
        first = each[0]
        name = f"{cluster['nodes']} nodes of {work['ranks'] // cluster['nodes']}, {first['rule']}"
        asked = "" if cluster["rule"] == "auto" else " (asked for)"
        by_frequency = first["rule"] == "frequency"
        orders = sorted(plan["orders"] for plan in each)[len(each) // 2]
        counted = max(plan["peak_bytes"] for plan in each) / samples
        covered = min(plan["covered_samples"] for plan in each) / samples
        out.cases += [
            Case(f"plan, {name}{asked}", "s", [plan["seconds"] for plan in each],
                 limit=orders if by_frequency else None,
                 limit_name="the permutations alone" if by_frequency else None,
                 note=f"{max(plan['cpu'] for plan in each):.1f} s of processor time at most; "
                      f"{covered:.4%} of the samples covered"),
            Case(f"kept, {name}{asked}", "B/sample",
                 [plan["kept_bytes"] / samples for plan in each],
                 note=f"resident {max(plan['resident_kept'] for plan in each) / samples:.1f}"),
            Case(f"peak, {name}{asked}", "B/sample",
                 [plan["resident_peak"] / samples for plan in each],
                 note=f"resident, with the lengths; {counted:.1f} by adding up what is allocated"),
        ]  # fmt: skip
    every = [plan for each in runs for plan in each]
    times = [case.value for case in out.cases if case.name.startswith("plan")]
    out.figures["plan_s"] = max(times)
    out.figures["plan_bytes_per_sample"] = max(plan["kept_bytes"] for plan in every) / samples
    out.figures["plan_peak_bytes_per_sample"] = max(
        max(plan["resident_peak"], plan["peak_bytes"]) / samples for plan in every
    )
    out.notes.append(
        f"{samples:,} samples of unequal lengths, {work['ranks']:,} ranks, "
        f"{work['epochs']} epochs, one core of {os.cpu_count()}; each plan in a process of its "
        "own; the figures are the worst cluster's"
    )
    return out
