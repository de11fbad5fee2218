"""Strangers at every port of a running job hear no more than a refusal, and change nothing."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Pulse
from forebay_testing import Cluster
from test_peers import _FILES, _Nodes

_CONNECTIONS = 10_000
# The transport's hello, 16 bytes; a frame by which a member is refused; an alert of TLS.
_REFUSAL = 256
_HELLO = b"FBYTCP1\n" + struct.pack("<II", 1, 0)


def _ports(pids: list[int]) -> set[int]:
    """The TCP ports at which these processes listen."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(fd)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            ports.add(int(fields[1].split(":")[1], 16))
    return ports


def _family(pid: int) -> list[int]:
    """A process and its children's children."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def _words(rng: random.Random) -> Iterator[bytes]:
    """What a stranger says: noise, other protocols, and ours up to the secret."""
    while True:
        yield b""
        yield rng.randbytes(rng.randrange(1, 600))
        yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        yield b"\x16\x03\x01\x00\xf8\x01\x00\x00\xf4\x03\x03" + rng.randbytes(80)
        yield _HELLO
        yield _HELLO[: rng.randrange(1, 16)]
        yield _HELLO + rng.randbytes(rng.randrange(1, 400))
        yield _HELLO + struct.pack("<IIQ", rng.randrange(1 << 32), 0, rng.randrange(1 << 48))
        yield _HELLO + struct.pack("<IIQ", 40, 0, 0) + rng.randbytes(40)
        yield struct.pack("<I", rng.randrange(1 << 16)) + rng.randbytes(100)


class _Strangers(threading.Thread):
    """Connects and talks until it has done so `count` times; keeps `held` connections open."""

    def __init__(
        self, places: list[tuple[str, int]], count: int, seed: int, held: int = 40
    ) -> None:
        super().__init__()
        self.most = 0  # bytes that one of them was told
        self.heard: set[bytes] = set()
        self.made = 0
        self.reached: set[tuple[str, int]] = set()
        self._places = sorted(places)
        self._count = count
        self._held = held
        self._rng = random.Random(seed)

    def run(self) -> None:
        open_ones: list[tuple[socket.socket, bytearray]] = []
        words = _words(self._rng)
        for i in range(self._count):
            one = socket.socket()
            one.settimeout(20)
            # Each place is told each of the ten things, whatever number of places there is.
            place = self._places[(i + i // 10) % len(self._places)]
            try:
                one.connect(place)
                self.reached.add(place)
                one.sendall(next(words))
            except (BrokenPipeError, ConnectionError):
                pass
            one.setblocking(False)
            if self._rng.random() < 0.2:  # gone with a reset
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.made += 1
            open_ones.append((one, bytearray()))
            if len(open_ones) > self._held:
                self._listen(open_ones)
                self._end(open_ones.pop(self._rng.randrange(len(open_ones))))
        for each in open_ones:
            self._end(each)

    def wait_for_answers(self, seconds: float) -> None:
        """Says each thing once at each place, and hears all that is answered in that time."""
        words = _words(self._rng)
        ones: list[tuple[socket.socket, bytearray]] = []
        for word in [next(words) for _ in range(10)]:
            for place in self._places:
                one = socket.socket()
                with contextlib.suppress(OSError):
                    one.settimeout(20)
                    one.connect(place)
                    one.sendall(word)
                one.setblocking(False)
                ones.append((one, bytearray()))
            # Fewer at a time than strangers may be: none is closed for another's sake.
            until = time.monotonic() + seconds / 10
            while time.monotonic() < until:
                self._listen(ones)
                time.sleep(0.005)
            while ones:
                self._end(ones.pop())

    def _listen(self, ones: list[tuple[socket.socket, bytearray]]) -> None:
        ready = select.select([one for one, _ in ones], [], [], 0)[0]
        for one, got in ones:
            if one in ready:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    got += one.recv(1 << 16)

    def _end(self, one: tuple[socket.socket, bytearray]) -> None:
        self._listen([one])
        one[0].close()
        self.most = max(self.most, len(one[1]))
        self.heard.add(bytes(one[1]))


@pytest.mark.parametrize(("transport", "name"), [("", "tcp at "), ("tls", "tls 1.3")])
def test_strangers_on_every_port_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, name: str
) -> None:
    """10,000 connections to the ports of members and of data, while two nodes train."""
    monkeypatch.setenv("FOREBAY_PEER_TRANSPORT", transport)
    with _Nodes(tmp_path, "embedded") as nodes:
        said = nodes.tell("epoch 0")
        assert all(name in one["cluster"]["description"] for one in said), said
        ports = _ports([pid for one in nodes.running for pid in _family(one.pid)])
        assert len(ports) >= 3, "two of data, and at least one of members"
        strangers = _Strangers([("127.0.0.1", port) for port in ports], _CONNECTIONS, seed=7)
        strangers.start()
        epoch = 1
        while strangers.is_alive() or epoch < 4:
            # Each sample's bytes are compared by the nodes.
            said = nodes.tell(f"epoch {epoch}")
            assert [one["samples"] for one in said] == [_FILES // 2] * 2
            epoch += 1
        strangers.join()
        said = nodes.tell("report")
        metrics = [one["metrics"] for one in said]
        # Nobody lost its place: every sample was read once for both, and no ask was in vain.
        assert sum(one["forebay_source_reads_total"] for one in metrics) == _FILES
        for what in ("timeouts", "lost", "corrupt"):
            assert sum(one[f"forebay_peer_{what}_total"] for one in metrics) == 0, what
        assert sum(one["forebay_peer_reads_total"] for one in metrics) > 0
        assert sum(one["forebay_peer_strangers_total"] for one in metrics) > 0
        assert all(one["cluster"]["peers"][0]["state"] == "connected" for one in said), said
    assert strangers.made == _CONNECTIONS
    assert strangers.most <= _REFUSAL, sorted(strangers.heard, key=len)[-1]
    said_all = b"".join(strangers.heard)
    assert (tmp_path / "secret").read_bytes().strip() not in said_all
    assert b"a/00" not in said_all, "a sample's bytes are its name"


# ---- four nodes, and a stranger with a network of its own

_NODES = 4
_SAMPLES = 400
_SAMPLE_BYTES = 6000
_PAGE = 9417  # the web page of daemons

_NODE = """
import json, sys, time
import forebay
node, nodes, folder, page, data, size = json.loads(sys.argv[1])
options = dict(memory="48M")
engine = (forebay.SharedEngine(folder=folder, metrics_port=page, linger=0, **options) if folder
          else forebay.Engine(**options))
loader = forebay.DataLoader(data, batch_size=10, shuffle=True, rank=node, world_size=nodes,
                            engine=engine)
print("ready", flush=True)
for line in sys.stdin:
    loader.set_epoch(int(line))
    said = {"samples": 0, "longest": 0.0}
    before = time.monotonic()
    for batch in loader:
        said["longest"] = max(said["longest"], time.monotonic() - before)
        for i in range(len(batch)):
            name = batch.paths[i].encode()
            assert bytes(batch[i]) == name * (size // len(name)), name
            said["samples"] += 1
        before = time.monotonic()
    said.update(cluster=engine.cluster(), metrics=engine.metrics())
    print(json.dumps(said), flush=True)
"""

_STRANGER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_strangers import _Strangers
strangers = _Strangers([tuple(place) for place in json.loads(sys.argv[2])], int(sys.argv[3]), 11)
strangers.wait_for_answers(1)
strangers.run()
print(json.dumps([strangers.made, sorted(strangers.reached),
                  [heard.hex() for heard in strangers.heard]]))
"""


def _listening(pid: int) -> set[int]:
    """The ports at which somebody listens in the network of a process, at any address."""
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports.add(int(fields[1].split(":")[1], 16))
    return ports


class _Job:
    """Four nodes, of which the first two have a daemon with a web page."""

    def __init__(self, cluster: Cluster, tmp: Path, variables: dict[str, str]) -> None:
        data = tmp / "data" / "a"
        data.mkdir(parents=True)
        for i in range(_SAMPLES):
            name = f"a/{i:04}"
            (tmp / "data" / name).write_bytes(name.encode() * (_SAMPLE_BYTES // len(name)))
        self.logs = [tmp / f"log{node}" for node in range(_NODES)]
        self.running = []
        for node in range(_NODES):
            folder = tmp / f"run{node}"
            folder.mkdir(mode=0o700)
            what = [node, _NODES, str(folder) if node < 2 else "", _PAGE, str(tmp / "data"),
                    _SAMPLE_BYTES]  # fmt: skip
            environment = {
                "WORLD_SIZE": str(_NODES), "FOREBAY_NODES": str(_NODES), "FOREBAY_PEER_LEASE": "20",
                "FOREBAY_PEER_WAIT": "20", "FOREBAY_PEER_SECRET": str(tmp / "secret"), **variables,
            }  # fmt: skip
            with open(self.logs[node], "w") as log:
                self.running.append(cluster.start(
                    node, [sys.executable, "-c", _NODE, json.dumps(what)], environment,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                ))  # fmt: skip
        assert [self._line(node) for node in range(_NODES)] == ["ready"] * _NODES

    def _line(self, node: int) -> str:
        out = self.running[node].stdout
        assert out is not None
        said = out.readline().strip()
        assert said, self.logs[node].read_text()[-3000:]
        return said

    def epoch(self, epoch: int) -> list[dict[str, Any]]:
        for one in self.running:
            assert one.stdin is not None
            one.stdin.write(f"{epoch}\n")
            one.stdin.flush()
        said = [json.loads(self._line(node)) for node in range(_NODES)]
        assert [one["samples"] for one in said] == [_SAMPLES // _NODES] * _NODES
        return said

    def end(self) -> None:
        for one in self.running:
            assert one.stdin is not None
            one.stdin.close()
        for one in self.running:
            one.wait(20)


@pytest.mark.skipif(not Cluster.available()[0], reason=Cluster.available()[1])
@pytest.mark.parametrize(("by", "transport", "name"),
                         [("list", "", "tcp at "), ("torchrun", "tls", "tls 1.3")])  # fmt: skip
def test_a_stranger_beside_a_job_of_four_nodes(
    tmp_path: Path, by: str, transport: str, name: str
) -> None:
    """10,000 connections from another network to all ports of all nodes: none is told more than a
    refusal, no sample changes, and no batch is late by more than a second.
    """
    with Cluster(_NODES + 1, gbit=None) as cluster, Pulse() as pulse:
        variables = {"FOREBAY_PEER_TRANSPORT": transport}
        if by == "list":  # of the first four
            variables["FOREBAY_PEERS"] = cluster.peers().rpartition(",")[0]
        else:
            variables |= {"FOREBAY_PEERS": "auto", "FOREBAY_NODE": "", "FOREBAY_NODES": "",
                          "GROUP_WORLD_SIZE": str(_NODES)}  # fmt: skip
        job = _Job(cluster, tmp_path, variables)
        said = job.epoch(0)
        assert all(name in one["cluster"]["description"] for one in said), said
        ports = [sorted(_listening(one.pid)) for one in job.running]
        assert all(len(of_node) >= 1 for of_node in ports) and all(
            _PAGE in of_node for of_node in ports[:2]
        ), ports
        places = [(cluster.address(node), port) for node in range(_NODES) for port in ports[node]]
        # As many again as find nobody: the pages' part.
        count = -(-_CONNECTIONS * len(places) // (len(places) - 2))
        stranger = cluster.start(
            _NODES,
            [sys.executable, "-c", _STRANGER, os.path.dirname(os.path.abspath(__file__)),
             json.dumps(places), str(count)],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        longest, epoch = 0.0, 1
        while stranger.poll() is None or epoch < 4:
            said = job.epoch(epoch)
            longest = max(longest, *(one["longest"] for one in said))
            epoch += 1
        out = stranger.communicate(timeout=20)[0]
        made, reached, heard_hex = json.loads(out)
        metrics = [one["metrics"] for one in job.epoch(epoch)]
        job.end()
    heard = [bytes.fromhex(one) for one in heard_hex]
    assert made == count
    # The page is for readers on its node; at all others somebody listened, and refused.
    assert {tuple(place) for place in reached} == {p for p in places if p[1] != _PAGE}
    assert 0 < max(map(len, heard)) <= _REFUSAL, sorted(heard, key=len)[-1]
    said_all = b"".join(heard)
    assert (tmp_path / "secret").read_bytes().strip() not in said_all
    assert b"a/00" not in said_all, "a sample's bytes are its name"
    assert longest <= 1 + pulse.longest, f"a batch came {longest:.2f} s late"
    # Nobody lost its place: every sample was read once for all, and no ask was in vain.
    assert sum(one["forebay_source_reads_total"] for one in metrics) == _SAMPLES
    for what in ("timeouts", "lost", "corrupt"):
        assert sum(one[f"forebay_peer_{what}_total"] for one in metrics) == 0, what
    assert all(one["forebay_peer_reads_total"] > 0 for one in metrics)
    assert sum(one["forebay_peer_strangers_total"] for one in metrics) > 0
