"""Losses and layers as the field writes them, the ways in which they are distributed, and the usual mistakes.

A program is a family, such as a contrastive loss, and a way. The families are of three kinds:

    of rows         L(x), of the rows of all ranks, which each rank gathers: every rank returns the whole loss
    of statistics   L(x, total): the sum over ranks of what the ranks' rows are, beside a part of this rank's rows alone
    of pairs        L(x, every, first): this rank's rows with all rows, of which they begin at row `first`

On one process each is the same function of the whole batch. A way is a gather, or a sum over ranks, that is right; a
mistake is one that is not. Features are those of a layer,
whose weights are checked as well.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from verdicts import ruled

import diffcoll as dc

WIDTH = 4


def batch(n):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 3, generator=generator, dtype=torch.double).requires_grad_()  # y is a constant
    return (
        x,
        torch.randn(n, generator=generator, dtype=torch.double),
        torch.tensor([0, 0, 1, 0, 2, 1, 1, 0]).repeat(n // 8 + 1)[:n],
    )


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


def pairwise_auc(z, y, k):
    score = z.sum(1)
    return F.softplus(score[k != 0, None] - score[k == 0]).mean()


def maximum_mean_discrepancy(z, y, k):
    a, b = z[:, :2], z[:, 2:]
    kernel = [torch.exp(-((u[:, None] - v) ** 2).sum(2)).mean() for u, v in ((a, a), (b, b), (a, b))]
    return kernel[0] + kernel[1] - 2 * kernel[2]


def independence(z, y, k):
    a, b = (v @ v.T for v in (z[:, :2], z[:, 2:]))
    center = torch.eye(len(z), dtype=z.dtype) - 1 / len(z)
    return (center @ a @ center * b).sum() / (len(z) - 1) ** 2


def sliced_wasserstein(z, y, k):
    return (z[:, 0].sort()[0] - y.sort()[0]).square().mean()


def proportional_hazards(z, y, k):
    order = y.argsort(descending=True)
    risk = z[order, 0]
    return (risk.logcumsumexp(0) - risk).mean()


def pearson(z, y, k):
    a, b = z[:, 0] - z[:, 0].mean(), y - y.mean()
    return -(a * b).sum() / (a.norm() * b.norm())


def concordance(z, y, k):
    a, b = z[:, 0], y
    covariance = ((a - a.mean()) * (b - b.mean())).mean()
    return 1 - 2 * covariance / (a.var(correction=0) + b.var(correction=0) + (a.mean() - b.mean()) ** 2)


def unexplained_variance(z, y, k):
    return ((z[:, 0] - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()


def whitening(z, y, k):
    centered = z - z.mean(0)
    return -torch.logdet(centered.T @ centered / len(z) + 0.1 * torch.eye(WIDTH, dtype=z.dtype))


def largest_eigenvalue(z, y, k):
    return torch.linalg.eigvalsh(z.T @ z / len(z))[-1]


def ranking(z, y, k):
    return F.cross_entropy(z[:, 0], y.softmax(0))


def worst_rows(z, y, k):
    return (z[:, 0] - y).square().topk(max(1, len(z) // 3))[0].mean()


def diversity(z, y, k):
    rows = F.normalize(z)
    return -torch.logdet(torch.eye(len(z), dtype=z.dtype) + torch.exp(-torch.cdist(rows, rows + 1e-3)))


# ── of statistics: a function of the rank's rows, and one of its sum over ranks ──────────────────────────


def _moments(z, *_):
    return torch.cat([torch.full((1,), float(len(z)), dtype=z.dtype), z.sum(0), z.square().sum(0)])


def variance(total):
    n, first, second = total[0], total[1 : 1 + WIDTH], total[1 + WIDTH :]
    return F.softplus(1 - (second / n - (first / n) ** 2 + 0.1).sqrt()).sum()


def _products(z, *_):
    return torch.cat([torch.full((1, WIDTH), len(z) / WIDTH, dtype=z.dtype), z.tanh().T @ z.sin()])


def redundancy(total):
    correlation = total[1:] / total[0].sum()
    return (correlation - torch.eye(WIDTH, dtype=total.dtype)).square().sum()


def _overlap(z, y, k):
    p, target = z[:, 0].sigmoid(), (k == 0).double()
    return torch.stack([(p * target).sum(), p.sum(), target.sum()])


def dice(total):
    return 1 - (2 * total[0] + 1) / (total[1] + total[2] + 1)


def jaccard(total):
    return 1 - (total[0] + 1) / (total[1] + total[2] - total[0] + 1)


def _probabilities(z, *_):
    return torch.cat([z.softmax(1).sum(0), torch.full((1,), float(len(z)), dtype=z.dtype)])


def marginal_entropy(total):
    p = total[:-1] / total[-1]
    return (p * p.log()).sum()


def _loads(z, *_):
    routed = F.one_hot(z.argmax(1), WIDTH).to(z.dtype).sum(0)
    return torch.cat([routed, z.softmax(1).sum(0), torch.full((1,), float(len(z)), dtype=z.dtype)])


def expert_balance(total):
    return WIDTH * (total[:WIDTH] * total[WIDTH:-1]).sum() / total[-1] ** 2


def _errors(z, y, k):
    kept = (k != 1).double()
    return torch.stack([((z[:, 0] - y) ** 2 * kept).sum(), kept.sum()])


def masked_mean(total):
    return total[0] / total[1]


def _positives(z, y, k):
    loss = F.binary_cross_entropy_with_logits(z[:, 0], (k == 2).double(), reduction="sum")
    return torch.stack([loss, (k == 2).sum().double()])


def per_positive(total):
    return total[0] / total[1].clamp(min=1)


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


def repulsion(z, every, first, n):
    others = torch.arange(first, first + len(z))[:, None] != torch.arange(len(every))
    return ((torch.exp(-torch.cdist(z, every + 1e-3)) * others).sum(1) + 1).log().sum() / n


def smoothed(z, every, first, n):
    weights = torch.exp(-((z[:, None] - every) ** 2).sum(2))
    return ((weights @ every / weights.sum(1, keepdim=True) - z) ** 2).sum() / n


def following(z, every, first, n):
    rows = torch.arange(first, first + len(z))
    return (z * every[(rows + 1) % len(every)].sin()).sum() / n


OF_ROWS = {
    f.__name__.replace("_", " "): f
    for f in (
        *(clip, supervised_contrastive, hardest_triplets, pairwise_auc, maximum_mean_discrepancy, independence),
        *(sliced_wasserstein, proportional_hazards, pearson, concordance, unexplained_variance, whitening),
        *(largest_eigenvalue, ranking, worst_rows, diversity),
    )
}
OF_STATISTICS = {
    "variance": (_moments, variance),
    "redundancy": (_products, redundancy),
    "dice": (_overlap, dice),
    "jaccard": (_overlap, jaccard),
    "marginal entropy": (_probabilities, marginal_entropy),
    "expert balance": (_loads, expert_balance),
    "masked mean": (_errors, masked_mean),
    "per positive": (_positives, per_positive),
}
OF_PAIRS = {
    f.__name__.replace("_", " "): f for f in (info_nce, sigmoid_pairs, attention, repulsion, smoothed, following)
}

# ── ways to gather and to sum ────────────────────────────────────────────────────────────────────────────


def _sizes(x):
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(x)]))
    return [int(k) for k in sizes]


def blocks_of_all(x):
    """The blocks of all ranks, padded to the length of the longest one for the message; the gradient is lost."""
    sizes = _sizes(x)
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    blocks = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(blocks, padded)
    return [block[:k] for block, k in zip(blocks, sizes, strict=True)]


def plain_gather(x):
    return torch.cat(blocks_of_all(x))


def _gather_layer(rule):
    """The layer that everybody copies, with a rule for its backward, of the gradient and the ranks' numbers of rows."""

    def gather(x):
        sizes = _sizes(x)
        return ruled(plain_gather, lambda g: rule(g, sizes))(x)

    return gather


gather_layer = _gather_layer(lambda g, sizes: _plain_sum(g).split(sizes)[dist.get_rank()])
#: The backward of early copies.
own_slice = _gather_layer(lambda g, sizes: g.split(sizes)[dist.get_rank()])
_from_the_next_rank = _gather_layer(
    lambda g, sizes: _plain_sum(g).split(sizes)[(dist.get_rank() + 1) % dist.get_world_size()]
)


def own_block_kept(x):
    blocks = blocks_of_all(x)
    blocks[dist.get_rank()] = x
    return torch.cat(blocks)


def _without_the_last_rank(x):
    sizes = _sizes(x)
    return dc.all_gather(x, sizes="auto")[: sum(sizes) - sizes[-1]]


def _last_rank_zero(x):
    sizes = _sizes(x)
    return dc.all_gather(x, sizes="auto") * (torch.arange(sum(sizes)) < sum(sizes[:-1]))[:, None]


def _plain_sum(x):
    y = x.detach().clone()
    dist.all_reduce(y)
    return y


#: The backward of Megatron-LM's g, where the losses of the ranks are other ones.
identity = ruled(_plain_sum, lambda g: g)


def _distributed_nn_sum(x):
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(x.clone())


def _distributed_nn_gather(x):
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(x))


def alone(x):
    return x


#: Right ways, and whether they take blocks of other sizes on each rank.
GATHERS = {
    "dc.all_gather": (lambda x: dc.all_gather(x, sizes="auto"), True),
    "GatherLayer": (gather_layer, True),
    "dc.gather_batch": (lambda x: dc.gather_batch(x).tree, True),
    "torch.distributed.nn": (_distributed_nn_gather, False),
}
SUMS = {
    "dc.all_reduce": dc.all_reduce,
    "AllReduce": ruled(_plain_sum, _plain_sum),
    "dc.reduce and dc.broadcast": lambda x: dc.broadcast(dc.reduce(x)),
    "torch.distributed.nn": _distributed_nn_sum,
}


@dataclass
class Mistake:
    """A way that is wrong."""

    way: Any
    #: What the returned loss is multiplied by.
    factor: Any = lambda: 1.0


def _by_n():
    return float(dc.get_world_size())


GATHER_MISTAKES = {
    "no gradient": Mistake(plain_gather),
    "own block kept": Mistake(own_block_kept),
    "own slice": Mistake(own_slice),
    "the next rank's block": Mistake(_from_the_next_rank),
    "no collective": Mistake(alone),
    "times N": Mistake(GATHERS["dc.all_gather"][0], _by_n),
}
#: For rows of which every rank returns the whole loss, and for the terms of a rank's own rows.
ROW_MISTAKES = {**GATHER_MISTAKES, "the last rank left out": Mistake(_without_the_last_rank)}
PAIR_MISTAKES = {**GATHER_MISTAKES, "the last rank zero": Mistake(_last_rank_zero)}
SUM_MISTAKES = {
    "no gradient": Mistake(_plain_sum),
    "identity": Mistake(identity),
    "averaged": Mistake(ruled(_plain_sum, lambda g: _plain_sum(g) / dist.get_world_size())),
    "no collective": Mistake(alone),
    "of rank 0": Mistake(dc.broadcast),
    "times N": Mistake(dc.all_reduce, _by_n),
}


def of_rows(family, gather, factor=lambda: 1.0):
    """Every rank returns the whole loss; the gradients are averaged."""
    loss = OF_ROWS[family]

    def distributed(model, x, y, k):
        z = gather(model(x))
        if gather is not alone:
            y, k = (dc.all_gather(v, sizes="auto")[: len(z)] for v in (y, k))
        return loss(z, y, k) * factor()

    return distributed, lambda model, x, y, k: loss(model(x), y, k), batch, {"module": encoder()}


def of_statistics(family, total, factor=lambda: 1.0):
    """Every rank returns a share of the loss of the sums; the gradients are summed."""
    statistics, loss = OF_STATISTICS[family]

    def distributed(model, x, y, k):
        z = model(x)
        return (loss(total(statistics(z, y, k))) / dc.get_world_size() + (z**2).sum()) * factor()

    def single(model, x, y, k):
        z = model(x)
        return loss(statistics(z, y, k)) + (z**2).sum()

    return distributed, single, batch, {"module": encoder(), "rank_reduction": "sum"}


def of_pairs(family, gather, factor=lambda: 1.0):
    """Every rank returns the terms of its own rows; the gradients are summed."""
    loss = OF_PAIRS[family]

    def distributed(model, x, y, k):
        first = int(dc.scan(torch.tensor([len(x)]), exclusive=True))
        z, n = model(x), int(dc.all_reduce(torch.tensor([len(x)])))
        return loss(z, gather(z), 0 if gather is alone else first, n) * factor()

    def single(model, x, y, k):
        z = model(x)
        return loss(z, z, 0, len(z))

    return distributed, single, batch, {"module": encoder(), "rank_reduction": "sum"}


#: (what makes a program, its families, right ways with whether they take uneven ranks, mistakes)
KINDS = (
    (of_rows, OF_ROWS, GATHERS, ROW_MISTAKES),
    (of_statistics, OF_STATISTICS, {way: (total, True) for way, total in SUMS.items()}, SUM_MISTAKES),
    (of_pairs, OF_PAIRS, GATHERS, PAIR_MISTAKES),
)
RIGHT = {
    f"{family}, {way}": (make, family, how, uneven)
    for make, families, ways, _ in KINDS
    for family in families
    for way, (how, uneven) in ways.items()
}
WRONG = {
    f"{family}, {name}": (make, family, mistake)
    for make, families, _, mistakes in KINDS
    for family in families
    for name, mistake in mistakes.items()
}
