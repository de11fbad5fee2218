"""Rank and world size from the launcher's variables."""

from __future__ import annotations

import os
import re

from .._errors import ArgumentError

# (rank, world size) variables, in the order in which they are believed.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPI (PMI)", "PMI_RANK", "PMI_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)


# How many ranks a launcher started on this node; the C++ core divides its budget by the same.
_LOCAL = (
    "LOCAL_WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)

_LOCAL_RANK = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
)


def local_world() -> int:
    """Ranks on this node; 1 when no launcher says more."""
    for name in _LOCAL:
        digits = re.match(r"\s*(\d+)", os.environ.get(name, ""))
        if digits and int(digits.group(1)) > 0:
            return int(digits.group(1))
    return 1


def local_rank() -> int:
    """This process's number among the ranks of its node; 0 when no launcher says."""
    return _said_local_rank() or 0


def _said_local_rank() -> int | None:
    for name in _LOCAL_RANK:
        digits = re.fullmatch(r"\s*(\d+)\s*", os.environ.get(name, ""))
        if digits:
            return int(digits.group(1))
    return None


def among_others() -> tuple[int, int] | None:
    """This process's number among the ranks of its node, and how many there are; None where it is
    alone, or the launcher does not say which one it is.
    """
    rank, world = _said_local_rank(), local_world()
    return None if world == 1 or rank is None or rank >= world else (rank, world)


def ranks_per_node(world_size: int) -> int:
    """Rank r of the job runs on node r // ranks_per_node."""
    nodes = os.environ.get("FOREBAY_NODES", "")
    if nodes.isdigit() and int(nodes) > 0:
        return -(-world_size // int(nodes))
    return min(local_world(), world_size)


def detect() -> tuple[int, int, str]:
    """(rank, world size, launcher's name); (0, 1, "") when nothing launched this process."""
    for name, rank_key, world_key in _LAUNCHERS:
        rank, world = os.environ.get(rank_key), os.environ.get(world_key)
        if rank is None or world is None:
            continue
        try:
            return int(rank), int(world), name
        except ValueError:
            raise ArgumentError(
                f"{name} set {rank_key}={rank!r} and {world_key}={world!r}; both must be numbers"
            ) from None
    return 0, 1, ""


def resolve(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Explicit values win; a missing one comes from the launcher."""
    if rank is None or world_size is None:
        found_rank, found_world, _ = detect()
        if rank is None:
            rank = found_rank if world_size is None or world_size == found_world else 0
        if world_size is None:
            world_size = found_world
    if world_size < 1 or not 0 <= rank < world_size:
        raise ArgumentError(f"rank {rank} of world size {world_size} does not exist")
    return rank, world_size
