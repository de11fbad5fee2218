"""`forebay run` and `forebay mount` on several nodes: how often do they read the source together?

Every node is a network namespace; all read one slow mount. The script knows nothing of Forebay;
what it says of each pass, a checksum of all bytes in their order among it, is compared with the
same script without Forebay.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from forebay.slowfs import SlowFs
from forebay_testing import Cluster

from .data import make_files
from .measure import Case, Outcome
from .passes import await_end_of_daemons, drop_pages, one_pass, scripts_of
from .run import Context

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_cluster_script.py")
_FOREBAY = [sys.executable, "-m", "forebay.cli"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_RENDEZVOUS_PORT = 29400
# Files that have just been made may still be being made: they are left alone so long.
_SETTLE_S = 3.5
# What the test bed tells of the nodes; torchrun's arguments have to do without.
_TOLD = ("FOREBAY_PEERS", "FOREBAY_NODE", "FOREBAY_NODES", "RANK", "WORLD_SIZE", "LOCAL_RANK",
         "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip

Passes = list[list[dict[str, Any]]]
"""For each pass what every node says of it."""


class _Bed:
    """Nodes, the mount that is their storage, and a local disk for each."""

    def __init__(self, ctx: Context, cluster: Cluster, mount: SlowFs, folder: str) -> None:
        self.cluster = cluster
        self.nodes = range(cluster.nodes)
        self._work = ctx.workload
        self._seed = ctx.seed
        self._mount = mount
        self._folder = folder
        for node in self.nodes:
            os.makedirs(os.path.join(folder, str(node)), mode=0o700)

    def disk(self, node: int) -> str:
        return os.path.join(self._folder, str(node))

    def variables(self, node: int) -> dict[str, str]:
        return {
            "XDG_RUNTIME_DIR": self.disk(node),
            "SLURM_TMPDIR": self.disk(node),
            "FOREBAY_PEER_SECRET": os.path.join(self._folder, "secret"),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # that namespaces have no names for their addresses
            "PYTHONWARNINGS": "ignore::UserWarning",
        }

    def script(self, folder: str, *more: str) -> list[str]:
        work = self._work
        return [_SCRIPT, folder, "--seed", str(self._seed), "--workers", str(work["workers"]),
                "--batch", str(work["batch"]), *more]  # fmt: skip

    def under_run(self, *options: str) -> list[str]:
        return [*_FOREBAY, "run", "--quiet", "--source", str(self._mount.path), *options, "--"]

    def start(self, node: int, command: list[str], *, piped: bool = True) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE if piped else subprocess.DEVNULL
        return self.cluster.start(node, command, self.variables(node), stdin=pipe, stdout=pipe)


class _Beds:
    """Makes a new one for each measurement."""

    def __init__(self, ctx: Context, mount: SlowFs) -> None:
        self._ctx = ctx
        self._mount = mount
        self._made = 0

    @contextlib.contextmanager
    def bed(self, nodes: int) -> Iterator[_Bed]:
        self._made += 1
        folder = os.path.join(self._ctx.scratch, f"b{self._made}")
        with Cluster(nodes, gbit=self._ctx.workload["gbit"]) as cluster:
            bed = _Bed(self._ctx, cluster, self._mount, folder)
            yield bed
            await_end_of_daemons([bed.disk(node) for node in bed.nodes])


def _check(passes: Passes, expected: Passes, what: str) -> None:
    """Every pass that both made has the same samples, in the same order, with the same bytes."""
    for number, (ours, theirs) in enumerate(zip(passes, expected, strict=False)):
        for one, other in zip(ours, theirs, strict=True):
            for key in ("samples", "bytes", "checksum"):
                if one[key] != other[key]:
                    raise RuntimeError(
                        f"{what}, pass {number}, rank {one['rank']}: {key} {one[key]}, without "
                        f"Forebay {other[key]}"
                    )


def _seconds(passes: Passes, which: int) -> float:
    """From the first node's start of a pass to the last one's end of it."""
    nodes = passes[which]
    return float(max(one["end"] for one in nodes) - min(one["start"] for one in nodes))


def _later(passes: Passes) -> float:
    return statistics.median(_seconds(passes, which) for which in range(1, len(passes)))


# ---- forebay run


def _epochs(bed: _Bed, folder: str, count: int, *, forebay: bool) -> Passes:
    command = [sys.executable, *bed.script(folder)]
    if forebay:
        command = [*bed.under_run("--peers", bed.cluster.peers()), *command]
    with scripts_of([bed.start(node, command) for node in bed.nodes]) as scripts:
        return [one_pass(scripts) for _ in range(count)]


def _run(ctx: Context, out: Outcome, mount: SlowFs, beds: _Beds, volume: int) -> None:
    work = ctx.workload
    folder = str(mount.path)
    for nodes in work["nodes"]:
        shares: list[float] = []
        times: dict[str, list[float]] = {"plain": [], "plain first": [], "first": [], "later": []}
        for repeat in range(ctx.repeats):
            with beds.bed(nodes) as bed:
                plain = _epochs(bed, folder, work["epochs"], forebay=False)
            mount.reset()
            with beds.bed(nodes) as bed:
                ours = _epochs(bed, folder, work["epochs"], forebay=True)
                shares.append(mount.stats()["bytes_read"] / volume)
            _check(ours, plain, f"forebay run, {nodes} nodes")
            times["plain first"].append(_seconds(plain, 0))
            times["plain"].append(_later(plain))
            times["first"].append(_seconds(ours, 0))
            times["later"].append(_later(ours))
            ctx.say(f"run, {nodes} nodes: {shares[-1]:.4f} of the data set read; later epochs "
                    f"{times['later'][-1]:.2f} s, plain {times['plain'][-1]:.2f} s "
                    f"({repeat + 1}/{ctx.repeats})")  # fmt: skip
        out.worst_median("run_source_vs_dataset", shares)
        out.worst_speedup("run_later_vs_plain", times["later"], times["plain"])
        out.cases.append(
            Case(f"forebay run, {nodes} nodes: source bytes / data set", "ratio", shares,
                 limit=1.0, limit_name="every file once")
        )  # fmt: skip
        for name, rival in (("first", "plain first"), ("later", "plain")):
            out.cases.append(
                Case(f"forebay run, {nodes} nodes, {name} epoch", "MB/s",
                     [volume / 1e6 / t for t in times[name]],
                     rivals={"the same script, plain":
                             volume / 1e6 / statistics.median(times[rival])})
            )  # fmt: skip


# ---- torchrun


def _torchrun(ctx: Context, out: Outcome, mount: SlowFs, beds: _Beds, volume: int) -> None:
    """Nobody but torchrun's arguments tells `forebay run` of the nodes."""
    part = ctx.workload["torchrun"]
    shares = []
    for repeat in range(part["repeats"]):
        mount.reset()
        with beds.bed(part["nodes"]) as bed:
            unset = [word for name in _TOLD for word in ("-u", name)]
            endpoint = f"{bed.cluster.address(0)}:{_RENDEZVOUS_PORT}"
            processes = []
            for node in bed.nodes:
                command = [
                    "env", *unset, *bed.under_run(), *_TORCHRUN, "--nnodes", str(part["nodes"]),
                    "--node-rank", str(node), "--rdzv-endpoint", endpoint, "--nproc-per-node", "1",
                    *bed.script(str(mount.path), "--epochs", str(part["epochs"])),
                ]  # fmt: skip
                processes.append(bed.start(node, command, piped=False))
            codes = [process.wait(180) for process in processes]
            if any(codes):
                raise RuntimeError(f"forebay run -- torchrun ended with {codes}")
            shares.append(mount.stats()["bytes_read"] / volume)
        ctx.say(f"torchrun: {shares[-1]:.4f} of the data set read ({repeat + 1}/{part['repeats']})")
    out.cases.append(
        Case(f"forebay run -- torchrun, {part['nodes']} nodes, {part['epochs']} epochs: source "
             "bytes / data set", "ratio", shares, limit=1.0, limit_name="every file once")
    )  # fmt: skip


# ---- forebay mount


@contextlib.contextmanager
def _mounted(bed: _Bed, source: str) -> Iterator[list[str]]:
    """The source through a mount on each node."""
    folders = [os.path.join(bed.disk(node), "mnt") for node in bed.nodes]
    try:
        starting = []
        for node, folder in zip(bed.nodes, folders, strict=True):
            os.mkdir(folder)
            command = [*_FOREBAY, "mount", source, folder, "--peers", bed.cluster.peers()]
            starting.append(bed.start(node, command, piped=False))
        codes = [process.wait(60) for process in starting]
        if any(codes):
            raise RuntimeError(f"forebay mount ended with {codes}")
        yield folders
    finally:
        for folder in filter(os.path.ismount, folders):
            subprocess.run([*_FOREBAY, "unmount", "--lazy", folder], check=False)


def _mount_passes(bed: _Bed, folders: list[str], count: int) -> Passes:
    """Every node reads all files, each in an order of its own."""
    processes = [
        bed.start(node, [sys.executable, *bed.script(folder, "--whole")])
        for node, folder in zip(bed.nodes, folders, strict=True)
    ]
    found: Passes = []
    with scripts_of(processes) as scripts:
        for number in range(count):
            # Not before the first pass: to open a file is to have it copied.
            for folder in folders if number else ():
                drop_pages(folder)
            found.append(one_pass(scripts))
    return found


def _mount(ctx: Context, out: Outcome, mount: SlowFs, beds: _Beds, volume: int) -> None:
    work = ctx.workload
    part = work["mount"]
    for nodes in work["nodes"]:
        shares, rates = [], []
        with beds.bed(nodes) as bed:
            plain = _mount_passes(bed, [str(mount.path)] * nodes, 1)
        for repeat in range(part["repeats"]):
            mount.reset()
            with beds.bed(nodes) as bed, _mounted(bed, str(mount.path)) as folders:
                passes = _mount_passes(bed, folders, part["passes"])
                shares.append(mount.stats()["bytes_read"] / volume)
            _check(passes, plain, f"forebay mount, {nodes} nodes")
            rates.append(nodes * volume / 1e6 / _later(passes))
            ctx.say(f"mount, {nodes} nodes: {shares[-1]:.4f} of the data set read "
                    f"({repeat + 1}/{part['repeats']})")  # fmt: skip
        out.worst_median("mount_source_vs_dataset", shares)
        out.cases += [
            Case(f"forebay mount, {nodes} nodes: source bytes / data set", "ratio", shares,
                 limit=1.0, limit_name="every file once"),
            Case(f"forebay mount, {nodes} nodes, later passes, page cache dropped", "MB/s", rates,
                 rivals={"the mount itself, plain":
                         nodes * volume / 1e6 / _seconds(plain, 0)}),
        ]  # fmt: skip


_PARTS: dict[str, Callable[[Context, Outcome, SlowFs, _Beds, int], None]] = {
    "run": _run,
    "torchrun": _torchrun,
    "mount": _mount,
}


def run(ctx: Context) -> Outcome:
    work = ctx.workload
    out = Outcome()
    data = os.path.join(ctx.scratch, "data")
    paths = make_files(data, work["files"], work["mean_bytes"], ctx.seed)
    volume = sum(os.path.getsize(path) for path in paths)
    time.sleep(_SETTLE_S)
    with SlowFs(
        data, open_ms=work["latency_ms"], read_ms=work["latency_ms"], stat_ms=work["stat_ms"],
        readdir_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"],
        seed=ctx.seed,
    ) as mount:  # fmt: skip
        beds = _Beds(ctx, mount)
        for name in work["parts"]:
            _PARTS[name](ctx, out, mount, beds, volume)
            ctx.save(out)
    out.notes.append(
        f"{work['files']} files of {work['mean_bytes']} B on average on one mount of "
        f"{work['latency_ms']:g} ms, {work['workers']} workers a node, links of {work['gbit']:g} "
        f"Gbit/s; run: {work['epochs']} epochs of DistributedSampler, all nodes begin an epoch "
        f"together; mount: {work['mount']['passes']} passes in which every node reads all files"
    )
    return out
