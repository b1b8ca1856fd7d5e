"""notes/how-to/migrating.md: every call in its tables runs, and the gradients of other libraries by release."""

import re
import warnings
from functools import partial
from importlib import import_module

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
    weight, found = (1.0, 10.0)[r], {}

    def x(requires_grad=False):
        return torch.tensor([(3.0, 5.0)[r]], requires_grad=requires_grad)

    def waited(y):
        return y.wait() if isinstance(y, functional.AsyncCollectiveTensor) else y

    def systems(group):
        yield "diffcoll", dc.all_reduce, dc.broadcast
        yield (
            "nn.functional",
            lambda x, op: nn.all_reduce(x, getattr(dist.ReduceOp, OPS[op].upper()), group),
            lambda x: nn.broadcast(x, 0, group),
        )
        yield (
            "_functional_collectives",
            lambda x, op: waited(functional.all_reduce(x, OPS[op], group)),
            lambda x: waited(functional.broadcast(x, 0, group)),
        )

    def gradient(f):
        leaf = x(requires_grad=True)
        return torch.autograd.grad(weight * f(leaf).sum(), leaf)[0]

    def of_op(op):
        return lambda reduce, _: gradient(lambda x: reduce(x, op))

    measures = {
        **{op: of_op(op) for op in OPS},
        "broadcast from rank 0": lambda _, broadcast: gradient(broadcast),
        "torch.func.grad of the sum": lambda reduce, _: torch.func.grad(lambda x: weight * reduce(x, "sum").sum())(x()),
        "torch.func.jvp of the sum, tangents 1": lambda reduce, _: torch.func.jvp(
            lambda x: reduce(x, "sum"), (x(),), (torch.ones(1),)
        )[1],
    }
    for name, measure in measures.items():
        group = dist.new_group()  # a call that raises leaves messages of other ranks in its group
        for system, *functions in systems(group):
            try:
                found[system, name] = measure(*functions).item()
            except (RuntimeError, NotImplementedError):
                found[system, name] = RAISES
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
    assert compared == 2 * len(rows) or RELEASE > (2, 15)


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
            "all_to_all(outs, ins, group)": lambda: torch.cat(nn.all_to_all([empty(), empty()], [*x.split(2)], group)),
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
    """Each row of the note's table: gradients of DTensor equal those of the diffcoll call in the same row."""
    rows = table("DTensor")

    def body(r):
        warnings.simplefilter("ignore")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        mesh = init_device_mesh("cpu", (2,))

        def placed(x, placement):
            return DTensor.from_local(x, mesh, [placement])

        names = {"dc": dc, "P": Partial(), "R": Replicate(), "S": Shard, "mean": Partial("avg"), "D": placed}
        names["to"] = lambda x, a, b: placed(x, a).redistribute(mesh, [b])  # with placement a, redistributed to b
        found = []
        for row in rows:
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
