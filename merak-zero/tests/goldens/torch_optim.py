"""Writes torch_optim.txt: parameters after each step of PyTorch's optimizers.

Made with torch 2.13.0 (CPU), Python 3.11: python torch_optim.py > torch_optim.txt Each line: case,
step, then the values of one parameter of four elements. The gradient of step t, element i, is
(t + 1) * [0.5, -1.25, 0.03125, 3.0][i] / 4 for even t and that times -0.75 for odd t.
"""

import torch

START = [1.0, -2.0, 0.5, 0.125]
GRAD = torch.tensor([0.5, -1.25, 0.03125, 3.0])
CASES = {
    "adamw_torch": lambda p: torch.optim.AdamW(
        p, lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, foreach=False
    ),
    "adam": lambda p: torch.optim.Adam(
        p, lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, foreach=False
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1, foreach=False),
    "sgd_momentum": lambda p: torch.optim.SGD(
        p, lr=0.01, weight_decay=0.1, momentum=0.9, foreach=False
    ),
    "sgd_nesterov": lambda p: torch.optim.SGD(
        p, lr=0.01, weight_decay=0.1, momentum=0.9, nesterov=True, foreach=False
    ),
}

for name, make in CASES.items():
    param = torch.tensor(START, requires_grad=True)
    optimizer = make([param])
    for t in range(6):
        scale = (t + 1) / 4 * (1.0 if t % 2 == 0 else -0.75)
        param.grad = GRAD * scale
        optimizer.step()
        print(name, t, *(f"{x:.9g}" for x in param.detach().tolist()))
