"""The test bed of several nodes: namespaces, links and processes are made, cut, slowed, removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forebay_bench.peers_cluster import NodeFailed, Oracle, Ranks
from forebay_bench.peers_node import Spec
from forebay_testing import Cluster, SlowFs

_usable, _reason = Cluster.available()
pytestmark = pytest.mark.skipif(not _usable, reason=f"no test bed here: {_reason}")
needs_fuse = pytest.mark.skipif(not SlowFs.available()[0], reason=SlowFs.available()[1])

_PORT = 5000
_BYTES = 1 << 20
_SERVER = f"""
import socket
server = socket.create_server(("", {_PORT}))
print("ready", flush=True)
while True:
    one, _ = server.accept()
    one.sendall(bytes({_BYTES}))
    one.close()
"""
_CLIENT = f"""
import socket, sys
one = socket.create_connection((sys.argv[1], {_PORT}), float(sys.argv[2]))
got = 0
while data := one.recv(1 << 16):
    got += len(data)
print(got)
"""


def _links() -> str:
    return subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(3, gbit=1) as made:
        server = made.start(1, [sys.executable, "-c", _SERVER], stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        yield made


def _fetch(cluster: Cluster, node: int, of: int = 1, patience: float = 20) -> int:
    """Bytes that came, or -1."""
    client = cluster.start(
        node, [sys.executable, "-c", _CLIENT, cluster.address(of), str(patience)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    said, _ = client.communicate(timeout=60)
    return int(said) if client.returncode == 0 else -1


def test_nodes_reach_each_other_until_they_are_cut_off(cluster: Cluster) -> None:
    assert _fetch(cluster, 0) == _fetch(cluster, 2) == _BYTES
    cluster.partition(1)
    assert _fetch(cluster, 0, patience=0.4) == -1
    cluster.heal(1)
    assert _fetch(cluster, 0) == _BYTES
    cluster.link(1, False)
    assert _fetch(cluster, 0, patience=0.4) == -1
    cluster.restore(1)
    assert _fetch(cluster, 0) == _BYTES


def test_a_link_has_its_rate(cluster: Cluster) -> None:
    assert cluster.rates() == [1e9] * 3
    cluster.slow(1, 50)
    assert cluster.rates() == [1e9, 2e7, 1e9]
    start = time.monotonic()
    assert _fetch(cluster, 0) == _BYTES
    assert time.monotonic() - start > 0.8 * (_BYTES - (128 << 10)) * 8 / 2e7  # never sooner
    cluster.rate(1, None)
    assert cluster.rates() == [1e9, 0, 1e9]
    cluster.restore(1)
    assert cluster.rates() == [1e9] * 3


def test_processes_are_killed_and_started_again(cluster: Cluster) -> None:
    assert cluster.running(1) and not cluster.running(0)
    cluster.kill(1)
    assert not cluster.running(1) and _fetch(cluster, 0, patience=0.4) == -1
    cluster.restart(1)
    until = time.monotonic() + 60
    while _fetch(cluster, 0) == -1:
        assert time.monotonic() < until
    assert cluster.running(1)


def test_nothing_of_it_stays_and_the_machine_is_not_touched() -> None:
    before, descriptors = _links(), len(os.listdir("/proc/self/fd"))
    with Cluster(2) as made:
        sleeper = made.start(0, ["sleep", "60"])
        namespace = os.readlink(f"/proc/{sleeper.pid}/ns/net")
        assert namespace != os.readlink("/proc/self/ns/net")
        assert os.readlink(f"/proc/{sleeper.pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
        assert _links() == before
    assert sleeper.poll() == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert _links() == before


def test_by_hand_and_killed_without_a_word(tmp_path: Path) -> None:
    """Whoever kills the command with -9 kills the nodes, too."""
    script = (
        "import os, time; out = open(os.environ['PLACE'] + os.environ['RANK'], 'w')\n"
        "print(os.getpid(), file=out, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-m", "forebay_testing", "--nodes", "2", "--",
               sys.executable, "-c", script]  # fmt: skip
    hand = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PLACE": f"{tmp_path}/"},
    )  # fmt: skip
    try:
        assert hand.stdin is not None and hand.stdout is not None
        for order in ("slow 1", "partition 0", "kill 0", "status"):
            print(order, file=hand.stdin, flush=True)
        lines = [hand.stdout.readline() for _ in range(4)]
        assert [line.split()[:2] for line in lines] == [["node", "0"], ["node", "1"]] * 2
        assert "does not run" in lines[2] and "1 Gbit/s  runs" in lines[3]
        until = time.monotonic() + 20
        while not (tmp_path / "1").exists() or not (tmp_path / "1").read_text():
            assert time.monotonic() < until
            time.sleep(0.01)
        pid = int((tmp_path / "1").read_text())
    finally:
        hand.kill()
        hand.communicate()
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


@needs_fuse
def test_ranks_of_all_nodes_read_one_mount(folder, tmp_path: Path) -> None:
    """The oracle sees what is wrong."""
    oracle = Oracle(str(folder.root), 3)
    specs = {}
    with SlowFs(folder.root, read_ms=1) as mount, Cluster(2) as cluster:
        for node in range(2):
            specs[node] = Spec(str(mount.path), 8, node, 2, seed=3, memory=64 << 20)
        with Ranks(cluster, specs, logs=str(tmp_path)) as ranks:
            epochs = ranks.epochs(2)
        assert mount.stats()["bytes_read"] >= oracle.bytes
        for node, spec in specs.items():
            for number in range(2):
                batches = epochs[node][number]["batches"]
                oracle.check(spec, batches, number)
                with pytest.raises(RuntimeError, match="another order"):
                    oracle.check(spec, batches, number + 1)
        broken = json.loads(json.dumps(batches))
        broken[1][4] ^= 1
        with pytest.raises(RuntimeError, match="wrong bytes in batch 1"):
            oracle.check(spec, broken, 1)


def test_a_rank_that_ends_is_told_with_its_words(tmp_path: Path) -> None:
    spec = Spec(str(tmp_path / "nothing"), 8, 0, 1)
    with Cluster(1) as cluster, pytest.raises(NodeFailed, match="nothing"):
        Ranks(cluster, {0: spec}, logs=str(tmp_path))
