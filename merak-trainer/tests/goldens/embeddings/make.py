"""What the heads of tiny models read, by torch and transformers: the embeddings of samples.

Run with torch 2.13 and transformers 5.24: `python make.py [CASE ...]`. Each case becomes CASE.json
beside this file: the golden whose configuration and parameters it has, from the root of the
repository, the tensors of three samples, for each sample the mean of the head's inputs over the
positions that are no padding, and the versions of the libraries. Weights and most samples are those
of merak-trace's goldens.
"""

import json
import math
import pathlib
import sys

import torch
import transformers

root = pathlib.Path(__file__).resolve().parents[4]
sys.path.insert(0, str(root / "merak-trace/tests/goldens/families"))
from make import BATCH, batch, file_name, samples, text
from formula import rounded, start, write

FAMILIES = "merak-{}/tests/goldens/families/{}.json"
CASES = {
    # Padding behind the tokens, then before them.
    "gpt2": FAMILIES.format("trainer", "gpt2"),
    "llama-left": FAMILIES.format("trace", "llama-left"),
    "bert-masked": FAMILIES.format("trace", "bert-masked"),
    "bert-classes": FAMILIES.format("trace", "bert-classes"),
    "t5": FAMILIES.format("trace", "t5"),
    "vit": FAMILIES.format("trace", "vit"),
}


def tensors(case, config):
    if case == "vit":
        shape = (BATCH, config.num_channels, config.image_size, config.image_size)
        pixels = torch.tensor([i * i // 7 % 256 for i in range(math.prod(shape))]).reshape(shape)
        return {"pixel_values": pixels, "labels": torch.arange(BATCH)}
    if case == "gpt2":
        return batch(lambda index: text(index, 0), 0)
    found = batch(samples(config), 0)
    if case == "llama-left":
        # Their places are transformers' own; ours are made of the tokens.
        del found["labels"]
    return found


def run(case, base):
    config = transformers.AutoConfig.for_model(**json.loads((root / base).read_text())["config"])
    config._attn_implementation = "eager"
    model = getattr(transformers, config.architectures[0])(config).float().eval()
    start({file_name(config.model_type, name): p for name, p in model.named_parameters()})
    given = tensors(case, config)
    read = []
    head = model.get_output_embeddings() or model.classifier
    head.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    inputs = {**given}
    if case == "vit":
        inputs["pixel_values"] = given["pixel_values"] / 127.5 - 1.0
    with torch.no_grad():
        model(**inputs)

    hidden = read[0].double()
    if hidden.ndim == 3:
        # Of an encoder-decoder, these are the decoder's positions.
        seen = given["labels"] != -100 if case == "t5" else given["attention_mask"].bool()
        hidden = torch.stack([row[mask].mean(0) for row, mask in zip(hidden, seen)])
    golden = {
        "base": base,
        "tensors": {name: {"shape": list(t.shape), "values": t.flatten().tolist()} for name, t in given.items()},
        "embeddings": [rounded(row.tolist(), 7) for row in hidden],
    }
    write(__file__, case, golden)


torch.set_num_threads(1)
for name in sys.argv[1:] or CASES:
    run(name, CASES[name])
