"""Times the loss of 16-bit logits on a CUDA device, forward and backward, a part of the rows at a
time, by the calls of ATen that `merak-trace/src/backend/tch/loss.rs` makes.

    python loss_parts.py [ROWS OF A PART ..]

Needs torch and a CUDA device; prints milliseconds, the mean of ten runs after three.
"""

import sys

import torch

ROWS, CLASSES = 8192, 50304


def forward(logits, labels, most):
    for x, y in zip(logits.split(most), labels.split(most)):
        shares = torch.log_softmax(x, -1, dtype=torch.float32)
        x.amax(-1).float() - shares.amax(-1)
        shares.gather(1, y[:, None])


def backward(logits, labels, scale, most):
    grads, at_labels = torch.empty_like(logits), []
    parts = zip(logits.split(most), labels.split(most), scale.split(most), grads.split(most))
    for x, y, s, to in parts:
        grad = torch.softmax(x, -1, dtype=torch.float32)
        at_labels.append((grad.gather(1, y[:, None]) - 1) * s)
        torch.mul(grad, s, out=to)
    rows = torch.arange(len(logits), device=logits.device)
    grads.index_put_((rows, labels), torch.cat(at_labels).view(-1).to(grads.dtype))


def milliseconds(run):
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 10


def main():
    logits = torch.randn(ROWS, CLASSES, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(CLASSES, (ROWS,), device="cuda")
    scale = torch.ones(ROWS, 1, device="cuda")
    for most in map(int, sys.argv[1:] or (83, 2112, 2668, ROWS)):
        there = milliseconds(lambda: forward(logits, labels, most))
        back = milliseconds(lambda: backward(logits, labels, scale, most))
        print(f"{most} rows: {there:.2f} forward, {back:.2f} backward")


if __name__ == "__main__":
    main()
