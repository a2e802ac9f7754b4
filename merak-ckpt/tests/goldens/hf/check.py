"""Loads folders that `merak-ckpt export-hf` has written, next to the models they come from.

    python check.py ORIGINAL EXPORTED [ORIGINAL EXPORTED ...]

Each pair must load in transformers without a missing or unexpected key and give the same logits,
bit for bit, in f32.
"""

import sys

import torch
from transformers import AutoModelForCausalLM


def load(path):
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    return model.eval(), {key: value for key, value in info.items() if value}


for original, exported in zip(sys.argv[1::2], sys.argv[2::2]):
    (a, _), (b, wrong) = load(original), load(exported)
    assert not wrong, wrong
    ids = torch.arange(6).view(1, 6)
    with torch.no_grad():
        x, y = a(ids).logits, b(ids).logits
    assert torch.equal(x, y), (x - y).abs().max()
    as_written = AutoModelForCausalLM.from_pretrained(exported).dtype
    print(f"{exported}: no missing or unexpected key, equal logits, {as_written}")
