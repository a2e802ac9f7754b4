"""Makes the folders beside this script that the tests import.

Written with torch 2.13.0, transformers 5.23.0, safetensors 0.8.0, Python 3.11:

    python make.py

- gpt2-safetensors  GPT-2 with its head tied, one model.safetensors
- gpt2-zip          the bare model (no `transformer.` prefix) as pytorch_model.bin, a zip archive, with causal masks
- gpt2-old          the same in the format before PyTorch 1.6
- gpt2-strided      the same as a zip archive whose tensors lie column by column, or are parts of larger ones
- expanded          one tensor whose rows are one row of its storage, which is refused
- parted            one tensor that is the middle of its storage
- llama-indexed     Llama in bf16, head of its own, several files and an index
- vit               ViT with three classes: a convolution makes its patches
- evil              a pytorch_model.bin that would run a command
- expected.json     for each folder and tensor, the shape and the f64 sum of the values
"""

import json
import os
import pathlib
import shutil

import torch
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

here = pathlib.Path(__file__).parent


def folder(name):
    path = here / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def described(state):
    return {
        name: {"shape": list(value.shape), "sum": value.double().sum().item(), "last": value.double().flatten()[-1].item()}
        for name, value in sorted(state.items())
    }


torch.manual_seed(7)
expected = {}

config = GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=8, vocab_size=20, bos_token_id=0, eos_token_id=1)
gpt2 = GPT2LMHeadModel(config)
for parameter in gpt2.parameters():
    torch.nn.init.normal_(parameter)
gpt2.save_pretrained(folder("gpt2-safetensors"))
state = {name: value for name, value in gpt2.state_dict().items() if name != "lm_head.weight"}
expected["gpt2-safetensors"] = described(state)

bare = dict(gpt2.transformer.state_dict())
for layer in range(2):
    bare[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(8, 8, dtype=torch.bool)).view(1, 1, 8, 8)
    bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
for name, new in [("gpt2-zip", True), ("gpt2-old", False)]:
    path = folder(name)
    config.save_pretrained(path)
    torch.save(bare, path / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    expected[name] = described(state)

strided = {}
for name, value in bare.items():
    if value.dim() == 2:
        # Column by column where rows are even, and every second column of a larger tensor
        # elsewhere.
        wide = torch.zeros(value.shape[0], 2 * value.shape[1])
        wide[:, ::2] = value
        value = value.t().contiguous().t() if value.shape[0] % 8 == 0 else wide[:, ::2]
    strided[name] = value
path = folder("gpt2-strided")
config.save_pretrained(path)
torch.save(strided, path / "pytorch_model.bin")
expected["gpt2-strided"] = described(state)

for name, value in [
    ("expanded", torch.ones(1, 4).expand(3, 4)),
    ("parted", torch.arange(256.0).view(16, 16)[2:6, 4:8]),
]:
    path = folder(name)
    (path / "config.json").write_text('{"model_type": "novel"}\n')
    torch.save({"w": value}, path / "pytorch_model.bin")

config = LlamaConfig(
    hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=20, max_position_embeddings=16, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
)
llama = LlamaForCausalLM(config).to(torch.bfloat16)
llama.save_pretrained(folder("llama-indexed"), max_shard_size="2KB")
expected["llama-indexed"] = described(llama.state_dict())

config = ViTConfig(
    hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, image_size=4, patch_size=2,
    num_channels=2, num_labels=3,
)
vit = ViTForImageClassification(config)
for parameter in vit.parameters():
    torch.nn.init.normal_(parameter)
vit.save_pretrained(folder("vit"))
# In memory its modules have other names.
expected["vit"] = described(load_file(here / "vit" / "model.safetensors"))


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/merak-was-here",)


path = folder("evil")
llama.config.save_pretrained(path)
torch.save({"w": Evil()}, path / "pytorch_model.bin")

(here / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
