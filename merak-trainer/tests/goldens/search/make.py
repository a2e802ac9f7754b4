"""What transformers generates greedily and by beam search, with end tokens, least lengths and runs
that may not repeat.

Run with torch 2.13 and transformers 5.23: `python make.py [CASE ...]`. Each case becomes CASE.json
beside this file: the configuration, names and shapes of the parameters as in model.safetensors,
prompts, for each set of options the new tokens, and the versions of the libraries. Weights are the
formula of merak-trace's goldens. Each prompt is continued alone.
"""

import json
import pathlib
import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here.parents[3] / "merak-trace/tests/goldens"))
from formula import start, write

PROMPTS = [[5, 17, 3], [8], [1, 2, 3, 4, 5, 6, 7], [30, 29], [11, 0, 7, 2]]
NEW_TOKENS = 8
OPTIONS = [
    {},
    {"no_repeat_ngram_size": 2},
    {"eos_token_id": [7, 23, 12], "min_new_tokens": 3},
    {"num_beams": 2},
    {"num_beams": 4, "length_penalty": 2.0, "eos_token_id": [7, 23]},
    {"num_beams": 3, "early_stopping": True, "eos_token_id": [7, 23, 12, 5]},
    {"num_beams": 3, "early_stopping": "never", "length_penalty": 0.5, "eos_token_id": [7, 23, 12, 5]},
    {"num_beams": 3, "length_penalty": -1.0, "eos_token_id": [7, 12, 5]},
    {"num_beams": 5, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "eos_token_id": [7], "min_new_tokens": 4},
]
FAMILIES = pathlib.Path("merak-trainer/tests/goldens/families"), pathlib.Path("merak-trace/tests/goldens/families")
CASES = {"gpt2": FAMILIES[0], "llama": FAMILIES[0], "t5": FAMILIES[1], "t5-gated": FAMILIES[1]}


def file_names(model):
    """Names and shapes of the parameters in model.safetensors."""
    return {name: list(p.shape) for name, p in sorted(model.named_parameters())}


def generate(model, prompt, options):
    out = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=False,
        pad_token_id=0,
        **{"eos_token_id": None, **options},
    )
    # A decoder's tokens begin with the one that it starts from.
    return out[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()


def run(case, folder):
    base = json.loads((here.parents[3] / folder / f"{case}.json").read_text())
    config = AutoConfig.for_model(**base["config"])
    config._attn_implementation = "eager"
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(config).float().eval()
    start(dict(model.named_parameters()))
    model.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as to:
        model.save_pretrained(to)
        saved = json.loads(pathlib.Path(to, "config.json").read_text())
    results = [{"options": o, "tokens": [generate(model, prompt, o) for prompt in PROMPTS]} for o in OPTIONS]
    golden = {
        "config": saved,
        "parameters": file_names(model),
        "decoder_start_token_id": getattr(config, "decoder_start_token_id", None),
        "prompts": PROMPTS,
        "results": results,
    }
    write(__file__, case, golden)


for name in sys.argv[1:] or CASES:
    run(name, CASES[name])
