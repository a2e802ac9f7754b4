#!/bin/bash
# Trains under torchrun, a rank in each process. On one host:
#     docs/launch/torchrun.sh CONFIG --dp 2 --tp 2
# On several hosts, run it on each:
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=n1 docs/launch/torchrun.sh CONFIG --dp 4 --tp 2
# The degrees multiply to NNODES times NPROC_PER_NODE. All hosts share the output folder.
set -eu
: "${1:?usage: torchrun.sh CONFIG [OPTIONS]}"

# torchrun starts all ranks again, up to MAX_RESTARTS times, when one has failed; each start goes on
# from the last checkpoint. Its agent holds MASTER_PORT, and rank 0 takes the next free port.
exec torchrun \
    --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --nproc-per-node "${NPROC_PER_NODE:-4}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    --max-restarts "${MAX_RESTARTS:-0}" --no-python \
    merak train "$1" --resume auto "${@:2}"
