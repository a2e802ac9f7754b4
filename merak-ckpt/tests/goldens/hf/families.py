"""Takes a tiny model of every family through `merak-ckpt import-hf` and `export-hf` and loads both
ends in transformers.

    python families.py MERAK_CKPT

MERAK_CKPT is the command. What it exports must load without a missing or unexpected key, have the
same names of tensors as what transformers saved, and give the same logits, bit for bit. Ran with
torch 2.13.0 and transformers 5.23.0.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
import transformers
from safetensors import safe_open

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
LLAMA = {**SIZES, "num_key_value_heads": 2}
T5 = {"vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
IMAGES = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}

CASES = {
    "bert": ("BertForMaskedLM", SIZES),
    "bert-untied": ("BertForMaskedLM", {**SIZES, "tie_word_embeddings": False}),
    "bert-classes": ("BertForSequenceClassification", {**SIZES, "num_labels": 3}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", LLAMA),
    "opt": ("OPTForCausalLM", {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5-gated": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "t5-untied": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "vit": ("ViTForImageClassification", {**IMAGES, "image_size": 8, "patch_size": 4, "num_labels": 3}),
}


def inputs(config):
    ids = torch.arange(6).view(1, 6)
    if config.model_type == "vit":
        return {"pixel_values": torch.linspace(-1, 1, 3 * 8 * 8).view(1, 3, 8, 8)}
    if config.model_type == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
    return {"input_ids": ids}


def load(builder, path):
    model, info = builder.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    return model.eval(), {key: value for key, value in info.items() if value}


def names(path):
    files = sorted(pathlib.Path(path).glob("*.safetensors"))
    return sorted(name for file in files for name in safe_open(file, "pt").keys())


def check(command, case, architecture, fields, folder):
    builder = getattr(transformers, architecture)
    torch.manual_seed(7)
    model = builder(builder.config_class(architectures=[architecture], **fields))
    if case == "t5-untied":
        # What a checkpoint of version 1.1 is.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    original, checkpoint, exported = (str(folder / f"{case}{end}") for end in ("", "-in", "-out"))
    model.save_pretrained(original)
    subprocess.run([command, "import-hf", original, checkpoint, "--tp", "2", "--pp", "2"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([command, "export-hf", checkpoint, exported], check=True, stdout=subprocess.DEVNULL)
    (a, _), (b, wrong) = load(builder, original), load(builder, exported)
    assert not wrong, (case, wrong)
    assert names(exported) == names(original), case
    with torch.no_grad():
        x, y = a(**inputs(a.config)).logits, b(**inputs(b.config)).logits
    assert torch.equal(x, y), (case, (x - y).abs().max())
    print(f"{case}: no missing or unexpected key, {len(names(exported))} tensors, equal logits")


with tempfile.TemporaryDirectory() as folder:
    for case, (architecture, fields) in CASES.items():
        check(sys.argv[1], case, architecture, fields, pathlib.Path(folder))
