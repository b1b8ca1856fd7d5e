"""Losses of a whole batch on one process, from their formulas, and programs that run ours against them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from diffcoll import all_reduce, gather_batch, sum_gradients
from diffcoll.nn import functional
from diffcoll.testing import assert_matches_single_process, simulate

SIZES = ((8,), (4, 4), (5, 3), (5, 0, 3), (0, 4, 0), (2, 3, 1, 2))
MARKS = ("labels", "ids", "exclude")


# ── contrastive losses: the term of each row, of which the loss is the mean ──────────────────────────────


def softmax(logits, positive, excluded):
    """−log softmax, averaged over each row's positives; 0 for a row without one."""
    log_p = logits.masked_fill(excluded, -torch.inf).log_softmax(1)
    weight = positive.to(logits.dtype) / positive.sum(1, keepdim=True).clamp(min=1)
    return -(log_p.masked_fill(~positive, 0) * weight).sum(1)


def decoupled(logits, positive, excluded):
    """Yeh et al. 2022, equation 6: log Σ exp s of the negatives − s of the positive; 0 for a row without either."""
    terms = []
    for s, p, e in zip(logits, positive, excluded, strict=True):
        negatives = s[~p & ~e]
        terms.append(negatives.logsumexp(0) - s[p].mean() if len(negatives) and p.any() else 0 * s.sum())
    return torch.stack(terms)


def masks(rows, labels=None, ids=None, exclude=None):
    """(positive, excluded) for pairs of two sets of features."""
    same = torch.eye(rows, dtype=torch.bool)
    positive = same if labels is None else labels[:, None] == labels
    excluded = torch.zeros_like(same) if ids is None else ids[:, None] == ids
    excluded = excluded if exclude is None else excluded | exclude
    return positive, excluded & ~positive


def clip(x, y, scale, bias, **marks):
    logits, pairs = scale * x @ y.T, masks(len(x), **marks)
    return (softmax(logits, *pairs) + softmax(logits.T, *(mask.T for mask in pairs))) / 2


def siglip(x, y, scale, bias, **marks):
    positive, excluded = masks(len(x), **marks)
    logits = scale * x @ y.T + bias
    return -F.logsigmoid(torch.where(positive, logits, -logits)).masked_fill(excluded, 0).sum(1)


def info_nce(x, y, scale, bias, more=None, terms=softmax, **marks):
    """more: logits of further columns, which are negatives."""
    logits, pairs = scale * x @ y.T, masks(len(x), **marks)
    if more is not None:
        logits = torch.cat([logits, scale * more], 1)
        pairs = [torch.cat([mask, torch.zeros(more.shape, dtype=torch.bool)], 1) for mask in pairs]
    return terms(logits, *pairs)


def hard(x, y):
    """Two negatives of each row, functions of it that are exact in half precision."""
    return torch.stack([y.flip(1), 2 * x.roll(1, 1)], 1)


def info_nce_of_hard_negatives(x, y, *scale, exclude=None, **marks):
    q, k, n = (F.normalize(z, dim=-1) for z in (x, y, hard(x, y)))
    return info_nce(q, k, *scale, more=(q[:, None] * n).sum(2), exclude=exclude, **marks)


def info_nce_of_shared_negatives(x, y, *scale, **marks):
    """He et al. 2020, equation 1, with the keys of the batch, too."""
    q, k, n = (F.normalize(z, dim=-1) for z in (x, y, hard(x, y).flatten(0, 1)))
    return info_nce(q, k, *scale, more=q @ n.T, **marks)


def passages(x, y):
    """Two positives of each row."""
    return torch.stack([y, y.roll(1, 1)], 1)


def info_nce_of_passages(x, y, scale, bias, **marks):
    q, p = (F.normalize(z, dim=-1) for z in (x, passages(x, y)))
    pairs = (mask.repeat_interleave(2, 1) for mask in masks(len(x), **marks))
    return softmax(scale * q @ p.flatten(0, 1).T, *pairs)


def short(x):
    """Which of the passages of each row are left out: none, the second, or both."""
    return (x[:, :1] > torch.tensor([0.9, 0.1])).detach()


def info_nce_of_fewer_passages(x, y, scale, bias, **marks):
    q, p = (F.normalize(z, dim=-1) for z in (x, passages(x, y)))
    positive, excluded = (mask.repeat_interleave(2, 1) for mask in masks(len(x), **marks))
    out = short(x).flatten()
    return softmax(scale * q @ p.flatten(0, 1).T, positive & ~out, excluded | out)


def views(zs, scale, labels, ids=None, exclude=None, terms=softmax):
    """Of all views of the samples: the mean over the views of each sample."""
    n, z = len(zs), torch.cat(zs)
    labels, ids = labels.repeat(n), None if ids is None else ids.repeat(n)
    itself = torch.eye(len(z), dtype=torch.bool)
    _, excluded = masks(len(z), labels, ids, None if exclude is None else exclude.repeat(n, n))
    positive = (labels[:, None] == labels) & ~itself
    return sum(terms(scale * z @ z.T, positive, excluded | itself).split(len(zs[0]))) / n


def nt_xent(x, y, scale, bias, **marks):
    return views([x, y], scale, torch.arange(len(x)), **marks)


def supcon(x, y, scale, bias, labels, **marks):
    return views([x, y], scale, labels, **marks)


def supcon_of_one_view(x, y, scale, bias, labels, **marks):
    return views([F.normalize(torch.cat([x, y], 1))], scale, labels, **marks)


#: Without the positives in the denominators.
DECOUPLED = {
    "info_nce": lambda x, y, *scale, **marks: info_nce(
        F.normalize(x), F.normalize(y), *scale, terms=decoupled, **marks
    ).mean(),
    "nt_xent": lambda x, y, scale, bias, **marks: views(
        [F.normalize(x), F.normalize(y)], scale, torch.arange(len(x)), terms=decoupled, **marks
    ).mean(),
}

# ── other losses ─────────────────────────────────────────────────────────────────────────────────────────


def barlow_twins(z1, z2, lambda_param=5e-3, eps=1e-5):
    """Zbontar et al. 2021, equations 1 and 2, with the batch norm of the published code."""
    n1, n2 = ((z - z.mean(0)) * (z.var(0, correction=0) + eps).rsqrt() for z in (z1, z2))
    c = n1.T @ n2 / len(z1)
    same = torch.eye(len(c), dtype=c.dtype)
    return ((c - same).square() * (same + lambda_param * (1 - same))).sum()


def vicreg(z1, z2, lambda_param=25.0, mu_param=25.0, nu_param=1.0, eps=1e-4):
    """Bardes et al. 2022, algorithm 1, with the halved variance term of the published code."""
    variance, covariance = 0, 0
    for z in (z1, z2):
        variance = variance + F.relu(1 - torch.sqrt(z.var(0) + eps)).mean() / 2
        c = torch.cov(z.T).reshape(z.shape[1], z.shape[1])
        covariance = covariance + (c**2 * (1 - torch.eye(len(c), dtype=c.dtype))).sum() / len(c)
    return lambda_param * F.mse_loss(z1, z2) + mu_param * variance + nu_param * covariance


def koleo(x, eps=1e-8, normalize=True):
    """Oquab et al. 2024, section 4, with the epsilons of the published code: one row after the other."""
    x = F.normalize(x) if normalize else x
    loss = 0
    for i, row in enumerate(x):
        others = torch.cat([x[:i], x[i + 1 :]])
        nearest = others[(others - row).detach().norm(dim=1).argmin()]
        loss = loss - torch.log(F.pairwise_distance(row, nearest, eps=eps) + eps)
    return loss / len(x)


def sigreg(z, directions, num_points=17, t_max=3.0):
    """Balestriero and LeCun 2025, section 4, direction by direction; t from −t_max to t_max."""
    t = torch.linspace(-t_max, t_max, 2 * num_points - 1, dtype=z.dtype)
    gaussian, statistics = torch.exp(-(t**2) / 2), []
    for direction in F.normalize(directions.to(z.dtype), dim=0).T:
        angles = t * (z @ direction)[:, None]
        distance = (angles.cos().mean(0) - gaussian) ** 2 + angles.sin().mean(0) ** 2
        statistics.append(len(z) * torch.trapezoid(distance * gaussian, t))
    return torch.stack(statistics).mean()


def vocabulary_cross_entropy(
    hidden, weight, target, bias=None, label_smoothing=0.0, z_loss=0.0, ignore_index=-100, reduction="mean"
):
    """PyTorch's, of all logits; the z-loss of Chowdhery et al. 2022, section 5, over the same tokens."""
    logits = (hidden @ weight.T + (0 if bias is None else bias)).reshape(-1, len(weight))
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "reduction": reduction}
    loss = F.cross_entropy(logits, target.reshape(-1), **options)
    log_z = logits.logsumexp(1).masked_fill(target.reshape(-1) == ignore_index, 0)
    if reduction == "none":
        return (loss + z_loss * log_z**2).view(target.shape)
    z_term = z_loss * (log_z**2).sum()
    return loss + (z_term if reduction == "sum" else z_term / (target != ignore_index).sum())


def moments(x, dims, weight=None):
    """The definition, by two passes over the values."""
    w = torch.ones_like(x) if weight is None else weight.expand(x.shape)
    count = w.sum(dims, keepdim=True)
    mean = (w * x).sum(dims, keepdim=True) / count
    return count, mean, (w * (x - mean) ** 2).sum(dims, keepdim=True) / count


def of_moments(found):
    """A loss of mean and variance."""
    _, mean, variance = found
    return (mean * variance).sum() + (variance + 0.1).log().sum() + mean.pow(3).sum()


def mean_of_tokens(losses, weight):
    """Σ w l / Σ w."""
    weight = weight.expand(losses.shape)
    return (weight * losses).sum() / weight.sum()


def ratio(kind, p, t, smooth=1.0, dims=None, alpha=0.3, beta=0.8):
    """Milletari et al. 2016, Rahman and Wang 2016, Salehi et al. 2017, each with the sums as they write them."""
    dims = {None: tuple(range(p.ndim)), "per class": (0, *range(2, p.ndim))}.get(dims, dims)
    both, false_positive, false_negative = ((x * y).sum(dims) for x, y in ((p, t), (p, 1 - t), (1 - p, t)))
    if kind == "dice":
        found = (2 * both + smooth) / (p.sum(dims) + t.sum(dims) + smooth)
    elif kind == "iou":
        found = (both + smooth) / (both + false_positive + false_negative + smooth)
    else:
        found = (both + smooth) / (both + alpha * false_positive + beta * false_negative + smooth)
    return (1 - found).mean()


# ── contrastive losses, ours and on one process ──────────────────────────────────────────────────────────


class Contrastive(NamedTuple):
    """A loss of the rows x and y, with a scale of the logits and a bias, which only one has."""

    ours: Callable
    terms: Callable
    #: What else the loss is given, of `MARKS`.
    marks: Sequence[Sequence[str]]
    #: Whether it normalizes the features, by default; `terms` does not.
    normalize: bool = True

    def whole(self, x, y, *scale, normalize=None, **marks):
        """The loss on one process."""
        if self.normalize if normalize is None else normalize:
            x, y = F.normalize(x), F.normalize(y)
        return self.terms(x, y, *scale, **marks).mean()


def tempered(call):
    """Our loss of two sets of features, whose scale is 1 / temperature."""
    return lambda x, y, scale, bias, **options: call(x, y, temperature=1 / scale, **options)


def ours_of_hard_negatives(x, y, **options):
    return functional.info_nce_loss(x, y, hard(x, y), **options)


def ours_of_shared_negatives(x, y, **options):
    return functional.info_nce_loss(x, y, gather_batch(hard(x, y).flatten(0, 1)).tree, **options)


def ours_of_passages(x, y, *, exclude=None, **options):
    exclude = None if exclude is None else exclude.repeat_interleave(2, 1)
    return functional.info_nce_loss(x, passages(x, y), exclude=exclude, **options)


def ours_of_fewer_passages(x, y, **options):
    return ours_of_passages(x, y, exclude_positives=short(x), **options)


PAIRS = ((), ("ids",), ("exclude",), ("ids", "exclude"))
LABELLED = (("labels",), ("labels", "ids"), ("labels", "ids", "exclude"))
CONTRASTIVE = {
    "clip": Contrastive(lambda x, y, s, b, **o: functional.clip_loss(x, y, s, **o), clip, PAIRS, normalize=False),
    "siglip": Contrastive(functional.siglip_loss, siglip, PAIRS, normalize=False),
    "info_nce": Contrastive(tempered(functional.info_nce_loss), info_nce, PAIRS + LABELLED),
    # the `terms` of these normalize negatives and passages too
    "info_nce_of_hard_negatives": Contrastive(
        tempered(ours_of_hard_negatives), info_nce_of_hard_negatives, PAIRS + LABELLED, normalize=False
    ),
    "info_nce_of_shared_negatives": Contrastive(
        tempered(ours_of_shared_negatives), info_nce_of_shared_negatives, PAIRS[::3] + LABELLED[2:], normalize=False
    ),
    "info_nce_of_passages": Contrastive(
        tempered(ours_of_passages), info_nce_of_passages, PAIRS + LABELLED, normalize=False
    ),
    "info_nce_of_fewer_passages": Contrastive(
        tempered(ours_of_fewer_passages), info_nce_of_fewer_passages, PAIRS[::3] + LABELLED[2:], normalize=False
    ),
    "nt_xent": Contrastive(tempered(functional.nt_xent_loss), nt_xent, PAIRS),
    "supcon": Contrastive(
        tempered(lambda x, y, **o: functional.supcon_loss(torch.stack([x, y], 1), **o)), supcon, LABELLED
    ),
    "supcon_of_one_view": Contrastive(
        tempered(lambda x, y, **o: functional.supcon_loss(torch.cat([x, y], 1), **o)),
        supcon_of_one_view,  # which normalizes what it concatenates
        LABELLED,
        normalize=False,
    ),
}
ROWS = [(kind, marks) for kind, loss in CONTRASTIVE.items() for marks in loss.marks]


def program(loss, marks, module, **options):
    """A loss of what `batch` makes, which has those in `marks`; module: its parameters."""

    def of(x, y, *values):
        chosen = {name: value for name, value in zip(MARKS, values, strict=True) if name in marks}
        return loss(x, y, module.scale, getattr(module, "bias", 0.0), **chosen, **options)

    return of


def pair(kind, marks, module, **options):
    """Our loss on a rank and the loss on one process; see `program`."""
    loss = CONTRASTIVE[kind]
    return program(loss.ours, marks, module, **options), program(loss.whole, marks, module)


def parameters_of(kind):
    values = {"scale": 2.5, "bias": -2.0} if kind == "siglip" else {"scale": 2.5}
    return nn.ParameterDict({name: torch.tensor(value).double() for name, value in values.items()})


# ── all losses ───────────────────────────────────────────────────────────────────────────────────────────


class Loss(NamedTuple):
    """A loss of the features x and y and the labels of rows: on a rank, the same on each, and on one process."""

    ours: Callable
    whole: Callable


def of_rows(kind):
    """A contrastive loss, which takes `chunk_size`."""

    def of(loss):
        def with_labels(x, y, labels, **options):
            return loss(x, y, 2.0, -1.0, **dict.fromkeys(CONTRASTIVE[kind].marks[0], labels), **options)

        return with_labels

    return Loss(of(CONTRASTIVE[kind].ours), of(CONTRASTIVE[kind].whole))


def of_views(ours, whole, **options):
    def of(loss):
        return lambda x, y, labels: loss(x, y, **options)

    return Loss(of(ours), of(whole))


def of_products(ours, whole, **options):
    """Of one set of features, the products of x and y."""

    def of(loss):
        return lambda x, y: loss(x * y, **options)

    return of_views(of(ours), of(whole))


def directions(features, many=4):
    return (1.7 * torch.arange(features * many)).view(features, many).sin()


def hidden(total):
    """States of four tokens, which depend on the rows of all ranks."""
    return (1.3 * torch.arange(4 * total.shape[0], dtype=torch.double)).view(4, -1).sin() + total.cos()


def vocabulary(x, y, labels, **options):
    """Rows of x are this rank's shard of the weight, and y is of its bias; also of `chunk_size`."""
    states = hidden(all_reduce((x * y).sum(0), grad_placement="replicate"))
    loss = functional.vocab_parallel_cross_entropy(states, x, TARGET, bias_shard=y[:, 0], **SMOOTHED, **options)
    return sum_gradients(loss)


TARGET, SMOOTHED = torch.tensor([1, -100, 2, 0]), {"label_smoothing": 0.1, "z_loss": 0.1}
LOSSES = {
    **{kind: of_rows(kind) for kind in CONTRASTIVE},
    "barlow twins": of_views(functional.barlow_twins_loss, barlow_twins, lambda_param=0.3),
    "vicreg": of_views(functional.vicreg_loss, vicreg),
    "koleo": of_products(functional.koleo_loss, koleo, normalize=False),
    "sigreg": of_products(
        lambda z: functional.sigreg_loss(z, directions(z.shape[1])), lambda z: sigreg(z, directions(z.shape[1]))
    ),
    "vocabulary": Loss(
        vocabulary,
        lambda x, y, labels: vocabulary_cross_entropy(hidden((x * y).sum(0)), x, TARGET, y[:, 0], **SMOOTHED),
    ),
    "dice": of_views(
        lambda x, y: functional.dice_loss(x.cos(), y.cos(), dims="per class"),
        lambda x, y: ratio("dice", x.cos(), y.cos(), dims=0),
    ),
    "moments": of_products(
        lambda z: of_moments(functional.moments(z, 0)),
        lambda z: of_moments(moments(z, 0)),
    ),
    "moments of weighted": of_views(
        lambda x, y: of_moments(functional.moments(x, (0, 1), weight=y[:, :1].square())),
        lambda x, y: of_moments(moments(x, (0, 1), y[:, :1].square())),
    ),
    "weighted mean": of_views(
        lambda x, y: functional.weighted_mean(x, weight=y[:, :1].square()).sin().sum(),
        lambda x, y: moments(x, 0, y[:, :1].square())[1].sin().sum(),
    ),
    "token mean": Loss(
        lambda x, y, labels: functional.token_mean(x * y, labels[:, None]),
        lambda x, y, labels: mean_of_tokens(x * y, labels[:, None]),
    ),
}
#: Those that take `chunk_size`.
IN_CHUNKS = [*CONTRASTIVE, "vocabulary"]


# ── data, and the comparison ─────────────────────────────────────────────────────────────────────────────


def data(*shape, seed=0, dtype=torch.double):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def batch(rows, dtype=torch.double, seed=None):
    """Features of 6 dimensions, labels, one of which a single row has, ids, and pairs to leave out."""
    g = torch.Generator().manual_seed(rows if seed is None else seed)
    xs = [torch.randn(rows, 6, generator=g, dtype=torch.double).to(dtype) for _ in range(2)]
    labels = torch.tensor([0, 1, 2, 0, 1, 1, 3, 2])[torch.arange(rows) % 8]
    return *xs, labels, torch.randint(0, 4, (rows,), generator=g), torch.rand(rows, rows, generator=g) < 0.3


def of_module(fn):
    """Return fn with an argument for the module, which is in its closure, and is copied with it."""
    return lambda module, *given, **named: fn(*given, **named)


def holds(ours, reference, make=batch, module=None, sizes=SIZES, **more):
    """Assert value, gradients and second order; on simulated ranks of which one is empty up to the fourth."""
    more = {"order": 2, "on": ["simulated"], "tolerance": 1e-10} | more
    if more["order"] > 1 and "simulated" in more["on"]:
        rows = next(each for each in sizes if 0 in each)
        to_fourth_order(ours, reference, rows, make, module, more.get("losses", "mean"))
    ours, reference = (of_module(fn) if module is not None else fn for fn in (ours, reference))
    assert assert_matches_single_process(ours, reference, make, module=module, ranks=sizes, **more).ok


def to_fourth_order(ours, reference, rows, make, module, losses):
    """With respect to each tensor alone, the module's parameters, and all of them.

    Gradients of ⟨w, gradient⟩ for constant w: a rank's graph has nothing but what the loss put there.
    """
    made = make(sum(rows))
    tensors = (made,) if isinstance(made, torch.Tensor) else made
    trained = [[i] for i, x in enumerate(tensors) if x.is_floating_point()]
    parameters = [] if module is None else [*module.parameters()]
    weights = [data(*x.shape, seed=20 + i) for i, x in enumerate([*tensors, *parameters])]
    chosen = [*trained, [*range(len(tensors), len(weights))]][: len(trained) + bool(parameters)]

    def of_rank(tensors, weights, leaves, loss, share):
        xs = [x.clone().requires_grad_(i in leaves) for i, x in enumerate(tensors)]
        y, leaves, orders = loss(*xs), [(i, [*xs, *parameters][i]) for i in leaves], []
        z = y * share if y.dim() == 0 else (y.sin() * weights[0]).sum() * share
        while len(orders) < 4 and z.requires_grad:  # a polynomial has no further ones
            of = torch.autograd.grad(z, [x for _, x in leaves], create_graph=True, materialize_grads=True)
            orders.append([g.detach() for g in of])
            z = sum((g * weights[i]).sum() for (i, _), g in zip(leaves, of, strict=True))
        return orders

    def cut(each):
        return [*zip(*(x.split(rows) for x in each[: len(tensors)]), strict=True)]

    for leaves in (*chosen, [i for each in chosen for i in each]):
        share = 1 / len(rows) if losses == "mean" else 1.0
        of_ranks = [[*parts, *weights[len(tensors) :]] for parts in cut(weights)]
        found = simulate(partial(of_rank, leaves=leaves, loss=ours, share=share), cut(tensors), of_ranks)
        for order, right in enumerate(of_rank(tensors, weights, leaves, reference, 1.0)):
            for i, g, *parts in zip(leaves, right, *(each[order] for each in found), strict=True):
                got = torch.cat(parts) if i < len(tensors) else sum(parts)
                torch.testing.assert_close(got, g, rtol=1e-6, atol=1e-8 * max(1.0, g.abs().max().item()))
