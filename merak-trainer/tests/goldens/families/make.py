"""Logits and training losses of tiny models, by torch and transformers.

Run with torch 2.13 and transformers 5.23: `python make.py [CASE ...]`. Each case becomes CASE.json
beside this file: the configuration as transformers saves it, names and shapes of the parameters as
they stand in model.safetensors, logits of the first batch, the losses of ten training steps, and
the versions of the libraries.

Weights (`formula.py` of merak-trace) and data are formulas that `tests/it/parity/formula.rs`
computes too.
"""

import json
import os
import pathlib
import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[4] / "merak-trace/tests/goldens"))
from formula import is_norm, rounded, start, write

BATCH, STEPS, VOCAB = 4, 10, 31
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 3e-3, 0.1, 1.0


def decays(name):
    return not is_norm(name) and not name.endswith("bias")


def sample(index, seq, pad):
    """Tokens, labels (of the next token, -100 where none counts) and mask of a sample; every third is padded."""
    tokens = [(7 * index + (t + index) * t) % VOCAB for t in range(seq + 1)]
    real = seq - 2 if index % 3 == 1 else seq
    labels = [tokens[t + 1] if t + 1 < real and (t != 1 or index % 3 != 0) else -100 for t in range(seq)]
    ids = [tokens[t] if t < real else pad for t in range(seq)]
    return ids, labels, [int(t < real) for t in range(seq)]


def batch(step, seq, pad):
    rows = [sample(step * BATCH + row, seq, pad) for row in range(BATCH)]
    ids, labels, mask = (torch.tensor(part) for part in zip(*rows))
    # transformers compares the logits of a position with the label of the next one.
    shifted = torch.full_like(labels, -100)
    shifted[:, 1:] = labels[:, :-1]
    return {"input_ids": ids, "attention_mask": mask, "labels": shifted}


def file_name(model_type, name):
    """The name that model.safetensors has for a parameter."""
    if model_type == "gpt_neox":
        return name.replace("lm_head.", "embed_out.")
    return name


def run(case, fields, seq):
    fields = {"vocab_size": VOCAB, **fields}
    config = AutoConfig.for_model(**fields)
    config._attn_implementation = "eager"
    # Dropout is off throughout: what trains here is the model that evaluates.
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model_type = fields["model_type"]
    named = {file_name(model_type, name): p for name, p in model.named_parameters()}
    start(named)
    pad = config.pad_token_id or 0

    first = batch(0, seq, pad)
    with torch.no_grad():
        logits = model(**first).logits
    real = first["attention_mask"].bool()
    rows = [logits[row][real[row]].flatten().tolist() for row in range(2)]

    groups = [
        {"params": [p for name, p in named.items() if decays(name)], "weight_decay": WEIGHT_DECAY},
        {"params": [p for name, p in named.items() if not decays(name)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step, seq, pad)).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = json.loads(pathlib.Path(folder, "config.json").read_text())
    golden = {
        "config": saved,
        "seq": seq,
        "parameters": {name: list(p.shape) for name, p in sorted(named.items())},
        "logits": [rounded(row, 7) for row in rows],
        "losses": rounded(losses, 8),
    }
    write(__file__, case, golden)


GPT2 = {"model_type": "gpt2", "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
LLAMA = {
    "model_type": "llama",
    "max_position_embeddings": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
}
OPT = {
    "model_type": "opt",
    "max_position_embeddings": 16,
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NEOX = {
    "model_type": "gpt_neox",
    "max_position_embeddings": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama(**fields):
    return {**LLAMA, **fields}


def rope(kind, **fields):
    return {"rope_type": kind, "rope_theta": 100.0, **fields}


def longrope(original, **fields):
    """Divisors for heads of 4."""
    return rope(
        "longrope",
        short_factor=[1.0, 1.5],
        long_factor=[2.0, 9.0],
        original_max_position_embeddings=original,
        **fields,
    )


CASES = {
    "gpt2": (GPT2, 8),
    "gpt2-variant": (
        {
            **GPT2,
            "n_inner": 24,
            "activation_function": "gelu",
            "scale_attn_by_inverse_layer_idx": True,
            "scale_attn_weights": False,
            "tie_word_embeddings": False,
        },
        8,
    ),
    "llama": (LLAMA, 8),
    "llama-3": (
        llama(
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            pad_token_id=0,
            head_dim=8,
            rope_parameters=rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=24,
            ),
        ),
        8,
    ),
    "llama-linear": (llama(rope_parameters=rope("linear", factor=4.0)), 8),
    "llama-dynamic": (
        llama(max_position_embeddings=8, head_dim=8, rope_parameters=rope("dynamic", factor=2.0)),
        12,
    ),
    "llama-yarn": (
        llama(
            head_dim=8,
            rope_parameters=rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=4,
                beta_fast=2.0,
                beta_slow=0.25,
                mscale=0.7,
                mscale_all_dim=0.3,
            ),
        ),
        8,
    ),
    "llama-longrope": (llama(rope_parameters=longrope(8)), 8),
    "llama-longrope-long": (
        llama(
            max_position_embeddings=12,
            tie_word_embeddings=True,
            rope_parameters=longrope(7, factor=4.0, attention_factor=0.8),
        ),
        8,
    ),
    "mistral": (llama(model_type="mistral", sliding_window=3, head_dim=8), 8),
    "qwen2": (
        llama(model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1, pad_token_id=3),
        8,
    ),
    "qwen3": (llama(model_type="qwen3", head_dim=8, tie_word_embeddings=True), 8),
    "qwen3-windows": (
        llama(
            model_type="qwen3",
            head_dim=4,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=2,
            layer_types=["sliding_attention", "full_attention"],
        ),
        8,
    ),
    "opt": (OPT, 8),
    "opt-post-norm": (
        {
            **OPT,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 8,
            "enable_bias": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu_new",
        },
        8,
    ),
    "gpt_neox": (NEOX, 8),
    "gpt_neox-sequential": (
        {
            **NEOX,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_fast",
            "hidden_dropout": 0.1,
            "rope_parameters": rope(
                "yarn", factor=4.0, original_max_position_embeddings=4, partial_rotary_factor=0.5, truncate=False
            ),
        },
        8,
    ),
    "gpt_neox-longrope": ({**NEOX, "rope_parameters": {**longrope(4), "partial_rotary_factor": 0.5}}, 8),
}


if __name__ == "__main__":
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        run(name, *CASES[name])
