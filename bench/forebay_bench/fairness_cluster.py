"""The part of `bench fairness` with several daemons that etcd joins, one job on each: does every
job get its share of the bytes that are read from the source, in every second?
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
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
_KILLED_S = 4.0
_WAIT_S = 20.0
_WHAT = "daemons with etcd"
# Of what the daemons say that they read, beside what the mount says that it gave.
_DISAGREE = 0.05


@dataclass
class _Window:
    """A second."""

    begin: float
    """Since the jobs began, in seconds."""
    phase: str
    settled: bool
    """Demand changed so long ago that the shares have to be right."""
    idle: str = ""
    """The job that wants nothing."""
    bytes: dict[str, float] = field(default_factory=dict)
    """By job."""
    error: float = 0.0
    """Of the job that is farthest from its share, relative to its share."""


@dataclass
class _Daemon:
    """What a node's daemon says that it has read from the source, again and again."""

    handle: Any
    alive: bool = True
    leads: bool = False
    times: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)

    def look(self) -> None:
        before = time.monotonic()
        said = json.loads(self.handle.describe())
        self.times.append((before + time.monotonic()) / 2)
        self.bytes.append(said["source"]["bytes"])
        self.leads = said["control"]["leads"]

    def read(self, begin: float, end: float) -> float:
        at = np.interp([begin, end], self.times, self.bytes)
        return float(at[1] - at[0])

    def last_read(self, end: float) -> float:
        """When it last had read something, as of then."""
        times = np.array(self.times)
        total = np.interp(end, times, self.bytes)
        return float(times[np.searchsorted(self.bytes, total)])


class _Measured:
    """One repetition of one set-up."""

    def __init__(
        self, ctx: Context, mount: SlowFs, place: str, etcd: str, setup: dict[str, Any]
    ) -> None:
        self._work = ctx.workload["cluster"]
        self._nodes: str = setup["nodes"]
        self._falls: int = setup["falls"]
        self._kills: bool = setup["kills"]
        self._shares = dict(zip("ab", ctx.workload["shares"], strict=True))
        policy = dict(version=1, job=[dict(match=n, share=s) for n, s in self._shares.items()])
        _forebay.store_policy([etcd], "/forebay/", json.dumps(policy))
        spec = dict(memory=ctx.workload["memory"], batch=ctx.workload["batch"], etcd=etcd)
        self.windows: list[_Window] = []
        self._jobs: list[Job] = []
        self._daemons: list[_Daemon] = []
        self._lock = threading.Lock()
        folders = [os.path.join(place, str(i)) for i in range(len(self._nodes))]
        try:
            for i, name in enumerate(self._nodes):
                os.mkdir(folders[i], 0o700)
                one = dict(root=os.path.join(str(mount.path), str(i)), folder=folders[i], job=name)
                self._jobs.append(Job(spec | one, ctx.workload["bytes"]))
            for job, folder in zip(self._jobs, folders, strict=True):
                job.await_ready()
                self._daemons.append(_Daemon(_forebay.SharedEngine.attach_running(folder)))
            with self._looking():
                self._run(mount)
            for job, daemon in zip(self._jobs, self._daemons, strict=True):
                if daemon.alive:
                    job.end()
        finally:
            for job in self._jobs:
                job.kill()

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_LOOK_S):
                for daemon in self._daemons:
                    with self._lock:
                        if daemon.alive:
                            daemon.look()

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _kill_leader(self) -> bool:
        """Its whole node: the daemon that controls, and the job that it serves."""
        with self._lock:
            for job, daemon in zip(self._jobs, self._daemons, strict=True):
                if daemon.leads:
                    daemon.look()
                    daemon.alive = False
                    os.kill(daemon.handle.pid, signal.SIGKILL)
                    job.kill()
                    return True
        return False

    def _await_reads(self) -> float:
        """When the last of them had begun to read."""
        until = time.monotonic() + _WAIT_S
        while not all(daemon.bytes and daemon.bytes[-1] > 0 for daemon in self._daemons):
            if time.monotonic() > until:
                raise RuntimeError(f"a job has read nothing in {_WAIT_S:g} s")
            time.sleep(_LOOK_S)
        return time.monotonic()

    def _run(self, mount: SlowFs) -> None:
        settle, both, fall = (self._work[name] for name in ("settle_s", "both_s", "fall_s"))
        time.sleep(3 * _LOOK_S)
        mount.reset()
        before = time.monotonic()
        for job in self._jobs:
            job.tell("go")
        began = self._await_reads()
        time.sleep(max(0.0, began + settle + both - time.monotonic()))
        self._jobs[self._falls].tell("pause")
        time.sleep(fall)
        back = self._jobs[self._falls].tell("go")
        time.sleep(fall)
        killed = time.monotonic()
        if self._kills:
            if not self._kill_leader():
                raise RuntimeError("no daemon is the controller")
            time.sleep(settle + _KILLED_S)
        end = time.monotonic()
        given = mount.stats()["bytes_read"]
        time.sleep(3 * _LOOK_S)
        read = sum(daemon.read(before, end) for daemon in self._daemons)
        self.agreement = read / given
        if abs(self.agreement - 1) > _DISAGREE:
            raise RuntimeError(
                f"the daemons read {self.agreement:.3f} of the bytes that the mount gave: not all "
                "reads are under the policy"
            )
        # What its read-ahead had room for it still read.
        fell = self._daemons[self._falls].last_read(back)
        change = self._work["change_s"]
        self._began = began
        self._add("all want more", began + settle, fell, settled=True)
        others = set(self._nodes[: self._falls] + self._nodes[self._falls + 1 :])
        idle = "" if self._nodes[self._falls] in others else self._nodes[self._falls]
        for phase, at, until, soon, who in (
            ("a node wants nothing", fell, back, change, idle),
            ("it wants more again", back, killed, change, ""),
            ("the controller was killed", killed, end, settle, ""),
        ):
            self._add(phase, at, min(at + soon, until), settled=False, idle=who)
            self._add(phase, at + soon, until, settled=True, idle=who)
        together = [sum(w.bytes.values()) for w in self.windows if w.settled and not w.idle]
        for window in self.windows:
            window.error = self._error(window, statistics.median(together))

    def _add(self, phase: str, begin: float, end: float, *, settled: bool, idle: str = "") -> None:
        for t in np.arange(begin, end - 1 + 1e-3):
            window = _Window(float(t) - self._began, phase, settled, idle)
            for name, daemon in zip(self._nodes, self._daemons, strict=True):
                window.bytes[name] = window.bytes.get(name, 0.0) + daemon.read(t, t + 1)
            self.windows.append(window)

    def _error(self, window: _Window, usual: float) -> float:
        read = window.bytes
        total = sum(read.values())
        if window.idle:  # the other one has the rest of what there is
            rest = max(usual, total) - read[window.idle]
            return abs(total - read[window.idle] - rest) / rest
        weights = sum(self._shares.values())
        fair = {name: share / weights * total for name, share in self._shares.items()}
        return max(abs(read[name] - fair[name]) / fair[name] for name in fair)

    def worst(self, settled: bool) -> _Window:
        found = (w for w in self.windows if w.settled == settled)
        return max(found, key=lambda w: w.error, default=_Window(0, "none", settled))


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
            _add_setup(ctx, out, setup, mount, place)
    out.notes.append(
        f"{_WHAT}: one job on each, as its letter says, shares "
        f"{':'.join(map(str, ctx.workload['shares']))}; one mount of "
        f"{work['bandwidth_mb']:g} MB/s; bytes that the daemons read from it, in windows of 1 s: "
        "by how much the job that is "
        f"farthest from its share is off; from {work['settle_s']:g} s after all began, "
        f"{work['change_s']:g} s after a node's demand has fallen to nothing or returned, and "
        f"{work['settle_s']:g} s after kill -9 of the node whose daemon is the controller"
    )


def _add_setup(
    ctx: Context, out: Outcome, setup: dict[str, Any], mount: SlowFs, place: str
) -> None:
    repeats = ctx.workload["cluster"]["repeats"]
    nodes = setup["nodes"]
    runs = []
    for i in range(repeats):
        where = os.path.join(place, f"{nodes}{i}")
        os.mkdir(where, 0o700)
        with Etcd() as etcd:
            runs.append(_Measured(ctx, mount, where, etcd.endpoint, setup))
        one = runs[-1]
        worst, soon = one.worst(settled=True), one.worst(settled=False)
        ctx.say(f"{_WHAT} {nodes}: worst second {worst.error:.1%} off ({worst.phase}, "
                f"{worst.begin:.1f} s); right after a change {soon.error:.1%}; daemons' bytes "
                f"{one.agreement:.3f} of the mount's ({i + 1}/{repeats})")  # fmt: skip
    out.worst_median("cluster_share_error", (one.worst(settled=True).error for one in runs))
    name = f"{_WHAT} {nodes}"
    out.cases += [
        Case(f"{name}: worst second: part that it is off", "ratio",
             [one.worst(settled=True).error for one in runs],
             note="; ".join(f"{each.phase}, {each.begin:.1f} s"
                            for each in (one.worst(settled=True) for one in runs))),
        Case(f"{name}: every second: part that it is off", "ratio",
             [w.error for one in runs for w in one.windows if w.settled]),
        Case(f"{name}: all jobs together", "bytes/s",
             [float(sum(w.bytes.values())) for one in runs for w in one.windows if w.settled],
             ctx.workload["cluster"]["bandwidth_mb"] * 1e6, "the mount"),
    ]  # fmt: skip
    if late := [w.error for one in runs for w in one.windows if not w.settled]:
        out.cases.append(Case(f"{name}: right after a change: part that it is off", "ratio", late))
