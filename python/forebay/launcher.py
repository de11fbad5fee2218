"""What a launcher that is yet to be started says of its nodes.

``forebay run -- torchrun --nnodes 4 ...`` starts the node's daemon before torchrun has told anybody
which node this is: it stands in torchrun's arguments.
"""

from __future__ import annotations

import os
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
    if any(name in environ for name in _TELLING) or not command:
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
    # A loader in the script may have peers of its own, under torchrun's name for the job.
    job = f"{told.get('id') or f'{host}:{port}'}-files"
    variables = {
        "FOREBAY_NODE": told["node"], "FOREBAY_NODES": low, "MASTER_ADDR": host.strip("[]"),
        "TORCHELASTIC_RUN_ID": job,
    }  # fmt: skip
    if port:
        variables["MASTER_PORT"] = port
    return variables, ""
