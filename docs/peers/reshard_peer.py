"""Reshards a checkpoint of a made-up GPT-2 from tp = 4 to tp = 2, pp = 2: `merak-ckpt reshard`,
torch.distributed.checkpoint and a copy of the files, by turns. Prints a line per run and the
medians.

    cargo build --release -p merak-ckpt && cargo build --release -p merak-ckpt --example made_up
    python reshard_peer.py FOLDER --layers 14 --hidden 2048 --runs 3 [--only copy ours torch]

FOLDER is on the disk that is measured and needs room for twice the state, and as much again for
PyTorch's. Both sides have the same tensors: parameters in f32 and two moments. PyTorch's ranks are
processes over gloo that hold DTensors, cut as ours are (rows of row layers, columns of column
layers and embeddings by tokens); four save, and four others of a mesh of tp = 2 by pp = 2, with
half of the layers each, load them with `dcp.load` into zeroed tensors and write them with
`dcp.save`, which syncs its files as we do. Its time begins when all ranks stand ready and ends when
the last is done, without imports. The copy is `cp --reflink=never` and an fsync of each file.
Before each run the files that it reads leave the page cache, or with `--warm` enter it.

`--work import` and `--work export` measure `merak-ckpt import-hf` and `export-hf` of the weights
alone beside the copy, `--source-tp` and `--to` other degrees:

    python reshard_peer.py FOLDER --hidden 1024 --warm --runs 3 --only copy ours --source-tp 1 --to tp=3
    python reshard_peer.py FOLDER --hidden 2048 --layers 10 --warm --runs 3 --only copy ours --work import --to tp=3
"""

import argparse
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK = {"reshard": "reshard", "import": "import-hf", "export": "export-hf"}
SOURCE_TP, TP, PP = 4, 2, 2  # of PyTorch's side


def shapes(layers, hidden, vocab):
    """(stage of two, name, shape, dim that tensor parallelism cuts) of every parameter."""
    h = hidden
    yield 0, "wte.weight", (vocab, h), 0
    yield 0, "wpe.weight", (1024, h), None
    yield 1, "ln_f.weight", (h,), None
    yield 1, "ln_f.bias", (h,), None
    for layer in range(layers):
        for name, shape, dim in [
            ("ln_1.weight", (h,), None),
            ("ln_1.bias", (h,), None),
            ("ln_2.weight", (h,), None),
            ("ln_2.bias", (h,), None),
            ("attn.c_attn.weight", (h, 3 * h), 1),
            ("attn.c_attn.bias", (3 * h,), 0),
            ("attn.c_proj.weight", (h, h), 0),
            ("attn.c_proj.bias", (h,), None),
            ("mlp.c_fc.weight", (h, 4 * h), 1),
            ("mlp.c_fc.bias", (4 * h,), 0),
            ("mlp.c_proj.weight", (4 * h, h), 0),
            ("mlp.c_proj.bias", (h,), None),
        ]:
            yield layer * PP // layers, f"h.{layer}.{name}", shape, dim


def state(args, mesh, stage, fill):
    """The tensors of a rank: parameters and moments, of one stage or of all."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    degree = mesh.size()
    tensors = {}
    for at, name, shape, dim in shapes(args.layers, args.hidden, args.vocab):
        if stage is not None and at != stage:
            continue
        local = list(shape)
        if dim is not None:
            local[dim] //= degree
        for kind in ("parameter", "exp_avg", "exp_avg_sq"):
            values = torch.rand(local) if fill else torch.zeros(local)
            placement = Replicate() if dim is None else Shard(dim)
            tensors[f"{kind}/{name}"] = DTensor.from_local(values, mesh, [placement], run_check=False)
    return tensors


def torch_rank(args):
    """One process of PyTorch's side; `--torch-rank save` or `reshard`, under torchrun's environment."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if args.torch_rank == "save":
        mesh, stage = init_device_mesh("cpu", (SOURCE_TP,)), None
    else:
        mesh = init_device_mesh("cpu", (PP, TP), mesh_dim_names=("pp", "tp"))["tp"]
        stage = rank // TP
    tensors = state(args, mesh, stage, fill=args.torch_rank == "save")
    dist.barrier()
    start = time.perf_counter()
    if args.torch_rank == "save":
        dcp.save(tensors, checkpoint_id=args.source)
    else:
        dcp.load(tensors, checkpoint_id=args.source)
        loaded = time.perf_counter()
        dcp.save(tensors, checkpoint_id=args.destination)
    dist.barrier()
    if rank == 0 and args.torch_rank == "reshard":
        end = time.perf_counter()
        print(json.dumps({"load_s": loaded - start, "s": end - start}), flush=True)
    dist.destroy_process_group()


def torch_ranks(args, what, count, source, destination=""):
    """Starts PyTorch's ranks; the line that the first prints."""
    shape = ["--layers", args.layers, "--hidden", args.hidden, "--vocab", args.vocab]
    command = [sys.executable, __file__, args.folder, *shape, "--torch-rank", what]
    command = [str(part) for part in [*command, "--source", source, "--destination", destination]]
    ranks = []
    for rank in range(count):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29533",
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank of PyTorch failed")
    lines = printed[0].strip().splitlines()
    return json.loads(lines[-1]) if lines else {}


def files(folder):
    return sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file())


def size(folder):
    return sum(path.stat().st_size for path in files(folder))


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def forget(folder):
    """Takes the files of a folder out of the page cache."""
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(folder):
    """Brings the files of a folder into the page cache."""
    for path in files(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def copy(args, source, destination):
    destination.mkdir()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    for path in files(source):
        subprocess.run(["cp", "--reflink=never", path, destination / path.name], check=True)
        sync(destination / path.name)
    sync(destination)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"s": seconds, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def ours(args, source, destination):
    command = [args.merak_ckpt, WORK[args.work], source, destination, "--max-memory", args.max_memory]
    if args.work != "export":
        for degree in args.to.split(","):
            name, value = degree.split("=")
            command += [f"--{name}", value]
    command = [str(part) for part in command]
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit("merak-ckpt failed")
    return {"s": seconds, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss / 1024}


def make_source(args, folder):
    """What `merak-ckpt` reads, and the copy."""
    out = folder / "made-up"
    shape = ["--layers", args.layers, "--hidden", args.hidden, "--vocab", args.vocab, "--tp", args.source_tp]
    only = [] if args.work == "reshard" else ["--only-weights"]
    subprocess.run([str(part) for part in [args.made_up, out, *shape, *only]], check=True)
    step = out / "checkpoints" / "step-00001000"
    if args.work != "import":
        return step
    hf = folder / "hf"
    subprocess.run([args.merak_ckpt, "export-hf", step, hf], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(out)
    return hf


def theirs(args, source, destination):
    return torch_ranks(args, "reshard", TP * PP, source, destination)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["copy", "ours", "torch"])
    parser.add_argument("--work", choices=WORK, default="reshard")
    parser.add_argument("--source-tp", type=int, default=SOURCE_TP)
    parser.add_argument("--to", default=f"tp={TP},pp={PP}")
    parser.add_argument("--warm", action="store_true", help="the files that are read are in the page cache")
    parser.add_argument("--max-memory", default="256MiB")
    parser.add_argument("--keep", action="store_true", help="leave the sources, and use those that are there")
    parser.add_argument("--merak-ckpt", default=ROOT / "target" / "release" / "merak-ckpt")
    parser.add_argument("--made-up", default=ROOT / "target" / "release" / "examples" / "made_up")
    parser.add_argument("--torch-rank", help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    parser.add_argument("--destination", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch_rank:
        return torch_rank(args)

    args.folder.mkdir(exist_ok=True)
    made = args.folder / f"{args.work}-{args.source_tp}"
    torch_source = args.folder / "torch-source"
    read = {"torch": torch_source}
    if {"copy", "ours"} & set(args.only):
        made.mkdir(exist_ok=True)
        found = next(iter([*made.glob("hf"), *made.glob("*/checkpoints/step-*")]), None)
        read["copy"] = read["ours"] = found or make_source(args, made)
    if "torch" in args.only and not torch_source.exists():
        torch_ranks(args, "save", SOURCE_TP, torch_source)

    sides = {"copy": copy, "ours": ours, "torch": theirs}
    results = {name: [] for name in args.only}
    for run in range(args.runs):
        # The order changes from run to run.
        for name in args.only[run % len(args.only) :] + args.only[: run % len(args.only)]:
            source, destination = read[name], args.folder / f"{name}-out"
            (warm if args.warm else forget)(source)
            result = sides[name](args, source, destination)
            result |= {"what": name, "bytes": size(source), "mb_per_s": size(source) / result["s"] / 1e6}
            print(json.dumps(result), flush=True)
            results[name].append(result)
            shutil.rmtree(destination)
            os.sync()
    for name, all_runs in results.items():
        if not all_runs:
            continue
        median = statistics.median(result["s"] for result in all_runs)
        print(f"{name}: {median:.2f} s, {all_runs[0]['bytes'] / median / 1e6:.0f} MB/s")
    if not args.keep:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
