"""Losses and layers as the field writes them, the ways in which they are distributed, and the usual mistakes.

A program is a family, such as a contrastive loss, and a way. The families are of three kinds:

    of rows         L(x), of the rows of all ranks, which each rank gathers: every rank returns the whole loss
    of statistics   L(x, total), of sums over this rank's rows, of which `total` makes those of all ranks
    of pairs        L(x, every, first): this rank's rows with all rows, of which they begin at row `first`

On one process each is the same function of the whole batch. A way is a gather, or a sum over ranks, that is right; a
mistake is one that is not. Features are those of a layer, whose weights are checked as well.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
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


# ── of statistics: sums over a rank's rows, and a function of those of all ranks ─────────────────────────


def _count(z):
    return torch.full((1,), float(len(z)), dtype=z.dtype)


def variance(z, y, k, total):
    n, first, second = total(torch.cat([_count(z), z.sum(0), z.square().sum(0)])).split([1, WIDTH, WIDTH])
    return F.softplus(1 - (second / n - (first / n) ** 2 + 0.1).sqrt()).sum()


def redundancy(z, y, k, total):
    products = total(torch.cat([_count(z).expand(1, WIDTH), z.tanh().T @ z.sin()]))
    return (products[1:] / products[0] - torch.eye(WIDTH, dtype=z.dtype)).square().sum()


def _overlap(z, k, total):
    p, target = z[:, 0].sigmoid(), (k == 0).double()
    return total(torch.stack([(p * target).sum(), p.sum(), target.sum()]))


def dice(z, y, k, total):
    both, p, target = _overlap(z, k, total)
    return 1 - (2 * both + 1) / (p + target + 1)


def jaccard(z, y, k, total):
    both, p, target = _overlap(z, k, total)
    return 1 - (both + 1) / (p + target - both + 1)


def marginal_entropy(z, y, k, total):
    sums = total(torch.cat([z.softmax(1).sum(0), _count(z)]))
    p = sums[:-1] / sums[-1]
    return (p * p.log()).sum()


def expert_balance(z, y, k, total):
    routed = F.one_hot(z.argmax(1), WIDTH).to(z.dtype).sum(0)
    routed, chances, n = total(torch.cat([routed, z.softmax(1).sum(0), _count(z)])).split([WIDTH, WIDTH, 1])
    return WIDTH * (routed * chances).sum() / n.sum() ** 2


def masked_mean(z, y, k, total):
    kept = (k != 1).double()
    errors, count = total(torch.stack([((z[:, 0] - y) ** 2 * kept).sum(), kept.sum()]))
    return errors / count


def per_positive(z, y, k, total):
    loss = F.binary_cross_entropy_with_logits(z[:, 0], (k == 2).double(), reduction="sum")
    loss, positives = total(torch.stack([loss, (k == 2).sum().double()]))
    return loss / positives.clamp(min=1)


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


def by_name(*families):
    return {f.__name__.replace("_", " "): f for f in families}


OF_ROWS = by_name(
    *(clip, supervised_contrastive, hardest_triplets, pairwise_auc, maximum_mean_discrepancy, independence),
    *(sliced_wasserstein, proportional_hazards, pearson, concordance, unexplained_variance, whitening),
    *(largest_eigenvalue, ranking, worst_rows, diversity),
)
OF_STATISTICS = by_name(
    *(variance, redundancy, dice, jaccard, marginal_entropy, expert_balance, masked_mean, per_positive),
)
OF_PAIRS = by_name(info_nce, sigmoid_pairs, attention, repulsion, smoothed, following)

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
    return dist_nn.all_reduce(x.clone())


def _distributed_nn_gather(x):
    return torch.cat(dist_nn.all_gather(x))


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


TIMES_N = "times N"
GATHER_MISTAKES = {
    "no gradient": plain_gather,
    "own block kept": own_block_kept,
    "own slice": own_slice,
    "the next rank's block": _from_the_next_rank,
    "no collective": alone,
    TIMES_N: GATHERS["dc.all_gather"][0],
}
#: For rows of which every rank returns the whole loss, and for the terms of a rank's own rows.
ROW_MISTAKES = {**GATHER_MISTAKES, "the last rank left out": _without_the_last_rank}
PAIR_MISTAKES = {**GATHER_MISTAKES, "the last rank zero": _last_rank_zero}
SUM_MISTAKES = {
    "no gradient": _plain_sum,
    "identity": identity,
    "averaged": ruled(_plain_sum, lambda g: _plain_sum(g) / dist.get_world_size()),
    "no collective": alone,
    "of rank 0": dc.broadcast,
    TIMES_N: dc.all_reduce,
}


def of_rows(loss, gather):
    """Every rank returns the whole loss; the gradients are averaged."""

    def value(model, x, y, k):
        z = gather(model(x))
        if gather is not alone:
            y, k = (dc.all_gather(v, sizes="auto")[: len(z)] for v in (y, k))
        return loss(z, y, k)

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
        z, first = model(x), int(dc.scan(torch.tensor([len(x)]), exclusive=True))
        return loss(z, gather(z), 0 if gather is alone else first, int(dc.all_reduce(torch.tensor([len(x)]))))

    return value


def program(make, loss, way, name=""):
    """Return the program of `verdicts` of a family and a way, or a mistake of this name."""
    value = make(loss, way)

    def distributed(model, x, y, k):
        return value(model, x, y, k) * (dc.get_world_size() if name == TIMES_N else 1)

    reduction = "mean" if make is of_rows else "sum"
    return distributed, make(loss, alone), batch, {"module": encoder(), "rank_reduction": reduction}


#: (what makes a program, its families, right ways with whether they take uneven ranks, mistakes)
KINDS = (
    (of_rows, OF_ROWS, GATHERS, ROW_MISTAKES),
    (of_statistics, OF_STATISTICS, {way: (total, True) for way, total in SUMS.items()}, SUM_MISTAKES),
    (of_pairs, OF_PAIRS, GATHERS, PAIR_MISTAKES),
)
RIGHT = {
    f"{family}, {way}": (make, loss, how, uneven)
    for make, families, ways, _ in KINDS
    for family, loss in families.items()
    for way, (how, uneven) in ways.items()
}
WRONG = {
    f"{family}, {name}": (make, loss, way, name)
    for make, families, _, mistakes in KINDS
    for family, loss in families.items()
    for name, way in mistakes.items()
}
