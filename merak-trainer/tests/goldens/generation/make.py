"""Greedy tokens of tiny models for prompts of several lengths in one batch, padded on the left.

Run with torch 2.13 and transformers 5.23: `python make.py [CASE ...]`. Each case, one of
../families, becomes CASE.json beside this file: prompts, the tokens that follow them, those with a
repetition penalty, and the versions of the libraries. Weights are the formula that ../families has.
A prompt alone must give the same, or nothing is written.
"""

import json
import pathlib
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here.parents[3] / "merak-trace/tests/goldens"))
from formula import start, write

PROMPTS = [[5, 17, 3], [8], [1, 2, 3, 4, 5, 6, 7], [30, 29], [8, 8, 8, 8, 8], [11, 0, 7, 2], [3, 1]]
NEW_TOKENS, PENALTY = 8, 1.4
CASES = ["gpt2", "llama", "mistral", "opt", "qwen3"]


def generate(model, prompts, penalty):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    processors = transformers.LogitsProcessorList()
    if penalty != 1.0:
        # The library's own looks at padding, too: here each row has its own tokens.
        processors.append(OwnTokens(penalty, [longest - len(prompt) for prompt in prompts]))
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False,
                         eos_token_id=None, pad_token_id=0, logits_processor=processors)
    return out[:, longest:].tolist()


class OwnTokens(transformers.LogitsProcessor):
    def __init__(self, penalty, skipped):
        self.processor, self.skipped = transformers.RepetitionPenaltyLogitsProcessor(penalty), skipped

    def __call__(self, ids, scores):
        rows = zip(self.skipped, ids, scores)
        return torch.cat([self.processor(row[skip:][None], score[None]) for skip, row, score in rows])


def run(case):
    golden = json.loads((here.parent / "families" / f"{case}.json").read_text())
    config = AutoConfig.for_model(**golden["config"])
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    start(dict(model.named_parameters()))
    result = {"base": case, "prompts": PROMPTS, "repetition_penalty": PENALTY}
    for key, penalty in [("tokens", 1.0), ("tokens_penalised", PENALTY)]:
        result[key] = generate(model, PROMPTS, penalty)
        alone = [generate(model, [prompt], penalty)[0] for prompt in PROMPTS]
        assert alone == result[key], (case, key, alone, result[key])
    write(__file__, case, result)


for name in sys.argv[1:] or CASES:
    run(name)
