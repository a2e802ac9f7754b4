"""Writes hf_schedules.txt: learning-rate factors of Hugging Face's schedules.

Made with transformers 5.23.0, torch 2.13.0, Python 3.11: python hf_schedules.py > hf_schedules.txt
Each line: case, step, factor of the learning rate 0.001, for 4 warmup steps of 20.
"""

import torch
from transformers import optimization as o

LR, W, N = 0.001, 4, 20
CASES = {
    "linear": lambda x: o.get_linear_schedule_with_warmup(x, W, N),
    "cosine": lambda x: o.get_cosine_schedule_with_warmup(x, W, N),
    "cosine_1.5": lambda x: o.get_cosine_schedule_with_warmup(x, W, N, num_cycles=1.5),
    "cosine_with_restarts_3": lambda x: o.get_cosine_with_hard_restarts_schedule_with_warmup(
        x, W, N, num_cycles=3
    ),
    "constant": lambda x: o.get_constant_schedule(x),
    "constant_with_warmup": lambda x: o.get_constant_schedule_with_warmup(x, W),
    "polynomial": lambda x: o.get_polynomial_decay_schedule_with_warmup(x, W, N),
    "polynomial_2_1e-5": lambda x: o.get_polynomial_decay_schedule_with_warmup(
        x, W, N, lr_end=1e-5, power=2.0
    ),
    "inverse_sqrt": lambda x: o.get_inverse_sqrt_schedule(x, W),
    "inverse_sqrt_16": lambda x: o.get_inverse_sqrt_schedule(x, W, timescale=16),
    "wsd": lambda x: o.get_wsd_schedule(x, W, 2, num_training_steps=N),
    "wsd_linear_8": lambda x: o.get_wsd_schedule(x, W, 8, num_training_steps=N, decay_type="linear"),
    "wsd_sqrt_8": lambda x: o.get_wsd_schedule(x, W, 8, num_training_steps=N, decay_type="1-sqrt"),
    "wsd_least_0.1": lambda x: o.get_wsd_schedule(x, W, 8, num_training_steps=N, min_lr_ratio=0.1),
    "wsd_linear_least_0.25": lambda x: o.get_wsd_schedule(
        x, W, 8, num_training_steps=N, decay_type="linear", min_lr_ratio=0.25
    ),
}

for name, make in CASES.items():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    schedule = make(optimizer)
    for t in range(N + 3):
        print(name, t, f"{schedule.lr_lambdas[0](t):.15g}")
