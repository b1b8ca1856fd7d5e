"""Losses and layers as the field writes them, the ways in which they are distributed, and the usual mistakes.

A program is a family, such as a contrastive loss, and a way. The families are of three kinds:

    of rows         L(x), of the rows of all ranks, which each rank gathers: every rank returns the whole loss
    of statistics   L(x, total), of sums over this rank's rows, of which `total` makes those of all ranks
    of pairs        L(x, every, first): this rank's rows with all rows, of which they begin at row `first`

On one process each is the same function of the whole batch. A way is a gather, or a sum over ranks, that is right; a
mistake is one that is not. Features are those of a layer, whose weights are checked as well.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import nn
from verdicts import numbers, ruled

import diffcoll as dc

WIDTH = 4


def batch(n):
    x, y = numbers(n, 3, seed=n).requires_grad_(), numbers(n, seed=n + 1)  # y is a constant
    return x, y, torch.tensor([0, 0, 1, 0, 2, 1, 1, 0]).repeat(n // 8 + 1)[:n]


def encoder():
    torch.manual_seed(0)
    return nn.Linear(3, WIDTH, dtype=torch.double)


# ── of rows: z (n, 4), y (n,) random, k (n,) one of three classes ────────────────────────────────────────


def _same(k):
    return k[:, None] == k


def clip(z, y, k):
    a, b = F.normalize(z[:, :2]), F.normalize(z[:, 2:])
    logits, targets = 5 * a @ b.T, torch.arange(len(z))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def supervised_contrastive(z, y, k):
    others = ~torch.eye(len(z), dtype=torch.bool)
    logits = F.normalize(z) @ F.normalize(z).T
    log_p = logits - logits.exp().mul(others).sum(1, keepdim=True).log()
    positive = (_same(k) & others).double()
    return -(log_p * positive).sum(1).div(positive.sum(1).clamp(min=1)).mean()


def hardest_triplets(z, y, k):
    far = torch.cdist(z, z + 1e-3)
    positive = far.masked_fill(~_same(k), -1).amax(1)
    return F.softplus(positive - far.masked_fill(_same(k), 1e3).amin(1)).mean()


def sliced_wasserstein(z, y, k):
    return (z[:, 0].sort()[0] - y.sort()[0]).square().mean()


def proportional_hazards(z, y, k):
    order = y.argsort(descending=True)
    risk = z[order, 0]
    return (risk.logcumsumexp(0) - risk).mean()


def pearson(z, y, k):
    a, b = z[:, 0] - z[:, 0].mean(), y - y.mean()
    return -(a * b).sum() / (a.norm() * b.norm())


def whitening(z, y, k):
    centered = z - z.mean(0)
    return -torch.logdet(centered.T @ centered / len(z) + 0.1 * torch.eye(WIDTH, dtype=z.dtype))


# ── of statistics: sums over a rank's rows, and a function of those of all ranks ─────────────────────────


def _count(z):
    return torch.full((1,), float(len(z)), dtype=z.dtype)


def variance(z, y, k, total):
    n, first, second = total(torch.cat([_count(z), z.sum(0), z.square().sum(0)])).split([1, WIDTH, WIDTH])
    return F.softplus(1 - (second / n - (first / n) ** 2 + 0.1).sqrt()).sum()


def redundancy(z, y, k, total):
    products = total(torch.cat([_count(z).expand(1, WIDTH), z.tanh().T @ z.sin()]))
    return (products[1:] / products[0] - torch.eye(WIDTH, dtype=z.dtype)).square().sum()


def dice(z, y, k, total):
    p, target = z[:, 0].sigmoid(), (k == 0).double()
    both, p, target = total(torch.stack([(p * target).sum(), p.sum(), target.sum()]))
    return 1 - (2 * both + 1) / (p + target + 1)


def expert_balance(z, y, k, total):
    routed = F.one_hot(z.argmax(1), WIDTH).to(z.dtype).sum(0)
    routed, chances, n = total(torch.cat([routed, z.softmax(1).sum(0), _count(z)])).split([WIDTH, WIDTH, 1])
    return WIDTH * (routed * chances).sum() / n.sum() ** 2


# ── of pairs: this rank's rows with those of all ranks ───────────────────────────────────────────────────


def info_nce(z, every, first, n):
    logits = z[:, :2] @ every[:, 2:].T
    return F.cross_entropy(logits, torch.arange(first, first + len(z)), reduction="sum") / n


def sigmoid_pairs(z, every, first, n):
    logits = z[:, :2] @ every[:, 2:].T
    signs = 2.0 * (torch.arange(first, first + len(z))[:, None] == torch.arange(len(every))) - 1
    return -F.logsigmoid(signs * logits).sum() / n


def attention(z, every, first, n):
    return ((z @ every.T).softmax(1) @ every.tanh()).square().sum() / n


def following(z, every, first, n):
    rows = torch.arange(first, first + len(z))
    return (z * every[(rows + 1) % len(every)].sin()).sum() / n


def by_name(*families):
    return {f.__name__.replace("_", " "): f for f in families}


OF_ROWS = by_name(
    clip,
    supervised_contrastive,
    hardest_triplets,
    sliced_wasserstein,
    proportional_hazards,
    pearson,
    whitening,
)
OF_STATISTICS = by_name(variance, redundancy, dice, expert_balance)
OF_PAIRS = by_name(info_nce, sigmoid_pairs, attention, following)

# ── ways to gather and to sum ────────────────────────────────────────────────────────────────────────────


def rows_of_all(x):
    """This rank's first row, and the number of rows of all ranks."""
    sizes = dc.all_gather(torch.tensor([len(x)]))
    return int(sizes[: dc.get_rank()].sum()), int(sizes.sum())


def blocks_of_all(x):
    """The blocks of all ranks, padded to the length of the longest one for the message; the gradient is lost."""
    sizes = dc.all_gather(torch.tensor([len(x)])).tolist()
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    blocks = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(blocks, padded)
    return [block[:k] for block, k in zip(blocks, sizes, strict=True)]


def plain_gather(x):
    return torch.cat(blocks_of_all(x))


def plain_sum(x):
    y = x.detach().clone()
    dist.all_reduce(y)
    return y


def own_rows(g, x, of=0):
    """The rows of g that are those of x on this rank, or on the one that is so many further."""
    sizes = dc.all_gather(torch.tensor([len(x)])).tolist()
    return g.split(sizes)[(dc.get_rank() + of) % len(sizes)]


def gather_layer(x, rule=lambda g, x: own_rows(plain_sum(g), x)):
    """The layer that everybody copies, with a rule for its backward."""
    return ruled(plain_gather, lambda g: rule(g, x))(x)


right_gather = partial(dc.all_gather, sizes="auto")
#: The backward of early copies.
own_slice = partial(gather_layer, rule=own_rows)
#: The backward of Megatron-LM's g, where the losses of the ranks are other ones.
identity = ruled(plain_sum, lambda g: g)


def own_block_kept(x):
    blocks = blocks_of_all(x)
    blocks[dc.get_rank()] = x
    return torch.cat(blocks)


def last_rank_zero(x):
    return right_gather(x * (dc.get_rank() < dc.get_world_size() - 1))


def alone(x):
    return x


#: Right ways. The last gather takes equal blocks only.
GATHERS = {
    "dc.all_gather": right_gather,
    "GatherLayer": gather_layer,
    "dc.gather_batch": lambda x: dc.gather_batch(x).tree,
    "torch.distributed.nn": lambda x: torch.cat(dist_nn.all_gather(x)),
}
SUMS = {
    "dc.all_reduce": dc.all_reduce,
    "AllReduce": ruled(plain_sum, plain_sum),
    "dc.reduce and dc.broadcast": lambda x: dc.broadcast(dc.reduce(x)),
    "torch.distributed.nn": lambda x: dist_nn.all_reduce(x.clone()),
}
WRONG_GATHERS = {
    "no gradient": plain_gather,
    "own block kept": own_block_kept,
    "own slice": own_slice,
    "the next rank's block": partial(gather_layer, rule=lambda g, x: own_rows(plain_sum(g), x, of=1)),
    "times N": partial(gather_layer, rule=lambda g, x: own_rows(plain_sum(g), x) * dc.get_world_size()),
    "the last rank zero": last_rank_zero,
    "no collective": alone,
}
WRONG_SUMS = {
    "no gradient": plain_sum,
    "identity": identity,
    "averaged": ruled(plain_sum, lambda g: plain_sum(g) / dc.get_world_size()),
    "times N": ruled(plain_sum, lambda g: plain_sum(g) * dc.get_world_size()),
    "of rank 0": dc.broadcast,
    "no collective": alone,
}


def of_rows(loss, gather):
    """Every rank returns the whole loss; the gradients are averaged."""

    def value(model, x, y, k):
        z = gather(model(x))
        return loss(z, y, k) if gather is alone else loss(z, right_gather(y), right_gather(k))

    return value


def of_statistics(loss, total):
    """Every rank returns a share of the loss of the sums; the gradients are summed."""

    def value(model, x, y, k):
        z = model(x)
        return loss(z, y, k, total) / dc.get_world_size() + (z**2).sum()

    return value


def of_pairs(loss, gather):
    """Every rank returns the terms of its own rows; the gradients are summed."""

    def value(model, x, y, k):
        z, (first, total) = model(x), rows_of_all(x)
        return loss(z, gather(z), 0 if gather is alone else first, total)

    return value


def program(make, loss, way):
    """Return the program of `verdicts` of a family and a way."""
    reduction = "mean" if make is of_rows else "sum"
    return make(loss, way), make(loss, alone), batch, {"module": encoder(), "losses": reduction}


def each(make, families, ways):
    """Return a function for each program, which makes it."""
    return {
        f"{family}, {name}": partial(program, make, loss, way)
        for family, loss in families.items()
        for name, way in ways.items()
    }


RIGHT = {
    **each(of_rows, OF_ROWS, GATHERS),
    **each(of_statistics, OF_STATISTICS, SUMS),
    **each(of_pairs, OF_PAIRS, GATHERS),
}
WRONG = {
    **each(of_rows, OF_ROWS, WRONG_GATHERS),
    **each(of_statistics, OF_STATISTICS, WRONG_SUMS),
    **each(of_pairs, OF_PAIRS, WRONG_GATHERS),
}
