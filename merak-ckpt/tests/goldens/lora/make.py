"""Makes the adapters beside this script, and what peft makes of their bases with them merged in.

Written with peft 0.21.2, torch 2.13.0, transformers 5.23.0, Python 3.11; the bases are folders of
../hf. Those on ../hf/vit were written with transformers 4.57.1: in transformers 5 the modules of
ViT have other names in memory than in files, and so in adapters.

    python make.py [CASE ...]

- gpt2       on ../hf/gpt2-safetensors: Conv1D weights, patterns of rank and alpha, biases, a module saved whole
- embedding  on ../hf/gpt2-safetensors: the token embedding, use_rslora, adapter_model.bin
- head       on ../hf/gpt2-safetensors: the head, and the embedding saved whole
- llama      on ../hf/llama-indexed: every linear layer of a bf16 model
- tables     on ../hf/llama-indexed: a square layer, embedding and head, with a wrong fan_in_fan_out
- vit        on ../hf/vit: linear layers and the convolution of patches, its rank its own, their biases, the classifier
- vit-dora   on ../hf/vit: the same layers with magnitudes

Each has the adapter as peft saves it, and merged.safetensors, with a head of its own where the
adapter changes head or embedding.
"""

import pathlib
import shutil
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

here = pathlib.Path(__file__).parent

CASES = {
    "gpt2": ("gpt2-safetensors", True, LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, bias="all",
        rank_pattern={"h.1.attn.c_attn": 2}, alpha_pattern={"c_fc": 3, r"h\.0\.attn\..*": 5},
        modules_to_save=["ln_f"], task_type="CAUSAL_LM",
    )),
    "embedding": ("gpt2-safetensors", False, LoraConfig(r=3, lora_alpha=6, target_modules=["wte"], use_rslora=True)),
    "head": ("gpt2-safetensors", True, LoraConfig(r=2, target_modules=["lm_head"], modules_to_save=["wte"])),
    "tables": ("llama-indexed", True, LoraConfig(
        r=2, target_modules=["q_proj", "embed_tokens", "lm_head"], fan_in_fan_out=True,
    )),
    "llama": ("llama-indexed", True, LoraConfig(r=2, lora_alpha=1, target_modules="all-linear")),
    "vit": ("vit", True, LoraConfig(
        r=2, lora_alpha=3, target_modules=["query", "projection"], rank_pattern={"projection": 3}, bias="lora_only",
        modules_to_save=["classifier"],
    )),
    "vit-dora": ("vit", True, LoraConfig(r=2, target_modules=["query", "projection"], use_dora=True)),
}

names = sys.argv[1:] or CASES
for name in names:
    base, as_safetensors, config = CASES[name]
    torch.manual_seed(11)
    auto = AutoModelForImageClassification if base == "vit" else AutoModelForCausalLM
    model = auto.from_pretrained(here / ".." / "hf" / base, dtype="auto")
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = f"../hf/{base}"
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    folder = here / name
    shutil.rmtree(folder, ignore_errors=True)
    adapted.save_pretrained(folder, safe_serialization=as_safetensors)
    (folder / "README.md").unlink(missing_ok=True)
    if head := adapted.get_output_embeddings():
        head = getattr(head, "base_layer", head)
        head.weight = torch.nn.Parameter(head.weight.clone())
    merged = adapted.merge_and_unload().state_dict()
    if name == "gpt2":
        merged.pop("lm_head.weight")  # the embedding once more
    save_file({key: value.contiguous() for key, value in merged.items()}, folder / "merged.safetensors")
