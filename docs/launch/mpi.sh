#!/bin/bash
# Trains under mpirun, a rank in each process; merak is built with the feature mpi. On one host:
#     docs/launch/mpi.sh CONFIG --dp 2 --tp 2
# On the hosts of a file, as mpirun reads it:
#     NPROC=8 HOSTFILE=hosts docs/launch/mpi.sh CONFIG --dp 2 --tp 2 --pp 2
# The degrees multiply to NPROC. All hosts share the output folder.
set -eu
: "${1:?usage: mpi.sh CONFIG [OPTIONS]}"

hosts=()
[[ -z ${HOSTFILE:-} ]] || hosts=(--hostfile "$HOSTFILE")
exec mpirun -n "${NPROC:-4}" "${hosts[@]}" \
    merak train "$1" --distributed.engine mpi --resume auto "${@:2}"
