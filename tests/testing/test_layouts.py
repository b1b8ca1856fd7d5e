"""Ways to divide a module over ranks: which numbers each rank holds is found, and the verdicts are right.

A way is (module, shard, ranks, further arguments of the check). Most run a function that is the same on one process.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_programs import copied, summed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from verdicts import differs, matches, numbers

import diffcoll as dc

CPU = torch.device("cpu")
DP, TP, BOTH = {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}
ROWS = {"placements": {"x": {"dp": Shard(0)}}}


class Net(nn.Module):
    def __init__(self, width=8, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, width, bias=bias), nn.Linear(width, 4, bias=bias)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh())


def loss(module, x):
    return module(x).sin().mean()


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


def fsdp2(whole, mesh):
    fully_shard(whole.up, mesh=mesh["dp"])
    return fully_shard(whole, mesh=mesh["dp"])


def fsdp2_of_tp(whole, mesh):
    return fully_shard(parallelized(whole, mesh), mesh=mesh["dp"])


def fsdp2_not_resharded(whole, mesh):
    return fully_shard(whole, mesh=mesh["dp"], reshard_after_forward=False)


def fsdp2_along_columns(whole, mesh):
    return fully_shard(whole, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(p.dim() - 1))


def hsdp(whole, mesh):
    return fully_shard(whole, mesh=mesh)


def fsdp1(whole, mesh, original=True, **more):
    return FSDP(whole, process_group=group_of(mesh, "dp"), use_orig_params=original, device_id=CPU, **more)


def fsdp1_in_parts(whole, mesh):
    whole.up = fsdp1(whole.up, mesh)
    return fsdp1(whole, mesh)


def fsdp1_flat(whole, mesh):
    return fsdp1(whole, mesh, original=False)


def fsdp1_grad_op(whole, mesh):
    return fsdp1(whole, mesh, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def fsdp1_not_sharded(whole, mesh):
    return fsdp1(whole, mesh, sharding_strategy=ShardingStrategy.NO_SHARD)


def fsdp1_hybrid(whole, mesh):
    groups = mesh["shard"].get_group(), mesh["replicate"].get_group()
    return FSDP(
        whole,
        process_group=groups,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=CPU,
        use_orig_params=True,
    )


def ddp(whole, mesh):
    return DDP(whole, process_group=group_of(mesh, "dp"))


def ddp_of_all(whole, mesh):
    return DDP(whole)


def ddp_inside(whole, mesh):
    whole.up = DDP(whole.up, process_group=group_of(mesh, "dp"))
    return whole


def ddp_made_anew(whole, mesh):
    whole.norm = DDP(nn.LayerNorm(4, dtype=torch.double), process_group=group_of(mesh, "dp"))
    return whole


def ddp_of_tp(whole, mesh):
    return DDP(tensor_parallel(whole, mesh), process_group=group_of(mesh, "dp"))


def replicated_dtensors(whole, mesh):
    def given(module, inputs, mesh):
        return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)

    return distribute_module(whole, mesh["dp"], None, given, lambda module, y, mesh: y.to_local())


def checkpointed(whole, mesh):
    parallelized(whole, mesh).up = checkpoint_wrapper(whole.up)
    return whole


def on_meta(whole, mesh):
    """Made on the meta device, and filled with other numbers."""
    with torch.device("meta"):
        made = Net().double()
    made = fully_shard(made, mesh=mesh["dp"])
    made.to_empty(device="cpu")
    for module in made.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()
    return made


# ── layers of one's own ──────────────────────────────────────────────────────────────────────────────────


class Parallel(nn.Module):
    """The net with parts of its layers; `names` are those of its tensors."""

    def __init__(self, whole, group, rows, names=("norm", "up", "down")):
        super().__init__()
        self.group, self.names = group, names
        norm, up, down = (nn.Module() for _ in range(3))
        norm.weight, norm.bias = whole.norm.weight, whole.norm.bias
        up.weight = nn.Parameter(whole.up.weight.detach()[rows].clone())
        up.bias = nn.Parameter(whole.up.bias.detach()[rows].clone())
        down.weight = nn.Parameter(whole.down.weight.detach()[:, rows].clone())
        down.bias = whole.down.bias
        for name, layer in zip(names, (norm, up, down), strict=True):
            self.add_module(name, layer)

    def forward(self, x):
        norm, up, down = (getattr(self, name) for name in self.names)
        x = copied(F.layer_norm(x, (4,), norm.weight, norm.bias), self.group)
        return summed((x @ up.weight.T + up.bias).tanh() @ down.weight.T, self.group) + down.bias


def _rows(whole, group):
    return torch.arange(len(whole.up.weight)).chunk(group.size())[group.rank()]


def tensor_parallel(whole, mesh):
    return Parallel(whole, group_of(mesh), _rows(whole, group_of(mesh)))


def interleaved(whole, mesh):
    return Parallel(whole, group_of(mesh), torch.arange(len(whole.up.weight))[group_of(mesh).rank() :: 2])


def with_fresh_memory(whole, mesh):
    """Fresh memory may hold the integers that were there before, unless it is filled."""
    if whole.up.bias.max() > 2**20 and not torch.empty(3).isnan().all():
        raise RuntimeError("the layout is found by shapes now, and wrong")
    return interleaved(whole, mesh)


def in_any_order(whole, mesh):
    order = torch.tensor([5, 0, 3, 7, 1, 2, 6, 4])
    return Parallel(whole, group_of(mesh), order.chunk(2)[group_of(mesh).rank()])


def uneven(whole, mesh):
    return Parallel(whole, group_of(mesh), torch.arange(8).split([5, 3])[group_of(mesh).rank()])


def renamed(whole, mesh):
    return Parallel(whole, group_of(mesh), _rows(whole, group_of(mesh)), ("ln", "fc1", "proj"))


def loaded(whole, mesh):
    """Made anew, and filled with a state dict."""
    made = tensor_parallel(copy.deepcopy(whole), mesh)
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(0.5)
    made.load_state_dict(tensor_parallel(whole, mesh).state_dict())
    return made


def padded(whole, mesh):
    """Ten features on three ranks, as twelve; the padding takes part, and is zero."""
    group, rank = group_of(mesh), mesh["tp"].get_local_rank()
    up, bias, down = (
        torch.cat([x.detach(), x.new_zeros(2, *x.shape[1:])])
        for x in (whole.up.weight, whole.up.bias, whole.down.weight.T)
    )
    made = Parallel(whole, group, torch.arange(4))
    made.up.weight, made.up.bias = (nn.Parameter(x.chunk(3)[rank].clone()) for x in (up, bias))
    made.down.weight = nn.Parameter(down.chunk(3)[rank].T.clone())
    return made


class Attention(nn.Module):
    """Heads of queries, and as many or fewer of keys and values."""

    def __init__(self, heads=4, of_keys=4, merged=False):
        super().__init__()
        torch.manual_seed(1)
        self.heads, self.of_keys = heads, of_keys
        if merged:
            self.qkv = nn.Linear(4, 2 * (heads + 2 * of_keys), bias=False)
        else:
            self.q, self.k, self.v = (nn.Linear(4, 2 * n, bias=False) for n in (heads, of_keys, of_keys))
        self.out = nn.Linear(2 * heads, 4, bias=False)

    def projected(self, x):
        if hasattr(self, "qkv"):
            return self.qkv(x).split([2 * n for n in (self.heads, self.of_keys, self.of_keys)], -1)
        return self.q(x), self.k(x), self.v(x)

    def forward(self, x):
        return attended(self, self.projected(x), self.heads, self.of_keys) @ self.out.weight.T


def attended(module, qkv, heads, of_keys):
    q, k, v = (y.unflatten(-1, (n, 2)).transpose(0, 1) for y, n in zip(qkv, (heads, of_keys, of_keys), strict=True))
    k, v = (y.repeat_interleave(heads // of_keys, 0) for y in (k, v))
    y = (q @ k.transpose(1, 2)).softmax(-1) @ v
    return y.transpose(0, 1).flatten(1)


class ParallelAttention(nn.Module):
    """A rank's heads, whose projections are one tensor."""

    def __init__(self, weight, out, group, heads, of_keys):
        super().__init__()
        self.fused, self.out = nn.Parameter(weight), nn.Parameter(out)
        self.group, self.heads, self.of_keys = group, heads, of_keys

    def forward(self, x):
        y = copied(x, self.group) @ self.fused.T
        sizes = [2 * n for n in (self.heads, self.of_keys, self.of_keys)]
        y = attended(self, y.split(sizes, -1), self.heads, self.of_keys)
        return summed(y @ self.out.T, self.group)


def merged_projections(whole, mesh):
    """The three projections become one tensor, as Megatron-core and vLLM have it."""
    group, rank = group_of(mesh), mesh["tp"].get_local_rank()
    parts = [each.weight.detach().chunk(2)[rank] for each in (whole.q, whole.k, whole.v)]
    out = whole.out.weight.detach().chunk(2, 1)[rank].clone()
    return ParallelAttention(torch.cat(parts), out, group, 2, 2)


def divided_projection(whole, mesh):
    """A merged projection is divided by heads, not as Shard(0) would."""
    group, rank = group_of(mesh), mesh["tp"].get_local_rank()
    parts = [part.chunk(2)[rank] for part in whole.qkv.weight.detach().chunk(3)]
    out = whole.out.weight.detach().chunk(2, 1)[rank].clone()
    return ParallelAttention(torch.cat(parts), out, group, 2, 2)


def shared_heads(whole, mesh):
    """Two heads of keys on four ranks: each is on two of them, which have parts of its gradient."""
    group, rank = group_of(mesh), mesh["tp"].get_local_rank()
    parts = [whole.q.weight.detach().chunk(4)[rank]]
    parts += [each.weight.detach().chunk(2)[rank // 2] for each in (whole.k, whole.v)]
    out = whole.out.weight.detach().chunk(4, 1)[rank].clone()
    return ParallelAttention(torch.cat(parts), out, group, 1, 1)


class Words(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self, count=6):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.inner = nn.Embedding(count, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, count, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(self.inner(self.embed(ids)).tanh()), labels)


class ParallelWords(nn.Module):
    """Some of the words, with rows of padding at the end."""

    def __init__(self, whole, group, count):
        super().__init__()
        self.group, self.inner, self.count = group, whole.inner, count
        each = -(-count // group.size())
        weight = whole.embed.weight.detach()
        weight = torch.cat([weight, weight.new_zeros(each * group.size() - count, weight.shape[1])])
        self.weight = nn.Parameter(weight.chunk(group.size())[group.rank()].clone())
        self.first = group.rank() * each

    def forward(self, ids, labels):
        local, mine = ids - self.first, len(self.weight)
        here = (local >= 0) & (local < mine)
        h = summed(self.weight[local.clamp(0, mine - 1)] * here[:, None], self.group)
        logits = copied(self.inner(h).tanh(), self.group) @ self.weight.T
        logits = logits.masked_fill(torch.arange(mine) + self.first >= self.count, -torch.inf)
        most = logits.detach().amax(1)
        dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        total = summed((logits - most[:, None]).exp().sum(1), self.group).log() + most
        own, here = labels - self.first, (labels >= self.first) & (labels < self.first + mine)
        picked = logits.gather(1, own.clamp(0, mine - 1)[:, None]).squeeze(1)
        return (total - summed(torch.where(here, picked, 0.0), self.group)).mean()


def tied_words(whole, mesh):
    return ParallelWords(whole, group_of(mesh), whole.embed.num_embeddings)


class Stage(nn.Module):
    """A stage of a pipeline, whose layers are numbered from 0."""

    def __init__(self, layers, first):
        super().__init__()
        self.layers, self.is_first = nn.ModuleList(layers), first


def pipeline(whole, mesh):
    rank = mesh["pp"].get_local_rank()
    return Stage(list(whole)[2 * rank : 2 * rank + 2], rank == 0)


def piped(module, x):
    from sharded_programs import Received, Sent

    if isinstance(module, nn.Sequential):
        return module(x).sin().mean()
    if module.is_first:
        for layer in module.layers:
            x = layer(x)
        return Sent.apply(x, 1)
    y = Received.apply(torch.zeros(len(x), 4, dtype=x.dtype, requires_grad=True), 0, 1)
    for layer in module.layers:
        y = layer(y)
    return y.sin().mean()


class TiedEnds(nn.Module):
    """The first weight is the last one, too; a pipeline has it twice, and sums the gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).tanh())


def tied_pipeline(whole, mesh):
    rank = mesh["pp"].get_local_rank()
    layer = nn.Linear(4, 4, bias=False, dtype=torch.double)
    with torch.no_grad():
        layer.weight.copy_(whole.first.weight)
    return Stage([layer, nn.Tanh()] if rank == 0 else [layer], rank == 0)


def tied_and_piped(module, x):
    return loss(module, x) if isinstance(module, TiedEnds) else piped(module, x)


def tied_and_made_anew(whole, mesh):
    """Each stage has the weight by the name that it has there."""
    stage, layer = nn.Module(), nn.Linear(4, 4, bias=False, dtype=torch.double)
    stage.is_first = mesh["pp"].get_local_rank() == 0
    setattr(stage, "first" if stage.is_first else "last", layer)
    stage.layers = (layer, torch.tanh) if stage.is_first else (layer,)
    return stage


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.group = None

    def forward(self, x):
        return sum(f(x).tanh() for f in self.experts)


class SomeExperts(nn.Module):
    """A rank's experts, numbered from 0, for the tokens of all."""

    def __init__(self, experts, group):
        super().__init__()
        self.local_experts, self.group = nn.ModuleList(experts), group
        for p in self.parameters():
            p.register_hook(lambda g: g / group.size())

    def forward(self, x):
        every = dc.all_gather(x, group=self.group)
        return dc.reduce_scatter(sum(f(every).tanh() for f in self.local_experts), group=self.group)


def experts(whole, mesh):
    rank = mesh["dp"].get_local_rank()
    return SomeExperts(list(whole.experts)[2 * rank : 2 * rank + 2], group_of(mesh, "dp"))


class Transposed(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.norm = whole.norm
        self.w, self.b = nn.Parameter(whole.up.weight.detach().T.clone()), whole.up.bias
        self.joint = nn.Parameter(torch.cat([whole.down.weight.detach().flatten(), whole.down.bias.detach()]))

    def forward(self, x):
        weight, bias = self.joint.split([len(self.joint) - 4, 4])
        return F.linear((self.norm(x) @ self.w + self.b).tanh(), weight.view(4, -1), bias)


def transposed_and_flat(whole, mesh):
    return Transposed(whole)


def compiled(whole, mesh):
    return torch.compile(parallelized(whole, mesh), backend="eager")


class Normalized(nn.Module):
    """Batch norm, whose buffers are made anew by the conversion."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())


def synchronized(whole, mesh):
    return ddp(dc.nn.convert_sync_batchnorm(whole), mesh)


class Scaled(nn.Module):
    """A DTensor that says Replicate() while nothing reduces its gradient."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(numbers(4))

    def forward(self, x):
        return x * (self.w.to_local() if isinstance(self.w, DTensor) else self.w)


def unequal_replicas(whole, mesh):
    whole.w = nn.Parameter(distribute_tensor(whole.w.detach(), mesh["dp"], [Replicate()]))
    return whole


def predicted(module, ids, labels):
    return module(ids, labels)


def rows_and_labels(module, x, labels):
    return F.cross_entropy(module(x), labels)


def vocabulary_of_dtensors(whole, mesh):
    plan = {"up": ColwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    return parallelize_module(whole, mesh["tp"], plan)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(4, 6)

    def forward(self, x):
        return self.up(x)


X, LONG = numbers(8, 4), numbers(2, 6, 4)
IDS = torch.tensor([0, 5, 2, 2, 4]), torch.tensor([1, 0, 5, 3, 3])
LAYERS = functools.partial(nn.Sequential, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())

#: name: (function, batch, module, shard, ranks, further arguments)
WAYS = {
    "parallelize_module": (loss, X, Net(), parallelized, TP, {}),
    "sequence parallel": (
        loss,
        LONG,
        Net(),
        in_sequence,
        TP,
        {"placements": {"x": {"tp": Shard(1)}}, "rank_reduction": {}},
    ),
    "fully_shard": (loss, X, Net(), fsdp2, DP, ROWS),
    "fully_shard, uneven": (loss, numbers(9, 4), Net(7), fsdp2, {"dp": 3}, ROWS),
    "fully_shard of tensor parallelism": (loss, X, Net(), fsdp2_of_tp, BOTH, ROWS),
    "fully_shard, not resharded": (loss, X, Net(), fsdp2_not_resharded, DP, ROWS),
    "fully_shard along columns": (loss, X, Net(), fsdp2_along_columns, DP, ROWS),
    "HSDP": (
        loss,
        X,
        Net(),
        hsdp,
        {"replicate": 2, "shard": 2},
        {"placements": {"x": {"replicate": Shard(0), "shard": Shard(0)}}},
    ),
    "FSDP": (loss, X, Net(), fsdp1, DP, ROWS),
    "FSDP in parts": (loss, X, Net(), fsdp1_in_parts, DP, ROWS),
    "FSDP, flat": (loss, X, Net(), fsdp1_flat, DP, ROWS),
    "FSDP, SHARD_GRAD_OP": (loss, X, Net(), fsdp1_grad_op, DP, ROWS),
    "FSDP, NO_SHARD": (loss, X, Net(), fsdp1_not_sharded, DP, ROWS),
    "FSDP, hybrid": (
        loss,
        X,
        Net(),
        fsdp1_hybrid,
        {"replicate": 2, "shard": 2},
        {"placements": {"x": {"replicate": Shard(0), "shard": Shard(0)}}},
    ),
    "DDP": (loss, X, Net(), ddp, DP, ROWS),
    "DDP of a mesh": (
        loss,
        X,
        Net(),
        ddp_of_all,
        {"dp": 2, "cp": 2},
        {"placements": {"x": {"dp": Shard(0), "cp": Shard(0)}}},
    ),
    "DDP of a part": (loss, X, Net(), ddp_inside, DP, ROWS),
    "DDP of a part, made anew": (loss, X, Net(), ddp_made_anew, DP, ROWS),
    "DDP of tensor parallelism": (loss, X, Net(), ddp_of_tp, BOTH, ROWS),
    "DTensors, replicated": (loss, X, Net(), replicated_dtensors, DP, {}),
    "a checkpoint's wrapper": (loss, X, Net(), checkpointed, TP, {}),
    "the meta device": (loss, X, Net(), on_meta, DP, ROWS),
    "layers of one's own": (loss, X, Net(), tensor_parallel, TP, {}),
    "more than one size": (loss, X, Net(), tensor_parallel, [{"tp": 2}, {"tp": 4}], {}),
    "two axes": (loss, X, Net(), tensor_parallel, BOTH, ROWS),
    "interleaved": (loss, X, Net(), interleaved, TP, {}),
    "with fresh memory": (loss, X, Net(), with_fresh_memory, TP, {}),
    "in any order": (loss, X, Net(), in_any_order, TP, {}),
    "uneven": (loss, X, Net(), uneven, TP, {}),
    "renamed": (loss, X, Net(), renamed, TP, {}),
    "filled with a state dict": (loss, X, Net(), loaded, TP, {}),
    "padded features": (loss, X, Net(10), padded, {"tp": 3}, {}),
    "merged projections": (loss, X, Attention(), merged_projections, TP, {}),
    "a merged projection, divided by heads": (loss, X, Attention(merged=True), divided_projection, TP, {}),
    "tied words": (predicted, IDS, Words(), tied_words, TP, {}),
    "padded words": (predicted, IDS, Words(7), tied_words, {"tp": 3}, {}),
    "a renumbered pipeline": (
        piped,
        X,
        LAYERS(),
        pipeline,
        {"pp": 2},
        {"placements": {"x": {"pp": Partial()}, "output": {"pp": Partial()}}},
    ),
    "tied across a pipeline": (
        tied_and_piped,
        X,
        TiedEnds(),
        tied_pipeline,
        {"pp": 2},
        {"placements": {name: {"pp": Partial()} for name in ("x", "output", "first.weight")}},
    ),
    "tied across a pipeline, made anew": (
        tied_and_piped,
        X,
        TiedEnds(),
        tied_and_made_anew,
        {"pp": 2},
        {"placements": {name: {"pp": Partial()} for name in ("x", "output", "first.weight")}},
    ),
    "heads of keys on two ranks each": (
        loss,
        X,
        Attention(4, 2),
        shared_heads,
        {"tp": 4},
        {"placements": {"k.weight": {"tp": Partial()}, "v.weight": {"tp": Partial()}}},
    ),
    "experts": (loss, X, Experts(), experts, DP, ROWS),
    "transposed and flat": (loss, X, Net(), transposed_and_flat, DP, ROWS),
    "batch norm": (loss, X, Normalized(), synchronized, DP, ROWS),
    "loss_parallel": (
        rows_and_labels,
        (X, torch.arange(8) % 6),
        Head(),
        vocabulary_of_dtensors,
        TP,
        {"context": loss_parallel},
    ),
    "bfloat16": (loss, X.bfloat16(), Net(64).bfloat16(), parallelized, TP, {"dtype": None}),
    "bfloat16, with a norm made anew": (loss, X.bfloat16(), Net(64).bfloat16(), with_a_new_norm, TP, {"dtype": None}),
    "float32": (loss, X.float(), Net(), fsdp2, DP, {"dtype": None, **ROWS}),
}


pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (".*returned a view tensor", "DTensor random operators", "The `NO_SHARD`", "FSDP is switching")
]


@pytest.mark.parametrize("on", ["simulated", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WAYS)
def test_a_right_way_is_right(name, on):
    fn, batch, module, shard, ranks, more = WAYS[name]
    report = matches((fn, fn, batch, {"module": module, "shard": shard, "ranks": ranks, **more}), on=[on])
    assert any(row.what.startswith("gradient of") for row in report.tables[0].rows)
    assert not report.notes or name == "the meta device"


@pytest.mark.parametrize("name", WAYS)
def test_a_wrong_gradient_is_seen_in_each(name):
    """All gradients are too large by half."""
    fn, batch, module, shard, ranks, more = WAYS[name]

    def wrong(module, *given):
        y = fn(module, *given)
        return y + (y - y.detach()) * (0.5 if dc.get_world_size() > 1 else 0.0)

    differs((wrong, fn, batch, {"module": module, "shard": shard, "ranks": ranks, **more}))
