"""The distributions from which transformers draws a token.

Run with torch 2.13 and transformers 5.23: `python make.py`. Writes distributions.json beside this
file: for each case the logits, the tokens so far, the options, and the ids that remain with their
probabilities, likeliest first. The processors are made by `generate` itself, so their order is the
library's.
"""

import json
import pathlib

import torch
import transformers
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

V = 24
OPTIONS = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"repetition_penalty": 1.8},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.8},
    {"temperature": 0.5, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 0.6, "top_k": 7, "min_p": 0.3},
    {"temperature": 2.0, "top_k": 12, "top_p": 0.75, "min_p": 0.5, "repetition_penalty": 1.3},
]

model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=4, n_layer=1, n_head=1, bos_token_id=None, eos_token_id=None))
cases = []
for index, options in enumerate(OPTIONS):
    generator = torch.Generator().manual_seed(index)
    logits = 2.5 * torch.randn(V, generator=generator)
    tokens = torch.randint(V, (6,), generator=generator).tolist()
    full = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
    processors = model._get_logits_processor(GenerationConfig(**full), input_ids_seq_length=len(tokens))
    scores = processors(torch.tensor([tokens]), logits[None].clone())[0]
    probabilities = torch.softmax(scores.double(), 0)
    kept = [i for i in torch.argsort(probabilities, descending=True).tolist() if probabilities[i] > 0]
    cases.append({"options": options, "tokens": tokens, "logits": [float(f"{x:.9g}") for x in logits.tolist()],
                  "ids": kept, "probabilities": [float(f"{probabilities[i]:.8g}") for i in kept]})
versions = {"torch": torch.__version__, "transformers": transformers.__version__}
lines = ",\n".join(f"    {json.dumps(case)}" for case in cases)
text = f'{{\n  "versions": {json.dumps(versions)},\n  "cases": [\n{lines}\n  ]\n}}\n'
pathlib.Path(__file__).with_name("distributions.json").write_text(text)
