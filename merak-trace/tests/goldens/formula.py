"""What the scripts of goldens share: numbers that Rust computes too, and the files that they write.

`uniform` and `weight` are those of `tests/it/parity/formula.rs` of merak-trace and merak-trainer.
"""

import json
import math
import pathlib

import numpy as np
import torch
import transformers


def uniform(name, count):
    """`count` numbers in [-1, 1): SplitMix64 from the FNV-1a hash of the name."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = ((state ^ byte) * 0x100000001B3) % 2**64
    with np.errstate(over="ignore"):
        x = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def is_norm(name):
    return name.endswith("weight") and ("norm" in name.lower() or ".ln_" in name)


def weight(name, shape):
    """The starting values of a parameter."""
    u = uniform(name, math.prod(shape))
    if is_norm(name):
        u = 1.0 + 0.1 * u
    elif name.endswith("bias"):
        u = 0.1 * u
    else:
        u = 0.3 * u
    return torch.from_numpy(u.astype(np.float32)).reshape(shape)


def start(named):
    """Gives parameters their starting values."""
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(weight(name, tuple(p.shape)))


def rounded(numbers, digits):
    return [float(f"{x:.{digits}g}") for x in numbers]


def write(script, case, golden):
    """Writes CASE.json beside a script, one key a line, the versions first."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    golden = {"versions": versions, **golden}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items())
    pathlib.Path(script).with_name(f"{case}.json").write_text("{\n" + lines + "\n}\n")
    print(case, golden.get("losses", [])[-1:])
