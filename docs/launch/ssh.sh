#!/bin/bash
# Trains on the hosts of a list without any launcher, over ssh:
#     HOSTS="n1 n2" RANKS_PER_HOST=2 docs/launch/ssh.sh CONFIG --dp 2 --tp 2
# The degrees multiply to the number of ranks. All hosts have merak, and share this folder.
set -u
: "${1:?usage: HOSTS=\"n1 n2\" ssh.sh CONFIG [OPTIONS]}"
read -ra hosts <<<"${HOSTS:?the hosts, parted by blanks}"
each=${RANKS_PER_HOST:-1}

# Variables as torchrun sets them; rank 0 is on the first host. A second start goes on from the last
# checkpoint.
pids=()
for ((rank = 0; rank < ${#hosts[@]} * each; rank++)); do
    line="cd $(printf %q "$PWD") && RANK=$rank WORLD_SIZE=$((${#hosts[@]} * each)) \
LOCAL_RANK=$((rank % each)) LOCAL_WORLD_SIZE=$each \
MASTER_ADDR=${hosts[0]} MASTER_PORT=${MASTER_PORT:-29500} exec merak train $(printf '%q ' "$1" --resume auto "${@:2}")"
    ${REMOTE:-ssh -tt} "${hosts[rank / each]}" "$line" </dev/null &
    pids+=($!)
done

# A run that is to end saves, on every host. A terminal of its own would keep Ctrl-C from the ranks,
# and bash keeps it from what runs in the background.
trap 'kill -TERM "${pids[@]}" 2>/dev/null' INT TERM HUP

# Ranks end by themselves when one fails: it has its own status, the others have 3.
worst=0
for pid in "${pids[@]}"; do
    # A signal ends the first wait, and not yet the rank.
    while
        wait "$pid"
        status=$?
        kill -0 "$pid" 2>/dev/null
    do :; done
    if [[ $status -ne 0 && ($worst -eq 0 || $worst -eq 3) ]]; then
        worst=$status
    fi
done
exit "$worst"
