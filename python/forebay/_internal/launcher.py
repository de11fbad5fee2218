"""What launchers say of the nodes and tasks of a job to ``forebay run``.

``forebay run -- torchrun --nnodes 4 ...`` starts the node's daemon before torchrun has told anybody
which node this is: it stands in torchrun's arguments. ``srun forebay run ...`` and
``mpirun forebay run ...`` start several on a node, which share one daemon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_NAMES = {
    "nnodes": "nodes", "node-rank": "node", "rdzv-endpoint": "endpoint", "rdzv-id": "id",
    "master-addr": "host", "master-port": "port",
}  # fmt: skip
_TELLING = ("GROUP_RANK", "SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "FOREBAY_NODE")


def torchrun_arguments(command: Sequence[str]) -> dict[str, str] | None:
    """What torchrun is told of its nodes; None: the command is not torchrun."""
    words = list(command)
    name = os.path.basename(words[0])
    if name == "torchrun":
        words = words[1:]
    elif name.startswith("python") and len(words) > 2 and words[1] == "-m" and words[2] in _MODULES:
        words = words[3:]
    else:
        return None
    told: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        option, equals, value = words[at].lstrip("-").partition("=")
        known = _NAMES.get(option.replace("_", "-"))
        has_value = not equals and at + 1 < len(words) and not words[at + 1].startswith("-")
        if known and equals:
            told[known] = value
        elif known and has_value:
            told[known] = words[at + 1]
        # Other options may have a value, too: the script's name, which is no option's, ends them.
        at += 2 if has_value and (known or not words[at + 1].endswith(".py")) else 1
    return told


def cluster_variables(
    command: Sequence[str], environ: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """Variables for the node's daemon, and why there are none though there are several nodes."""
    # The script of sbatch is one process, of which SLURM tells nothing about other nodes.
    script = environ.get("ENVIRONMENT") == "BATCH" and not environ.get("SLURM_STEP_ID")
    telling = [name for name in _TELLING if name in environ]
    if not command or (telling and not (script and telling == ["SLURM_NODEID"])):
        return {}, ""
    told = torchrun_arguments(command)
    if not told or told.get("nodes", "1") == "1":
        return {}, ""
    nodes = told["nodes"]
    remedy = "set FOREBAY_NODE and FOREBAY_NODES on each node, or use --peers"
    low, colon, high = nodes.partition(":")
    if colon and low != high:
        return {}, f"--nnodes {nodes} leaves open how many nodes there are; {remedy}"
    if "node" not in told:
        return {}, f"torchrun's arguments do not tell which node this is (--node-rank); {remedy}"
    host, _, port = told.get("endpoint", "").rpartition(":")
    if not host:
        host, port = told.get("host") or told.get("endpoint", ""), told.get("port", "")
    if not host:
        return {}, f"torchrun's arguments do not tell where node 0 is (--rdzv-endpoint); {remedy}"
    variables = {
        "FOREBAY_NODE": told["node"], "FOREBAY_NODES": low, "MASTER_ADDR": host.strip("[]"),
        "TORCHELASTIC_RUN_ID": told.get("id") or f"{host}:{port}",
    }  # fmt: skip
    if port:
        variables["MASTER_PORT"] = port
    return variables, ""


def tasks_here(environ: Mapping[str, str]) -> tuple[int, str]:
    """How many tasks the launcher of this process has on this node, and what names the job: the
    same for them, and for no other job. An empty name: nothing tells.
    """

    def count(name: str) -> int:
        digits = re.match(r"\s*(\d+)", environ.get(name, ""))
        return int(digits.group(1)) if digits else 0

    def of(*names: str) -> str:
        return " ".join(environ.get(name, "") for name in names)

    if "GROUP_RANK" in environ and "TORCHELASTIC_RUN_ID" in environ:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
        return count("LOCAL_WORLD_SIZE"), f"torchrun {of(*names)}"
    # mpirun in a SLURM job has variables of SLURM's, too, which speak of something else.
    for local in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if local in environ:
            return count(local), f"mpi {environ.get('PMIX_NAMESPACE') or _parent()}"
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:  # not the script of sbatch
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
        here = _slurm_tasks(tasks, count("SLURM_NODEID")) or count("SLURM_NTASKS_PER_NODE")
        return here, f"slurm {of('SLURM_JOB_ID', 'SLURM_STEP_ID', 'SLURM_NODEID')}"
    return 1, ""


def shared_job(environ: Mapping[str, str]) -> str:
    """Names the job and the node whose tasks share a daemon; empty: this is the only task."""
    tasks, job = tasks_here(environ)
    return f"{job} {os.uname().nodename} {environ.get('FOREBAY_NODE', '')}" if tasks > 1 else ""


def _slurm_tasks(text: str, node: int) -> int:
    """Of SLURM's compact list, such as 4(x2),1: that of a node; 0: it does not tell."""
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            return 0
        node -= int(found.group(2) or 1)
        if node < 0:
            return int(found.group(1))
    return 0


def _parent() -> str:
    """The process that started this one, with its start: a launcher's own, which has started the
    other tasks of the node, too.
    """
    try:
        with open(f"/proc/{os.getppid()}/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return f"{os.getppid()} {started}"
