"""Losses and gradients of tiny models under torch.autocast, by torch and transformers.

Run with torch 2.13 and transformers 5.23: `python make.py`. Each case becomes CASE.json beside this
file: the golden of `../families` whose configuration it has, the type of autocast on the processor,
the losses of ten training steps, the gradients of the first one, and the versions of the libraries.
Weights, data and optimizer are those of `../families/make.py`.
"""

import json
import os
import pathlib
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

FAMILIES = pathlib.Path(__file__).resolve().parents[1] / "families"
sys.path.insert(0, str(FAMILIES))
from make import LEARNING_RATE, MAX_NORM, STEPS, WEIGHT_DECAY, batch, decays
from formula import rounded, start, write

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def run(base, key):
    golden = json.loads((FAMILIES / f"{base}.json").read_text())
    config = AutoConfig.for_model(**golden["config"])
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    named = dict(model.named_parameters())
    start(named)
    groups = [
        {"params": [p for name, p in named.items() if decays(name)], "weight_decay": WEIGHT_DECAY},
        {"params": [p for name, p in named.items() if not decays(name)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8)
    scale = 2.0**14 if key == "fp16" else 1.0
    losses, gradients = [], {}
    for step in range(STEPS):
        with torch.autocast("cpu", DTYPES[key]):
            loss = model(**batch(step, golden["seq"], config.pad_token_id or 0)).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        (loss * scale).backward()
        for p in named.values():
            p.grad /= scale
        if step == 0:
            gradients = {name: rounded(p.grad.flatten().tolist(), 4) for name, p in sorted(named.items())}
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    golden = {"base": base, "dtype": key, "losses": rounded(losses, 8), "gradients": gradients}
    write(__file__, f"{base}-{key}", golden)


if __name__ == "__main__":
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(1)
    for base in ["gpt2", "llama"]:
        for key in DTYPES:
            run(base, key)
