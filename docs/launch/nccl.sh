#!/bin/bash
# Trains on CUDA devices, a rank in a process for each; merak is built with the features tch and
# nccl. On one host, a rank for each device that it has:
#     docs/launch/nccl.sh CONFIG --dp 2 --tp 4
# On several hosts, in a SLURM job with a task for each device:
#     sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 \
#         docs/launch/nccl.sh CONFIG --dp 2 --tp 8
# The degrees multiply to the number of ranks; NPROC sets another one on one host. NCCL's library is
# the file of MERAK_DISTRIBUTED__NCCL_LIBRARY, else the one that the system finds. All hosts share
# the output folder.
set -eu
: "${1:?usage: nccl.sh CONFIG [OPTIONS]}"

train=(train "$1" --distributed.engine nccl
    --compute.backend tch --compute.device cuda --resume auto "${@:2}")
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    exec srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --wait=60 merak "${train[@]}"
fi
exec merak launch -n "${NPROC:-$(nvidia-smi --list-gpus | wc -l)}" -- "${train[@]}"
