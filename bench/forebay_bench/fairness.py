"""Two jobs on one saturated source: does each get its share, and what the other leaves?"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from typing import Any

import numpy as np
from forebay import _forebay
from forebay_testing import Etcd, SlowFs

from . import fairness_cluster, fairness_run
from .data import make_files, socket_folder
from .fairness_job import STEP_S, Job
from .measure import Case, Outcome
from .run import Context

_ENOUGH = 0.95  # of a rate: that much of it counts as having it


class _Measured:
    """One repetition."""

    def __init__(self, ctx: Context, mount: SlowFs, place: str, etcd: str) -> None:
        work = ctx.workload
        self._share = work["shares"][0] / sum(work["shares"])
        roots = [os.path.join(str(mount.path), name) for name in "ab"]
        folders = [f"{place}-{name if etcd else 'both'}" for name in "ab"]
        policy = dict(version=1, job=[
            dict(match=name, share=share)
            for name, share in zip("ab", work["shares"], strict=True)
        ])  # fmt: skip
        spec = dict(memory=work["memory"], batch=work["batch"], etcd=etcd)
        self._jobs = []
        try:
            for name, root, folder in zip("ab", roots, folders, strict=True):
                job = Job(dict(spec, root=root, folder=folder, job=name), work["bytes"])
                self._jobs.append(job)
                job.await_ready()
            if etcd:
                _forebay.store_policy([etcd], "/forebay/", json.dumps(policy))
            else:
                _forebay.SharedEngine.attach_running(folders[0]).set_policy(json.dumps(policy))
            self._run(work)
        finally:
            for job in self._jobs:
                job.kill()

    def _run(self, work: dict[str, Any]) -> None:
        a, b = self._jobs
        begin = b.tell("go")
        time.sleep(work["alone_s"])
        alone = time.monotonic()
        both = a.tell("go")
        time.sleep(work["settle_s"] + work["both_s"])
        idle = a.tell("pause")
        time.sleep(work["idle_s"])
        back = a.tell("go")
        time.sleep(work["idle_s"])
        end = time.monotonic()
        for job in (a, b):
            job.end()
        settled = both + work["settle_s"]
        # Before the other came, or while it was idle: the tuner may still have been searching.
        first = b.rate(begin + work["alone_s"] / 2, alone)
        later = [b.rate(t, t + STEP_S) for t in np.arange(idle, back - STEP_S, STEP_S / 2)]
        self.alone = max(first, statistics.median(later))
        self.total = a.rate(settled, idle) + b.rate(settled, idle)
        self.share = a.rate(settled, idle) / self.total
        shares = []
        for t in np.arange(settled, idle - work["window_s"] + 1e-6, work["window_s"]):
            of_a, of_b = (job.taken(t, t + work["window_s"]) for job in (a, b))
            shares.append(of_a / (of_a + of_b))
        self.error = max(abs(s - self._share) / self._share for s in shares)
        self.redistribute = b.until(idle, back, lambda rate: rate >= _ENOUGH * self.alone)
        left = 1 - _ENOUGH * self._share
        self.returned = b.until(back, end, lambda rate: rate <= left * self.total)


def run(ctx: Context) -> Outcome:
    work = ctx.workload
    out = Outcome()
    data = os.path.join(ctx.scratch, "data")
    for name in "ab":
        make_files(os.path.join(data, name), work["files"], work["bytes"], ctx.seed, sigma=0.0)
    runs: list[_Measured] = []
    cluster: list[_Measured] = []
    with SlowFs(data, bandwidth_mb=work["bandwidth_mb"], read_ms=work["read_ms"]) as mount:
        # A socket's path is short, whatever the scratch folder's is.
        with tempfile.TemporaryDirectory(prefix="forebay-", dir=socket_folder()) as place:
            for i in range(ctx.repeats):
                one = _Measured(ctx, mount, os.path.join(place, str(i)), "")
                runs.append(one)
                ctx.say(f"share {one.share:.3f}, worst window {one.error:.1%} off; taken up in "
                        f"{one.redistribute:.2f} s, back in {one.returned:.2f} s; "
                        f"{one.total / one.alone:.0%} of what one gets alone")  # fmt: skip
            usable, why = Etcd.available()
            for i in range(work["cluster_repeats"] if usable else 0):
                with Etcd() as etcd:
                    one = _Measured(ctx, mount, os.path.join(place, f"c{i}"), etcd.endpoint)
                cluster.append(one)
                ctx.say(f"two daemons: share {one.share:.3f}, worst window {one.error:.1%} off; "
                        f"taken up in {one.redistribute:.2f} s")  # fmt: skip
            if not usable:
                out.notes.append(f"two daemons were not measured: {why}")
    _report(out, work, runs, cluster)
    ctx.save(out)
    fairness_cluster.run(ctx, out)
    ctx.save(out)
    fairness_run.run(ctx, out)
    return out


def _report(
    out: Outcome, work: dict[str, Any], runs: list[_Measured], cluster: list[_Measured]
) -> None:
    median = statistics.median
    out.median("share_error", (r.error for r in runs))
    out.median("redistribute_s", (r.redistribute for r in runs))
    out.median("shared_vs_alone", (r.total / r.alone for r in runs))
    wanted = work["shares"][0] / sum(work["shares"])
    limit = work["bandwidth_mb"] * 1e6
    out.cases += [
        Case(f"share of the job with {work['shares'][0]} of {sum(work['shares'])}", "ratio",
             [r.share for r in runs], wanted, "the policy"),
        Case("share, worst window: part that it is off", "ratio", [r.error for r in runs]),
        Case("until an idle job's share is taken up", "s", [r.redistribute for r in runs]),
        Case("until it is given back", "s", [r.returned for r in runs]),
        Case("both jobs together", "bytes/s", [r.total for r in runs], limit, "the mount",
             {"one job alone, without a limit": median(r.alone for r in runs)}),
    ]  # fmt: skip
    if cluster:
        out.cases += [
            Case("two daemons with etcd: share", "ratio", [r.share for r in cluster], wanted,
                 "the policy"),
            Case("two daemons with etcd: worst window", "ratio", [r.error for r in cluster]),
            Case("two daemons with etcd: taken up", "s", [r.redistribute for r in cluster]),
        ]  # fmt: skip
    out.notes.append(
        f"one mount of {work['bandwidth_mb']:g} MB/s, {work['read_ms']:g} ms a read; each job has "
        f"a data set of samples of {work['bytes']} B, nothing is kept; consumers count the bytes, "
        f"shares in windows of {work['window_s']:g} s, {work['settle_s']:g} s after the second job "
        "came"
    )
    out.notes.append(
        f"idle: the consumer stops, and its read-ahead fills what memory it has; taken up: from "
        f"then on the other one gets at least {_ENOUGH:.0%} of its rate alone, over {STEP_S} s"
    )
