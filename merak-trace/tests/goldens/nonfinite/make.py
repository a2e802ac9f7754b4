"""What PyTorch makes of NaN and infinity: results and gradients of operations, in f32 on the CPU.

`python make.py` writes pytorch.json beside this file, with torch 2.13. A case has the operands (one
after the other, shapes and numbers), integers where there are any, the gradient of the result, the
result, and the gradients of the operands. Numbers that are not finite are the strings nan, inf and
-inf.
"""

import json
import math
import pathlib

import torch
import torch.nn.functional as F

NAN, INF = math.nan, math.inf
ROWS = [
    [1.0, NAN, 2.0, 3.0, -1.0],
    [INF, 1.0, 2.0, 0.0, -1.0],
    [-INF, 1.0, 2.0, 0.0, 3.0],
    [-INF, -INF, -INF, -INF, -INF],
    [INF, INF, 0.0, 1.0, 2.0],
    [INF, -INF, 0.0, 1.0, 2.0],
    [2.0, 2.0, 2.0, 2.0, 2.0],
    [-0.0, 1.0, 2.0, 3.0, 4.0],
    [0.5, -1.0, 2.0, -3.0, 4.0],
]
DY = [0.5, -1.0, 2.0, 0.25, 1.0]
SCALE, SHIFT = [1.0, -2.0, 0.5, 1.5, 3.0], [0.1, 0.2, 0.3, 0.4, 0.5]


def attend(hidden):
    """Two heads of three, keys of some positions hidden from all queries; a table of biases by relative position."""

    def run(q, k, v, table=None):
        heads = [x.view(1, -1, 2, 3).transpose(1, 2) for x in (q, k, v)]
        seen = torch.tensor([0.0 if key not in hidden else -INF for key in range(k.shape[1])])
        scores = heads[0] @ heads[1].transpose(2, 3) * 0.7 + seen
        if table is not None:
            # The buckets of T5, 8 in both directions for distances up to 4: one for each distance
            # here.
            ahead = torch.arange(4) - torch.arange(4).unsqueeze(1)
            scores = scores + table[torch.where(ahead > 0, 4 + ahead, -ahead)].permute(2, 0, 1)
        return (scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(1, -1, 6)

    return run


def attended(place=None, value=None):
    """Queries, keys and values of four positions, one number of which may be another."""
    operands = [torch.sin(torch.arange(24.0) * (i + 1.3)).view(1, 4, 6) for i in range(3)]
    if place is not None:
        operand, position, element = place
        operands[operand][0, position, element] = value
    return operands


def biased(place, value):
    table = torch.cos(torch.arange(16.0)).view(8, 2)
    table[place] = value
    return [*attended(), table]


def rope(x):
    """Heads of four, whose halves turn together, at the positions 0, 5 and 2."""
    angles = torch.tensor([0.0, 5.0, 2.0]).unsqueeze(1) * torch.tensor([1.0, 0.1])
    cos, sin = angles.cos().view(1, 3, 1, 2), angles.sin().view(1, 3, 1, 2)
    first, second = x.view(1, 3, 2, 4).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).view(1, 3, 8)


def turned(place, value):
    x = torch.sin(torch.arange(24.0)).view(1, 3, 8)
    x[0][place] = value
    return [x]


def matrix(rows=ROWS):
    return torch.tensor(rows)


UNARY = {
    "softmax": lambda x: x.softmax(-1),
    # As written down: the vectors of F.gelu make NaN of infinity, its scalars do not.
    "gelu_erf": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
}
CASES = [(name, name, op, [matrix()], None) for name, op in UNARY.items()]
CASES += [
    ("add", "add", lambda a, b: a + b, [matrix(), matrix(ROWS[::-1])], None),
    # As the layers do: what is dropped is multiplied by zero.
    ("dropout of everything", "dropout", lambda x: F.dropout(x, 1.0), [matrix()], None),
    ("silu_mul", "silu_mul", lambda a, b: F.silu(a) * b, [matrix(), matrix(ROWS[::-1])], None),
    (
        "layer_norm",
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, (5,), w, b, 1e-5),
        [matrix(), torch.tensor(SCALE), torch.tensor(SHIFT)],
        None,
    ),
    ("rms_norm", "rms_norm", lambda x, w: F.rms_norm(x, (5,), w, 1e-5), [matrix(), torch.tensor(SCALE)], None),
    ("linear", "linear", lambda x, w: x @ w.T, [matrix(ROWS[:3]), torch.ones(2, 5)], None),
]
CASES += [
    (
        f"cross_entropy of row {row}, label {label}",
        "cross_entropy",
        lambda x, ids: F.cross_entropy(x, ids, reduction="sum"),
        [torch.tensor([ROWS[row], ROWS[8]])],
        [label, 3],
    )
    for row in range(len(ROWS))
    for label in (0, 2)
]
CASES += [
    (f"embedding of {value}", "embedding", lambda table, ids: table[ids], [matrix([*ROWS[:2], [value] * 5])], [2, 0, 2])
    for value in (NAN, INF)
]
CASES += [
    (f"attention with {value} at {place}", "attention", attend(()), attended(place, value), None)
    for value in (NAN, INF, -INF)
    for place in ((0, 1, 2), (1, 2, 4), (2, 3, 0))
]
CASES += [
    (f"attention with {value} behind the mask at {place}", "attention_masked", attend((3,)), attended(place, value), None)
    for value in (NAN, INF)
    for place in ((0, 1, 2), (1, 2, 4))
]
CASES += [
    (f"rope with {value} at {place}", "rope", rope, turned(place, value), None)
    for value in (NAN, INF, -INF)
    for place in ((0, 1), (1, 2), (2, 7))
]
CASES += [
    (f"attention with a bias of {value} at {place}", "attention_biased", attend(()), biased(place, value), None)
    for value in (NAN, INF, -INF)
    for place in ((1, 0), (6, 1))
]


def plain(tensor):
    def number(x):
        return float(f"{x:.7g}") if math.isfinite(x) else str(x)

    return [number(x) for x in tensor.flatten().tolist()]


cases = []
for name, op, function, operands, ids in CASES:
    operands = [operand.clone().requires_grad_() for operand in operands]
    y = function(*operands, *([torch.tensor(ids)] if ids else []))
    dy = torch.tensor(DY * y.numel())[: y.numel()].view(y.shape) if y.dim() else torch.tensor(1.0)
    y.backward(dy)
    case = {
        "name": name,
        "op": op,
        "operands": [{"shape": list(x.shape), "data": plain(x)} for x in operands],
        "ids": ids or [],
        "dy": plain(dy),
        "y": plain(y),
        "grads": [plain(x.grad) for x in operands],
    }
    cases.append(case)
lines = ",\n".join(f"  {json.dumps(case)}" for case in cases)
path = pathlib.Path(__file__).with_name("pytorch.json")
path.write_text(f'{{"torch": "{torch.__version__}", "cases": [\n{lines}\n]}}\n')
