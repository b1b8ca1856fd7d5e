"""notes/how-to/migrating.md: every call in its tables runs, and the gradients of other libraries by release."""

import re
import warnings
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from test_notes import NOTES

import diffcoll as dc
from diffcoll.testing import spawn

NOTE = (NOTES / "how-to" / "migrating.md").read_text(encoding="utf-8")
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


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


def releases(head):
    """Return (2, 11), (2, 13) for a column title that ends in "2.11 – 2.13"; of a single release, twice the same."""
    found = [tuple(map(int, number.split("."))) for number in re.findall(r"2\.\d+", head)]
    return (found[0], found[-1]) if found else None


# ── gradients, by release ────────────────────────────────────────────────────────────────────────────────

OPS = {"sum": "sum", "mean": "avg", "max": "max", "min": "min", "product": "product"}
RAISES = "raises"


def measured(r):
    """Return results of x = 3, 5 and weights 1, 10 on this rank, by system and row of the table."""
    warnings.simplefilter("ignore")  # deprecation warnings
    nn = import_module("torch.distributed.nn.functional")
    functional = import_module("torch.distributed._functional_collectives")
    start, weight = (3.0, 5.0)[r], (1.0, 10.0)[r]
    found = {}

    def gradient(f):
        x = torch.tensor([start], requires_grad=True)
        (weight * f(x).sum()).backward()
        return x.grad.item()

    def systems(group):
        def waited(y):
            return y.wait() if isinstance(y, functional.AsyncCollectiveTensor) else y

        def theirs(op):
            return lambda x: waited(functional.all_reduce(x, OPS[op], group))

        yield "diffcoll", lambda op: lambda x: dc.all_reduce(x, op), dc.broadcast
        yield (
            "nn.functional",
            lambda op: lambda x: nn.all_reduce(x, getattr(dist.ReduceOp, OPS[op].upper()), group),
            lambda x: nn.broadcast(x, 0, group),
        )
        yield "_functional_collectives", theirs, lambda x: waited(functional.broadcast(x, 0, group))

    def attempt(measure, *of):
        try:
            return measure(*of)
        except (RuntimeError, NotImplementedError):
            return RAISES

    def by_func(f):
        return torch.func.grad(lambda x: weight * f(x).sum())(torch.tensor([start])).item()

    measures = {
        **{op: lambda reduce, _, op=op: gradient(reduce(op)) for op in OPS},
        "broadcast from rank 0": lambda _, broadcast: gradient(broadcast),
        "torch.func.grad of the sum": lambda reduce, _: by_func(reduce("sum")),
        "torch.func.jvp of the sum, tangents 1": lambda reduce, _: torch.func.jvp(
            reduce("sum"), (torch.tensor([start]),), (torch.ones(1),)
        )[1].item(),
    }
    for name, measure in measures.items():
        group = dist.new_group()  # a call that raises leaves messages of other ranks in its group
        for system, *functions in systems(group):
            found[system, name] = attempt(measure, *functions)
    return found


def test_gradients_by_release():
    """The note's table, its column for this release; diffcoll's are right."""
    zero, one = spawn(measured, range(2))
    rows = table("Which numbers change?")
    assert {name for _, name in zero} == {row["x = (3, 5), weights (1, 10)"].replace("`", "") for row in rows}
    compared = 0
    for row in rows:
        name = row.pop("x = (3, 5), weights (1, 10)").replace("`", "")

        def said(system, name=name):
            pair = zero[system, name], one[system, name]
            return RAISES if RAISES in pair else "{:g}, {:g}".format(*pair)

        assert said("diffcoll") == row.pop("right"), name
        for head, cell in row.items():
            system = head.split()[0].strip("`,")
            first, last = releases(head)
            if first <= RELEASE <= last:
                number, _, since = cell.partition(" since ")
                works = not since or RELEASE >= releases(since)[0]
                assert said(system) == (number.strip("*") if works else RAISES), (name, head)
                compared += 1
    if RELEASE <= (2, 15):
        assert compared == 2 * len(rows)
    elif not compared:
        pytest.skip("the note names no column for this release")


def test_what_is_bold_is_a_silent_bug():
    """In the table of gradients: a number that is not the right one, and no error."""
    for row in table("Which numbers change?"):
        for head, cell in row.items():
            if releases(head):
                number = cell.partition(" since ")[0]
                assert number.startswith("**") == (number.strip("*") not in (row["right"], RAISES)), (head, row)


# ── equivalent calls ─────────────────────────────────────────────────────────────────────────────────────


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
            "all_to_all(outs, ins, group)": lambda: torch.cat(
                nn.all_to_all([empty(), empty()], list(x.split(2)), group)
            ),
            "broadcast(x, src, group)": lambda: nn.broadcast(x.clone(), 1, group),
        }
        found = []
        for first, call in calls:
            y = eval(call.replace("…", "").replace(", ]", "]"), dict(names))
            found.append((first, y, theirs[first]() if first in theirs else None))
        return found

    for of_rank in spawn(body, range(2)):
        compared = [first for first, ours, theirs in of_rank if theirs is not None and torch.equal(ours, theirs)]
        assert len(compared) == 5


class Pair(torch.autograd.Function):
    """A function and its backward, defined separately, as in Megatron's mappings."""

    @staticmethod
    def forward(ctx, x, f, backward):
        ctx.backward_of = backward
        return f(x)

    @staticmethod
    def backward(ctx, gy):
        return ctx.backward_of(gy), None, None


def identity(x):
    return x.clone()


def summed(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


def gathered(dim):
    def f(x):
        ys = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size())]
        dist.all_gather(ys, x.contiguous())
        return torch.cat(ys, dim)

    return f


def own(dim):
    return lambda x: x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def scattered(dim):
    return lambda x: own(dim)(summed(x))


def exchanged(split_dim, concat_dim):
    def f(x):
        n, r = dist.get_world_size(), dist.get_rank()
        blocks = [y.chunk(n, split_dim)[r] for y in gathered(0)(x).chunk(n, 0)]
        return torch.cat(blocks, concat_dim)

    return f


#: Megatron's function → its forward and backward, as in megatron/core/tensor_parallel/mappings.py.
MEGATRON = {
    "copy_to_tensor_model_parallel_region(x)": (identity, summed),
    "reduce_from_tensor_model_parallel_region(x)": (summed, identity),
    "scatter_to_tensor_model_parallel_region(x)": (own(-1), gathered(-1)),
    "gather_from_tensor_model_parallel_region(x)": (gathered(-1), own(-1)),
    "scatter_to_sequence_parallel_region(x)": (own(0), gathered(0)),
    "gather_from_sequence_parallel_region(x)": (gathered(0), scattered(0)),
    "gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)": (gathered(0), own(0)),
    "reduce_scatter_to_sequence_parallel_region(x)": (scattered(0), gathered(0)),
    "all_gather_last_dim_from_tensor_parallel_region(x)": (gathered(-1), scattered(-1)),
    "reduce_scatter_last_dim_to_tensor_parallel_region(x)": (scattered(-1), gathered(-1)),
    "all_to_all_sp2hp(x)": (exchanged(-1, 0), exchanged(0, -1)),
    "all_to_all_hp2sp(x)": (exchanged(0, -1), exchanged(-1, 0)),
}


def number(r):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(r), dtype=torch.float64)


def outcome(f, r):
    """Return the value of f and the gradient of a loss that differs between ranks."""
    x = number(r).requires_grad_()
    y = f(x)
    weights = (r + 1) * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    (weights * y.sin()).sum().backward()
    return y.detach(), x.grad


def test_megatrons_functions():
    rows = table("Megatron-LM")
    calls = {row["Megatron-LM"].strip("`"): row["diffcoll"].strip("`") for row in rows}
    assert calls.keys() == MEGATRON.keys()

    def body(r):
        found = {}
        for name, (forward, backward) in MEGATRON.items():
            call = eval(f"lambda x: {calls[name]}", {"dc": dc})
            found[name] = outcome(lambda x, f=forward, b=backward: Pair.apply(x, f, b), r), outcome(call, r)
        return found

    for of_rank in spawn(body, range(2)):
        for name, (theirs, ours) in of_rank.items():
            torch.testing.assert_close(ours, theirs, msg=name)


def test_dtensors_placements():
    """Each row of the note's table: gradients of DTensor equal those of the diffcoll call in the same row."""
    rows = table("DTensor")

    def body(r):
        warnings.simplefilter("ignore")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        mesh = init_device_mesh("cpu", (2,))

        def placed(placement):
            return lambda x: DTensor.from_local(x, mesh, [placement])

        names = {"dc": dc, "P": Partial(), "R": Replicate(), "S": Shard, "mean": Partial("avg")}
        names |= {"D": lambda x, placement: placed(placement)(x)}
        found = []
        for row in rows:
            # to(P, R): x with placement P, redistributed to R
            names["to"] = lambda x, a, b: placed(a)(x).redistribute(mesh, [b])
            for cell in (row["DTensor"], row["diffcoll"]):
                x = torch.tensor([[3.0, 1.0], [5.0, 2.0]][r], requires_grad=True)
                y = eval(cell.strip("`"), {**names, "x": x})
                ((1.0, 10.0)[r] * y).sum().backward()
                found.append((y.tolist(), x.grad.tolist()))
        return found

    zero, one = spawn(body, range(2))
    for k, row in enumerate(rows):
        theirs, ours = ((zero[i], one[i]) for i in (2 * k, 2 * k + 1))
        assert [y for y, _ in theirs] == [y for y, _ in ours], row
        said = row["same gradient"]
        times = 2 if said == "no, N times" else 1
        same = [gx for _, gx in theirs] == [[times * value for value in gx] for _, gx in ours]
        assert same == (said in ("yes", "no, N times") or (said == "since 2.11" and RELEASE >= (2, 11))), row
