"""What torchrun's arguments say of the nodes, before torchrun says it itself."""

from __future__ import annotations

import pytest
from forebay._internal.launcher import cluster_variables, shared_job, tasks_here, torchrun_arguments

TWO = {
    "FOREBAY_NODE": "1", "FOREBAY_NODES": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "n0:29400",
}  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nnodes 2 --node-rank 1 --rdzv-endpoint n0:29400 train.py --nnodes 9",
        "torchrun --nnodes=2 --node_rank=1 --rdzv_endpoint=n0:29400 train.py",
        "/opt/bin/torchrun --nnodes=2:2 --standalone --node_rank=1 --rdzv_endpoint=n0:29400 t.py",
        "python3 -m torch.distributed.run --nproc-per-node 8 --nnodes 2 --node-rank 1"
        " --rdzv-endpoint n0:29400 -m package.train",
        "python -m torch.distributed.launch --nnodes 2 --node_rank 1 --master_addr n0"
        " --master_port 29400 train.py",
    ],
)
def test_arguments_of_two_nodes(line: str) -> None:
    assert cluster_variables(line.split(), {}) == (TWO, "")


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --nnodes 2",
        "torchrun --nproc-per-node 8 train.py",
        "torchrun --nnodes 1 --node-rank 0 train.py",
        "python -m package.train --nnodes 2 --node-rank 1",
    ],
)
def test_one_node_or_another_program(line: str) -> None:
    assert cluster_variables(line.split(), {}) == ({}, "")


def test_a_launcher_that_has_told_counts_more() -> None:
    line = "torchrun --nnodes 2 --node-rank 1 --rdzv-endpoint n0:29400 train.py".split()
    assert cluster_variables(line, {"SLURM_NODEID": "0"}) == ({}, "")
    # In the script of sbatch it has not.
    script = {"SLURM_NODEID": "0", "ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "7"}
    assert cluster_variables(line, script) == (TWO, "")
    assert cluster_variables(line, {**script, "SLURM_STEP_ID": "0"}) == ({}, "")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("torchrun --nnodes 1:4 --node-rank 1 --rdzv-endpoint n0:1 train.py", "--nnodes 1:4"),
        ("torchrun --nnodes 2 --rdzv-endpoint n0:1 train.py", "which node this is"),
        ("torchrun --nnodes 2 --node-rank 1 train.py", "where node 0 is"),
    ],
)
def test_what_is_left_open_is_said(line: str, says: str) -> None:
    variables, why = cluster_variables(line.split(), {})
    assert variables == {}
    assert says in why
    assert "FOREBAY_NODE" in why


def test_it_is_not_torchrun() -> None:
    assert torchrun_arguments(["python", "torchrun"]) is None


SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_PROCID": "4"}


@pytest.mark.parametrize(
    ("variables", "tasks"),
    [
        ({}, 1),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4"}, 0),  # of one node, and this is the second
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2),1"}, 4),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,1"}, 1),
        ({**SRUN, "SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "8"}, 1),  # sbatch
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}, 2),
        ({"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "8"}, 8),
    ],
)
def test_tasks_on_a_node(variables: dict[str, str], tasks: int) -> None:
    assert tasks_here(variables)[0] == tasks
    assert bool(shared_job(variables)) == (tasks > 1)


def test_a_job_shares_with_itself_only() -> None:
    one = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    assert shared_job(one) == shared_job({**one, "SLURM_PROCID": "5"})
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"):
        assert shared_job(one) != shared_job({**one, name: "0" if name == "SLURM_NODEID" else "9"})
    mpi = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "a"}
    assert shared_job(mpi) != shared_job({**mpi, "PMIX_NAMESPACE": "b"})
