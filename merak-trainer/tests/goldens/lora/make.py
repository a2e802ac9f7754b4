"""Logits, training losses and greedy tokens of tiny models with PEFT adapters.

Run with torch 2.13, transformers 5.23 and peft 0.21.2: `python make.py [CASE ...]`. Each case
becomes CASE.json beside this file: the base (a case of ../families), the adapter's configuration,
names and shapes of the tensors that peft saves, logits of the first batch, the losses of ten
training steps, tokens with and without the adapter, and the versions of the libraries. In the cases
named after bf16 the base is in bf16, as users of large models load it, and the adapter is left
to peft, which makes it f32; they have losses, types of elements and norms of the trained factors.

Weights and data are the formulas of ../families/make.py; factors are named as peft names them in a
model.
"""

import importlib.util
import json
import pathlib
import sys
import tempfile

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

here = pathlib.Path(__file__).parent
spec = importlib.util.spec_from_file_location("families", here.parent / "families" / "make.py")
families = importlib.util.module_from_spec(spec)
spec.loader.exec_module(families)
from formula import weight  # the folder is on the path since `families` was run

PROMPTS = [[5, 17, 3], [8], [1, 2, 3, 4, 5, 6, 7]]
NEW_TOKENS = 6

CASES = {
    "gpt2": ("gpt2", {
        "r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "bias": "all",
        "rank_pattern": {"h.1.attn.c_attn": 2}, "alpha_pattern": {"c_fc": 3}, "modules_to_save": ["ln_f"],
        "fan_in_fan_out": True, "init_lora_weights": False,
    }),
    "gpt2-embedding": ("gpt2", {"r": 3, "lora_alpha": 6, "target_modules": ["wpe", "c_proj"], "fan_in_fan_out": True,
                                "layers_to_transform": None, "init_lora_weights": False}),
    "llama": ("llama", {"r": 2, "lora_alpha": 1, "target_modules": "all-linear", "use_rslora": True,
                        "init_lora_weights": False}),
    "llama-dora": ("llama", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
                             "use_dora": True, "init_lora_weights": False}),
    "gpt2-bf16": ("gpt2", {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "wpe"],
                           "fan_in_fan_out": True, "init_lora_weights": False}),
    "llama-bf16": ("llama", {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "init_lora_weights": False}),
    "llama-dora-bf16": ("llama", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "o_proj"],
                                  "use_dora": True, "init_lora_weights": False}),
    "gpt2-dora": ("gpt2", {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn", "c_proj"], "use_dora": True,
                           "fan_in_fan_out": True, "init_lora_weights": False}),
}


def own_name(name):
    """The name without peft's wrappers; None for what a wrapper keeps aside."""
    name = name.removeprefix("base_model.model.")
    if ".original_module." in name:
        return None
    return name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")


def greedy(model):
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
                             do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(out[0, len(prompt):].tolist())
    return found


def run(case):
    base, lora = CASES[case]
    golden = json.loads((here.parent / "families" / f"{base}.json").read_text())
    config = AutoConfig.for_model(**golden["config"])
    config._attn_implementation = "eager"
    is_narrow = case.endswith("-bf16")
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16 if is_narrow else torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weight(name, tuple(p.shape)))
    without = greedy(model)
    lora = {"task_type": "CAUSAL_LM", **{k: v for k, v in lora.items() if v is not None}}
    adapted = get_peft_model(model, LoraConfig(**lora)).eval()
    named = {own_name(name): p for name, p in adapted.named_parameters() if own_name(name)}
    with torch.no_grad():
        for name, p in named.items():
            if ".lora_" in name or p.requires_grad:
                p.copy_(weight(name, tuple(p.shape)))
    seq, pad = golden["seq"], config.pad_token_id or 0
    first = families.batch(0, seq, pad)
    with torch.no_grad():
        logits = adapted(**first).logits
    real = first["attention_mask"].bool()
    rows = [logits[row][real[row]].flatten().tolist() for row in range(2)]
    tokens = greedy(adapted)

    trained = {name: p for name, p in named.items() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if families.decays(name)], "weight_decay": families.WEIGHT_DECAY},
        {"params": [p for name, p in trained.items() if not families.decays(name)], "weight_decay": 0.0},
    ]
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        with safe_open(pathlib.Path(folder, "adapter_model.safetensors"), "pt") as file:
            saved = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
    optimizer = torch.optim.AdamW(groups, lr=families.LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step in range(families.STEPS):
        loss = adapted(**families.batch(step, seq, pad)).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), families.MAX_NORM)
        optimizer.step()
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__},
        "base": base,
        "lora": lora,
        "trained": sorted(trained),
        "saved": saved,
        "logits": [[float(f"{x:.7g}") for x in row] for row in rows],
        "losses": [float(f"{x:.8g}") for x in losses],
        "prompts": PROMPTS,
        "tokens": tokens,
        "tokens_without": without,
    }
    if is_narrow:
        for key in ("logits", "saved", "prompts", "tokens", "tokens_without"):
            del result[key]
        result["dtypes"] = {name: str(p.dtype).removeprefix("torch.") for name, p in named.items()}
        result["norms"] = {name: float(f"{p.detach().double().norm():.8g}") for name, p in trained.items()}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
    (here / f"{case}.json").write_text("{\n" + lines + "\n}\n")
    print(case, losses[0], losses[-1], tokens)


for name in sys.argv[1:] or CASES:
    run(name)
