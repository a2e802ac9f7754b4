"""A GPT training step in PyTorch, of the shape that `merak bench gpt` times.

    python gpt_peer.py single [--compile] [--threads 2] [--bf16] [--device cuda]
    python gpt_peer.py dp|fsdp|tp|pp [--ranks 2]

dp is DistributedDataParallel, fsdp is FSDP2 by layer, tp is DTensor with column and row layers, pp is
torch.distributed.pipelining with 1F1B; each starts one gloo process per rank with one compute
thread. --batch and --microbatches count over all replicas. --bf16 runs forward and loss under
autocast, with f32 weights. Prints one JSON line with the keys of `merak bench gpt`; peak_bytes is
summed over the processes. Needs torch 2.13 and nothing else.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention with q, k and v apart, so that DTensor can split each by columns."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.head_dim = hidden // heads
        self.q = nn.Linear(hidden, hidden)
        self.k = nn.Linear(hidden, hidden)
        self.v = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x):
        batch, seq, _ = x.shape

        def by_head(y):
            return y.reshape(batch, seq, -1, self.head_dim).transpose(1, 2)

        y = functional.scaled_dot_product_attention(
            by_head(self.q(x)), by_head(self.k(x)), by_head(self.v(x)), is_causal=True
        )
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.norm_1 = nn.LayerNorm(hidden, eps=1e-5)
        self.attention = Attention(hidden, heads)
        self.norm_2 = nn.LayerNorm(hidden, eps=1e-5)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Embeddings(nn.Module):
    """Token and position embeddings."""

    def __init__(self, vocab, seq, hidden):
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(seq, hidden)

    def forward(self, ids):
        return self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))


class Head(nn.Module):
    """Final norm and an untied projection without bias."""

    def __init__(self, hidden, vocab):
        super().__init__()
        self.norm = nn.LayerNorm(hidden, eps=1e-5)
        self.logits = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x):
        return self.logits(self.norm(x))


def build(args, stage=0, stages=1):
    """One stage's part of the model, layers dealt out evenly."""
    torch.manual_seed(stage)
    share = args.layers // stages
    parts = [Layer(args.hidden, args.heads) for _ in range(share)]
    if stage == 0:
        parts.insert(0, Embeddings(args.vocab, args.seq, args.hidden))
    if stage == stages - 1:
        parts.append(Head(args.hidden, args.vocab))
    model = nn.Sequential(*parts)
    for name, param in model.named_parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(param)
    return model


def adamw(model, fused=True):
    """AdamW as in `merak bench gpt`: no decay on biases and norms."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-4, fused=fused)


def mean_loss(logits, labels):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def made_up(args, step, replica, replicas):
    """A replica's share of a step's random tokens: inputs and labels."""
    generator = torch.Generator().manual_seed(step * replicas + replica)
    shape = (args.batch // replicas, args.seq + 1)
    tokens = torch.randint(args.vocab, shape, generator=generator).to(args.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def accumulate(model, ids, labels, microbatches, before_last=lambda: None, bf16=False):
    """Forward and backward of each microbatch; the mean loss."""
    total = torch.zeros((), device=ids.device)
    pairs = list(zip(ids.chunk(microbatches), labels.chunk(microbatches)))
    for number, (x, y) in enumerate(pairs, 1):
        if number == len(pairs):
            before_last()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            loss = mean_loss(model(x), y) / microbatches
        loss.backward()
        total += loss.detach()
    return total.item()


def update(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def single(args, _rank):
    model = build(args).to(args.device)
    optimizer = adamw(model)
    forward = torch.compile(model) if args.compile else model

    def step(number):
        loss = accumulate(
            forward, *made_up(args, number, 0, 1), args.microbatches, bf16=args.bf16
        )
        update(optimizer)
        return loss

    return step, model


def data_parallel(args, rank):
    model = build(args)
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(model)

    def sync(on):
        replica.require_backward_grad_sync = on

    def step(number):
        sync(False)
        ids, labels = made_up(args, number, rank, args.ranks)
        share = args.microbatches // args.ranks
        loss = accumulate(replica, ids, labels, share, before_last=lambda: sync(True))
        update(optimizer)
        return loss

    return step, model


def fully_sharded(args, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build(args)
    mesh = init_device_mesh("cpu", (args.ranks,))
    for layer in model:
        if isinstance(layer, Layer):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model, fused=False)

    def step(number):
        ids, labels = made_up(args, number, rank, args.ranks)
        loss = accumulate(model, ids, labels, args.microbatches // args.ranks)
        update(optimizer)
        return loss

    return step, model


def tensor_parallel(args, _rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = build(args)
    mesh = init_device_mesh("cpu", (args.ranks,))
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model:
        if isinstance(layer, Layer):
            parallelize_module(layer, mesh, plan)
    optimizer = adamw(model, fused=False)  # which cannot mix DTensors and plain ones

    def step(number):
        loss = accumulate(model, *made_up(args, number, 0, 1), args.microbatches)
        update(optimizer)
        return loss

    return step, model


def pipeline_parallel(args, rank):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = build(args, rank, args.ranks)
    optimizer = adamw(model)
    stage = PipelineStage(model, rank, args.ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=mean_loss)

    def step(number):
        ids, labels = made_up(args, number, 0, 1)
        losses = []
        inputs = (ids,) if rank == 0 else ()
        if rank == args.ranks - 1:
            schedule.step(*inputs, target=labels, losses=losses)
        else:
            schedule.step(*inputs)
        update(optimizer)
        return torch.stack(losses).mean().item() if losses else 0.0

    return step, model


BUILDERS = {
    "single": single,
    "dp": data_parallel,
    "fsdp": fully_sharded,
    "tp": tensor_parallel,
    "pp": pipeline_parallel,
}


def total(number):
    """The sum over all processes."""
    if dist.is_initialized():
        tensor = torch.tensor(number)
        dist.all_reduce(tensor)
        return tensor.item()
    return number


def measure(args, rank):
    """Builds, warms up, times, reports."""
    step, model = BUILDERS[args.mode](args, rank)
    times, losses = [], []
    for number in range(args.warmup + args.steps):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        losses.append(step(number))
        times.append(time.perf_counter() - start)
    # numel of a DTensor is that of the whole tensor.
    params = sum(p.numel() for p in model.parameters())
    if args.mode == "pp":
        params = total(params)
    if args.mode in ("dp", "fsdp"):
        losses = [total(loss) / args.ranks for loss in losses]
    peak = total(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if rank == (args.ranks - 1 if args.mode == "pp" else 0):
        seconds = statistics.median(times[args.warmup :])
        report = {
            "mode": args.mode if args.mode == "single" else f"{args.mode}{args.ranks}",
            "tokens_per_s": args.batch * args.seq / seconds,
            "ms_per_step": seconds * 1e3,
            "params": params,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "peak_bytes": peak,
            "device_peak_bytes": torch.cuda.max_memory_allocated() if args.device != "cpu" else None,
        }
        print(json.dumps(report), flush=True)


def on_rank(rank, args, port):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks
    )
    measure(args, rank)
    dist.destroy_process_group()
    # Threads of FSDP2 that are still there would abort the process while it ends (PyTorch 2.15).
    os._exit(0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("mode", choices=BUILDERS)
    parser.add_argument("--compile", action="store_true", help="torch.compile (single)")
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast (single)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (single)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="compute threads (single)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of dp, tp and pp")
    defaults = {"layers": 8, "hidden": 512, "heads": 8, "seq": 256, "vocab": 8192, "batch": 16}
    defaults |= {"microbatches": 8, "steps": 5, "warmup": 2}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.mode != "single" and (args.compile or args.bf16 or args.device != "cpu"):
        parser.error("--compile, --bf16 and --device go with single")
    if args.mode == "pp" and args.layers % args.ranks:
        parser.error(f"--layers {args.layers} is no multiple of --ranks {args.ranks}")
    return args


def main():
    args = arguments()
    if args.mode == "single":
        args.ranks = 1
        torch.set_num_threads(args.threads)
        measure(args, 0)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        multiprocessing.spawn(on_rank, (args, free_port()), nprocs=args.ranks)


if __name__ == "__main__":
    main()
