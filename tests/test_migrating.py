"""notes/how-to/migrating.md: every call in its tables runs, and gives what the call that it replaces gives."""

import re
import warnings
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from test_notes import NOTES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import diffcoll as dc
from diffcoll.testing import spawn

NOTE = (NOTES / "how-to" / "migrating.md").read_text(encoding="utf-8")


def table(heading):
    """Return the rows of the first table under a heading: cells by column title, without code marks."""
    lines = NOTE.partition(f"\n## {heading}\n")[2].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def test_every_call_runs_and_gives_what_torch_gives():
    """The first call of diffcoll in each row, beside torch.distributed.nn.functional where the row names one of its."""
    rows = [*table("How do I replace it?"), *table("How do I replace _functional_collectives?")]
    calls = [[re.search(r"`(.*?)`", cell)[1] for cell in row.values()] for row in rows]
    assert len(calls) > 10

    def body(r):
        warnings.simplefilter("ignore")
        nn, group = import_module("torch.distributed.nn.functional"), dist.group.WORLD
        x = torch.arange(8.0).view(4, 2) * (r + 1) + r
        names = {"dc": dc, "x": x, "group": group, "op": "sum", "dim": 0, "src": 1, "dst": 1, "offset": 1}
        names |= {"split_dim": 0, "concat_dim": 0, "sizes": [2, 2], "in_sizes": [2, 2], "out_sizes": [2, 2]}
        empty = partial(torch.empty, 2, 2)
        theirs = {
            "all_reduce(x, op, group)": lambda: nn.all_reduce(x, group=group),
            "all_gather(x, group)": lambda: torch.cat(nn.all_gather(x, group)),
            "reduce_scatter(out, list, op, group)": lambda: nn.reduce_scatter(empty(), list(x.split(2)), group=group),
            "all_to_all(outs, ins, group)": lambda: torch.cat(nn.all_to_all([empty(), empty()], [*x.split(2)], group)),
            "broadcast(x, src, group)": lambda: nn.broadcast(x.clone(), 1, group),
        }
        assert theirs.keys() < dict(calls).keys()
        for first, call in calls:
            y = eval(call.replace("…", "").replace(", ]", "]"), names)
            if first in theirs:
                torch.testing.assert_close(y, theirs[first](), msg=first)

    spawn(body, range(2))


class Pair(torch.autograd.Function):
    """A function and its backward, defined separately, as in Megatron's mappings."""

    @staticmethod
    def forward(ctx, x, f, backward):
        ctx.backward_of = backward
        return f(x)

    @staticmethod
    def backward(ctx, gy):
        return ctx.backward_of(gy), None, None


def own(dim):
    return lambda x: x.chunk(dc.get_world_size(), dim)[dc.get_rank()].clone()


gathered = {dim: partial(dc.all_gather, dim=dim) for dim in (0, -1)}
scattered = {dim: partial(dc.reduce_scatter, dim=dim) for dim in (0, -1)}
#: From heads to sequences, and back.
HEADS, SEQUENCES = (partial(dc.all_to_all, split_dim=d, concat_dim=-1 - d) for d in (-1, 0))
#: Megatron's function → its forward and backward, as in megatron/core/tensor_parallel/mappings.py.
MEGATRON = {
    "copy_to_tensor_model_parallel_region(x)": (torch.clone, dc.all_reduce),
    "reduce_from_tensor_model_parallel_region(x)": (dc.all_reduce, torch.clone),
    "scatter_to_tensor_model_parallel_region(x)": (own(-1), gathered[-1]),
    "gather_from_tensor_model_parallel_region(x)": (gathered[-1], own(-1)),
    "scatter_to_sequence_parallel_region(x)": (own(0), gathered[0]),
    "gather_from_sequence_parallel_region(x)": (gathered[0], scattered[0]),
    "gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)": (gathered[0], own(0)),
    "reduce_scatter_to_sequence_parallel_region(x)": (scattered[0], gathered[0]),
    "all_gather_last_dim_from_tensor_parallel_region(x)": (gathered[-1], scattered[-1]),
    "reduce_scatter_last_dim_to_tensor_parallel_region(x)": (scattered[-1], gathered[-1]),
    "all_to_all_sp2hp(x)": (HEADS, SEQUENCES),
    "all_to_all_hp2sp(x)": (SEQUENCES, HEADS),
}


def outcome(f, r):
    """Return the value of f and the gradient of a loss that differs between ranks."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(r), dtype=torch.float64, requires_grad=True)
    y = f(x)
    weights = (r + 1) * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    (weights * y.sin()).sum().backward()
    return y.detach(), x.grad


def test_megatrons_functions():
    calls = {row["Megatron-LM"].strip("`"): row["diffcoll"].strip("`") for row in table("Megatron-LM")}
    assert calls.keys() == MEGATRON.keys()

    def body(r):
        for name, both in MEGATRON.items():
            ours = outcome(eval(f"lambda x: {calls[name]}", {"dc": dc}), r)
            torch.testing.assert_close(ours, outcome(lambda x, both=both: Pair.apply(x, *both), r), msg=name)

    spawn(body, range(2))


def test_dtensors_placements():
    """Each row of the note's table: DTensor's value and gradient are those of the diffcoll call in the same row."""
    rows = table("DTensor")

    def body(r):
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2,))

        def placed(x, placement):
            return DTensor.from_local(x, mesh, [placement])

        names = {"dc": dc, "P": Partial(), "R": Replicate(), "S": Shard, "mean": Partial("avg"), "D": placed}
        names["to"] = lambda x, a, b: placed(x, a).redistribute(mesh, [b])  # with placement a, redistributed to b

        def outcome(cell):
            x = torch.tensor([[3.0, 1.0], [5.0, 2.0]][r], requires_grad=True)
            y = eval(cell.strip("`"), {**names, "x": x})
            ((1.0, 10.0)[r] * y).sum().backward()
            return y.detach(), x.grad

        for row in rows:
            (y, gx), (our_y, our_gx) = outcome(row["DTensor"]), outcome(row["diffcoll"])
            times = 2 if row["same gradient"] == "no, N times" else 1
            torch.testing.assert_close((y, gx), (our_y, times * our_gx), msg=row["DTensor"])

    spawn(body, range(2))
