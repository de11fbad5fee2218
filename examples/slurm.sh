#!/bin/bash
# sbatch examples/slurm.sh /data/imagenet
#
# Four ranks on each of two nodes. The ranks of a node share one engine, found by SLURM's variables;
# nothing is started before and nothing is left behind.
#SBATCH --job-name=forebay
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -euo pipefail

data="${1:?name the data folder: sbatch examples/slurm.sh FOLDER}"
shift
here="${FOREBAY_EXAMPLES:-$SLURM_SUBMIT_DIR/examples}"

export MASTER_ADDR MASTER_PORT
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# torch.distributed wants its own names for what SLURM tells each task.
# shellcheck disable=SC2016
srun bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
  exec python "$@"' task "$here/torchrun_ddp.py" "$data" "$@"
