"""Loads an adapter that `merak train` saved into Python's peft and compares greedy tokens.

Run with torch 2.13, transformers 5.23 and peft 0.21.2:

    merak generate BASE --adapter ADAPTER --prompt-ids 5,17,3 --temperature 0 --max-new-tokens 16 --json > ours.json
    python check.py BASE ADAPTER ours.json

BASE is a Hugging Face folder. No key of the adapter may be missing or unexpected.
"""

import json
import sys

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

base, adapter, ours = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
saved, loaded = load_file(f"{adapter}/adapter_model.safetensors"), get_peft_model_state_dict(model)
assert saved.keys() == loaded.keys(), saved.keys() ^ loaded.keys()
assert all(torch.equal(saved[key], loaded[key]) for key in saved)
for completion in json.load(open(ours)):
    ids = torch.tensor([completion["prompt_ids"]])
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                         max_new_tokens=len(completion["ids"]))
    theirs = out[0, ids.shape[1]:].tolist()
    assert theirs == completion["ids"], (theirs, completion["ids"])
    with model.disable_adapter():
        plain = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                               max_new_tokens=len(completion["ids"]))
    print(len(theirs), "tokens equal;", "other" if plain[0].tolist() != out[0].tolist() else "the same",
          "without the adapter")
