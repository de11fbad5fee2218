"""Nodes of a job as programs see them: options, statistics, status and reports, over real TCP."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import forebay
import pytest
from data_sets import written_long_ago
from forebay._internal import peers_watch
from forebay.views import daemon_status, peers_status, top, watch
from forebay.views.report import CAUSES, EpochReport, sentence, table

_FILES = 120
_BYTES = 6000


def _ports(n: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


_NODE = """
import json, logging, os, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
import forebay
node, kind, folder, data, nodes, epochs = json.loads(sys.argv[1])
options = dict(memory="48M", peers=nodes)
engine = (forebay.SharedEngine(folder=folder, **options) if kind == "daemon"
          else forebay.Engine(**options))
loader = forebay.DataLoader(data, batch_size=8, rank=node, world_size=2, engine=engine,
                            epochs=epochs)
print("ready", flush=True)
for line in sys.stdin:
    said = {}
    if line.startswith("epoch"):
        loader.set_epoch(int(line.split()[1]))
        said["samples"] = 0
        for batch in loader:
            for i in range(len(batch)):
                name = batch.paths[i].encode()
                assert bytes(batch[i]) == name * 1000, name
                said["samples"] += 1
    said.update(report=loader.report(), cluster=engine.cluster(), metrics=engine.metrics(),
                reads=[[r.source_reads, r.peer_reads, r.peer_bytes] for r in loader.stats()])
    print(json.dumps(said), flush=True)
"""


class _Nodes:
    """Two processes, each a node. One that a busy machine keeps waiting for longer than `wait`
    seconds reads from the source, and is dead to the other after `lease` seconds.
    """

    def __init__(self, tmp: Path, kind: str, wait: float = 20, lease: float = 20,
                 epochs: int | None = None) -> None:  # fmt: skip
        self.data = tmp / "data" / "a"
        self.data.mkdir(parents=True)
        for i in range(_FILES):
            name = f"a/{i:04}"
            (tmp / "data" / name).write_bytes(name.encode() * (_BYTES // len(name)))
        ports = _ports(2)
        nodes = ",".join(f"127.0.0.1:{port}" for port in ports)
        script = tmp / "node.py"
        script.write_text(_NODE)
        self.folders = [tmp / f"run{node}" for node in range(2)]
        self.logs = [tmp / f"log{node}" for node in range(2)]
        self.running = []
        for node in range(2):
            self.folders[node].mkdir(mode=0o700)
            what = [node, kind, str(self.folders[node]), str(tmp / "data"), nodes, epochs]
            with open(self.logs[node], "w") as log:
                self.running.append(subprocess.Popen(
                    [sys.executable, str(script), json.dumps(what)], stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=log, text=True,
                    env={**os.environ, "FOREBAY_NODE": str(node), "FOREBAY_PEER_LEASE": str(lease),
                         "FOREBAY_PEER_WAIT": str(wait),
                         "FOREBAY_PEER_SECRET": str(tmp / "secret")},
                ))  # fmt: skip
        for node in range(2):
            assert self.line(node) == "ready"

    def line(self, node: int) -> str:
        out = self.running[node].stdout
        assert out is not None
        said = out.readline().strip()
        assert said, self.logs[node].read_text()[-3000:]
        return said

    def tell(self, words: str, nodes: tuple[int, ...] = (0, 1)) -> list[dict[str, Any]]:
        for node in nodes:
            to = self.running[node].stdin
            assert to is not None
            to.write(f"{words}\n")
            to.flush()
        return [json.loads(self.line(node)) for node in nodes]

    def __enter__(self) -> _Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.running:
            try:
                process.wait(20)
            finally:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


@pytest.mark.parametrize("kind", ["embedded", "daemon"])
def test_two_nodes_read_each_sample_once(tmp_path: Path, kind: str) -> None:
    with _Nodes(tmp_path, kind) as nodes:
        said: list[dict[str, Any]] = []
        for epoch in range(3):
            said = nodes.tell(f"epoch {epoch}")
            assert [s["samples"] for s in said] == [_FILES // 2] * 2
        time.sleep(0.3)  # what is told of peers may be so old
        said = nodes.tell("stats")
        reads = sum(s["metrics"]["forebay_source_reads_total"] for s in said)
        assert _FILES <= reads <= _FILES + 4
        for node, s in enumerate(said):
            other = 1 - node
            assert s["cluster"]["node"] == node and s["cluster"]["nodes"] == 2
            (peer,) = [p for p in s["cluster"]["peers"] if p["node"] == other]
            assert peer["state"] == "connected" and peer["reads"] > 0 and peer["fault"] == ""
            given = sum(r[1] for r in s["reads"])
            assert 0 < given <= s["metrics"]["forebay_peer_reads_total"]
            assert sum(r[2] for r in s["reads"]) == given * _BYTES
            assert "of peers" in s["report"]
            if kind == "embedded":
                assert "forebay: peers: 2 nodes by " in nodes.logs[node].read_text()
                continue
            log = (nodes.folders[node] / "forebayd.log").read_text()
            assert "peers: 2 nodes by " in log
            client = forebay._forebay.SharedEngine.attach_running(str(nodes.folders[node]))
            status = json.loads(client.describe())
            assert status["cluster"]["peers"][0]["node"] == other
            text = daemon_status.describe(status, "here")
            assert f"\ncluster\n  node {node} of 2 nodes by " in text
            assert f"node {other} (" in text
            shown = "\n".join(str(line) for line in top.frame(status, None))
            assert "cluster" in shown


@pytest.mark.parametrize("kind", ["embedded", "daemon"])
def test_homes_by_use_read_nothing_twice(tmp_path: Path, kind: str) -> None:
    epochs = 6
    with _Nodes(tmp_path, kind, epochs=epochs) as nodes:
        for epoch in range(epochs):
            said = nodes.tell(f"epoch {epoch}")
            assert [s["samples"] for s in said] == [_FILES // 2] * 2
            end = time.monotonic() + 20
            while epoch == 0 and time.monotonic() < end:
                said = nodes.tell("stats")
                planned = [s["metrics"]["forebay_peer_planned_datasets"] for s in said]
                if planned == [1, 1]:
                    break
                time.sleep(0.05)
        said = nodes.tell("stats")
        assert [s["metrics"]["forebay_peer_planned_datasets"] for s in said] == [1, 1]
        reads = sum(s["metrics"]["forebay_source_reads_total"] for s in said)
        assert _FILES <= reads <= _FILES + 4


def test_the_report_names_a_node_that_was_killed(tmp_path: Path) -> None:
    with _Nodes(tmp_path, "embedded", wait=0.5, lease=1) as nodes:
        nodes.tell("epoch 0")
        os.kill(nodes.running[1].pid, signal.SIGKILL)
        nodes.running[1].wait()
        end = time.monotonic() + 30
        for epoch in range(1, 10_000):
            time.sleep(0.05)
            (said,) = nodes.tell(f"epoch {epoch}", (0,))
            assert said["samples"] == _FILES // 2
            (peer,) = [p for p in said["cluster"]["peers"] if p["node"] == 1]
            if peer["state"] == "dead" or time.monotonic() > end:
                break
        assert peer["state"] == "dead" and peer["fault"]
        assert f"node 1 ({peer['address']}), dead" in said["report"]
        nodes.running[1].stdin.close()


_RANK = """
import json, sys
import forebay
node, nodes, peers, folder, data, batch_size, state, steps = json.loads(sys.argv[1])
engine = forebay.Engine(memory="48M", peers=peers, cache_dir=folder, cache_bytes="16M")
loader = forebay.DataLoader(data, batch_size=batch_size, shuffle=True, seed=3, rank=node,
                            world_size=nodes, engine=engine)
if state is not None:
    loader.load_state_dict(state)
got = []
batches = iter(loader)
while len(got) < steps:
    batch = next(batches, None)
    if batch is None:
        batches = iter(loader)
        continue
    for i in range(len(batch)):
        assert bytes(batch[i]) == batch.paths[i].encode() * 1000, batch.paths[i]
    got.append([batch.paths[i] for i in range(len(batch))])
print(json.dumps([got, loader.state_dict()]), flush=True)
for _ in sys.stdin:  # the others may need this node
    print(json.dumps(engine.metrics()), flush=True)
"""


class _Job:
    """Ranks that take `steps` batches each, from `state` on, and stay until the end."""

    def __init__(self, tmp: Path, nodes: int, batch: int, steps: int, state: Any) -> None:
        self.logs = [tmp / f"log{nodes}-{node}" for node in range(nodes)]
        self.running = []
        peers = ",".join(f"127.0.0.1:{port}" for port in _ports(nodes))
        for node in range(nodes):
            what = [node, nodes, peers, str(tmp / f"cache{node}"), str(tmp / "data"), batch, state,
                    steps]  # fmt: skip
            with open(self.logs[node], "w") as log:
                self.running.append(subprocess.Popen(
                    [sys.executable, "-c", _RANK, json.dumps(what)], stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=log, text=True,
                    env={**os.environ, "FOREBAY_NODE": str(node), "FOREBAY_PEER_LEASE": "20",
                         "FOREBAY_PEER_WAIT": "20",
                         "FOREBAY_PEER_SECRET": str(tmp / "secret")},
                ))  # fmt: skip

    def lines(self) -> list[Any]:
        said = []
        for node, process in enumerate(self.running):
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, self.logs[node].read_text()[-3000:]
            said.append(json.loads(line))
        return said

    def sums(self) -> dict[str, int]:
        """Counters of all nodes together."""
        for process in self.running:
            assert process.stdin is not None
            process.stdin.write("metrics\n")
            process.stdin.flush()
        said = self.lines()
        return {name: sum(one[name] for one in said) for name in said[0]}

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.running:
            try:
                process.wait(20)
            finally:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


def test_a_restart_with_fewer_nodes_goes_on_with_their_folders(tmp_path: Path) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    files, step = 240, 24
    for i in range(files):
        name = f"a/{i:04}"
        (tmp_path / "data" / name).write_bytes(name.encode() * 1000)
        written_long_ago(tmp_path / "data" / name)
    with forebay.DataLoader(tmp_path / "data", batch_size=step, shuffle=True, seed=3,
                            memory="16M", peers=False) as whole:  # fmt: skip
        expected = [sorted(batch.paths) for _ in range(2) for batch in whole]
    state, left_out = None, 0
    skipped = lambda sums: sums["forebay_tier_skipped_writes_total"]
    # Four nodes end in the second epoch; three of them go on.
    for nodes, steps in ((4, 13), (3, 7)):
        with _Job(tmp_path, nodes, step // nodes, steps, state) as job:
            said = job.lines()
            state = said[0][1]
            assert all(one[1] == state for one in said)
            for k in range(steps):
                assert sorted(path for one in said for path in one[0][k]) == expected.pop(0)
            end = time.monotonic() + 30
            sums = job.sums()
            # Where a folder's thread has no time, a copy is left out, and read again by the next.
            while nodes == 4 and sums["forebay_tier_writes_total"] < files - skipped(sums):
                assert time.monotonic() < end, "nobody writes to the folders"
                time.sleep(0.05)
                sums = job.sums()
            left_out += skipped(sums)
            reads = sums["forebay_source_reads_total"]
            # A busy machine's.
            failed = sum(
                sums[f"forebay_{what}_total"]
                for what in ("peer_timeouts", "peer_refused", "peer_avoided", "source_hedged_reads")
            )
            if nodes == 4:
                assert files <= reads <= files + failed
            else:
                # Only what the fourth alone had; without folders it would be all of 7 steps of 24.
                assert reads < files / 2 + failed + left_out
                assert sums["forebay_tier_hits_total"] > 0
    assert not expected


def _cluster(**of_node_2: Any) -> dict[str, Any]:
    fine = dict(address="10.0.0.1:7421", state="connected", fault="", reads=10, bytes=1000,
                served=5, served_bytes=500, timeouts=0, refused=0, corrupt=0, lost=0,
                latency_ns=1_000_000)  # fmt: skip
    peers = [{**fine, "node": 1}, {**fine, "node": 2, **of_node_2}, {**fine, "node": 3}]
    return dict(node=0, nodes=4, coordinated=True, description="4 nodes by a list, tcp", health="",
                peers=peers)  # fmt: skip


def _report() -> EpochReport:
    import numpy as np

    return EpochReport(epoch=2, seconds=10.0, batches=1, samples=10, bytes=10,
                       wait={**dict.fromkeys(CAUSES, 0.0), "peer": 4.0}, source_reads=5,
                       source_bytes=5, batch_seconds=np.zeros(1), peer_reads=30,
                       peer_bytes=10 << 20)  # fmt: skip


def test_the_sentence_blames_the_right_node() -> None:
    assert peers_status.at_fault(None) == ""
    assert peers_status.at_fault(_cluster()) == ""
    late = _cluster(fault="no answer for 2.0 s", timeouts=3)
    assert peers_status.at_fault(late) == "node 2 (10.0.0.1:7421): no answer for 2.0 s"
    slow = _cluster(latency_ns=50_000_000)
    assert peers_status.at_fault(slow) == "node 2 (10.0.0.1:7421): a read takes 50.0 ms"
    assert sentence(_report(), late) == (
        "Epoch 2: 10 samples in 10.00 s; training waited 40% of the time, 100% of it for reads "
        "from other nodes (30 reads, 1.0 MiB/s; node 2 (10.0.0.1:7421): no answer for 2.0 s)."
    )
    assert sentence(_report()).endswith("reads from other nodes (30 reads, 1.0 MiB/s).")
    assert "of peers" in table([_report()])


def test_what_is_shown_of_a_cluster() -> None:
    assert peers_status.cluster_lines(None) == [] and peers_status.fault_lines(None) == []
    assert peers_status.fault_lines(_cluster()) == []
    bad = _cluster(state="dead", fault="silent\x1b for 5 s", lost=2, corrupt=1)
    lines = peers_status.cluster_lines(bad)
    assert lines[0] == "node 0 of 4 nodes by a list, tcp" and len(lines) == 4
    assert "dead: 10 samples" in lines[2] and "1 with wrong bytes, 2 lost with" in lines[2]
    assert "last fault: silent? for 5 s" in lines[2] and "\x1b" not in "".join(lines)
    assert peers_status.fault_lines(bad) == [lines[2].strip()]
    off = peers_status.cluster_lines(
        {**_cluster(), "coordinated": False, "health": "node 0 is off"}
    )
    assert off[0].endswith("; each reads for itself") and off[1] == "  node 0 is off"


def test_a_wait_for_peers_is_explained_by_the_status() -> None:
    stream = dict(job="j", rank=0, recent_stall_ns={**dict.fromkeys(CAUSES, 0), "peer": 5 * 10**9},
                  recent_ns=10**10)  # fmt: skip
    said = dict(clients=[dict(pid=1, streams=[stream])], cluster=_cluster(fault="cut", lost=1))
    assert "of it for reads from other nodes (node 2 (10.0.0.1:7421): cut)" in watch.why_idle(said)


@pytest.mark.parametrize("peers", [3, ["a:1"]])
def test_what_peers_takes(peers: Any) -> None:
    with pytest.raises(forebay.ArgumentError, match="peers is"):
        forebay.Engine(memory="16M", peers=peers)


def test_an_engine_alone_has_no_cluster(monkeypatch: pytest.MonkeyPatch,
                                        caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    monkeypatch.setenv("FOREBAY_PEERS", "nonsense")
    with pytest.raises(forebay.ArgumentError, match="FOREBAY_PEERS"):
        forebay.Engine(memory="16M")
    assert forebay.Engine(memory="16M", peers=False).cluster() is None
    monkeypatch.delenv("FOREBAY_PEERS")
    with caplog.at_level(logging.INFO, "forebay"):
        engine = forebay.Engine(memory="16M")
    assert engine.cluster() is None and not caplog.records


def test_a_second_rank_of_a_node_leaves_being_the_node_to_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("FOREBAY_PEERS", "nonsense")  # an error where it is looked at
    assert forebay.Engine(memory="16M").cluster() is None


def test_peers_that_cannot_be_had_are_a_line_in_the_log(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import logging, sys
        logging.basicConfig(level=logging.INFO)
        import forebay
        engine = forebay.Engine(memory="16M", peers="127.0.0.1:1,127.0.0.1:2")
        assert engine.cluster() is None
    """)
    missing = str(tmp_path / "nothing.so")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
        env={**os.environ, "FOREBAY_NODE": "0", "FOREBAY_PEER_TRANSPORT": "ucx",
             "FOREBAY_UCX_LIBRARY": missing,
             "FOREBAY_PEER_SECRET": str(tmp_path / "secret")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING:forebay:forebay: no peers: " in done.stderr


# ---- peers that are off are said to be, where the user looks

_TOLD = """
import json, logging, sys, time
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
import forebay
from forebay._internal import peers_watch
from forebay.views import daemon_status
kind, folder, data, peers, wait_for = json.loads(sys.argv[1])
peers_watch._LOOK_S = peers_watch._LASTED_S = 0.05
engine = (forebay.SharedEngine("32M", folder=folder, peers=peers, linger=0) if kind == "daemon"
          else forebay.Engine("32M", peers=peers))
until = time.monotonic() + 60
while wait_for not in engine.peers_problem() and time.monotonic() < until:
    time.sleep(0.02)
loader = forebay.DataLoader(data, 8, rank=0, world_size=1, engine=engine)
next(iter(loader))
said = {"report": loader.report(), "problem": engine.peers_problem(), "status": "",
        "wait": loader.stats()[-1].wait}
if kind == "daemon":
    described = json.loads(engine.client().describe())
    said["status"] = daemon_status.describe(described, folder)
print(json.dumps(said), flush=True)
sys.stdin.read()
time.sleep(0.3)  # some looks more
"""


class _Told:
    """A training process that waits until its peers have a problem."""

    def __init__(self, kind: str, folder: Path, data: Path, peers: Any, wait_for: str,
                 **env: str) -> None:  # fmt: skip
        arguments = json.dumps([kind, str(folder), str(data), peers, wait_for])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TOLD, arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **env},
        )  # fmt: skip

    def said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"problem": "", "error": self.log()}

    def log(self) -> str:
        _, log = self._process.communicate(timeout=120)
        return log


def _data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "a").mkdir(parents=True)
    for i in range(8):
        (tmp_path / "data" / "a" / f"{i}.bin").write_bytes(bytes(100))
    return tmp_path / "data"


def _warnings(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("WARNING:forebay:")]


def _await_gone(folder: Path) -> None:
    until = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["embedded", "daemon"])
def test_why_there_are_no_peers_is_said_once_a_node(tmp_path: Path, kind: str) -> None:
    """With torchrun's variables, and nothing asked for."""
    data, folder = _data(tmp_path), tmp_path / "run"
    variables = {
        "FOREBAY_PEER_TRANSPORT": "ucx", "FOREBAY_UCX_LIBRARY": str(tmp_path / "nothing.so"),
        "FOREBAY_PEER_SECRET": str(tmp_path / "secret"), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
    }  # fmt: skip
    ranks = [
        _Told(kind, folder, data, None, "no peers" if rank == 0 or kind == "daemon" else "",
              RANK=str(rank), LOCAL_RANK=str(rank), **variables)
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.said() for rank in ranks]
    logs = [rank.log() for rank in ranks]
    assert "nothing.so" in said[0]["problem"], (said, logs)
    assert "nothing.so" in said[0]["report"]
    assert kind == "embedded" or "nothing.so" in said[0]["status"]
    told = [_warnings(log) for log in logs]
    assert [len(lines) for lines in told] == [1, 0], told
    assert "nothing.so" in told[0][0]
    _await_gone(folder)


def test_a_daemon_that_was_started_without_peers(tmp_path: Path) -> None:
    data, folder = _data(tmp_path), tmp_path / "run"
    first = _Told("daemon", folder, data, False, "")
    assert first.said()["problem"] == ""
    second = _Told("daemon", folder, data, None, "started without them", FOREBAY_NODE="0",
                   FOREBAY_PEERS="127.0.0.1:1,127.0.0.1:2")  # fmt: skip
    assert "started without them" in second.said()["report"]
    assert len([line for line in _warnings(second.log()) if "started without them" in line]) == 1
    assert _warnings(first.log()) == []
    _await_gone(folder)


@pytest.mark.parametrize("kind", ["embedded", "daemon"])
def test_another_secret_is_said_on_both_nodes(tmp_path: Path, kind: str) -> None:
    """It is seen after the start, by who connects and by whom it connects to. The time that reads
    wait for the nodes to join is charged to them, not to the storage.
    """
    data = _data(tmp_path)
    peers = ",".join(f"127.0.0.1:{port}" for port in _ports(2))
    nodes = [
        _Told(kind, tmp_path / f"run{node}", data, peers, "another secret", FOREBAY_NODE=str(node),
              FOREBAY_PEER_SECRET=str(tmp_path / f"secret{node}"), FOREBAY_PEER_JOIN_WAIT="2")
        for node in range(2)
    ]  # fmt: skip
    for node in nodes:
        said = node.said()
        assert "another secret" in said["problem"], said
        assert "another secret" in said["report"]
        assert said["wait"]["peer"] > said["wait"]["source"], said
        assert kind == "embedded" or "another secret" in said["status"]
    for node in nodes:
        log = node.log()
        assert len([line for line in _warnings(log) if "another secret" in line]) == 1, log
    for node in range(2):
        _await_gone(tmp_path / f"run{node}")


def test_a_problem_is_said_when_it_has_lasted_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = peers_watch.PeersWatch()
    with caplog.at_level(logging.INFO, "forebay"):
        for now, problem in ((0, "slow"), (5, "slow"), (10, ""), (20, "away"), (34, "away")):
            watch.look(problem, now)
        assert caplog.records == []
        for now in (35, 40, 1000):
            watch.look("away", now)
        watch.look("", 1001)
        watch.look("", 1002)
        watch.look("broken", 1003, lasting=True)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert "away" in caplog.records[0].message and "broken" in caplog.records[2].message


def test_why_there_are_no_peers_is_in_the_status() -> None:
    assert peers_status.cluster_lines(None, "no peers: \x1b[2J") == ["no peers: ?[2J"]
    assert peers_status.cluster_lines(_cluster(), "") == peers_status.cluster_lines(_cluster())
