"""Ways to divide a module over ranks: which numbers each rank holds is found, and the verdicts are right."""

import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from sharded_programs import MLP, called, copied, summed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from verdicts import differs, loss, matches, numbers, ruled, several, sharded

import diffcoll as dc

DP, TP, BOTH, HYBRID = {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"replicate": 2, "shard": 2}
X = numbers(8, 4)


def way(shard, ranks=TP, module=None, batch=X, fn=loss, **more):
    return sharded(shard, ranks, MLP() if module is None else module, batch, fn, **more)


def share(module, x):
    """Of the mean over the rows of all ranks."""
    return loss(module, x) / dc.get_world_size()


def group_of(mesh, axis="tp"):
    return mesh[axis].get_group()


# ── PyTorch's own ────────────────────────────────────────────────────────────────────────────────────────


def parallelized(whole, mesh):
    return parallelize_module(whole, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def with_a_new_norm(whole, mesh):
    whole.norm = nn.LayerNorm(4).bfloat16()
    return parallelized(whole, mesh)


def in_sequence(whole, mesh):
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(whole, mesh["tp"], plan)


def vocabulary(whole, mesh):
    plan = {"up": ColwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    return parallelize_module(whole, mesh["tp"], plan)


def fsdp2(whole, mesh, axes="dp", **more):
    fully_shard(whole.up, mesh=mesh[axes], **more)
    return fully_shard(whole, mesh=mesh[axes], **more)


def fsdp(whole, mesh, axes=("dp",), strategy=ShardingStrategy.FULL_SHARD, original=True):
    groups = tuple(group_of(mesh, axis) for axis in axes)
    return FullyShardedDataParallel(
        whole,
        process_group=groups if len(groups) > 1 else groups[0],
        sharding_strategy=strategy,
        device_id=torch.device("cpu"),
        use_orig_params=original,
    )


def ddp(whole, mesh):
    return DistributedDataParallel(whole, process_group=group_of(mesh, "dp"))


def in_part(wrap):
    def shard(whole, mesh):
        whole.up = wrap(whole.up, mesh)
        return whole

    return shard


def replicated_dtensors(whole, mesh):
    def given(module, inputs, mesh):
        return tuple(DTensor.from_local(x, mesh, [Shard(0)]) for x in inputs)

    return distribute_module(whole, mesh["dp"], None, given, lambda module, y, mesh: y.to_local())


def on_meta(whole, mesh):
    """Made on the meta device, and filled with other numbers."""
    with torch.device("meta"):
        made = MLP()
    made = fully_shard(made, mesh=mesh["dp"])
    made.to_empty(device="cpu")
    for module in (made.norm, made.up, made.down):
        module.reset_parameters()
    return made


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(4, 6)

    def forward(self, x, labels):
        return F.cross_entropy(self.up(x), labels)


class Normalized(nn.Sequential):
    """Batch norm, whose buffers are made anew by the conversion."""

    def __init__(self):
        torch.manual_seed(4)
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


# ── layers of one's own ──────────────────────────────────────────────────────────────────────────────────


class Parallel(nn.Module):
    """The net with some features of its layers."""

    def __init__(self, whole, group, rows):
        super().__init__()
        self.group, self.norm = group, whole.norm
        up, down = whole.up.weight.detach()[rows].T.clone(), whole.down.weight.detach()[:, rows].clone()
        self.up = nn.ParameterDict({"weight": up, "bias": whole.up.bias.detach()[rows].clone()})  # as GPT-2 has it
        self.down = nn.ParameterDict({"weight": down, "bias": whole.down.bias})

    def forward(self, x):
        y = (copied(self.norm(x), self.group) @ self.up["weight"] + self.up["bias"]).tanh()
        return summed(y @ self.down["weight"].T, self.group) + self.down["bias"]


def of_features(divided):
    """Features in some order, divided among the ranks."""

    def shard(whole, mesh):
        group = group_of(mesh)
        return Parallel(whole, group, divided(torch.arange(len(whole.up.weight)), group.size())[group.rank()])

    return shard


tensor_parallel = of_features(torch.chunk)


in_any_order = of_features(lambda rows, n: rows[numbers(12).argsort()].chunk(n))


class Attention(nn.Module):
    """Heads of queries, and as many or fewer of keys and values, whose projections are three tensors or one."""

    group = None

    def __init__(self, heads=4, of_keys=4, merged=False):
        super().__init__()
        torch.manual_seed(1)
        self.counts = (heads, of_keys, of_keys)
        each = [torch.randn(2 * n, 4) for n in self.counts]
        if merged:
            self.qkv = nn.Parameter(torch.cat(each))
        else:
            self.q, self.k, self.v = map(nn.Parameter, each)
        self.out = nn.Parameter(torch.randn(4, 2 * heads))

    def projections(self):
        return self.qkv.split([2 * n for n in self.counts]) if hasattr(self, "qkv") else (self.q, self.k, self.v)

    def forward(self, x):
        x, counts = x if self.group is None else copied(x, self.group), self.counts
        each = [
            (x @ w.T).unflatten(-1, (n, 2)).transpose(0, 1) for w, n in zip(self.projections(), counts, strict=True)
        ]
        q, k, v = (y.repeat_interleave(counts[0] // len(y), 0) for y in each)
        y = ((q @ k.transpose(1, 2)).softmax(-1) @ v).transpose(0, 1).flatten(1) @ self.out.T
        return y if self.group is None else summed(y, self.group)


def some_heads(whole, mesh):
    """A rank's heads, whose projections become one tensor, as Megatron-core and vLLM have it.

    Where there are fewer heads of keys than ranks, several have the same one, and parts of its gradient.
    """
    n, rank = mesh["tp"].size(), mesh["tp"].get_local_rank()
    heads, of_keys, _ = whole.counts
    parts = min(n, of_keys)
    q, k, v = (x.detach() for x in whole.projections())
    mine = [q.chunk(n)[rank], *(x.chunk(parts)[rank * parts // n] for x in (k, v))]
    made = Attention(heads // n, of_keys // parts, merged=True)
    made.qkv, made.out = nn.Parameter(torch.cat(mine)), nn.Parameter(whole.out.detach().chunk(n, 1)[rank].clone())
    made.group = group_of(mesh)
    return made


HALF = {"batch": X.bfloat16(), "dtype": None}
WAYS = {
    "tensor parallel": lambda: way(parallelized),
    "sequence parallel": lambda: way(
        in_sequence, batch=numbers(2, 6, 4), placements={"x": {"tp": Shard(1)}}, losses={}
    ),
    "loss_parallel": lambda: way(
        vocabulary, module=Head(), batch=(X, torch.arange(8) % 6), fn=called, context=loss_parallel
    ),
    "fully_shard, uneven": lambda: way(fsdp2, {"dp": 3}, MLP(7), numbers(9, 4)),
    "fully_shard of tensor parallelism": lambda: way(
        lambda whole, mesh: fully_shard(parallelized(whole, mesh), mesh=mesh["dp"]), BOTH
    ),
    "fully_shard along columns": lambda: way(partial(fsdp2, shard_placement_fn=lambda p: Shard(p.dim() - 1)), DP),
    "FSDP in parts": lambda: way(lambda whole, mesh: fsdp(in_part(fsdp)(whole, mesh), mesh), DP),
    "FSDP, flat": lambda: way(partial(fsdp, original=False), DP),
    "FSDP, SHARD_GRAD_OP": lambda: way(partial(fsdp, strategy=ShardingStrategy.SHARD_GRAD_OP), DP),
    "FSDP, hybrid": lambda: way(
        partial(fsdp, axes=("shard", "replicate"), strategy=ShardingStrategy.HYBRID_SHARD), HYBRID
    ),
    "DDP": lambda: way(ddp, DP),
    "DDP of a mesh": lambda: way(lambda whole, mesh: DistributedDataParallel(whole), {"dp": 2, "cp": 2}),
    "DDP of a part": lambda: way(in_part(ddp), DP),
    "DDP of a part, made anew": lambda: way(
        in_part(lambda part, mesh: ddp(nn.Linear(4, 12, dtype=torch.double), mesh)), DP
    ),
    "DDP of tensor parallelism": lambda: way(lambda whole, mesh: ddp(tensor_parallel(whole, mesh), mesh), BOTH),
    "DTensors, replicated": lambda: way(replicated_dtensors, DP, fn=share, single=loss, losses="sum"),
    "a checkpoint's wrapper": lambda: way(
        lambda whole, mesh: in_part(lambda part, mesh: checkpoint_wrapper(part))(parallelized(whole, mesh), mesh)
    ),
    "the meta device": lambda: way(on_meta, DP),
    "batch norm": lambda: way(lambda whole, mesh: ddp(dc.nn.convert_sync_batchnorm(whole), mesh), DP, Normalized()),
    "in any order": lambda: way(in_any_order),
    "uneven": lambda: way(of_features(lambda rows, n: rows.split([7, 5]))),
    "merged projections": lambda: way(some_heads, module=Attention()),
    "a merged projection, divided by heads": lambda: way(some_heads, module=Attention(merged=True)),
    "heads of keys on two ranks each": lambda: way(
        some_heads, {"tp": 4}, Attention(4, 2), placements={"k": {"tp": Partial()}, "v": {"tp": Partial()}}
    ),
    "bfloat16": lambda: way(parallelized, module=MLP(64).bfloat16(), **HALF),
    "bfloat16, with a norm made anew": lambda: way(with_a_new_norm, module=MLP(64).bfloat16(), **HALF),
    "float32": lambda: way(fsdp2, DP, MLP().float(), X.float(), dtype=None),
}


pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (".*returned a view tensor", "DTensor random operators", "FSDP is switching")
]


@pytest.mark.parametrize("on", ["simulated", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WAYS)
def test_a_right_way_is_right(name, on):
    report = matches(WAYS[name](), on=[on])
    assert any(row.what.startswith("gradient of") for row in report.tables[0].rows)
    assert not report.notes or name == "the meta device"


@pytest.mark.parametrize("name", WAYS)
def test_a_wrong_gradient_is_seen_in_each(name):
    """All gradients are too large by half. What `shard` detaches is no cut."""
    fn, single, batch, more = WAYS[name]()

    def wrong(module, *given):
        return ruled(torch.clone, lambda g: g * (1.5 if several() else 1))(fn(module, *given))

    assert not differs((wrong, single, batch, more)).cuts


def test_a_layout_that_shapes_do_not_show():
    """A program that is right is not called wrong, but wrong on the layout that its shapes say."""

    def made_anew(whole, mesh):
        made = some_heads(whole, mesh)
        for p in made.parameters():
            nn.init.zeros_(p)
        return made

    def heads(whole, at):
        return torch.cat([x.chunk(2)[at["tp"]] for x in whole.chunk(3)])

    program = partial(way, made_anew, module=Attention(merged=True))
    report = differs(program())
    assert "anew" in report.condition and report.condition in str(report)
    matches(program(placements={"qkv": heads}))


# ── what shard must not do ───────────────────────────────────────────────────────────────────────────────


def changed(change, name="up.weight"):
    def shard(whole, mesh):
        with torch.no_grad():
            change(whole.get_parameter(name), mesh)
        return whole

    return shard


def unwritten(whole, mesh):
    whole.up.weight = nn.Parameter(torch.rand(12, 4, generator=torch.Generator().manual_seed(time.time_ns())))
    return whole


def rounded(whole, mesh):
    whole.up.weight = nn.Parameter((whole.up.weight.detach() / 3).round())
    return whole


OF_ROWS = {"x": {"dp": Shard(0)}}
#: What `shard` does to numbers of the whole, and words of the error.
COMPUTED = {
    "a factor": (changed(lambda x, mesh: x.mul_(1.75)), "up.weight is 1.75 times"),
    "a factor and a sum": (changed(lambda x, mesh: x.mul_(0.5).add_(0.1)), r"up.weight is 0.(5|49\d*) times"),
    "a bias on each rank": (changed(lambda x, mesh: x.div_(mesh.size()), "down.bias"), "down.bias is 0.5 times"),
    "the sign": (changed(lambda x, mesh: x.neg_()), "up.weight is -1 times"),
    "rounding": (rounded, "up.weight"),
    "other numbers in each call": (unwritten, "memory that nothing wrote"),
}


@pytest.mark.parametrize("dtype", [torch.double, torch.float, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COMPUTED)
def test_numbers_that_shard_computes_with_are_refused(name, dtype):
    shard, words = COMPUTED[name]
    with pytest.raises(ValueError, match=words):
        matches(way(shard, DP, placements=OF_ROWS, dtype=dtype))


def made_anew(whole, mesh, seed=lambda rank: 0, trained=True):
    torch.manual_seed(seed(mesh.get_local_rank()))
    whole.up = nn.Linear(4, 12)
    whole.up.bias.requires_grad_(trained)
    return whole


def test_ranks_that_start_with_other_numbers():
    program = partial(way, ranks=DP, placements=OF_ROWS)
    report = matches(program(made_anew))
    assert any("up.weight" in words and "anew" in words for words in report.not_compared)
    report = differs(program(partial(made_anew, seed=lambda rank: rank)))
    assert {"first numbers of up.weight", "first numbers of up.bias"} == {
        row.what for row in report.tables[0].rows if not row.ok
    }


def test_a_parameter_that_is_frozen_on_one_side():
    frozen = MLP()
    frozen.up.bias.requires_grad_(False)
    matches(way(lambda whole, mesh: whole, DP, frozen))
    for module, shard in ((frozen, made_anew), (MLP(), partial(made_anew, trained=False))):
        report = differs(way(shard, DP, module))
        assert "requires_grad of up.bias" in {row.what for row in report.tables[0].rows if not row.ok}


def test_a_layer_of_the_default_dtype_and_a_constant_of_another():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.mask = nn.Linear(4, 3), torch.ones(3, 3)

        def forward(self, x):
            return self.up(x) @ self.mask

    def shard(whole, mesh):
        up = nn.Linear(4, 3)
        with torch.no_grad():
            up.weight.copy_(whole.up.weight), up.bias.copy_(whole.up.bias)
        whole.up = up
        return whole

    matches(way(shard, DP, Masked()))
