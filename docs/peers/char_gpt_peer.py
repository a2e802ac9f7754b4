"""The small character-level GPT of examples/configs/shakespeare.toml in PyTorch.

    python docs/peers/char_gpt_peer.py shakespeare.txt [--threads 2] [--steps 2000]

The same sizes, rates and steps; windows begin at random places. Validates 200 random batches of the
last tenth of the text. Prints one JSON line with the seconds of the training and the validation
loss. Needs torch 2.13, and gpt_peer.py beside it.
"""

import argparse
import json
import math
import pathlib
import time

import torch
from torch import nn

from gpt_peer import Embeddings, Head, Layer, mean_loss

WIDTH, HEADS, LAYERS, SEQ, BATCH = 128, 4, 4, 64, 12
RATE, LEAST_RATE, WARMUP = 1e-3, 1e-4, 100
EVAL_BATCHES = 200

parser = argparse.ArgumentParser()
parser.add_argument("text", type=pathlib.Path)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()

text = args.text.read_text()
characters = sorted(set(text))
number = {character: at for at, character in enumerate(characters)}
ids = torch.tensor([number[character] for character in text])
cut = int(0.9 * len(ids))

torch.manual_seed(1337)
torch.set_num_threads(args.threads)
layers = [Embeddings(len(characters), SEQ, WIDTH)]
layers += [Layer(WIDTH, HEADS) for _ in range(LAYERS)]
model = nn.Sequential(*layers, Head(WIDTH, len(characters)))
for param in model.parameters():
    if param.dim() == 2:
        nn.init.normal_(param, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.1, fused=True)


def batch(part):
    starts = torch.randint(len(part) - SEQ - 1, (BATCH,))
    windows = torch.stack([part[start : start + SEQ + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def rate(step):
    """From a hundredth of the rate to all of it, and to a tenth of it by a cosine."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    share = (step - WARMUP) / (args.steps - WARMUP)
    return LEAST_RATE + 0.5 * (1 + math.cos(math.pi * share)) * (RATE - LEAST_RATE)


def loss_of(part):
    inputs, labels = batch(part)
    return mean_loss(model(inputs), labels)


start = time.perf_counter()
for step in range(args.steps):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    loss_of(ids[:cut]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
seconds = time.perf_counter() - start

with torch.no_grad():
    loss = sum(loss_of(ids[cut:]).item() for _ in range(EVAL_BATCHES)) / EVAL_BATCHES
print(json.dumps({"peer": "pytorch", "version": torch.__version__, "seconds": round(seconds, 1),
                  "val_loss": round(loss, 4)}))
