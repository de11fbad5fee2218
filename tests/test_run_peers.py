"""Unmodified programs on several nodes: what one has read of the source, the others get from it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forebay import _forebay
from forebay.commands import run as run_command
from forebay.slowfs import SlowFs
from forebay_testing import Etcd
from transparent.under import LIBRARY

FILES, BYTES, NODES = 120, 30_000, 3

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason="this build has no libforebay_posix.so"
)

# Each node in an order of its own, twice.
READ = """
import hashlib, os, random, sys
folder, seed = sys.argv[1], int(sys.argv[2])
names = sorted(os.listdir(folder))
for turn in range(2):
    random.Random(seed * 10 + turn).shuffle(names)
    seen = {}
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            seen[name] = hashlib.sha256(file.read()).hexdigest()
    print(hashlib.sha256(repr(sorted(seen.items())).encode()).hexdigest())
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(7)
    for i in range(FILES):
        (folder / f"{i:04}.bin").write_bytes(rng.randbytes(BYTES))
    time.sleep(3.2)  # files that have just changed are left alone
    return folder


def test_nodes_read_the_source_once(data: Path, tmp_path: Path) -> None:
    peers = ",".join(f"127.0.0.1:{port}" for port in free_ports(NODES))
    plain = subprocess.run(
        [sys.executable, "-c", READ, str(data), "0"], capture_output=True, text=True, check=True
    ).stdout
    with SlowFs(data, read_ms=2) as slow:
        runs = []
        for node in range(NODES):
            runtime = tmp_path / f"n{node}"
            runtime.mkdir(mode=0o700)
            env = {
                **os.environ,
                "XDG_RUNTIME_DIR": str(runtime),
                "FOREBAY_NODE": str(node),
                "FOREBAY_NODES": str(NODES),
                "FOREBAY_PEER_SECRET": str(tmp_path / "secret"),
            }
            command = [
                sys.executable, "-m", "forebay.cli", "run", "--peers", peers, "--source",
                str(slow.path), "--", sys.executable, "-c", READ, str(slow.path), str(node),
            ]  # fmt: skip
            runs.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        said = [each.communicate(timeout=120) for each in runs]
        read = slow.stats()["bytes_read"]
    for out, err in said:
        assert out == plain, err
    # A node that is late for a moment, as on a busy machine, may cost a read; without peers each
    # would be read by every node.
    assert read <= 1.1 * FILES * BYTES, [err for _, err in said]


def launched(launcher: str, job: str, node: int, task: int) -> dict[str, str]:
    """The variables of one of two tasks on one of two nodes."""
    rank = 2 * node + task
    if launcher == "srun":
        return {
            "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_NODEID": str(node),
            "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(task), "SLURM_NTASKS": "4",
        }  # fmt: skip
    return {
        "MASTER_ADDR": "127.0.0.1", "PMIX_NAMESPACE": job, "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(task),
    }  # fmt: skip


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_tasks_of_nodes_read_the_source_once(data: Path, tmp_path: Path, launcher: str) -> None:
    plain = subprocess.run(
        [sys.executable, "-c", READ, str(data), "0"], capture_output=True, text=True, check=True
    ).stdout
    job = f"{os.getpid()}{time.monotonic_ns() % 10**6}"  # no other test's port
    with SlowFs(data, read_ms=2) as slow:
        runs = []
        for node, task in ((n, t) for n in range(2) for t in range(2)):
            env = {**os.environ, "FOREBAY_PEER_SECRET": str(tmp_path / "secret")}
            env |= launched(launcher, job, node, task)
            for name, variable in (("run", "XDG_RUNTIME_DIR"), ("tmp", "TMPDIR")):
                (tmp_path / f"{name}{node}").mkdir(mode=0o700, exist_ok=True)
                env[variable] = str(tmp_path / f"{name}{node}")
            command = [
                sys.executable, "-m", "forebay.cli", "run", "--source", str(slow.path), "--",
                sys.executable, "-c", READ, str(slow.path), str(2 * node + task),
            ]  # fmt: skip
            runs.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        said = [each.communicate(timeout=120) for each in runs]
        read = slow.stats()["bytes_read"]
    for out, err in said:
        assert out == plain, err
        assert "WARNING" not in err
    # A daemon a node, each of which says what it did.
    assert [err.count("files copied") for _, err in said] == [1, 0, 1, 0]
    assert read <= 1.1 * FILES * BYTES, [err for _, err in said]


def test_a_name_joins_folders_at_other_paths(data: Path, tmp_path: Path) -> None:
    peers = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    plain = subprocess.run(
        [sys.executable, "-c", READ, str(data), "0"], capture_output=True, text=True, check=True
    ).stdout
    with SlowFs(data, read_ms=2) as one, SlowFs(data, read_ms=2) as other:
        assert one.path != other.path
        runs = []
        for node, slow in enumerate((one, other)):
            runtime = tmp_path / f"n{node}"
            runtime.mkdir(mode=0o700)
            env = {
                **os.environ, "XDG_RUNTIME_DIR": str(runtime), "FOREBAY_NODE": str(node),
                "FOREBAY_NODES": "2", "FOREBAY_PEER_SECRET": str(tmp_path / "secret"),
            }  # fmt: skip
            command = [
                sys.executable, "-m", "forebay.cli", "run", "--peers", peers, "--source",
                f"images={slow.path}", "--", sys.executable, "-c", READ, str(slow.path), str(node),
            ]  # fmt: skip
            runs.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        said = [each.communicate(timeout=120) for each in runs]
        read = sum(slow.stats()["bytes_read"] for slow in (one, other))
    for out, err in said:
        assert out == plain, err
        assert "WARNING" not in err
    assert read <= 1.1 * FILES * BYTES, [err for _, err in said]


@pytest.mark.parametrize("by", ["list", "etcd", "etcds"])
def test_mounts_of_nodes_read_the_source_once(data: Path, tmp_path: Path, by: str) -> None:
    with contextlib.ExitStack() as held:
        peers = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
        variables = {"FOREBAY_PEER_SECRET": str(tmp_path / "secret")}
        if by != "list":
            usable, reason = Etcd.available()
            if not usable:
                pytest.skip(reason)
            etcd = held.enter_context(Etcd(secured=by == "etcds"))
            peers = f"{by}://{etcd.endpoint.split('//')[1]}"
            if by == "etcds":  # the secret lies in it
                variables = etcd.variables
        # A name, as the nodes have the data at different paths.
        slow = [held.enter_context(SlowFs(data, read_ms=2)) for _ in range(2)]
        points = []
        for node in range(2):
            for name in (f"n{node}", f"m{node}"):
                (tmp_path / name).mkdir(mode=0o700)
            points.append(tmp_path / f"m{node}")
            env = {
                **os.environ, "XDG_RUNTIME_DIR": str(tmp_path / f"n{node}"),
                "FOREBAY_NODE": str(node), "FOREBAY_NODES": "2", **variables,
            }  # fmt: skip
            forebay = [sys.executable, "-m", "forebay.cli"]
            done = subprocess.run(
                [
                    *forebay, "mount", str(slow[node].path), str(points[node]),
                    "--peers", peers, "--name", "images",
                ],
                env=env, capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            held.callback(
                subprocess.run, [*forebay, "unmount", str(points[node])], timeout=60, check=True
            )
            assert (done.returncode, done.stderr) == (0, "")
        time.sleep(3)  # the members have found each other
        names = sorted(path.name for path in data.iterdir())
        for node in (0, 1):
            random.Random(node).shuffle(names)
            for name in names:
                assert (points[node] / name).read_bytes() == (data / name).read_bytes()
        read = sum(each.stats()["bytes_read"] for each in slow)
        assert read <= 1.1 * FILES * BYTES


def test_torchrun_of_several_nodes_has_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOREBAY_PEERS", "FOREBAY_NODE", "GROUP_RANK", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    arguments = run_command.argparse.Namespace(peers=None)
    command = "torchrun --nnodes 2 --node-rank 1 --rdzv-endpoint n0:29400 train.py".split()
    settings: dict[str, object] = {}
    with run_command.peers_of(arguments, command, settings):
        assert os.environ["FOREBAY_NODE"] == "1" and os.environ["FOREBAY_NODES"] == "2"
    assert settings == {}
    assert "FOREBAY_NODE" not in os.environ
    arguments.peers = "off"
    settings.clear()
    with run_command.peers_of(arguments, command, settings):
        assert "FOREBAY_NODE" not in os.environ


def test_torchrun_as_a_task_of_srun_on_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOREBAY_PEERS", "FOREBAY_NODE", "GROUP_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    srun = {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }  # fmt: skip
    for name, value in srun.items():
        monkeypatch.setenv(name, value)
    arguments = run_command.argparse.Namespace(peers=None)
    # Which node this is, torchrun finds out later; SLURM tells now.
    command = "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint n1:29400 train.py".split()
    with run_command.peers_of(arguments, command, {}):
        assert _forebay.cluster_name("", "-files") == "slurm-77.0-files of 2 nodes"
