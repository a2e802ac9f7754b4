#!/bin/bash
# Trains on several hosts of a SLURM cluster, a rank in each task:
#     sbatch docs/launch/slurm.sh CONFIG --dp 2 --tp 2 --pp 2
# The degrees multiply to the number of tasks. All hosts share the output folder.
#SBATCH --job-name=merak
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
# Five minutes before the time is up every rank gets USR1: the training saves and ends with status
# 138, and the job queues again.
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
: "${1:?usage: sbatch slurm.sh CONFIG [OPTIONS]}"

# The first of the step's hosts is where rank 0 is found; its port follows from the job's number.
# A task that fails ends the step with its own status, once the others have named it.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --wait=60 \
    merak train "$1" --resume auto "${@:2}"
status=$?
if [[ $status -eq 138 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
