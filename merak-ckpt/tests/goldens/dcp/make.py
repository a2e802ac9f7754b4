"""Makes the folders of torch.distributed.checkpoint beside this script that the tests import.

Written with torch 2.13.0, transformers 5.23.0, Python 3.11:

    python make.py [NAME ..]

- gpt2    one process; a GPT-2 with its head tied that AdamW has trained for five steps, under `model` and `optim` with a
          list of parameter groups, a step and a table of positions that lies column by column
- llama   two processes of FSDP2, which cut rows unevenly; Adam, its state and groups under flat keys
- grid    four processes, two by two; a made-up model in bf16 cut along rows, columns and both, names at the top
- sgd     one process; SGD with momentum, names at the top and flat keys
- tensors one process; AMSGrad in two groups, with a learning rate that is a tensor, betas that are a list of tensors, betas that
          are a tuple of tensors, and a number of NumPy
- bare-sgd  one process; SGD without momentum, which has no state, in two groups
- threads two processes of FSDP2 that write two files each; fused AdamW in two groups with a learning rate that is a tensor
- by-number  state of the optimizer as `optimizer.state_dict()` gives it: under numbers instead of names

- whole   a model that a planner did not flatten
- parts   what HuggingFaceStorageWriter writes: each process's part of each tensor as safetensors
- safetensors  what FileSystemWriter writes that was told to write safetensors

expected.json has, for each folder, the sums of each tensor's values by kind and name, and for gpt2
the losses of five more steps on the first batches of `batch`.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

here = pathlib.Path(__file__).parent
BATCH, SEQ, STEPS, VOCAB = 4, 8, 5, 31
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def batch(step):
    """The batch of a step, of the samples that merak-trainer's formula makes."""
    ids, labels = [], []
    for index in range(step * BATCH, (step + 1) * BATCH):
        tokens = [(7 * index + (t + index) * t) % VOCAB for t in range(SEQ + 1)]
        real = SEQ - 2 if index % 3 == 1 else SEQ
        ids.append([tokens[t] if t < real else 0 for t in range(SEQ)])
        row = [tokens[t + 1] if t + 1 < real and (t != 1 or index % 3 != 0) else -100 for t in range(SEQ)]
        # transformers compares the logits of a position with the label of the next one.
        labels.append([-100] + row[:-1])
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def train(model, optimizer, steps):
    losses = []
    for step in range(steps):
        loss = model(**batch(step)).loss
        losses.append(round(loss.item(), 8))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def whole(value):
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().double().flatten()


def sums(value):
    """Two sums, the second of which depends on the order."""
    values = whole(value)
    weights = torch.arange(len(values), dtype=torch.float64) * 7 % 11
    return [values.sum().item(), (values * weights).sum().item()]


def expected(params, state):
    """By kind and name; `state` has the optimizer's tensors by name."""
    found = {"parameter": {name: sums(value) for name, value in params.items()}}
    for name, values in state.items():
        for kind, value in values.items():
            found.setdefault(kind, {})[name] = sums(value) if torch.is_tensor(value) else value
    return found


def folder(name):
    path = here / name
    shutil.rmtree(path, ignore_errors=True)
    return path


def save(name, state):
    # Of several processes, none may remove what another has written.
    path = here / name if dist.is_initialized() else folder(name)
    dcp.save(state, checkpoint_id=str(path))


def in_processes(count, work):
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(in_process, (count, work, scratch), nprocs=count)
        return json.loads(pathlib.Path(scratch, "result").read_text())


def in_process(rank, count, work, scratch):
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=count)
    torch.manual_seed(7)
    result = work()
    if rank == 0:
        pathlib.Path(scratch, "result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def gpt2():
    torch.manual_seed(7)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=8, n_positions=SEQ, vocab_size=VOCAB, bos_token_id=0, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    named = dict(model.named_parameters())
    decays = {name: name.endswith("weight") and ".ln_" not in name for name in named}
    groups = [
        {"params": [p for name, p in named.items() if decays[name]], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if not decays[name]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.999), eps=1e-8)
    train(model, optimizer, STEPS)
    config.save_pretrained(here)
    (here / "config.json").rename(here / "gpt2.json")
    optim = get_optimizer_state_dict(model, optimizer)
    state = model.state_dict()
    found = expected(named, optim["state"])
    positions = state["transformer.wpe.weight"]
    state["transformer.wpe.weight"] = positions.t().contiguous().t()
    save("gpt2", {"model": state, "optim": optim, "train": {"step": STEPS, "seen": torch.tensor(STEPS * BATCH)}})
    first = {"state": {0: optimizer.state_dict()["state"][0]}}
    save("by-number", {"model": {"transformer.wpe.weight": positions}, "optim": first})
    found["losses"] = train(model, optimizer, STEPS)
    return found


def llama():
    config = LlamaConfig(
        hidden_size=6, intermediate_size=9, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1,
        vocab_size=VOCAB, max_position_embeddings=16, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train(model, optimizer, 2)
    if dist.get_rank() == 0:
        config.save_pretrained(here)
        (here / "config.json").rename(here / "llama.json")
    optim = get_optimizer_state_dict(model, optimizer, options=FLAT)
    kept = {key: value for key, value in optim.items() if key.startswith("state.") or key.endswith((".lr", ".betas"))}
    params = get_model_state_dict(model)
    save("llama", {"app": {"net": params, "optim": kept}})
    return expected(params, by_name(optim))


def by_name(optim):
    """The state of an optimizer under flat keys."""
    found = {}
    for key, value in optim.items():
        if key.startswith("state."):
            name, kind = key.removeprefix("state.").rsplit(".", 1)
            found.setdefault(name, {})[kind] = value
    return found


class Grid(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in [("rows", (5, 4)), ("columns", (3, 6)), ("both", (4, 6)), ("copies", (3,))]:
            layer = torch.nn.Module()
            layer.weight = torch.nn.Parameter(torch.randn(shape).to(torch.bfloat16))
            setattr(self, name, layer)


def grid():
    mesh = init_device_mesh("cpu", (2, 2))
    model = Grid()
    places = {
        "rows": [Shard(0), Shard(0)], "columns": [Replicate(), Shard(1)], "both": [Shard(0), Shard(1)],
        "copies": [Replicate(), Replicate()],
    }
    for name, placement in places.items():
        layer = getattr(model, name)
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.data, mesh, placement))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(2):
        for name, placement in places.items():
            weight = getattr(model, name).weight
            weight.grad = distribute_tensor(torch.randn(weight.shape).to(torch.bfloat16), mesh, placement)
        optimizer.step()
    optim = get_optimizer_state_dict(model, optimizer, options=FLAT)
    params = get_model_state_dict(model)
    kept = {key: value for key, value in optim.items() if key.startswith("state.")}
    save("grid", {**params, **kept})
    return expected(params, by_name(optim))


def sgd():
    torch.manual_seed(7)
    model = Grid().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    save("sgd", {**model.state_dict(), **get_optimizer_state_dict(model, optimizer, options=FLAT)})
    return expected(model.state_dict(), by_name(get_optimizer_state_dict(model, optimizer, options=FLAT)))


def halves(model, **options):
    """Two groups of parameters."""
    named = list(model.parameters())
    return [{"params": named[:2], "weight_decay": 0.1, **options}, {"params": named[2:], "weight_decay": 0.0, **options}]


def steps(model, optimizer, count):
    for _ in range(count):
        for parameter in model.parameters():
            grad = torch.ones(parameter.shape).cumsum(-1) / 7 - 0.3
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
            parameter.grad = grad.to(parameter.dtype)
        optimizer.step()


def kept(state):
    """What an import keeps of the state of an optimizer."""
    return {name: {kind: value for kind, value in values.items() if kind != "max_exp_avg_sq"} for name, values in state.items()}


def tensors():
    torch.manual_seed(7)
    model = Grid().float()
    lr = torch.tensor(3e-3, dtype=torch.float64)
    optimizer = torch.optim.AdamW(halves(model), lr=lr, amsgrad=True, foreach=False)
    steps(model, optimizer, 4)
    params, optim = model.state_dict(), get_optimizer_state_dict(model, optimizer)
    first, second = optim["param_groups"]
    first["betas"] = [torch.tensor(0.75), torch.tensor(0.5)]
    second["betas"] = (torch.tensor(0.75), torch.tensor(0.25))
    second["weight_decay"] = numpy.float64(0.1)
    save("tensors", {"model": params, "optim": optim})
    return expected(params, kept(optim["state"]))


def bare_sgd():
    torch.manual_seed(7)
    model = Grid().float()
    optimizer = torch.optim.SGD(halves(model), lr=0.1)
    steps(model, optimizer, 1)
    save("bare-sgd", {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)})
    return expected(model.state_dict(), {})


def threads():
    model = Grid().float()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(halves(model), lr=torch.tensor(0.25), fused=True)
    steps(model, optimizer, 3)
    params, optim = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": params, "optim": optim}, storage_writer=FileSystemWriter(str(here / "threads"), thread_count=2))
    return expected(params, optim["state"])


def parts():
    model = Grid()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    dcp.save(get_model_state_dict(model), storage_writer=HuggingFaceStorageWriter(str(here / "parts"), save_distributed=True))
    return {}


def others():
    """Folders that no import reads."""
    state = {"weight": torch.ones(3)}
    dcp.save({"model": state, "step": 3}, checkpoint_id=str(folder("whole")), planner=DefaultSavePlanner(flatten_state_dict=False))
    writer = FileSystemWriter(str(folder("safetensors")), serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=writer)


def main(names):
    path = here / "expected.json"
    results = json.loads(path.read_text()) if names else {}
    alone = {"gpt2": gpt2, "sgd": sgd, "tensors": tensors, "bare-sgd": bare_sgd, "others": others}
    together = {"llama": (llama, 2), "grid": (grid, 4), "threads": (threads, 2), "parts": (parts, 2)}
    for name in names or [*alone, *together]:
        if name in alone:
            results[name] = alone[name]()
        else:
            work, count = together[name]
            folder(name)
            results[name] = in_processes(count, work)
    results = {name: result for name, result in results.items() if result}
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
