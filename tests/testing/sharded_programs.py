"""Sharded programs, right ones and the same with planted bugs.

Each is a program of `verdicts`, made by a function of the name of a bug. `PROGRAMS` has the bugs of each.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Shard
from verdicts import loss, numbers, ruled, sharded

import diffcoll as dc


def parameter(*shape, seed=0):
    return nn.Parameter(numbers(*shape, seed=seed))


# ── what Megatron-LM calls f and g ───────────────────────────────────────────────────────────────────────


def sum_over(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def copied(x, group):
    """f: the same input for all ranks of a group, whose gradients are summed."""
    return ruled(torch.clone, partial(sum_over, group=group))(x)


def summed(x, group):
    """g: the sum over a group, whose gradient all ranks have already."""
    return ruled(partial(sum_over, group=group), lambda g: g)(x)


def joined(x, group, is_part):
    """The rows of all ranks of a group. The gradient is this rank's part of the sum, or its slice."""
    rule = dc.reduce_scatter if is_part else dc.split
    return ruled(partial(dc.all_gather, group=group), partial(rule, group=group))(x)


def scattered(x, group):
    """This rank's rows of the sum over a group."""
    return ruled(partial(dc.reduce_scatter, group=group), partial(dc.all_gather, group=group))(x)


# ── tensor parallelism ───────────────────────────────────────────────────────────────────────────────────


class MLP(nn.Module):
    """A norm and two layers."""

    def __init__(self, width=12):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up = nn.LayerNorm(4, dtype=torch.double), nn.Linear(4, width, dtype=torch.double)
        self.down = nn.Linear(width, 4, dtype=torch.double)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh())


class Row(nn.Linear):
    """Row-parallel."""

    def __init__(self, inputs, outputs, group, bug):
        super().__init__(inputs, outputs, dtype=torch.double)
        self.group, self.bug = group, bug

    def forward(self, x):
        y = x @ self.weight.T
        if self.bug == "bias":
            y = y + self.bias
        if self.bug != "g":
            y = summed(y, self.group)
        return y if self.bug == "bias" else y + self.bias


class ShardedMLP(MLP):
    def __init__(self, group, bug):
        width = 12 // group.size()
        super().__init__(width)
        self.group, self.bug, self.down = group, bug, Row(width, 4, group, bug)

    def forward(self, x):
        h = self.norm(x)
        return self.down(self.up(h if self.bug == "f" else copied(h, self.group)).tanh())


def called(module, *given):
    return module(*given)


def mlp(bug, ranks=None, **more):
    ranks = ranks or [{"tp": 2}, {"tp": 4}]
    return sharded(lambda whole, mesh: ShardedMLP(mesh["tp"].get_group(), bug), ranks, MLP(), numbers(6, 4), **more)


def data_and_tensor(bug):
    """Rows along one axis, features along the other."""
    return mlp(bug, {"dp": 3, "tp": 2}, **({"already_reduced": ["dp"]} if bug == "not averaged" else {}))


def clipped_step(bug, module, x):
    """A step with all gradients scaled to a norm of 1; it returns the norm."""
    module(x).square().sum().backward()
    total = torch.zeros((), dtype=torch.double)
    for name, p in module.named_parameters():
        is_copy = isinstance(module, ShardedMLP) and not name.startswith(("up", "down.weight"))
        is_counted = bug == "copies" or not is_copy or module.group.rank() == 0
        total += p.grad.square().sum() * is_counted
    if isinstance(module, ShardedMLP):
        dist.all_reduce(total, group=module.group)
    for p in module.parameters():
        p.grad /= total.sqrt()
    torch.optim.SGD(module.parameters(), 0.1).step()
    return total.sqrt()


def clipped(bug):
    fn, single = partial(clipped_step, bug), partial(clipped_step, "")
    return fn, single, *mlp("")[2:]


class Vocabulary(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self):
        super().__init__()
        self.embed = self.head = parameter(7, 3)

    def forward(self, ids, labels):
        return F.cross_entropy(self.embed[ids] @ self.head.T, labels, label_smoothing=0.3)


class ShardedVocabulary(nn.Module):
    """A rank's words, with rows of padding at the end of the last one's."""

    def __init__(self, whole, group, bug):
        super().__init__()
        self.group, self.bug, self.count = group, bug, len(whole.embed)
        self.each = -(-self.count // group.size())
        self.first = group.rank() * self.each
        padded = F.pad(whole.embed.detach(), (0, 0, 0, self.each * group.size() - self.count))
        self.weight = nn.Parameter(padded[self.first :][: self.each].clone())

    def at(self, ids):
        """Where the words stand among this rank's, and whether they do."""
        local = ids - self.first
        return local.clamp(0, self.each - 1), (local >= 0) & (local < self.each)

    def forward(self, ids, labels):
        group, (at, mine) = self.group, self.at(ids)
        h = summed(self.weight[at] * mine[:, None], group)
        logits = (h if self.bug == "f" else copied(h, group)) @ self.weight[: self.count - self.first].T
        most = logits.detach().amax(1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
        exponentials = (logits - most[:, None]).exp().sum(1)
        if self.bug == "logits counted N times":
            exponentials = summed(exponentials, group)
        total = summed(exponentials, group).log() + most
        at, mine = self.at(labels)
        own = summed(logits.gather(1, at[:, None]).squeeze(1) * mine, group)
        smooth = logits.sum(1)
        if self.bug != "local mean":
            smooth = summed(smooth, group)
        smooth = smooth / (self.each if self.bug.startswith("local") else self.count)
        return (total - 0.7 * own - 0.3 * smooth).mean()


def vocabulary(bug):
    ids = torch.tensor([0, 6, 2, 2, 4]), torch.tensor([1, 0, 6, 3, 3])

    def shard(whole, mesh):
        return ShardedVocabulary(whole, mesh["tp"].get_group(), bug)

    return sharded(shard, {"tp": 3}, Vocabulary(), ids, called)


class ShardedSequence(MLP):
    """The norm is applied to this rank's part of the sequence."""

    def __init__(self, group, bug):
        super().__init__(12 // group.size())
        self.group, self.bug = group, bug
        shared = {"norm": self.norm.parameters(), "bias": [self.down.bias]}
        for which, parameters in shared.items():
            for p in parameters if bug != which else ():
                p.register_hook(partial(sum_over, group=group))

    def forward(self, x):
        every = joined(self.norm(x), self.group, self.bug != "slice")
        return scattered(self.up(every).tanh() @ self.down.weight.T, self.group) + self.down.bias


def sequence(bug):
    left_out, placements = bug, {"x": {"tp": Shard(0)}}
    if bug == "said to be partial":  # somebody sums them later
        left_out, placements["norm.*"] = "norm", {"tp": Partial()}

    def shard(whole, mesh):
        return ShardedSequence(mesh["tp"].get_group(), left_out)

    return sharded(shard, {"tp": 2}, MLP(), numbers(6, 4), called, placements=placements, losses={})


# ── context parallelism ──────────────────────────────────────────────────────────────────────────────────


def scores(q, k, rows, columns):
    return (q @ k.T / math.sqrt(q.shape[-1])).masked_fill(rows[:, None] < columns, -math.inf)


def attention(q, k, v):
    """Causal attention of (S, E)."""
    rows = torch.arange(len(q))
    return scores(q, k, rows, rows).softmax(1) @ v


def zigzag(whole, rank, n):
    """The first and the last of what is left, so that all ranks have as much to do."""
    blocks = whole.chunk(2 * n)
    return torch.cat([blocks[rank], blocks[-1 - rank]])


def context(bug, length=12, n=3):
    """Attention over a sequence that the ranks have in parts; keys and values go around."""

    def positions(rank):
        every = torch.arange(length)
        return every.chunk(n)[rank] if bug == "contiguous" else zigzag(every, rank, n)

    def distributed(q, k, v):
        rank, found, values = dc.get_rank(), [], []
        for step in range(n):
            of_keys = positions((rank + (step if bug == "wrong offset" else -step)) % n)
            if bug == "wrong mask" and step > 0:
                of_keys = torch.full_like(of_keys, -1)  # hides none
            found.append(scores(q, k, positions(rank), of_keys))
            values.append(v)
            k, v = (k if bug == "stale keys" else dc.shift(k)), dc.shift(v)
        return torch.cat(found, 1).softmax(1) @ torch.cat(values)

    def placement(whole, at):
        return zigzag(whole, at["cp"], n)

    placements = dict.fromkeys((*"qkv", "output"), {"cp": Shard(0)} if bug == "not said" else placement)
    return distributed, attention, tuple(numbers(3, length, 4)), {"ranks": {"cp": n}, "placements": placements}


def ulysses(bug):
    """(S, H, E): parts of the sequence become heads."""

    def heads(q, k, v, first=0):
        return torch.stack([attention(q[:, h], k[:, h], v[:, h]) * (first + h + 1) for h in range(q.shape[1])], 1)

    def distributed(q, k, v):
        q, k, v = (exchange(x, 1, 0) for x in (q, k, v))
        return exchange(heads(q, k, v, 0 if bug == "wrong head" else dc.get_rank() * q.shape[1]), 0, 1)

    def exchange(x, split, concat):
        y = dc.all_to_all(x.detach() if bug == "no gradient" else x, split, concat)
        return y.flip(concat) if bug == "order" and concat else y

    placements = {name: {"cp": Shard(0)} for name in "qkv"}
    return distributed, heads, tuple(numbers(3, 6, 2, 4)), {"ranks": {"cp": 2}, "placements": placements}


def tokens(bug):
    """A mean over the tokens that a mask selects, of parts of rows and of sequences."""

    def single(w, x, mask):
        return ((x @ w).sin() * mask).sum() / mask.sum()

    def distributed(w, x, mask):
        mine = mask.sum()
        count = mine.double()
        if bug == "padding":
            count = torch.tensor(float(mask.numel()))
        if bug == "local counts":
            return ((x @ w).sin() * mask).sum() / mine
        total = dc.all_reduce(count.detach())
        factor = 1 if bug == "mean of the axes" else dc.get_world_size()
        return factor * ((x @ w).sin() * mask).sum() / total

    x = numbers(4, 4, 3)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    placements = {key: {"dp": Shard(0), "cp": Shard(1)} for key in ("x", "mask")}
    more = {"ranks": {"dp": 2, "cp": 2}, "placements": placements}
    return distributed, single, (numbers(3, seed=7), x, mask), more


# ── experts ──────────────────────────────────────────────────────────────────────────────────────────────


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.weight = parameter(3, 6), parameter(6, 3, 3, seed=1)

    def forward(self, x):
        chances = (x @ self.gate).softmax(1)
        y = torch.einsum("te,tf,efg->tg", chances, x, self.weight)
        return y.sin().sum(1).mean() + 0.1 * (chances.mean(0) ** 2).sum()


class ShardedExperts(Experts):
    """Every rank applies its experts to the tokens of all."""

    def __init__(self, mesh, bug):
        super().__init__()
        self.group, self.bug = mesh["ep"].get_group(), bug
        self.weight = parameter(6 // self.group.size(), 3, 3)
        divisor = mesh["dp"].size() if bug == "wrong axes" else 1 if bug == "nobody divides" else self.group.size()
        self.weight.register_hook(lambda g: g / divisor)

    def forward(self, x):
        n, first = self.group.size(), self.group.rank() * len(self.weight)
        chances = (x @ self.gate).softmax(1)
        every, each = dc.all_gather((x, chances), group=self.group)
        if self.bug == "dropped tokens":
            each = each * (torch.arange(len(each)) < len(each) - 1)[:, None]
        y = torch.einsum("te,tf,efg->tg", each[:, first : first + len(self.weight)], every, self.weight)
        y = dc.reduce_scatter(y, group=self.group)
        load = dc.all_reduce(chances.mean(0), "mean", group=dist.group.WORLD)
        auxiliary = 0.1 * (load**2).sum()
        return y.sin().sum(1).mean() + (n * auxiliary if self.bug == "auxiliary" else auxiliary)


def rows_of(outer, inner):
    """Rows are divided along two axes."""
    return lambda whole, at: whole.tensor_split(at.mesh[outer] * at.mesh[inner])[at[outer] * at.mesh[inner] + at[inner]]


def experts(bug):
    def shard(whole, mesh):
        return ShardedExperts(mesh, bug)

    placements = {"x": rows_of("dp", "ep"), "weight": {"ep": Shard(0)}}
    return sharded(shard, {"dp": 2, "ep": 3}, Experts(), numbers(12, 3), called, placements=placements)


# ── pipelines ────────────────────────────────────────────────────────────────────────────────────────────


def receive(like, source):
    x = torch.empty_like(like)
    dist.recv(x, source)
    return x


def sent(x, to):
    """Sends x, and receives its gradient; the result stands for what the other rank computes."""

    def send(x):
        dist.send(x.contiguous(), to)
        return x.new_zeros(())

    return ruled(send, lambda g: receive(x.detach(), to))(x)


def received(shape, source, factor=1):
    """Receives a tensor, and sends its gradient."""
    like = torch.zeros(shape, dtype=torch.double, requires_grad=True)
    return ruled(partial(receive, source=source), lambda g: dist.send(g.contiguous() * factor, source))(like)


class TiedEnds(nn.Module):
    """The first weight is the last one, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(4, 4, bias=False, dtype=torch.double) for _ in range(2))
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).tanh())


class Stage(nn.Module):
    """A stage of a pipeline. The first one's weight has another name, the last one's is made anew."""

    def __init__(self, weight, first, bug):
        super().__init__()
        self.first, self.bug = first, bug
        layer = nn.Linear(4, 4, bias=False, dtype=torch.double)
        if first:
            layer.weight = nn.Parameter(weight.detach().clone())
            self.layers = nn.Sequential(layer, nn.Tanh())
        else:
            self.last = layer

    def forward(self, x):
        if self.first:
            return sent(self.layers(x) * (2 if self.bug == "twice" else 1), 1)
        y = loss(self.last, received((len(x), 4), 0, 0 if self.bug == "zeros" else 1))
        return y * 2 if self.bug == "value twice" else y


def pipeline(bug):
    """Both ranks have the tied weight, whose gradients are parts of a sum."""

    def shard(whole, mesh):
        return Stage(whole.first.weight, mesh.get_rank() == 0, bug)

    placements = {key: {"pp": Partial()} for key in ("output", "x", "first.weight")}
    return sharded(shard, {"pp": 2}, TiedEnds(), numbers(5, 4), called, loss, placements=placements)


# ── PyTorch's own ────────────────────────────────────────────────────────────────────────────────────────


def fully_sharded(bug):
    def shard(whole, mesh):
        fully_shard(whole, mesh=mesh["shard"] if bug == "not replicated" else mesh)
        if bug == "summed":
            whole.set_gradient_divide_factor(1.0)
        return whole

    more = {"already_reduced": ["replicate"]} if bug == "not replicated" else {}
    placements = {"x": rows_of("replicate", "shard")}
    x = numbers(10 if bug == "uneven" else 12, 4)
    return sharded(shard, {"replicate": 2, "shard": 2}, MLP(), x, placements=placements, **more)


#: program: its bugs, and the words that are observed of some
PROGRAMS = {
    mlp: {
        "f": "right after a sum over tp",
        "g": "differs between the ranks of tp, where it counts once .*down, which is right after a sum over tp",
        "bias": "that of down, which has its bias 2 times, once for each rank of tp",
    },
    clipped: {"copies": "value: .* that of a norm that counts norm.weight, norm.bias, down.bias once on each rank"},
    data_and_tensor: dict.fromkeys(("f", "bias", "not averaged"), ""),
    vocabulary: {
        **dict.fromkeys(("local vocabulary size", "f"), ""),
        "local mean": "value: differs between the ranks of tp, where it counts once",
        "logits counted N times": "value: larger by log 3, the logarithm of the size of tp",
    },
    sequence: {"norm": "norm.weight and norm.bias: right after a sum over tp", "bias": "", "slice": ""},
    context: dict.fromkeys(("stale keys", "wrong mask", "wrong offset", "contiguous", "not said"), ""),
    ulysses: dict.fromkeys(("wrong head", "order", "no gradient"), ""),
    tokens: {
        "local counts": r"one process weighs them .* \(by their ones of mask\)",
        "padding": "which is the part of mask that is one",
        "mean of the axes": "",
    },
    experts: dict.fromkeys(("nobody divides", "wrong axes", "dropped tokens", "auxiliary"), ""),
    pipeline: dict.fromkeys(("zeros", "twice", "value twice"), ""),
    fully_sharded: dict.fromkeys(("not replicated", "summed", "uneven"), ""),
}
