"""Configurations of every family as transformers writes them.

Run once with transformers 4 and once with transformers 5: `python make.py`. Each run becomes
transformers-4.json or transformers-5.json beside this file: by family what `save_pretrained` writes
and all that the configuration holds, and the version. Made with 4.57.3 and 5.23.0; torch is not
needed.
"""

import json
import os
import pathlib
import tempfile

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import transformers
from transformers import AutoConfig

MAJOR = int(transformers.__version__.split(".")[0])
SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
LLAMA = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8}
ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def rope(theta, **scaling):
    """A base and a scaling, in the words of either version."""
    if MAJOR >= 5:
        return {"rope_parameters": {"rope_theta": theta, "rope_type": "default", **scaling}}
    return {"rope_theta": theta, **({"rope_scaling": scaling} if scaling else {})}


def rotary(share, theta):
    if MAJOR >= 5:
        return {"rope_parameters": {"rope_theta": theta, "rope_type": "default", "partial_rotary_factor": share}}
    return {"rotary_pct": share, "rotary_emb_base": theta}


CASES = {
    "bert": ("bert", "BertForMaskedLM", {**SIZES, "intermediate_size": 24}),
    "bert-classes": ("bert", "BertForSequenceClassification", {**SIZES, "intermediate_size": 24, "num_labels": 5}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM", {**SIZES, "intermediate_size": 24, **rotary(0.5, 500.0)}),
    "llama": ("llama", "LlamaForCausalLM", {**LLAMA, **rope(500.0)}),
    "llama-linear": ("llama", "LlamaForCausalLM", {**LLAMA, **rope(500.0, rope_type="linear", factor=2.0)}),
    "llama-longrope": (
        "llama",
        "LlamaForCausalLM",
        {
            **LLAMA,
            "original_max_position_embeddings": 6,
            **rope(500.0, rope_type="longrope", short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 3.5, 8.0]),
        },
    ),
    "mistral": ("mistral", "MistralForCausalLM", {**LLAMA, "sliding_window": 3, **rope(500.0)}),
    "opt": ("opt", "OPTForCausalLM", {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "qwen2": (
        "qwen2",
        "Qwen2ForCausalLM",
        {
            **{name: size for name, size in LLAMA.items() if name != "head_dim"},
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 1,
            **rope(500.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=4),
        },
    ),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {**LLAMA, "attention_bias": True, **rope(500.0)}),
    "t5": (
        "t5",
        "T5ForConditionalGeneration",
        {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    ),
    "t5-gated": (
        "t5",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 31,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "feed_forward_proj": "gated-gelu",
        },
    ),
    "vit": ("vit", "ViTForImageClassification", {**ENCODER, "image_size": 8, "patch_size": 4, "num_labels": 5}),
}


def written(model_type, architecture, fields):
    dtype = "dtype" if MAJOR >= 5 else "torch_dtype"
    config = AutoConfig.for_model(model_type, architectures=[architecture], **{dtype: "bfloat16"}, **fields)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        saved = json.loads(pathlib.Path(folder, "config.json").read_text())
    return {"saved": saved, "all": json.loads(config.to_json_string(use_diff=False))}


cases = {name: written(*case) for name, case in CASES.items()}
lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
path = pathlib.Path(__file__).with_name(f"transformers-{MAJOR}.json")
path.write_text(f'{{\n  "version": "{transformers.__version__}",\n{lines}\n}}\n')
