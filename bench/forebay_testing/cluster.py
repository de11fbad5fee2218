"""A cluster on one machine: a network namespace for each node, joined by a bridge.

with Cluster(4, gbit=10) as cluster:
    for node in range(4):
        cluster.start(node, [sys.executable, "train.py"])
    cluster.partition(2)

The nodes share the machine's files, so one slowfs is the shared storage of all. The bridge has a
namespace of its own: nothing of the machine's network is touched. Namespaces have no names; open
descriptors of this process hold them, so they go with it, however it ends.

By hand: ``python -m forebay_testing --help``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from forebay._errors import ArgumentError, UnsupportedError
from forebay.slowfs import SlowFs

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_TOOLS = ("ip", "tc", "bridge")
_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
_MTU = 9000
PEER_PORT = 7421

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _new_namespace() -> int:
    """A descriptor of a new network namespace; the calling thread stays in its own."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            _check(_libc.unshare(_CLONE_NEWNET), "unshare(CLONE_NEWNET)")
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _enter(namespace: int) -> None:
    """In a child, before its program starts. The mounts stay those of this process."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        os._exit(126)


@dataclass
class _Started:
    command: list[str]
    environment: dict[str, str]
    streams: dict[str, Any]
    process: subprocess.Popen[Any] = field(init=False)


class Cluster:
    """Namespaces, links and the processes in them; ``with`` or ``close()`` ends them all.

    ``gbit``: what each node's link carries, each way; None: as much as the machine can.
    """

    @staticmethod
    def available() -> tuple[bool, str]:
        """Whether one can be made here and, if not, why."""
        missing = [tool for tool in _TOOLS if _tool(tool) is None]
        if missing:
            return False, f"{', '.join(missing)} not found; try: apt install iproute2"
        return _try_one()

    def __init__(self, nodes: int, *, gbit: float | None = 10.0) -> None:
        if not 1 <= nodes <= 200:
            raise ArgumentError(f"nodes is {nodes}; a cluster has 1 to 200")
        self.nodes = nodes
        self._gbit = gbit
        self._switch = -1
        self._namespaces: list[int] = []
        self._started: dict[int, list[_Started]] = {node: [] for node in range(nodes)}
        try:
            self._switch = _new_namespace()
            for _ in range(nodes):
                self._namespaces.append(_new_namespace())
            self._join()
            for node in range(nodes):
                self.rate(node, gbit)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise UnsupportedError(f"no network namespace: {error}") from error
            raise

    def _join(self) -> None:
        lines = [f"link add hub mtu {_MTU} type bridge", "link set hub up"]
        for node in range(self.nodes):
            there = self.namespace(node)
            lines += [
                f"link add port{node} mtu {_MTU} type veth peer name eth0 mtu {_MTU} netns {there}",
                f"link set port{node} master hub up",
            ]
        self._tool(self._switch, "ip", "-batch", "-", said="\n".join(lines))
        for node, namespace in enumerate(self._namespaces):
            lines = ["link set lo up", f"addr add {self.address(node)}/16 dev eth0",
                     "link set eth0 up"]  # fmt: skip
            self._tool(namespace, "ip", "-batch", "-", said="\n".join(lines))
            # The same on every machine. BBR, which some have, paces packets by a timer; in a
            # virtual machine that costs more than sending them.
            self._tool(namespace, "sh", "-c", f"echo reno > {_CONGESTION} || true")

    def _tool(self, namespace: int, tool: str, *arguments: str, said: str = "") -> str:
        done = subprocess.run(
            [_tool(tool) or tool, *arguments], input=said, capture_output=True, text=True,
            preexec_fn=functools.partial(_enter, namespace), check=False,
        )  # fmt: skip
        if done.returncode != 0:
            words = (done.stderr or done.stdout).strip()
            raise UnsupportedError(f"{tool} {' '.join(arguments)}: {words or done.returncode}")
        return done.stdout

    # ---- links

    def namespace(self, node: int) -> str:
        """A path for ``nsenter --net=PATH``."""
        return f"/proc/{os.getpid()}/fd/{self._namespaces[node]}"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def peers(self, port: int = PEER_PORT) -> str:
        """FOREBAY_PEERS, as a list of all."""
        return ",".join(f"{self.address(node)}:{port}" for node in range(self.nodes))

    def partition(self, node: int) -> None:
        """What it sends, and what is sent to it, is lost without a word."""
        self._tool(self._switch, "bridge", "link", "set", "dev", f"port{node}", "state", "0")

    def heal(self, node: int) -> None:
        self._tool(self._switch, "bridge", "link", "set", "dev", f"port{node}", "state", "3")

    def link(self, node: int, up: bool) -> None:
        """Pulls the cable, which the node notices, or puts it back."""
        self._tool(self._switch, "ip", "link", "set", f"port{node}", "up" if up else "down")

    def rate(self, node: int, gbit: float | None) -> None:
        """Each way; None: no limit."""
        ends = ((self._namespaces[node], "eth0"), (self._switch, f"port{node}"))
        for namespace, device in ends:
            if gbit is None:
                shown = self._tool(namespace, "tc", "qdisc", "show", "dev", device)
                if "tbf" in shown:
                    self._tool(namespace, "tc", "qdisc", "del", "dev", device, "root")
                continue
            # A millisecond of it at once: timers are no better. At least a segment before it is
            # cut into packets.
            burst = max(128 << 10, int(gbit * 1e9 / 8 * 1e-3))
            limit = f"rate {gbit * 1e3:.3f}mbit burst {burst} latency 20ms"
            self._tool(
                namespace, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit.split()
            )

    def slow(self, node: int, times: float = 10.0) -> None:
        """The link carries so many times less."""
        self.rate(node, (self._gbit or 10.0) / times)

    def restore(self, node: int) -> None:
        """The link as it was made."""
        self.link(node, True)
        self.heal(node)
        self.rate(node, self._gbit)

    def rates(self) -> list[float]:
        """Bits a second of each node's link, 0 without a limit: what the kernel says."""
        found = []
        for namespace in self._namespaces:
            shown = json.loads(self._tool(namespace, "tc", "-j", "qdisc", "show", "dev", "eth0"))
            tbf = [q["options"]["rate"] * 8.0 for q in shown if q["kind"] == "tbf"]
            found.append(tbf[0] if tbf else 0.0)
        return found

    # ---- processes

    def environment(self, node: int) -> dict[str, str]:
        """Of this process, and who the node is: a rank for each, and Forebay's list of peers."""
        return {
            **os.environ,
            "RANK": str(node),
            "WORLD_SIZE": str(self.nodes),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(node),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "eth0",
            "FOREBAY_PEERS": self.peers(),
            "FOREBAY_NODE": str(node),
            "FOREBAY_NODES": str(self.nodes),
            # Where a process asks for UCX: shared memory would go around the links.
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": "eth0",
        }

    def start(
        self,
        node: int,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[Any]:
        """Runs a program on a node, with ``variables`` beside those of `environment`."""
        environment = {**self.environment(node), **(variables or {})}
        streams = dict(stdin=stdin, stdout=stdout, stderr=stderr)
        started = _Started(list(command), environment, streams)
        self._launch(node, started)
        self._started[node].append(started)
        return started.process

    def _launch(self, node: int, started: _Started) -> None:
        started.process = subprocess.Popen(
            started.command, env=started.environment, text=True,
            preexec_fn=functools.partial(_enter, self._namespaces[node]), **started.streams,
        )  # fmt: skip

    def running(self, node: int) -> bool:
        return any(each.process.poll() is None for each in self._started[node])

    def kill(self, node: int) -> None:
        """kill -9 of all that runs there."""
        for each in self._started[node]:
            each.process.kill()
            each.process.wait()

    def restart(self, node: int) -> None:
        """Starts what was started there before, after a kill."""
        self.kill(node)
        for each in self._started[node]:
            self._launch(node, each)

    def forget(self, node: int) -> None:
        """Ends what runs there; a restart does not bring it back."""
        self.kill(node)
        for each in self._started[node]:
            for stream in (each.process.stdin, each.process.stdout, each.process.stderr):
                if stream is not None:
                    stream.close()
        self._started[node].clear()

    def close(self) -> None:
        """Ends all processes and removes the network. May be called again."""
        for node in self._started:
            self.forget(node)
        for namespace in [*self._namespaces, self._switch]:
            if namespace >= 0:
                os.close(namespace)
        self._namespaces, self._switch = [], -1

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tool(name: str) -> str | None:
    """Also where a user's PATH does not lead."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


@functools.cache
def _try_one() -> tuple[bool, str]:
    try:
        Cluster(1).close()
    except UnsupportedError as error:
        return False, f"{error} (needs root, or CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    return True, ""


# ---- by hand

_HELP = """\
  partition N | heal N | down N | up N   lose N's packets; pull N's cable
  slow N [TIMES] | rate N GBIT           a slower link (10 times), a rate
  restore N                              the link as it was
  kill N | restart N                     kill -9, and the same command again
  enter N                                how to get a shell on the node
  status | quit"""


def _act(cluster: Cluster, words: list[str]) -> str:
    what, *rest = words
    if what == "status":
        lines = []
        for node, rate in enumerate(cluster.rates()):
            runs = "runs" if cluster.running(node) else "does not run"
            lines.append(f"node {node}  {cluster.address(node)}  {rate / 1e9:g} Gbit/s  {runs}")
        return "\n".join(lines)
    one: dict[str, Callable[[int], Any]] = {
        "partition": cluster.partition,
        "heal": cluster.heal,
        "down": lambda node: cluster.link(node, False),
        "up": lambda node: cluster.link(node, True),
        "restore": cluster.restore,
        "kill": cluster.kill,
        "restart": cluster.restart,
        "slow": lambda node: cluster.slow(node, float(rest[1]) if rest[1:] else 10.0),
        "rate": lambda node: cluster.rate(node, float(rest[1])),
        "enter": lambda node: print(f"nsenter --net={cluster.namespace(node)}"),
    }
    if what not in one:
        return _HELP
    try:
        node = int(rest[0])
        if not 0 <= node < cluster.nodes:
            raise ValueError
        one[what](node)
    except (IndexError, ValueError):
        return f"{what} takes a node, 0 to {cluster.nodes - 1}\n{_HELP}"
    return ""


@contextlib.contextmanager
def _storage(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    if not args.data:
        yield {}
        return
    with SlowFs(args.data, open_ms=args.latency_ms, read_ms=args.latency_ms) as mount:
        print(f"{args.data} is slow storage at {mount.path} (DATA in the nodes' environment)")
        yield {"DATA": str(mount.path)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m forebay_testing",
        description="Runs COMMAND on every node of a cluster of network namespaces; then takes "
        "orders from standard input. All of it is gone when this ends.",
        epilog=f"orders:\n{_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gbit", type=float, default=10.0, help="each link, each way (default 10)")
    parser.add_argument("--data", help="a folder that the nodes see as slow storage, $DATA")
    parser.add_argument("--latency-ms", type=float, default=5.0, help="of that storage (default 5)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _storage(args) as more, Cluster(args.nodes, gbit=args.gbit) as cluster:
            for node in range(args.nodes if command else 0):
                cluster.start(node, command, more)
            print(_act(cluster, ["status"]))
            for line in sys.stdin:
                words = line.split()
                if words[:1] == ["quit"]:
                    break
                if words and (said := _act(cluster, words)):
                    print(said, flush=True)
    except KeyboardInterrupt:
        return 130
    return 0
