"""How far trainings of one model part that differ in the number of microbatches alone.

    python adafactor_drift.py

A small tied GPT-2 of transformers learns sequences for 30 steps of 8 samples, in one microbatch and
in 2, 4 and 8, with AdamW of torch and Adafactor of transformers, in f32 and f64. A line has the
largest relative gap of a step's loss, and of an element of a parameter to the largest one there.
"""

import itertools

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.optimization import Adafactor

VOCAB, SEQ, SAMPLES, STEPS, LR = 61, 32, 8, 30, 1e-2


def train(microbatches, optimizer, dtype):
    """The loss of each step, and the parameters after the last one."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=VOCAB, n_positions=SEQ, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).to(dtype)
    step = optimizer(model.parameters())
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        first = torch.randint(0, 200, (SAMPLES, 1), generator=data)
        tokens = (first + 3 * torch.arange(SEQ)[None]) % VOCAB
        step.zero_grad()
        losses.append(0.0)
        for part in tokens.chunk(microbatches):
            loss = model(part, labels=part).loss / microbatches
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.step()
    params = {name: param.detach().double() for name, param in model.named_parameters()}
    return torch.tensor(losses, dtype=torch.float64), params


def adafactor(params):
    return Adafactor(params, lr=LR, scale_parameter=False, relative_step=False, warmup_init=False)


def adamw(params):
    return torch.optim.AdamW(params, lr=LR)


def main():
    torch.set_num_threads(1)
    for optimizer, dtype in itertools.product([adamw, adafactor], [torch.float32, torch.float64]):
        losses, params = train(1, optimizer, dtype)
        for microbatches in (2, 4, 8):
            other_losses, others = train(microbatches, optimizer, dtype)
            of_loss = ((other_losses - losses).abs() / losses).max().item()
            gaps = ((others[name] - param).abs().max() / param.abs().max() for name, param in params.items())
            of_params = max(gap.item() for gap in gaps)
            print(f"{optimizer.__name__:9} {dtype} {microbatches} microbatches: loss {of_loss:.1e}, parameters {of_params:.1e}")


if __name__ == "__main__":
    main()
