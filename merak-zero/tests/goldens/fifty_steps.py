"""Writes fifty_steps.txt: parameters of a small model after 1, 10 and 50 steps of every optimizer.

Made with torch 2.13.0 (CPU), transformers 5.23.0, Python 3.11: python fifty_steps.py >
fifty_steps.txt. torch 2.15 writes the same. Each line: case, parameter, updates done, then its
values.

Numbers are exact in f32: `noise` below. A parameter starts with the values noise(k, i), k its
position and i the element. The gradient before update t, from 0, is its value / 2 plus
noise(100 + 10 * t + k, i). Parameters of one dimension do not decay.

PyTorch steps AdamW, Adam, SGD and Muon, transformers Adafactor. `Lamb` and `Lion` are their papers'
rules. PyTorch's Muon computes its products in bf16: here that cast is taken out, so that they are
in f32 as everything else is.
"""

import torch
from transformers.optimization import Adafactor

SHAPES = {"wide": (5, 12), "tall": (12, 5), "vector": (7,), "conv": (4, 3, 2, 2)}
LR, DECAY, STEPS, SHOWN = 0.02, 0.1, 50, (1, 10, 50)
MASK = (1 << 64) - 1

# Older versions call the method, torch 2.15 names the type.
torch.Tensor.bfloat16 = lambda self: self.clone()
torch.bfloat16 = torch.float32


def noise(stream, index):
    x = ((stream << 32 | index) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 29) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 32) * 0x94D049BB133111EB) & MASK
    return (x >> 40) / (1 << 23) - 1.0


def noises(stream, shape):
    count = torch.Size(shape).numel()
    return torch.tensor([noise(stream, i) for i in range(count)]).reshape(shape)


class Lamb(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 1904.00962, with the identity for its function of the weight's norm."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                m, v = state["m"], state["v"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m_hat = m / (1 - beta1 ** state["t"])
                v_hat = v / (1 - beta2 ** state["t"])
                update = m_hat / (v_hat.sqrt() + group["eps"]) + decay * p
                weight_norm, update_norm = p.norm(), update.norm()
                ratio = 1.0
                if weight_norm > 0 and update_norm > 0:
                    ratio = (weight_norm / update_norm).item()
                p.sub_(update, alpha=group["lr"] * ratio)


class Lion(torch.optim.Optimizer):
    """Program 1 of arXiv 2302.06675."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = (m * beta1 + p.grad * (1 - beta1)).sign()
                p.mul_(1 - lr * group["weight_decay"]).sub_(update, alpha=lr)
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def adam(rule, **more):
    betas = dict(betas=(0.9, 0.95), eps=1e-6) if rule is not Lion else dict(betas=(0.9, 0.95))
    return lambda groups: [rule(groups, lr=LR, **betas, **more)]


def sgd(**more):
    return lambda groups: [torch.optim.SGD(groups, lr=LR, foreach=False, **more)]


def adafactor(groups):
    fixed = dict(scale_parameter=False, relative_step=False, warmup_init=False)
    return [Adafactor(groups, lr=LR, **fixed)]


def muon(groups):
    matrices = [p for group in groups for p in group["params"] if p.dim() == 2]
    others = [
        dict(group, params=[p for p in group["params"] if p.dim() != 2]) for group in groups
    ]
    return [
        torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.95), eps=1e-6, foreach=False),
    ]


CASES = {
    "adamw_torch": adam(torch.optim.AdamW, foreach=False),
    "adam": adam(torch.optim.Adam, foreach=False),
    "sgd": sgd(),
    "sgd_momentum": sgd(momentum=0.9),
    "sgd_nesterov": sgd(momentum=0.9, nesterov=True),
    "lion": adam(Lion, weight_decay=0.0),
    "lamb": adam(Lamb, weight_decay=0.0),
    "adafactor": adafactor,
    "muon": muon,
}

for case, make in CASES.items():
    params = [noises(k, shape).requires_grad_() for k, shape in enumerate(SHAPES.values())]
    groups = [
        dict(params=[p for p in params if p.dim() > 1], weight_decay=DECAY),
        dict(params=[p for p in params if p.dim() == 1], weight_decay=0.0),
    ]
    optimizers = make(groups)
    for t in range(STEPS):
        for k, p in enumerate(params):
            p.grad = p.detach() / 2 + noises(100 + 10 * t + k, p.shape)
        for optimizer in optimizers:
            optimizer.step()
        if t + 1 in SHOWN:
            for name, p in zip(SHAPES, params):
                values = (f"{x:.9g}" for x in p.detach().flatten().tolist())
                print(case, name, t + 1, *values)
