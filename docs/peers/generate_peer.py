"""What `merak bench generate` does, on transformers: greedy decoding of a GPT-2 with random
weights.

Run with torch 2.13 and transformers 5.23: `python generate_peer.py --batch 8`. Prints the same JSON
line.
"""

import argparse
import json
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
for name, default in [("layers", 12), ("hidden", 768), ("heads", 12), ("vocab", 50257), ("batch", 1), ("prompt", 32),
                      ("new-tokens", 64), ("steps", 3), ("threads", 2)]:
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()

torch.set_num_threads(args.threads)
torch.manual_seed(0)
config = GPT2Config(vocab_size=args.vocab, n_positions=args.prompt + args.new_tokens, n_embd=args.hidden,
                    n_layer=args.layers, n_head=args.heads, bos_token_id=None, eos_token_id=None)
model = GPT2LMHeadModel(config).eval()
ids = torch.tensor([[(7 * row + (at + row) * at) % args.vocab for at in range(args.prompt)]
                    for row in range(args.batch)])


@torch.inference_mode()
def timed(new_tokens):
    start = time.perf_counter()
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
                         min_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    assert out.shape[1] == args.prompt + new_tokens
    return time.perf_counter() - start


timed(2)
times = [(timed(1), timed(args.new_tokens)) for _ in range(args.steps)]
median = lambda xs: sorted(xs)[len(xs) // 2]
step = median([(whole - first) / (args.new_tokens - 1) for first, whole in times])
params = sum(p.numel() for p in model.parameters())
print(json.dumps({
    "batch": args.batch, "prompt": args.prompt, "new_tokens": args.new_tokens, "params": params,
    "prefill_ms": median([first for first, _ in times]) * 1e3, "ms_per_step": step * 1e3,
    "tokens_per_s": args.batch / step, "weight_bytes_per_s": 4 * params / step,
}))
