"""Random faults in a cluster of real processes on real links: whoever lives gets every sample of
its stream, right, in order and in time, and says which peer was at fault.

A world is four nodes that train without end while one fault after the other, a seed each, happens
to one of them: it is killed, cut off, has a link of a tenth, starts anew, or replies with wrong
bytes. Faults end before the next one begins.

The bound: a read waits for a peer for at most FOREBAY_PEER_WAIT, then for the source. A batch is
late by no more than twice that (its peer, and another holder), and a second for the source and for
processors that others use. A process that starts also waits for its peers, FOREBAY_PEER_JOIN_WAIT
at most.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Pulse, seed_count
from forebay_bench.data import make_files
from forebay_bench.peers_cluster import Oracle, Ranks
from forebay_bench.peers_node import Spec
from forebay_testing import Cluster, SlowFs

_usable, _reason = Cluster.available()
pytestmark = [
    pytest.mark.skipif(not _usable, reason=f"no test bed here: {_reason}"),
    pytest.mark.skipif(not SlowFs.available()[0], reason=SlowFs.available()[1]),
]

_NODES = 4
_FILES = 600
_BYTES = 20_000
_BATCH = 8
_GBIT = 0.2  # a tenth of it is less than the nodes want
_WAIT_S = 0.5
_LEASE_S = 1.0
_JOIN_S = 3.0
_SLACK_S = 1.0
_MOST_SEEDS = 300
_SEEDS_A_WORLD = 10

_COUNTERS = ("timeouts", "refused", "corrupt", "lost")
_FAULTS = ("kill", "partition", "slow", "restart", "corrupt")


def _crowd() -> float:
    """Where many more processes want to run than there are processors, waiting for a processor is
    no hang of ours."""
    return max(1.0, min(4.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2))


class World:
    def __init__(
        self, mount: SlowFs, oracle: Oracle, place: Path, pulse: Pulse, *,
        first: Sequence[int] = range(_NODES), step_ms: float = 20, **variables: str,
    ) -> None:  # fmt: skip
        """``first``: the nodes that are there from the start. ``variables``: of all nodes."""
        self._oracle = oracle
        self._pulse = pulse
        self._place = place
        self._specs: dict[int, Spec] = {}
        self._logs: list[tuple[int, Path]] = []  # of every process that there was, with its rank
        self._worst = 0.0
        self._more = variables
        tier = int(1.05 * oracle.bytes / _NODES)
        self._plain: dict[str, Any] = dict(
            root=str(mount.path), batch=_BATCH, world=_NODES, seed=7, step_ms=step_ms,
            memory=tier + (12 << 20), memory_tier=tier, read_ahead=1 << 20,
        )  # fmt: skip
        self._cluster = Cluster(_NODES, gbit=_GBIT)
        try:
            for node in first:
                self._new_log(node)
            variables = {node: self._variables() for node in first}
            self._ranks = Ranks(self._cluster, self._specs, logs=str(place), variables=variables)
            for node in first:
                self._ranks.ask(node, run=1)
        except BaseException:
            self._cluster.close()
            raise

    def _bound(self) -> float:
        return (2 * _WAIT_S + _SLACK_S) * _crowd() + 2 * self._pulse.longest

    def _variables(self, **more: str) -> dict[str, str]:
        return {
            "FOREBAY_PEER_SECRET": str(self._place / "secret"),
            "FOREBAY_PEER_LEASE": str(_LEASE_S),
            "FOREBAY_PEER_WAIT": str(_WAIT_S),
            "FOREBAY_PEER_JOIN_WAIT": str(_JOIN_S),
            **self._more,
            **more,
        }

    def _new_log(self, node: int) -> None:
        log = self._place / f"batches{len(self._logs)}"
        log.touch()
        self._logs.append((node, log))
        self._specs[node] = Spec(rank=node, log=str(log), **self._plain)

    # ---- what happens to nodes

    def _start(self, node: int, **more: str) -> None:
        self._new_log(node)
        self._ranks.specs[node] = self._specs[node]
        self._ranks.start(node, **self._variables(**more))
        self._ranks.answer(node, 60)  # it is ready
        self._ranks.ask(node, run=1)

    def _lines(self, node: int) -> int:
        return Path(self._specs[node].log).read_bytes().count(b"\n")

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, what
            time.sleep(0.02)

    def _go_on(self, batches: int) -> None:
        """Every node that lives gets that many more, in time."""
        before = {node: self._lines(node) for node in self._ranks.running()}
        for node, had in before.items():
            started = had == 0
            limit = self._bound() * 2 + (_JOIN_S + 5 if started else 0)
            self._until(
                lambda node=node, had=had: self._lines(node) >= had + batches,
                limit,
                f"node {node} hangs after {had} batches",
            )

    def _seen(self, victim: int) -> dict[int, tuple[dict[str, Any], str]]:
        """Of every other node: what it knows of the victim, and its report."""
        seen = {}
        for node in self._ranks.running():
            if node == victim:
                continue
            self._ranks.ask(node, stats=1)
            said = self._ranks.answer(node, 30)
            (peer,) = (each for each in said["cluster"]["peers"] if each["node"] == victim)
            seen[node] = (peer, said["report"])
        return seen

    def suffer(self, seed: int) -> None:
        """One seed: a fault, what must follow from it, and its end."""
        rng = random.Random(seed)
        fault = _FAULTS[seed % len(_FAULTS)] if seed < 20 else rng.choice(_FAULTS)
        victim = rng.randrange(_NODES)
        print(f"seed {seed}: {fault} of node {victim}")
        time.sleep(rng.uniform(0, 0.3))
        # After the fault before this one it is taken back, or nobody could notice another.
        self._until(
            lambda: any(peer["state"] == "connected" for peer, _ in self._seen(victim).values()),
            4 * self._bound() + 10,
            f"nobody takes node {victim} back",
        )
        before = self._seen(victim)
        if fault == "kill":
            self._ranks.kill(victim)
        elif fault == "partition":
            self._cluster.partition(victim)
        elif fault == "slow":
            self._cluster.slow(victim)
        elif fault == "restart":
            self._ranks.kill(victim)
            self._start(victim)
        else:
            self._ranks.kill(victim)
            self._start(victim, FOREBAY_PEER_FAULT="corrupt:2")
        self._go_on(rng.randrange(5, 30))
        self._named(fault, victim, before)
        if fault == "kill":
            self._start(victim)
        elif fault == "corrupt":
            self._ranks.kill(victim)
            self._start(victim)
        else:
            self._cluster.restore(victim)
        self._go_on(5)

    def _named(
        self, fault: str, victim: int, before: dict[int, tuple[dict[str, Any], str]]
    ) -> None:
        """Somebody was failed by the victim, says how, and its report has the victim's name."""

        def named() -> bool:
            for node, (peer, report) in self._seen(victim).items():
                counters = ("corrupt",) if fault == "corrupt" else _COUNTERS
                grew = any(peer[name] > before[node][0][name] for name in counters)
                # Between two requests a connection is lost without one.
                said = fault in ("kill", "restart") and peer["faults"] > before[node][0]["faults"]
                slow = fault == "slow" and peer["latency_ns"] > 100e6
                if (grew or said or slow) and f"node {victim}" in report:
                    return True
            return False

        self._until(named, 4 * self._bound(), f"nobody says that node {victim} had a {fault}")

    # ---- what was delivered

    def check(self) -> None:
        for rank, log in self._logs:
            self._check_one(rank, log)
        print(f"the longest wait was {self._worst:.2f} s, the bound is {self._bound():.1f} s")

    def _check_one(self, rank: int, log: Path) -> None:
        """From the start of its process on nothing is missing, whenever it ended."""
        lines = log.read_text().split("\n")[:-1]
        expected: list[list[int]] = []
        at = epoch = 0
        for i, line in enumerate(lines):
            number_of_epoch, number, _, wait, crc, samples = json.loads(line)
            if at == len(expected):
                epoch += 1 if expected else 0
                expected, at = self._oracle.batches(epoch, rank, _NODES, _BATCH), 0
            where = f"rank {rank}, epoch {epoch}, batch {at} ({log.name})"
            assert (number_of_epoch, number) == (epoch, at), where
            assert samples == expected[at], f"{where}: another order"
            assert crc == self._oracle.checksum(samples), f"{where}: wrong bytes"
            if i > 0:
                self._worst = max(self._worst, wait)
            limit = self._bound() + (_JOIN_S if i == 0 else 0)
            assert wait <= limit, f"{where}: {wait:.2f} s, the bound is {limit:.2f} s"
            at += 1

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self._ranks.close()
        self._cluster.close()


def _groups() -> list[range]:
    seeds = min(seed_count(), _MOST_SEEDS)
    return [range(at, min(at + _SEEDS_A_WORLD, seeds)) for at in range(0, seeds, _SEEDS_A_WORLD)]


@pytest.mark.seeds
@pytest.mark.parametrize("seeds", _groups(), ids=lambda group: f"seeds{group.start}")
def test_faults_of_a_peer_reach_nobody(seeds: range, tmp_path: Path) -> None:
    make_files(str(tmp_path / "data"), _FILES, _BYTES, 1)
    oracle = Oracle(str(tmp_path / "data"), 7)
    with (
        tempfile.TemporaryDirectory(prefix="forebay-faults-", dir="/tmp") as place,
        SlowFs(tmp_path / "data", open_ms=2, read_ms=2) as mount,
        Pulse() as pulse,
    ):
        world = World(mount, oracle, Path(place), pulse)
        try:
            world._go_on(3)
            for seed in seeds:
                world.suffer(seed)
        finally:
            world.close()
        world.check()


# ---- node 0 holds the list of members, until it is gone


def _told(world: World, node: int) -> dict[str, Any]:
    world._ranks.ask(node, stats=1)
    return world._ranks.answer(node, 30)


def _await_holder(world: World, holder: int) -> None:
    """All that live see each other, and one of them keeps the list."""
    living = world._ranks.running()

    def settled() -> bool:
        for node in living:
            cluster = _told(world, node)["cluster"]
            words = "registrar at" if node == holder else f"registered with node {holder} at"
            states = {each["node"]: each["state"] for each in cluster["peers"]}
            if words not in cluster["description"]:
                return False
            if any(states.get(peer) != "connected" for peer in living if peer != node):
                return False
        return True

    world._until(settled, 60, f"node {holder} does not hold the list of {living}")


def test_node_0_dies_in_the_first_epoch_and_another_comes_late(tmp_path: Path) -> None:
    make_files(str(tmp_path / "data"), _FILES, _BYTES, 1)
    oracle = Oracle(str(tmp_path / "data"), 7)
    with (
        tempfile.TemporaryDirectory(prefix="forebay-faults-", dir="/tmp") as place,
        SlowFs(tmp_path / "data", open_ms=2, read_ms=2) as mount,
        Pulse() as pulse,
    ):
        world = World(
            mount, oracle, Path(place), pulse, first=range(3), step_ms=200, FOREBAY_PEERS="auto"
        )
        try:
            world._go_on(2)
            assert world._lines(0) < _FILES // _NODES // _BATCH, "it is in its first epoch"
            world._ranks.kill(0)
            _await_holder(world, 1)
            world._start(3)
            _await_holder(world, 1)
            world._go_on(2)
            world._until(
                lambda: sum(each["reads"] for each in _told(world, 3)["cluster"]["peers"]) > 20,
                60,
                "the late joiner gets nothing from its peers",
            )
            # Who took over dies as well; node 0 returns after that, and gets the list back.
            world._ranks.kill(1)
            _await_holder(world, 2)
            world._start(0)
            _await_holder(world, 0)
            world._go_on(5)
        finally:
            world.close()
        world.check()
