"""The part of `bench fairness` with several daemons that etcd joins, one job on each: does every
job get its share of the bytes that are read from the source, in every second?
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from forebay import _forebay
from forebay_testing import Etcd, SlowFs

from .data import make_files, socket_folder
from .fairness_job import Job
from .measure import Case, Outcome
from .run import Context

_LOOK_S = 0.05
# Of what the daemons say that they read, beside what the mount says that it gave.
_DISAGREE = 0.05


@dataclass
class _Window:
    begin: float
    """Seconds after the jobs began."""
    phase: str
    bytes: dict[str, float]
    """By job."""
    error: float = 0.0
    """Of the job that is farthest from its share, relative to its share."""


@dataclass
class _Daemon:
    """What a node's daemon says that it has read from the source, again and again."""

    handle: Any
    times: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)

    def look(self) -> None:
        before = time.monotonic()
        said = json.loads(self.handle.describe())
        self.times.append((before + time.monotonic()) / 2)
        self.bytes.append(said["source"]["bytes"])

    def read(self, begin: float, end: float) -> float:
        at = np.interp([begin, end], self.times, self.bytes)
        return float(at[1] - at[0])


class _Measured:
    """One repetition of one set-up."""

    def __init__(
        self, ctx: Context, mount: SlowFs, place: str, etcd: str, nodes: str, falls: int
    ) -> None:
        work = ctx.workload["cluster"]
        self._nodes = nodes
        self._shares = dict(zip("ab", ctx.workload["shares"], strict=True))
        self._falls = falls
        policy = dict(version=1, job=[dict(match=n, share=s) for n, s in self._shares.items()])
        _forebay.store_policy([etcd], "/forebay/", json.dumps(policy))
        spec = dict(memory=ctx.workload["memory"], batch=ctx.workload["batch"], etcd=etcd)
        jobs: list[Job] = []
        self._daemons: list[_Daemon] = []
        try:
            for i, name in enumerate(nodes):
                root = os.path.join(str(mount.path), str(i))
                folder = os.path.join(place, str(i))
                os.mkdir(folder, 0o700)
                jobs.append(Job(dict(spec, root=root, folder=folder, job=name),
                                ctx.workload["bytes"]))  # fmt: skip
            for i, job in enumerate(jobs):
                job.await_ready()
                folder = os.path.join(place, str(i))
                self._daemons.append(_Daemon(_forebay.SharedEngine.attach_running(folder)))
            with self._looking():
                self._run(work, mount, jobs)
            for job in jobs:
                job.end()
        finally:
            for job in jobs:
                job.kill()

    @contextlib.contextmanager
    def _looking(self) -> Any:
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_LOOK_S):
                for daemon in self._daemons:
                    daemon.look()

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _run(self, work: dict[str, Any], mount: SlowFs, jobs: list[Job]) -> None:
        time.sleep(3 * _LOOK_S)
        mount.reset()
        began = max(job.tell("go") for job in jobs)
        phases = [("all want more", work["settle_s"] + work["both_s"], "")]
        phases += [("one node less", work["fall_s"], "pause"), ("again", work["fall_s"], "go")]
        at = began
        self.windows: list[_Window] = []
        for phase, seconds, what in phases:
            if what:
                jobs[self._falls].tell(what)
            begin = max(at, began + work["settle_s"])
            at += seconds
            time.sleep(max(0.0, at - time.monotonic()))
            for t in np.arange(begin, at - 1 + 1e-6):
                self.windows.append(_Window(t - began, phase, {}))
        given = mount.stats()["bytes_read"]
        time.sleep(3 * _LOOK_S)
        read = sum(daemon.read(began - 2 * _LOOK_S, at) for daemon in self._daemons)
        self.agreement = read / given
        for window in self.windows:
            self._fill(window, began + window.begin)

    def _fill(self, window: _Window, begin: float) -> None:
        for name, daemon in zip(self._nodes, self._daemons, strict=True):
            read = daemon.read(begin, begin + 1)
            window.bytes[name] = window.bytes.get(name, 0.0) + read
        window.error = self._error(window)

    def _error(self, window: _Window) -> float:
        total = sum(window.bytes.values())
        of = {n: s / sum(self._shares.values()) * total for n, s in self._shares.items()}
        return max(abs(window.bytes[n] - fair) / fair for n, fair in of.items())


def run(ctx: Context, out: Outcome) -> None:
    """Adds cluster_share_error, with its cases."""
    work = ctx.workload["cluster"]
    usable, why = Etcd.available()
    if not usable:
        out.notes.append(f"cluster_share_error was not measured: {why}")
        return
    data = os.path.join(ctx.scratch, "cluster")
    for i in range(max(len(setup["nodes"]) for setup in work["setups"])):
        files = os.path.join(data, str(i))
        make_files(files, ctx.workload["files"], ctx.workload["bytes"], ctx.seed, sigma=0.0)
    with (
        SlowFs(data, bandwidth_mb=work["bandwidth_mb"], read_ms=ctx.workload["read_ms"]) as mount,
        tempfile.TemporaryDirectory(prefix="forebay-", dir=socket_folder()) as place,
    ):
        for setup in work["setups"]:
            for i in range(work["repeats"]):
                where = os.path.join(place, f"{setup['nodes']}{i}")
                os.mkdir(where, 0o700)
                with Etcd() as etcd:
                    one = _Measured(ctx, mount, where, etcd.endpoint, setup["nodes"],
                                    setup["falls"])  # fmt: skip
                for w in one.windows:
                    ctx.say(f"{setup['nodes']} {w.begin:5.1f} {w.phase:15} {w.error:6.3f} " +
                            " ".join(f"{n}={b/1e6:.2f}" for n, b in w.bytes.items()) +
                            f" sum {sum(w.bytes.values())/1e6:.2f}")
                ctx.say(f"agreement {one.agreement}")
