"""Collectives and messages of two ranks beside gloo's, by turns.

    cargo build --release -p merak-mpu --example time-collectives
    python docs/peers/collectives_peer.py target/release/examples/time-collectives

Needs torch. Each round runs merak's processes, merak's threads and gloo's processes once; a ratio
is the median over the rounds of gloo's time by merak's of the same round. With `sockets` behind the
program, merak's processes share no memory, as those of several hosts.
"""

import statistics
import subprocess
import sys
import time

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
BATCHES = 7
BATCH_BYTES = 64 << 20
ROUNDS = 3
PORT = 29_800


def gloo(rank, port):
    """One of gloo's two processes; what merak-mpu/examples/time-collectives.rs does."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for size in SIZES:
        data = torch.zeros(size // 4)
        out = torch.empty_like(data)
        half = data[: data.numel() // 2].clone()
        halves = list(out.chunk(2)) if rank == 0 else None

        def message():
            if rank == 0:
                dist.send(data, 1)
                dist.recv(out, 1)
            else:
                dist.recv(out, 0)
                dist.send(out, 0)

        ops = {
            "all_reduce": lambda: dist.all_reduce(data, dist.ReduceOp.SUM),
            "all_to_all": lambda: dist.all_to_all_single(out, data),
            "broadcast": lambda: dist.broadcast(data, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(out, half),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(half, data, dist.ReduceOp.SUM),
            "all_gather, new memory": lambda: dist.all_gather_into_tensor(
                torch.empty_like(data), half
            ),
            "reduce_scatter, new memory": lambda: dist.reduce_scatter_tensor(
                torch.empty_like(half), data, dist.ReduceOp.SUM
            ),
            "gather": lambda: dist.gather(half, halves, 0),
            "gather, new memory": lambda: dist.gather(
                half, list(torch.empty_like(out).chunk(2)) if rank == 0 else None, 0
            ),
            "message": message,
        }
        for name, op in ops.items():
            count = min(max(BATCH_BYTES // size, 3), 500)
            times = []
            for _ in range(BATCHES + 1):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(count):
                    op()
                times.append((time.perf_counter() - start) / count)
            if rank == 0:
                seconds = statistics.median(times[1:]) / (2 if name == "message" else 1)
                print(f"{name} {size} {seconds:.9f}", flush=True)
    dist.destroy_process_group()


def lines(command, *others):
    processes = [subprocess.Popen(other) for other in others]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for process in processes:
        assert process.wait() == 0
    words = [line.rsplit(maxsplit=2) for line in text.splitlines()]
    return {(name, int(size)): float(seconds) for name, size, seconds in words}


def main(program, engine="tcp"):
    rounds = []
    for number in range(ROUNDS):
        peer = [sys.executable, __file__, "--gloo"]
        port = str(PORT + number)
        rounds.append(
            (
                lines([program, engine]),
                lines([program, "threads"]),
                lines([*peer, "0", port], [*peer, "1", port]),
            )
        )
    print(f"| operation | size | gloo | {engine} | ratio | threads | ratio |")
    print("|---|---|---|---|---|---|---|")
    for key in sorted(rounds[0][0]):
        tcp, threads, peer = ([one[column][key] for one in rounds] for column in range(3))
        cells = [f"{key[0]}", f"{key[1] >> 10} KiB", f"{statistics.median(peer) * 1e6:.0f} us"]
        for own in (tcp, threads):
            ratio = statistics.median(other / mine for other, mine in zip(peer, own))
            cells += [f"{statistics.median(own) * 1e6:.0f} us", f"{ratio:.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1] == "--gloo":
        gloo(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(*sys.argv[1:])
