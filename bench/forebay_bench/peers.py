"""Several nodes as one cache: how often they read the source, how fast they serve each other.

Every node is a network namespace with a rank of its own; all read one slow mount. Order and bytes
of every batch are checked against the sampler and the files.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forebay import _forebay
from forebay.commands import doctor
from forebay.loader import open_catalog
from forebay_testing import Cluster, Etcd, SlowFs

from .data import catalogs_in, make_files
from .measure import Case, Outcome
from .peers_cluster import Oracle, Ranks, cluster_seconds
from .peers_node import Spec
from .run import Context
from .torch_rival import best_workers

Epochs = Mapping[int, Sequence[Mapping[str, Any]]]
_PERFTEST_PORT = 13337
# What the transport sets where there is no RDMA (src/transport/ucx/ucx_config.cc).
_OUR_UCX = {"UCX_TCP_RX_SEG_SIZE": "264k", "UCX_ZCOPY_THRESH": "16k"}


def _mount(ctx: Context, data: str) -> SlowFs:
    work = ctx.workload
    return SlowFs(
        data, open_ms=work["latency_ms"], read_ms=work["latency_ms"], stat_ms=work["stat_ms"],
        readdir_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"],
        seed=ctx.seed,
    )  # fmt: skip


class Setup:
    """One mount, the data below it, and what every node's process needs."""

    def __init__(self, ctx: Context, mount: SlowFs, data: str) -> None:
        self.ctx = ctx
        self.work = ctx.workload
        self.mount = mount
        self.oracle = Oracle(data, ctx.seed)
        self._secrets = 0
        # The nodes find the index: what they read from the mount is samples.
        self.cache = os.path.join(ctx.scratch, "catalogs")
        with catalogs_in(self.cache):
            found = len(open_catalog(str(mount.path), progress=False))
        if found != len(self.oracle.files):
            raise RuntimeError(f"{mount.path} shows {found} files of {len(self.oracle.files)}")

    def specs(self, nodes: int, **how: Any) -> dict[int, Spec]:
        """Each node holds `share` of its part of the data."""
        tier = int(self.work["share"] * self.oracle.bytes / nodes)
        plain: dict[str, Any] = dict(
            root=str(self.mount.path), batch=self.work["batch"], world=nodes, seed=self.ctx.seed,
            memory=tier + self.work["staging_bytes"], memory_tier=tier,
        )  # fmt: skip
        return {node: Spec(rank=node, **{**plain, **how}) for node in range(nodes)}

    def variables(self, nodes: int, **more: str) -> dict[int, dict[str, str]]:
        self._secrets += 1
        secret = os.path.join(self.ctx.scratch, f"secret{self._secrets}")
        same = {"FOREBAY_CACHE_DIR": self.cache, "FOREBAY_PEER_SECRET": secret, **more}
        return {node: same for node in range(nodes)}

    def ranks(self, cluster: Cluster, specs: Mapping[int, Spec], **more: str) -> Ranks:
        variables = self.variables(cluster.nodes, **more)
        return Ranks(cluster, specs, logs=self.ctx.scratch, variables=variables)

    def check(self, specs: Mapping[int, Spec], epochs: Epochs, *, bytes_too: bool = True) -> None:
        for node, runs in epochs.items():
            for run in runs:
                self.oracle.check(specs[node], run["batches"], run["epoch"], bytes_too=bytes_too)


def rank_spread(epochs: Epochs, which: int) -> float:
    """(Slowest - fastest) / median of the ranks' times of one epoch."""
    took = [each[which]["end"] - each[which]["start"] for each in epochs.values()]
    return float((max(took) - min(took)) / statistics.median(took))


def batch_tail(epochs: Epochs, which: int) -> float:
    """p99 / median of the time from one batch to the next, all ranks together."""
    gaps: list[float] = []
    for runs in epochs.values():
        taken = [entry[2] for entry in runs[which]["batches"]]
        gaps += [b - a for a, b in zip(taken, taken[1:], strict=False)]
    gaps.sort()
    return gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))] / gaps[len(gaps) // 2]


# ---- the source


def _source(ctx: Context, out: Outcome, setup: Setup) -> None:
    work = ctx.workload
    later = range(1, work["epochs"])
    worst = 0.0
    spreads, first_spreads, tails = [], [], []
    for nodes in work["nodes"]:
        ratios: dict[str, list[float]] = {"on": [], "off": []}
        for repeat in range(ctx.repeats):
            for how, ratio in ratios.items():
                # Without coordination, once: it stands beside, and there is none on one node.
                if how == "off" and (repeat or nodes == 1):
                    continue
                specs = setup.specs(nodes, step_ms=work["step_ms"])
                setup.mount.reset()
                with Cluster(nodes, gbit=work["gbit"]) as cluster:
                    coordinate = "1" if how == "on" else "0"
                    with setup.ranks(cluster, specs, FOREBAY_PEER_COORDINATE=coordinate) as ranks:
                        epochs = ranks.epochs(work["epochs"])
                        ratio.append(setup.mount.stats()["bytes_read"] / setup.oracle.bytes)
                setup.check(specs, epochs)
                ctx.say(f"{nodes} nodes, coordination {how}: {ratio[-1]:.4f} of the data set read "
                        f"({repeat + 1}/{ctx.repeats})")  # fmt: skip
                if how == "on" and nodes == max(work["nodes"]):
                    spreads += [rank_spread(epochs, e) for e in later]
                    first_spreads.append(rank_spread(epochs, 0))
                    tails += [batch_tail(epochs, e) for e in later]
        worst = max(worst, *ratios["on"])
        name = "1 node" if nodes == 1 else f"{nodes} nodes"
        out.cases.append(
            Case(f"source bytes / data set, {name}", "ratio", ratios["on"], limit=1.0,
                 limit_name="every sample once",
                 rivals={"coordination off": ratios["off"][0]} if ratios["off"] else {})
        )  # fmt: skip
    out.figures["cluster_source_vs_dataset"] = worst
    out.median("rank_spread", spreads)
    out.median("batch_p99_vs_median", tails)
    most = max(work["nodes"])
    out.cases += [
        Case(f"rank spread, {most} nodes, later epochs", "ratio", spreads),
        Case(f"rank spread, {most} nodes, first epochs", "ratio", first_spreads),
        Case(f"batch p99 / median, {most} nodes, later epochs", "ratio", tails),
    ]
    out.notes.append(
        f"{work['files']} files of {work['mean_bytes']} B on average, {work['epochs']} epochs, "
        f"batches of {work['batch']} with a step of {work['step_ms']:g} ms; each of n nodes holds "
        f"{work['share']:g}/n of the data in memory, beside {work['staging_bytes'] >> 20} MiB to "
        f"read ahead; links of {work['gbit']:g} Gbit/s, a mount of {work['latency_ms']:g} ms; "
        "ranks never wait for each other"
    )


# ---- the first epoch


def _first(ctx: Context, out: Outcome, setup: Setup) -> None:
    """By a user's clock: from the first call on any node to the last node's last batch. Every node
    lists the files itself, or finds a list."""
    work = ctx.workload
    nodes = max(work["nodes"])
    catalog = _forebay.Catalog.build(str(setup.mount.path))
    sizes = catalog.lengths().tolist()
    paths = [catalog.object_path(i) for i in range(len(sizes))]
    specs = setup.specs(nodes, later=True)
    limits: list[float] = []
    took: dict[str, list[float]] = {"cold": [], "saved": []}
    for repeat in range(ctx.repeats):
        limits.append(float(_forebay.limit_read_files(paths, sizes, work["limit_threads"])[0]))
        for how, times in took.items():
            variables = setup.variables(nodes)
            if how == "cold":
                variables = {
                    node: {**each, "FOREBAY_CACHE_DIR":
                           os.path.join(ctx.scratch, f"unlisted{repeat}-{node}")}
                    for node, each in variables.items()
                }  # fmt: skip
            with (
                Cluster(nodes, gbit=work["gbit"]) as cluster,
                Ranks(cluster, specs, logs=ctx.scratch, variables=variables) as ranks,
            ):
                said = ranks.all(epochs=1)
            epochs = {node: each["epochs"] for node, each in said.items()}
            setup.check(specs, epochs)
            begun = min(each["opened"] for each in said.values())
            times.append(max(each[0]["end"] for each in epochs.values()) - begun)
            ctx.say(f"{nodes} nodes, first epoch, {how}: {times[-1]:.2f} s, the source alone "
                    f"{limits[-1]:.2f} s ({repeat + 1}/{ctx.repeats})")  # fmt: skip
    rate = setup.oracle.bytes / 1e6
    for how, times in took.items():
        out.speedup(f"first_{how}_vs_limit", times, limits)
        what = "listing included" if how == "cold" else "a saved list"
        out.cases.append(
            Case(f"first epoch, {nodes} nodes, {what}, joining included", "MB/s",
                 [rate / t for t in times], limit=rate / statistics.median(limits),
                 limit_name=f"{work['limit_threads']} plain threads that know the paths")
        )  # fmt: skip


# ---- PyTorch


def _torch(ctx: Context, out: Outcome, setup: Setup) -> None:
    work = ctx.workload
    nodes = max(work["nodes"])
    specs = setup.specs(nodes)

    def torch_later(workers: int) -> float:
        rival = setup.specs(nodes, kind="torch", workers=workers)
        with Cluster(nodes, gbit=work["gbit"]) as cluster, setup.ranks(cluster, rival) as ranks:
            epochs = ranks.epochs(2)
        setup.check(rival, epochs, bytes_too=False)
        return cluster_seconds(epochs, 1)

    fixed = work.get("workers")
    workers = fixed[0] if fixed and len(fixed) == 1 else 0
    workers = workers or best_workers(torch_later, ctx.say, start=4, counts=fixed)
    ours: list[float] = []
    theirs: list[float] = []
    as_bytes: list[float] = []
    rival = setup.specs(nodes, kind="torch", workers=workers)
    old_rival = setup.specs(nodes, kind="torch_bytes", workers=work["workers_bytes"])
    with (
        Cluster(nodes, gbit=work["gbit"]) as cluster,
        Cluster(nodes, gbit=work["gbit"]) as other,
        Cluster(nodes, gbit=work["gbit"]) as third,
        setup.ranks(third, old_rival) as old,
        setup.ranks(other, rival) as plain,
        setup.ranks(cluster, specs) as ranks,
    ):
        setup.check(rival, plain.epochs(1), bytes_too=False)
        setup.check(specs, ranks.epochs(2))
        for repeat in range(ctx.repeats):
            # The first has what was read ahead while PyTorch ran.
            epochs = ranks.epochs(3)
            setup.check(specs, epochs)
            ours.append(cluster_seconds(epochs, 2))
            of_torch = plain.epochs(1)
            setup.check(rival, of_torch, bytes_too=False)
            theirs.append(cluster_seconds(of_torch, 0))
            of_old = old.epochs(1)
            setup.check(old_rival, of_old, bytes_too=False)
            as_bytes.append(cluster_seconds(of_old, 0))
            ctx.say(f"{nodes} nodes: forebay {ours[-1]:.3f} s, torch ({workers} workers) "
                    f"{theirs[-1]:.3f} s, as bytes {as_bytes[-1]:.3f} s "
                    f"({repeat + 1}/{ctx.repeats})")  # fmt: skip
    out.speedup("later_vs_torch", ours, theirs)
    out.speedup("later_vs_torch_bytes", ours, as_bytes)
    rate = setup.oracle.bytes / 1e6
    name = f"PyTorch, {workers} workers a node"
    out.cases.append(
        Case(f"later epoch, {nodes} nodes, no step", "MB/s", [rate / t for t in ours],
             rivals={name: rate / statistics.median(theirs),
                     f"{work['workers_bytes']} workers a node, bytes":
                     rate / statistics.median(as_bytes)})
    )  # fmt: skip


# ---- the link


def perftest(
    cluster: Cluster, size: int, count: int, variables: Mapping[str, str] | None = None
) -> float:
    """Bytes a second of `ucx_perftest -t ucp_am_bw -E sleep` from node 0 to node 1."""
    common = ["ucx_perftest", "-p", str(_PERFTEST_PORT), "-E", "sleep"]
    server = cluster.start(
        1, common, variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    command = [*common, cluster.address(1), "-t", "ucp_am_bw", "-s", str(size), "-n", str(count),
               "-w", str(count // 10)]  # fmt: skip
    try:
        for _ in range(50):  # until the server listens
            client = cluster.start(
                0, command, variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            said, _ = client.communicate(timeout=300)
            final = re.search(r"Final:.*", said)
            if final is not None:
                # Messages a second, overall: the last column.
                return float(final[0].split()[-1]) * size
            if server.poll() is not None:
                break
        raise RuntimeError(f"ucx_perftest: {said[-500:]}")
    finally:
        server.kill()
        server.wait()


def peer_rate(ranks: Ranks, epochs: int) -> float:
    """Bytes a second that node 1 gets from node 0, over whole epochs."""
    peer, source = _reads(ranks)
    ranks.ask(1, epochs=epochs + 1)
    runs = ranks.answer(1)["epochs"]
    now_peer, now_source = _reads(ranks)
    samples = sum(len(entry[5]) for run in runs for entry in run["batches"])
    if now_source - source > 0.05 * samples:
        raise RuntimeError(f"{now_source - source} of {samples} samples came from the source")
    # What was read ahead before the clock ran came over the link, too, but not in this time.
    share = min(1.0, (now_peer - peer) / samples)
    runs = runs[1:]
    seconds = runs[-1]["end"] - runs[0]["start"]
    return float(share * sum(run["bytes"] for run in runs) / seconds)


def _reads(ranks: Ranks) -> tuple[int, int]:
    ranks.ask(1, stats=1)
    metrics = ranks.answer(1)["metrics"]
    return metrics["forebay_peer_reads_total"], metrics["forebay_source_reads_total"]


def _rates(ctx: Context, out: Outcome, setup: Setup) -> None:
    work = ctx.workload["rate"]
    data = os.path.join(ctx.scratch, "equal")
    make_files(data, work["files"], work["bytes"], ctx.seed, sigma=0.0)
    with _mount(ctx, data) as mount:
        _rates_from(ctx, out, setup, str(mount.path))


def _rates_from(ctx: Context, out: Outcome, setup: Setup, data: str) -> None:
    work = ctx.workload["rate"]
    total = work["files"] * work["bytes"]
    room = 2 * total + (64 << 20)
    # Node 0 has room for all, node 1 for none: whatever node 1 reads comes over the link.
    plain: dict[str, Any] = dict(
        root=data, batch=work["batch"], world=1, rank=0, seed=ctx.seed, touch=False
    )
    specs = {
        0: Spec(**plain, memory=room),
        1: Spec(**plain, memory=work["staging_bytes"], keep=False, knobs=work["knobs"]),
    }
    rival: list[float] = []
    ours: list[float] = []
    limited: list[float] = []
    usable = shutil.which("ucx_perftest") is not None
    with Cluster(2, gbit=None) as cluster, setup.ranks(cluster, specs) as ranks:
        ranks.ask(1, epochs=1)
        ranks.answer(1)
        for repeat in range(ctx.repeats):
            ours.append(peer_rate(ranks, work["epochs"]))
            if usable:
                rival.append(perftest(cluster, work["bytes"], work["messages"]))
            for node in range(2):
                cluster.rate(node, work["limit_gbit"])
            limited.append(peer_rate(ranks, work["limited_epochs"]))
            for node in range(2):
                cluster.rate(node, None)
            ctx.say(f"from a peer: {ours[-1] / 1e6:.0f} MB/s, ucx_perftest "
                    f"{rival[-1] / 1e6 if rival else 0:.0f} MB/s; {limited[-1] / 1e6:.1f} MB/s of "
                    f"{work['limit_gbit'] * 125:g} ({repeat + 1}/{ctx.repeats})")  # fmt: skip
    as_user = {**specs, 1: replace(specs[1], knobs={}, touch=True)}
    _default_rate(ctx, out, setup, as_user, usable)
    try:
        doctor.measure_transport("tls", count=10)
    except OSError as error:
        out.notes.append(f"no TLS was measured: {error}")
    else:
        _default_rate(ctx, out, setup, as_user, usable, tls=True)
    link = work["limit_gbit"] * 125e6
    out.median("peer_vs_link", (rate / link for rate in limited))
    limit = {}
    if usable:
        # Rates: the other way round than times.
        out.speedup("peer_vs_ucx_perftest", rival, ours)
        limit = dict(limit=statistics.median(rival) / 1e6,
                     limit_name="ucx_perftest -t ucp_am_bw -E sleep")  # fmt: skip
    else:
        out.notes.append("ucx_perftest is not installed (ucx-utils): nothing to compare with")
    out.cases += [
        Case(f"samples of {work['bytes']} B from a peer", "MB/s", [r / 1e6 for r in ours],
             **limit),  # type: ignore[arg-type]
        Case(f"the same over {work['limit_gbit']:g} Gbit/s", "MB/s", [r / 1e6 for r in limited],
             limit=link / 1e6, limit_name="the link"),
    ]  # fmt: skip


def _default_rate(
    ctx: Context,
    out: Outcome,
    setup: Setup,
    specs: dict[int, Spec],
    usable: bool,
    tls: bool = False,
) -> None:
    """What a user gets: default knobs and transport, or TLS, every byte checksummed;
    `ucx_perftest` with the settings of UCX that Forebay makes.
    """
    work = ctx.workload["rate"]
    how = "default knobs, TLS, checksummed" if tls else "default knobs, checksummed"
    variables = {"FOREBAY_PEER_TRANSPORT": "tls"} if tls else {}
    ours: list[float] = []
    rival: list[float] = []
    limited: list[float] = []
    with Cluster(2, gbit=None) as cluster, setup.ranks(cluster, specs, **variables) as ranks:
        ranks.ask(1, epochs=1)
        ranks.answer(1)
        for repeat in range(ctx.repeats):
            ours.append(peer_rate(ranks, work["epochs"]))
            if usable:
                rival.append(perftest(cluster, work["bytes"], work["messages"], _OUR_UCX))
            if tls:
                for node in range(2):
                    cluster.rate(node, work["limit_gbit"])
                limited.append(peer_rate(ranks, work["limited_epochs"]))
                for node in range(2):
                    cluster.rate(node, None)
            ctx.say(f"from a peer, {how}: {ours[-1] / 1e6:.0f} MB/s, "
                    f"ucx_perftest {rival[-1] / 1e6 if rival else 0:.0f} MB/s "
                    f"({repeat + 1}/{ctx.repeats})")  # fmt: skip
    case = Case(f"samples of {work['bytes']} B from a peer, {how}", "MB/s",
                [rate / 1e6 for rate in ours])  # fmt: skip
    link = work["limit_gbit"] * 125e6
    if tls:
        out.median("peer_tls_vs_link", (rate / link for rate in limited))
    if usable:
        out.speedup(f"peer_{'tls' if tls else 'default'}_vs_ucx_perftest", rival, ours)
        case.limit = statistics.median(rival) / 1e6
        case.limit_name = "ucx_perftest, " + " ".join(f"{k}={v}" for k, v in _OUR_UCX.items())
    out.cases.append(case)


# ---- finding a sample


def _lookups(ctx: Context, out: Outcome) -> None:
    work = ctx.workload["lookup"]
    usable, why = Etcd.available()
    locate: list[float] = []
    asked: list[float] = []
    if usable:
        with Etcd() as etcd:
            for i in range(ctx.repeats):
                found = _forebay.time_locate(work["samples"], work["nodes"], work["groups"], i)
                locate.append(statistics.median(found))
                found = _forebay.time_etcd_lookups(etcd.endpoint, work["keys"], work["asked"], i)
                asked.append(statistics.median(found))
    else:
        out.notes.append(f"no look-up in etcd was measured: {why}")
        for i in range(ctx.repeats):
            found = _forebay.time_locate(work["samples"], work["nodes"], work["groups"], i)
            locate.append(statistics.median(found))
    out.median("locate_ns", locate)
    rivals = {}
    if asked:
        out.median("etcd_lookup_us", asked)
        rivals["etcd"] = statistics.median(asked) * 1e3
    out.cases.append(
        Case(f"finding one of {work['samples']:,} samples on {work['nodes']} nodes", "ns", locate,
             rivals=rivals)
    )  # fmt: skip


# ---- locality


def _global(batches: Mapping[int, Sequence[Sequence[int]]], number: int) -> list[int]:
    return sorted(sample for each in batches.values() for sample in each[number])


def _fetched(ranks: Ranks) -> int:
    """Samples that all nodes together took from peers or the source."""
    names = ("forebay_peer_reads_total", "forebay_source_reads_total")
    return sum(said["metrics"][name] for said in ranks.stats().values() for name in names)


def _locality(ctx: Context, out: Outcome, setup: Setup) -> None:
    work = ctx.workload
    nodes = max(work["nodes"])
    shares: dict[bool, list[float]] = {True: [], False: []}
    batch = work["locality"]["batch"]
    count = work["locality"]["epochs"]
    for repeat in range(ctx.repeats):
        for locality in shares:
            specs = setup.specs(nodes, batch=batch, locality=locality, step_ms=2 * work["step_ms"])
            with Cluster(nodes, gbit=work["gbit"]) as cluster, setup.ranks(cluster, specs) as ranks:
                first = ranks.epochs(1)
                before = _fetched(ranks)
                later = ranks.epochs(count)
                # All that came from elsewhere, also what was pulled ahead of its use.
                elsewhere = _fetched(ranks) - before
            for e in range(count + 1):
                runs = first if e == 0 else later
                got = {
                    n: [entry[5] for entry in each[max(0, e - 1)]["batches"]]
                    for n, each in runs.items()
                }
                wanted = {n: setup.oracle.batches(e, n, nodes, batch) for n in runs}
                for number in range(len(wanted[0])):
                    if _global(got, number) != _global(wanted, number):
                        raise RuntimeError(f"epoch {e}: global batch {number} is another set")
            samples = sum(len(entry[5]) for runs in later.values() for run in runs
                          for entry in run["batches"])  # fmt: skip
            shares[locality].append(1 - elsewhere / samples)
            ctx.say(f"locality {'on' if locality else 'off'}: {shares[locality][-1]:.3f} local "
                    f"({repeat + 1}/{ctx.repeats})")  # fmt: skip
    out.median("local_share", shares[True])
    out.cases.append(
        Case(f"samples that are local, {nodes} nodes, batches of {batch}", "ratio", shares[True],
             limit=1.0, limit_name="all", rivals={"without": statistics.median(shares[False])})
    )  # fmt: skip


def run(ctx: Context) -> Outcome:
    work = ctx.workload
    out = Outcome()
    data = os.path.join(ctx.scratch, "data")
    make_files(data, work["files"], work["mean_bytes"], ctx.seed)
    with _mount(ctx, data) as mount:
        setup = Setup(ctx, mount, data)
        parts = work["parts"]
        if "source" in parts:
            _source(ctx, out, setup)
        if "first" in parts:
            _first(ctx, out, setup)
        if "torch" in parts:
            _torch(ctx, out, setup)
        if "locality" in parts:
            _locality(ctx, out, setup)
        if "rate" in parts:
            _rates(ctx, out, setup)
    if "lookup" in parts:
        _lookups(ctx, out)
    return out
