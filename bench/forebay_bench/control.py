"""One round of the cluster's controller over many stages, through a real etcd."""

from __future__ import annotations

import statistics

import numpy as np
from forebay import _forebay
from forebay_testing import Etcd

from .measure import Case, Outcome
from .run import Context


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    common = {
        "stages": work["stages"], "jobs": work["jobs"], "warm": work["warm"],
        "rounds": work["rounds"],
    }  # fmt: skip
    rounds: list[float] = []
    medians: list[float] = []
    reads: list[float] = []
    memory: list[float] = []
    slowest: list[float] = []
    with Etcd() as etcd:
        for i in range(ctx.repeats):
            total, read, written = _forebay.time_control_rounds(
                [etcd.endpoint], seed=ctx.seed + i, **common
            )
            rounds += total
            medians.append(statistics.median(total))
            slowest.append(float(np.percentile(total, 95)))
            reads.append(statistics.median(read))
            local, _, _ = _forebay.time_control_rounds([], seed=ctx.seed + i, **common)
            memory.append(statistics.median(local))
            ctx.say(f"round {medians[-1]:.1f} ms, in memory {memory[-1]:.1f} ms")
    out.figures["round_ms"] = statistics.median(rounds)
    out.repeats["round_ms"] = medians
    stages = work["stages"]
    out.cases += [
        Case(f"round, {stages:,} stages, etcd", "ms", medians, statistics.median(reads),
             "the range read alone", {"in-memory store": statistics.median(memory)}),
        Case(f"round, {stages:,} stages, etcd, 95th percentile", "ms", slowest),
        Case(f"round, {stages:,} stages, in memory", "ms", memory),
    ]  # fmt: skip
    out.notes.append(
        f"{work['jobs']} jobs, {work['rounds']} rounds after {work['warm']} of warm-up in each of "
        f"{ctx.repeats} repetitions; every summary changes before each round, outside the clock"
    )
    out.notes.append(
        f"a round: one range read, the division, one batch of {written} keys; etcd is a single "
        "member on this machine, with its disk"
    )
    return out
