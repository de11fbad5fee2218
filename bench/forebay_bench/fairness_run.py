"""The part of `bench fairness` with programs that know nothing of Forebay: two `forebay run`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from forebay import _forebay
from forebay.files import attach_running
from forebay_testing import Etcd, SlowFs

from .data import make_files, socket_folder
from .measure import Case, Outcome
from .passes import Script, await_end_of_daemons
from .run import Context

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_cluster_script.py")
# Files that have just been made may still be being made: they are left alone so long.
_SETTLE_S = 3.5
_WAIT_S = 20.0
# Daemons and mount are asked one after the other.
_DISAGREE = 0.1
_JOINED = "forebay run"
_ONE_DAEMON = "forebay run, one daemon"


@dataclass
class _Look:
    """At one moment, from the start on."""

    read: list[int]
    """Bytes, for each job."""
    all: int
    """Bytes, by the daemons, as of this moment."""
    under_way: int
    """Reads of which the mount has counted the bytes already, and no daemon has."""
    given: int
    """Bytes, by the mount."""


class _Job:
    """A script under `forebay run`: with a daemon of its own, that etcd joins with others, or with
    one that all who name the same cache folder have.
    """

    def __init__(
        self, work: dict[str, Any], name: str, data: str, place: str, etcd: str | None
    ) -> None:
        self.name = name
        self.runtime = place if etcd is None else os.path.join(place, name)
        os.makedirs(self.runtime, mode=0o700, exist_ok=True)
        shared = ["--cache", os.path.join(place, "cache")] if etcd is None else []
        command = [
            sys.executable, "-m", "forebay.cli", "run", "--quiet", "--job", name, "--source", data,
            *shared, "--",
            sys.executable, _SCRIPT, data, "--whole", "--workers", str(work["workers"]),
        ]  # fmt: skip
        env = {
            **os.environ, "XDG_RUNTIME_DIR": self.runtime, "SLURM_TMPDIR": self.runtime,
            "XDG_STATE_HOME": self.runtime,
            "FOREBAY_ETCD": etcd or "", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore::UserWarning",
        }  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip
        self.script = Script(self._process)
        self._daemon: Any = None

    def attach(self) -> None:
        self._daemon = attach_running(os.path.join(self.runtime, "forebay"))

    def set_policy(self, policy: str) -> None:
        self._daemon.set_policy(policy)

    def described(self) -> dict[str, Any]:
        return dict(json.loads(self._daemon.describe()))

    def source(self) -> tuple[int, int]:
        """Bytes that the daemon has read for this job, the only one that it has, and reads that
        are on their way.
        """
        said = self.described()
        jobs = [job["job"] for job in said["control"]["jobs"]]
        if jobs and jobs != [self.name]:
            raise RuntimeError(f"the daemon of job {self.name} reads for {jobs}")
        return said["source"]["bytes"], said["source"]["in_flight"]

    def still_reads(self) -> bool:
        return self._process.poll() is None and not self.script.has_answer()

    def end(self) -> None:
        self._daemon = None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_WAIT_S)
        # Also PyTorch's workers, which wait for ever for a script that ended in the middle.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class _Measured:
    """One repetition; without ``etcd`` both jobs have one daemon."""

    def __init__(self, ctx: Context, mount: SlowFs, place: str, etcd: str | None) -> None:
        work = ctx.workload["run"]
        shares = ctx.workload["shares"]
        self._wanted = shares[0] / sum(shares)
        rules = [dict(match=n, share=share) for n, share in zip("ab", shares, strict=True)]
        policy = json.dumps(dict(version=1, job=rules))
        if etcd is not None:
            _forebay.store_policy([etcd], "/forebay/", policy)
        self._one_daemon = etcd is None
        self._jobs: list[_Job] = []
        try:
            for name in "ab":
                data = os.path.join(str(mount.path), name)
                self._jobs.append(_Job(work, name, data, place, etcd))
            for job in self._jobs:
                job.script.answer()
                job.attach()
            if etcd is None:
                self._jobs[0].set_policy(policy)
            mount.reset()
            for job in self._jobs:
                job.script.begin()
            self._watch(mount, work, ctx.workload["bytes"])
        finally:
            for job in self._jobs:
                job.end()
            await_end_of_daemons(sorted({job.runtime for job in self._jobs}))

    def _look(self, mount: SlowFs) -> _Look:
        if self._one_daemon:
            return self._look_at_one(mount)
        (a, under_way_a), (b, under_way_b) = (job.source() for job in self._jobs)
        return _Look([a, b], a + b, under_way_a + under_way_b, mount.stats()["bytes_read"])

    def _look_at_one(self, mount: SlowFs) -> _Look:
        said = self._jobs[0].described()
        given = mount.stats()["bytes_read"]
        # As of the control loop's last round, a tenth of a second ago at most, both at once.
        read = {job["job"]: job["read_bytes"] for job in said["control"]["jobs"]}
        names = [job.name for job in self._jobs]
        if not set(read) <= set(names):
            raise RuntimeError(f"the daemon of jobs {names} reads for {sorted(read)}")
        source = said["source"]
        return _Look([read.get(n, 0) for n in names], source["bytes"], source["in_flight"], given)

    def _watch(self, mount: SlowFs, work: dict[str, Any], sample_bytes: int) -> None:
        end = time.monotonic() + _WAIT_S
        while min(self._look(mount).read) == 0:
            if time.monotonic() > end:
                raise RuntimeError(f"a job has read nothing in {_WAIT_S:g} s")
            time.sleep(0.02)
        at = time.monotonic() + work["settle_s"]
        looks = []
        for _ in range(work["windows"] + 1):
            time.sleep(max(0.0, at - time.monotonic()))
            looks.append(self._look(mount))
            at += work["window_s"]
        if not all(job.still_reads() for job in self._jobs):
            raise RuntimeError("a job came to its end while it was measured: it needs more files")
        self.shares = []
        for before, after in zip(looks, looks[1:], strict=False):
            a, b = (now - then for then, now in zip(before.read, after.read, strict=True))
            self.shares.append(a / (a + b))
        self.error = max(abs(share - self._wanted) / self._wanted for share in self.shares)
        last = looks[-1]
        self.rate = (last.given - looks[0].given) / (work["windows"] * work["window_s"])
        self.agreement = (last.all + last.under_way * sample_bytes) / last.given
        if abs(self.agreement - 1) > _DISAGREE:
            raise RuntimeError(
                f"the daemons read {self.agreement:.3f} of the bytes that the mount gave: not all "
                "reads are under the policy"
            )


def _repeat(ctx: Context, mount: SlowFs, place: str, what: str, etcd: bool) -> list[_Measured]:
    repeats = ctx.workload["run"]["repeats"]
    runs = []
    for i in range(repeats):
        # Places of sockets have short paths.
        where = os.path.join(place, f"{'e' if etcd else 'o'}{i}")
        with Etcd() if etcd else contextlib.nullcontext() as store:
            one = _Measured(ctx, mount, where, store.endpoint if store is not None else None)
        shutil.rmtree(where, ignore_errors=True)
        runs.append(one)
        ctx.say(f"{what}: shares {', '.join(f'{s:.3f}' for s in one.shares)}, worst "
                f"{one.error:.1%} off; daemons' bytes {one.agreement:.3f} of the mount's "
                f"({i + 1}/{repeats})")  # fmt: skip
    return runs


def _add_cases(ctx: Context, out: Outcome, what: str, runs: list[_Measured]) -> None:
    shares = ctx.workload["shares"]
    out.cases += [
        Case(f"{what}: share, every second", "ratio", [s for one in runs for s in one.shares],
             shares[0] / sum(shares), "the policy"),
        Case(f"{what}: share, worst second: part that it is off", "ratio",
             [one.error for one in runs]),
        Case(f"{what}: both jobs together", "bytes/s", [one.rate for one in runs],
             ctx.workload["run"]["bandwidth_mb"] * 1e6, "the mount"),
        Case(f"{what}: source bytes by the daemons / by the mount", "ratio",
             [one.agreement for one in runs], 1.0, "the same"),
    ]  # fmt: skip


def run(ctx: Context, out: Outcome) -> None:
    """Adds run_share_error and run_share_error_one_daemon, with their cases."""
    work = ctx.workload["run"]
    data = os.path.join(ctx.scratch, "run")
    for name in "ab":
        files = os.path.join(data, name)
        make_files(files, work["files"], ctx.workload["bytes"], ctx.seed, sigma=0.0)
    time.sleep(_SETTLE_S)
    usable, why = Etcd.available()
    with (
        SlowFs(data, bandwidth_mb=work["bandwidth_mb"], read_ms=ctx.workload["read_ms"]) as mount,
        tempfile.TemporaryDirectory(prefix="forebay-", dir=socket_folder()) as place,
    ):
        joined = _repeat(ctx, mount, place, _JOINED, etcd=True) if usable else []
        one_daemon = _repeat(ctx, mount, place, _ONE_DAEMON, etcd=False)
    if usable:
        out.median("run_share_error", (one.error for one in joined))
        _add_cases(ctx, out, _JOINED, joined)
    else:
        out.notes.append(f"run_share_error was not measured: {why}")
    out.median("run_share_error_one_daemon", (one.error for one in one_daemon))
    _add_cases(ctx, out, _ONE_DAEMON, one_daemon)
    out.notes.append(
        f"forebay run: two PyTorch scripts with {work['workers']} workers, each with a data set "
        "and a daemon of its own, which etcd joins; one mount of "
        f"{work['bandwidth_mb']:g} MB/s; shares of the bytes that the daemons read from it, in "
        f"windows of {work['window_s']:g} s, {work['settle_s']:g} s after both began; one daemon: "
        "the same two with one --cache folder, and so one daemon, without etcd"
    )
