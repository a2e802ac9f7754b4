#!/bin/bash
# Trains on the hosts of a list without any launcher, over ssh:
#     HOSTS="n1 n2" RANKS_PER_HOST=2 docs/launch/ssh.sh CONFIG --dp 2 --tp 2
# The degrees multiply to the number of ranks. All hosts have merak, and share this folder.
set -u
: "${1:?usage: HOSTS=\"n1 n2\" ssh.sh CONFIG [OPTIONS]}"
read -ra hosts <<<"${HOSTS:?the hosts, parted by blanks}"
each=${RANKS_PER_HOST:-1}
ranks=$((${#hosts[@]} * each))

# A signal ends every ssh, which hangs up on its host: the rank there saves and ends. Bash keeps
# Ctrl-C from what runs in the background.
pids=()
is_ended=0
end_all() {
    is_ended=1
    [[ ${#pids[@]} -eq 0 ]] || kill -TERM "${pids[@]}" 2>/dev/null
}
trap end_all INT TERM HUP

# Variables as torchrun sets them; rank 0 is on the first host. A second start goes on from the last
# checkpoint.
for ((rank = 0; rank < ranks && !is_ended; rank++)); do
    line="cd $(printf %q "$PWD") && RANK=$rank WORLD_SIZE=$ranks \
LOCAL_RANK=$((rank % each)) LOCAL_WORLD_SIZE=$each \
MASTER_ADDR=${hosts[0]} MASTER_PORT=${MASTER_PORT:-29500} exec merak train $(printf '%q ' "$1" --resume auto "${@:2}")"
    ${REMOTE:-ssh -tt} "${hosts[rank / each]}" "$line" </dev/null &
    pids+=($!)
done

# Ranks end by themselves when one fails: it has its own status, the others have 3.
worst=0
for pid in "${pids[@]}"; do
    # A signal ends the wait at once, and the ssh a little later.
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
