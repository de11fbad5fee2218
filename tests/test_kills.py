"""kill -9 at random moments: clients, daemons, the controller in one of them, and etcd.

A world has two nodes, which are two runtime folders with a daemon each, one etcd, and an elected
controller in one of the daemons. Whoever lives gets every sample, right and once, never waits long
for a batch, and nothing is left behind.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forebay
import kill_client
import pytest
from conftest import Pulse, seed_count
from data_sets import DataSet, batches_of, torch_order
from forebay_testing import Etcd
from test_daemon import _await, _crc, _daemons

_HANG_S = 5.0
_MOST_SEEDS = 500
_AT_ONCE = 4
_ELECTION = "/forebay/leader"
_QUICK = ("--heartbeat-interval=20", "--election-timeout=200")


def _hang_limit(pulse: Pulse) -> float:
    """Seconds that a batch may take. Where many more processes want to run than there are
    processors, as on a machine that builds meanwhile, waiting for a processor is no hang of ours.
    """
    crowd = os.getloadavg()[0] / (os.cpu_count() or 1)
    return _HANG_S * max(1.0, min(4.0, crowd / 2)) + 2 * pulse.longest


class Zygote:
    """Forks clients, so that each costs milliseconds and not the imports."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, kill_client.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, **order: object) -> Client:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            print(json.dumps(order), file=self._process.stdin, flush=True)
            return Client(int(self._process.stdout.readline()), order)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Client:
    def __init__(self, pid: int, order: dict) -> None:
        self.pid = pid
        self.seed: int = order["seed"]
        self.out = Path(order["out"])
        self.killed = False

    def ended(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return True
        return stat.rsplit(")", 1)[1].split()[0] == "Z"

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def lines(self) -> list:
        if not self.out.exists():
            return []
        return [line for line in self.out.read_text().split("\n")[:-1]]


def _leader(etcd: Etcd) -> int:
    """The process that leads, as its name ends with its number; 0: nobody."""
    key = base64.b64encode(_ELECTION.encode()).decode()
    request = urllib.request.Request(
        f"{etcd.endpoint}/v3/kv/range", json.dumps({"key": key}).encode(), method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=1) as answer:
            kvs = json.load(answer).get("kvs", [])
    except OSError:
        return 0
    name = base64.b64decode(kvs[0]["value"]).decode() if kvs else ""
    end = name.rsplit("-", 1)[-1]
    return int(end) if end.isdigit() else 0


class World:
    def __init__(self, data: DataSet, zygote: Zygote, pulse: Pulse, seed: int) -> None:
        self._data = data
        self._pulse = pulse
        self._zygote = zygote
        self._rng = random.Random(seed)
        self._root = Path(tempfile.mkdtemp(prefix=f"fb-kill-{seed}-", dir="/tmp"))
        self._nodes = [self._root / "a", self._root / "b"]
        for node in self._nodes:
            node.mkdir(mode=0o700)
        self._clients: list[Client] = []
        self._etcd = Etcd(*_QUICK) if Etcd.available()[0] else None
        self.done: list[str] = []  # what was killed, and when
        self.longest = 0.0  # that anybody waited for a batch
        self.returns = 0  # to a daemon, after one had died

    def _start_client(self, node: Path) -> Client:
        number = len(self._clients)
        env = {"XDG_RUNTIME_DIR": str(node)}
        if self._etcd is not None:
            env["FOREBAY_ETCD"] = self._etcd.endpoint
        client = self._zygote.start(
            root=str(self._data.root), seed=number, out=str(self._root / f"out{number}"), env=env
        )
        self._clients.append(client)
        return client

    def _kill_daemon(self, pid: int) -> bool:
        if not pid or not any(pid in _daemons(node / "forebay") for node in self._nodes):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    def _harm(self) -> str:
        rng = self._rng
        what = rng.choice(["client", "daemon", "daemon", "controller", "etcd", "stop", "late"])
        if what == "late":
            self._start_client(rng.choice(self._nodes))
        elif what in ("client", "stop"):
            living = [c for c in self._clients if not c.killed and not c.ended()]
            if not living:
                return "nobody"
            victim = rng.choice(living)
            if what == "client":
                victim.killed = True
                victim.signal(signal.SIGKILL)
            else:
                victim.signal(signal.SIGSTOP)
                time.sleep(rng.random() * 0.3)
                victim.signal(signal.SIGCONT)
            return f"{what} {victim.seed}"
        elif what == "etcd" and self._etcd is not None:
            self._etcd.kill()
            if rng.random() < 0.7:
                time.sleep(rng.random() * 0.3)
                self._etcd.launch()
                return "etcd, and started it again"
        elif what == "controller" and self._etcd is not None:
            leader = _leader(self._etcd)
            return f"controller {leader}" if self._kill_daemon(leader) else "no controller"
        else:
            for pid in _daemons(rng.choice(self._nodes) / "forebay"):
                self._kill_daemon(pid)
        return what

    def run(self) -> None:
        begin = time.monotonic()
        for node in self._nodes * 2:
            self._start_client(node)
        first = list(self._clients)
        _await(lambda: all(len(c.lines()) > 1 for c in first), "a client that does not start", 60)
        for _ in range(self._rng.randint(2, 5)):
            time.sleep(self._rng.random() * 0.2)
            done = self._harm()
            self.done.append(f"{time.monotonic() - begin:.2f} s: {done}")
        for client in self._clients:
            _await(client.ended, f"client {client.seed} does not end", 60)
            self._check(client)

    def _check(self, client: Client) -> None:
        errors = Path(f"{client.out}.err")
        said = errors.read_text() if errors.exists() else ""
        # What they say is that they go on without the daemon, or with one again.
        assert "Traceback" not in said and "Error" not in said, said
        assert said.count("\n") <= 2 * len(self.done) + 1, said
        lines = client.lines()
        finished = bool(lines) and lines[-1] == "done"
        assert client.killed or finished, (client.seed, lines[-1:], said)
        got = [json.loads(line) for line in lines if line.startswith("[")]
        expected = []
        for epoch in range(kill_client.EPOCHS):
            order = torch_order(len(self._data), shuffle=True, seed=client.seed, epoch=epoch,
                                rank=0, world=1, drop_last=False)  # fmt: skip
            expected += [
                [epoch, samples, _crc(self._data, samples)]
                for samples in batches_of(order, kill_client.BATCH)
            ]
        assert [line[:3] for line in got] == expected[: len(got)]
        assert not finished or len(got) == len(expected)
        ends = [json.loads(line) for line in lines if line.startswith('{"end')]
        shared = [end["shared"] for end in ends]
        self.returns += sum(b and not a for a, b in zip(shared, shared[1:], strict=False))
        longest = max([line[3] for line in got] + [end["waited"] for end in ends], default=0.0)
        self.longest = max(self.longest, longest)
        limit = _hang_limit(self._pulse)
        assert longest < limit, f"client {client.seed} waited {longest:.1f} s for a batch"

    @staticmethod
    def _left(node: Path) -> list[Path]:
        """Files of a node where everybody is dead."""
        # All who could have noticed a daemon's death may be dead.
        forebay._forebay.SharedEngine.clear_dead(str(node / "forebay"))
        left = [p for p in node.rglob("*") if p.is_file() or p.is_socket()]
        # The log of a daemon that was killed stays, if there is something in it.
        logs = [p for p in left if p.name == "forebayd.log" and p.stat().st_size]
        return [] if left == logs else left

    def close(self) -> None:
        """Everybody is gone at the end, and has left nothing."""
        try:
            for client in self._clients:
                client.signal(signal.SIGCONT)
                client.signal(signal.SIGKILL)
            for node in self._nodes:
                folder = node / "forebay"
                _await(lambda f=folder: _daemons(f) == [], f"a daemon in {node} does not end", 20)
                # One that is being started has no name yet, and ends when it finds nobody.
                until = time.monotonic() + 20
                while left := self._left(node):
                    assert time.monotonic() < until, f"left behind: {left}"
                    time.sleep(0.1)
        finally:
            if self._etcd is not None:
                self._etcd.close()
            shutil.rmtree(self._root, ignore_errors=True)


@pytest.mark.seeds
def test_random_kills(folder: DataSet) -> None:
    zygote = Zygote()
    failed: list[str] = []
    kills: Counter[str] = Counter()
    waits = [0.0]

    def live(seed: int) -> None:
        if len(failed) > 3:
            return
        world = World(folder, zygote, pulse, seed)
        try:
            try:
                world.run()
            finally:
                world.close()
        except BaseException as error:
            failed.append(f"seed {seed}, {world.done}: {type(error).__name__}: {error}")
        kills.update(done.split(": ")[1].rstrip(" 0123456789") for done in world.done)
        kills["return to a daemon"] += world.returns
        waits.append(world.longest)

    try:
        with Pulse() as pulse, ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(live, range(min(seed_count(), _MOST_SEEDS))))
    finally:
        zygote.close()
    print(f"{len(waits) - 1} worlds, {dict(kills)}; the longest wait: {max(waits):.2f} s")
    assert not failed, "\n".join(failed)


@pytest.mark.skipif(not Etcd.available()[0], reason=Etcd.available()[1])
def test_another_node_leads_when_the_controller_is_killed(
    folder: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And training goes on without etcd, which is found again when it is back."""
    with Etcd(*_QUICK) as etcd, Pulse() as pulse:
        monkeypatch.setenv("FOREBAY_ETCD", etcd.endpoint)
        engines = [
            forebay.SharedEngine(memory="64M", linger=0, folder=tmp_path / node) for node in "ab"
        ]
        loaders = [forebay.DataLoader(folder.root, 4, engine=engine) for engine in engines]
        longest = 0.0

        def states() -> list[str]:
            nonlocal longest
            for loader in loaders:
                start = time.monotonic()
                assert len(next(iter(loader))) == 4
                longest = max(longest, time.monotonic() - start)
            said = [engine._describe() for engine in engines]
            return [one["control"]["state"] if isinstance(one, dict) else "gone" for one in said]

        clients = [engine.client() for engine in engines]
        pids = [client.pid for client in clients if client is not None]
        _await(lambda: states() == ["following"] * 2 and _leader(etcd) in pids, "no controller")
        etcd.kill()
        _await(lambda: states() == ["no store"] * 2, "nobody misses etcd")
        etcd.launch()
        _await(lambda: states() == ["following"] * 2, "etcd is not found again")
        _await(lambda: _leader(etcd) in pids, "no controller after etcd's return")
        leader = _leader(etcd)
        os.kill(leader, signal.SIGKILL)
        # The other one, or what its node has started meanwhile.
        _await(lambda: bool(states()) and _leader(etcd) not in (0, leader), "nobody leads", 30)
        other = 1 - pids.index(leader)
        _await(lambda: states()[other] == "following", "the other one does not follow")
        assert longest < _hang_limit(pulse)
        for held in (loaders, clients, engines):
            held.clear()
        _await(lambda: not any(_daemons(tmp_path / node) for node in "ab"), "a daemon stays", 30)
    for node in "ab":
        assert [p.name for p in tmp_path.glob(f"{node}/*")] in ([], ["forebayd.log"])
