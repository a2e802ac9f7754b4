"""Alternates `merak bench gpt` and gpt_peer.py and prints the median ratio of each mode, as a
Markdown table.

    cargo build --release
    python compare.py [single compile dp tp pp zero1 zero2 zero3] [--pairs 5] [-- --layers 8 ..]

The modes zero1 and zero2 run two replicas with these stages of ZeRO against DistributedDataParallel,
zero3 against FSDP2. The modes tch, bf16 and bf16-compile run one rank on libtorch (build with
`--features tch`), in f32 against eager and in bf16 against autocast; own-bf16 runs the default
backend in bf16. `-- --device cuda` runs them on a GPU. What stands behind `--` goes to both. Runs of
a pair follow each other, and the order changes from pair to pair, so that a slow minute of the
machine falls on both. Run it with a Python that has torch, on an idle machine.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
OURS = {"single": [], "compile": [], "dp": ["--dp", "2"], "tp": ["--tp", "2"], "pp": ["--pp", "2"]}
THEIRS = {mode: [mode] for mode in OURS} | {"compile": ["single", "--compile"]}
BF16 = ["--backend", "tch", "--dtype", "bf16"]
OURS |= {"tch": ["--backend", "tch"], "bf16": BF16, "bf16-compile": BF16, "own-bf16": ["--dtype", "bf16"]}
THEIRS |= {"tch": ["single"], "bf16": ["single", "--bf16"], "bf16-compile": ["single", "--bf16", "--compile"]}
THEIRS |= {"own-bf16": THEIRS["bf16"]}
OURS |= {f"zero{stage}": ["--dp", "2", "--zero", str(stage)] for stage in (1, 2, 3)}
THEIRS |= {"zero1": ["dp"], "zero2": ["dp"], "zero3": ["fsdp"]}
DEFAULT = ["single", "dp", "tp", "pp"]


def run(command, env=None):
    """The JSON line that a command prints last."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    return json.loads(done.stdout.strip().splitlines()[-1])


def pair(mode, merak, shape, swap):
    """One run of each: ours and theirs."""
    alone = THEIRS[mode][0] == "single"
    peer_env = dict(os.environ) if alone else os.environ | {"OMP_NUM_THREADS": "1"}
    runs = [
        lambda: run([merak, "bench", "gpt", *OURS[mode], *shape]),
        lambda: run([sys.executable, str(HERE / "gpt_peer.py"), *THEIRS[mode], *shape], peer_env),
    ]
    results = [call() for call in (reversed(runs) if swap else runs)]
    ours, theirs = reversed(results) if swap else results
    if ours["params"] != theirs["params"]:
        sys.exit(f"{mode}: {ours['params']} parameters of ours, {theirs['params']} of PyTorch's")
    return ours, theirs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("modes", nargs="*", help=f"some of {' '.join(OURS)}; default: {' '.join(DEFAULT)}")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--merak", default=str(HERE.parents[1] / "target" / "release" / "merak"))
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, shape = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    unknown = [mode for mode in args.modes if mode not in OURS]
    if unknown:
        parser.error(f"unknown mode {unknown[0]!r}, expected some of {' '.join(OURS)}")

    print("| mode | merak, tokens/s | PyTorch, tokens/s | median ratio | merak, peak MiB | PyTorch, peak MiB |")
    print("|---|---|---|---|---|---|", flush=True)
    for mode in args.modes or DEFAULT:
        pairs = [pair(mode, args.merak, shape, number % 2 == 1) for number in range(args.pairs)]

        def median(side, key, pairs=pairs):
            return statistics.median(results[side][key] for results in pairs)

        ratio = statistics.median(o["tokens_per_s"] / t["tokens_per_s"] for o, t in pairs)
        speeds = f"{median(0, 'tokens_per_s'):.0f} | {median(1, 'tokens_per_s'):.0f}"
        place = "peak_bytes" if pairs[0][0]["device_peak_bytes"] is None else "device_peak_bytes"
        peaks = " | ".join(f"{median(side, place) / 2**20:.0f}" for side in (0, 1))
        print(f"| {mode} | {speeds} | {ratio:.2f} | {peaks} |", flush=True)


if __name__ == "__main__":
    main()
