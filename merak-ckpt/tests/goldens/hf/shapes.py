"""Writes shapes.json: configuration and shapes of what transformers saves of a tiny model of every
family.

    python shapes.py

Ran with torch 2.13.0 and transformers 5.23.0.
"""

import json
import pathlib
import tempfile

import transformers
from safetensors import safe_open

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 12,
}
GPT2 = {"vocab_size": 31, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 12}
LLAMA = {**SIZES, "num_key_value_heads": 2}
OPT = {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16}
T5 = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 4}
IMAGES = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
IMAGES = {**IMAGES, "image_size": 8, "patch_size": 4}

CASES = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2-inner": ("GPT2ForSequenceClassification", {**GPT2, "n_inner": 40}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama-biases": ("LlamaForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {**LLAMA, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8, "attention_bias": True}),
    "opt": ("OPTForCausalLM", OPT),
    "opt-350m": ("OPTForCausalLM", {**OPT, "word_embed_proj_dim": 8, "do_layer_norm_before": False}),
    "opt-plain": ("OPTForCausalLM", {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
    "gpt_neox-no-biases": ("GPTNeoXForCausalLM", {**SIZES, "attention_bias": False}),
    "bert": ("BertForMaskedLM", SIZES),
    "bert-apart": ("BertForMaskedLM", {**SIZES, "tie_word_embeddings": False}),
    "bert-pairs": ("BertForPreTraining", SIZES),
    "bert-classes": ("BertForSequenceClassification", SIZES),
    "bert-tokens": ("BertForTokenClassification", SIZES),
    "vit": ("ViTForImageClassification", IMAGES),
    "vit-no-biases": ("ViTForImageClassification", {**IMAGES, "qkv_bias": False}),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5-gated": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "t5-encoder": ("T5EncoderModel", T5),
    "t5-classes": ("T5ForSequenceClassification", T5),
}

models = {}
for case, (architecture, fields) in CASES.items():
    builder = getattr(transformers, architecture)
    config = builder.config_class(architectures=[architecture], pad_token_id=0, **fields)
    with tempfile.TemporaryDirectory() as folder:
        builder(config).save_pretrained(folder)
        folder = pathlib.Path(folder)
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
        config = json.loads((folder / "config.json").read_text())
    models[case] = {"config": config, "tensors": tensors}
lines = [f"{json.dumps(case)}: {json.dumps(model, sort_keys=True)}" for case, model in models.items()]
pathlib.Path(__file__).with_name("shapes.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
