"""Logits and training losses of tiny models, by torch and transformers.

Run with torch 2.13 and transformers 5.23: `python make.py [CASE ...]`. Each case becomes CASE.json
beside this file: the configuration as transformers saves it, names and shapes of the parameters as
they stand in model.safetensors (with a head of its own where the weights differ, though config.json
ties it to the embedding), logits of the first batch, the losses of ten training steps, and the
versions of the libraries.

Weights (`../formula.py`) and data are formulas that `tests/it/parity/formula.rs` computes too.
"""

import json
import math
import os
import pathlib
import sys
import tempfile

import torch
import transformers
from safetensors import safe_open

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from formula import rounded, start, uniform, write

BATCH, STEPS, VOCAB, SEQ, TARGET = 3, 10, 31, 8, 6
LEARNING_RATE, WEIGHT_DECAY = 3e-3, 0.1


def token(index, t):
    return (7 * index + (t + index) * t) % VOCAB


def real(index):
    """Positions of a sample that are no padding."""
    return SEQ - 2 if index % 3 == 1 else SEQ


def text(index, pad):
    ids = [token(index, t) if t < real(index) else pad for t in range(SEQ)]
    return {"input_ids": ids, "attention_mask": [int(t < real(index)) for t in range(SEQ)]}


def masked(index, pad):
    """Every third token is to be found."""
    sought = [(token(index, t) + 5) % VOCAB if (t + index) % 3 == 0 and t < real(index) else -100 for t in range(SEQ)]
    return {**text(index, pad), "token_type_ids": [int(t >= SEQ // 2) for t in range(SEQ)], "labels": sought}


def continued(index, pad):
    """Padding before the tokens; transformers compares the logits of a position with the label of the next one."""
    first, tokens = SEQ - real(index), [token(index, t) for t in range(real(index))]
    mask = [0] * first + [1] * len(tokens)
    return {"input_ids": [pad] * first + tokens, "attention_mask": mask, "labels": [-100] * (first + 1) + tokens[1:]}


def label(index, classes):
    return -100 if index % 5 == 4 else index * index % classes


def classified(index, pad, classes):
    return {**masked(index, pad), "labels": label(index, classes)}


def translated(index, pad):
    target = [token(index + 3, t) if t + 1 < TARGET or index % 3 != 0 else -100 for t in range(TARGET)]
    return {**text(index, pad), "labels": target}


def image(index, shape, classes):
    pixels = uniform(f"image {index}", math.prod(shape)).astype("float32").reshape(shape)
    return {"pixel_values": pixels.tolist(), "labels": label(index, classes)}


def samples(config):
    pad, classes = getattr(config, "pad_token_id", None) or 0, config.num_labels
    if config.model_type == "t5":
        return lambda index: translated(index, pad)
    if config.model_type == "vit":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return lambda index: image(index, (config.num_channels, height, width), classes)
    if config.architectures[0].endswith(("CausalLM", "LMHeadModel")):
        return lambda index: continued(index, pad)
    if "Classification" in config.architectures[0]:
        return lambda index: classified(index, pad, classes)
    return lambda index: masked(index, pad)


def batch(sample, step):
    rows = [sample(step * BATCH + row) for row in range(BATCH)]
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def file_name(model_type, name):
    """The name that model.safetensors has for a parameter."""
    if model_type == "gpt_neox":
        return name.replace("lm_head.", "embed_out.")
    if model_type == "vit":
        for module, file in [
            (".layers.", ".encoder.layer."),
            ("attention.q_proj", "attention.attention.query"),
            ("attention.k_proj", "attention.attention.key"),
            ("attention.v_proj", "attention.attention.value"),
            ("attention.o_proj", "attention.output.dense"),
            ("mlp.fc1", "intermediate.dense"),
            ("mlp.fc2", "output.dense"),
        ]:
            name = name.replace(module, file)
    return name


def run(case, architecture, fields, untie=False):
    builder = getattr(transformers, architecture)
    config = builder.config_class(architectures=[architecture], **fields)
    config._attn_implementation = "eager"
    # Dropout is off throughout: what trains here is the model that evaluates.
    model = builder(config).float().eval()
    if untie:
        # What a checkpoint of version 1.1 makes of it, whose head is a tensor of its own.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    named = {file_name(config.model_type, name): p for name, p in model.named_parameters()}
    start(named)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(pathlib.Path(folder, "model.safetensors"), "pt") as file:
            assert set(file.keys()) == set(named), set(file.keys()) ^ set(named)
        saved = json.loads(pathlib.Path(folder, "config.json").read_text())
        if untie:
            # It comes back as it was, whatever its configuration says.
            model = builder.from_pretrained(folder, attn_implementation="eager").float().eval()
            assert saved["tie_word_embeddings"] and not torch.equal(model.lm_head.weight, model.shared.weight)

    sample = samples(config)
    with torch.no_grad():
        first = batch(sample, 0)
        logits = model(**first).logits
        if "CausalLM" in architecture or "LMHead" in architecture:
            # What stands at padding is nobody's business.
            logits *= first["attention_mask"].unsqueeze(-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-8, weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(sample, step)).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    golden = {
        "config": saved,
        "parameters": {name: list(p.shape) for name, p in sorted(named.items())},
        "logits": rounded(logits.flatten().tolist(), 7),
        "losses": rounded(losses, 8),
    }
    write(__file__, case, golden)


BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "decoder_start_token_id": 0,
}
CAUSAL = {**BERT, "max_position_embeddings": 16}
OPT = {**{name: size for name, size in CAUSAL.items() if name != "intermediate_size"}, "ffn_dim": 24}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 5,
}

CASES = {
    "bert-masked": ("BertForMaskedLM", BERT),
    "bert-masked-variant": (
        "BertForMaskedLM",
        {**BERT, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "pad_token_id": None, "type_vocab_size": 3},
    ),
    "bert-classes": ("BertForSequenceClassification", {**BERT, "num_labels": 3, "classifier_dropout": 0.2}),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5-gated": (
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3},
        True,
    ),
    "t5-silu": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-silu", "layer_norm_epsilon": 1e-3}),
    "gpt2-left": ("GPT2LMHeadModel", {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "gpt_neox-left": ("GPTNeoXForCausalLM", CAUSAL),
    "llama-left": ("LlamaForCausalLM", {**CAUSAL, "num_key_value_heads": 2}),
    "opt-left": ("OPTForCausalLM", OPT),
    "vit": ("ViTForImageClassification", VIT),
    "vit-variant": (
        "ViTForImageClassification",
        {**VIT, "image_size": [7, 9], "patch_size": [3, 2], "num_channels": 2, "qkv_bias": False, "hidden_act": "relu"},
    ),
}


if __name__ == "__main__":
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        run(name, *CASES[name])
