#!/bin/bash
# Trains on one host of a SLURM cluster, in one task whose ranks are threads:
#     sbatch docs/launch/slurm-threads.sh CONFIG --tp 2 --pp 4
#SBATCH --job-name=merak
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
# Five minutes before the time is up the training gets USR1: it saves and ends with status 138, and
# the job queues again.
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
: "${1:?usage: sbatch slurm-threads.sh CONFIG [OPTIONS]}"

srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" merak train "$1" --resume auto "${@:2}"
status=$?
if [[ $status -eq 138 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
