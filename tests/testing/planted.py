"""Distributed losses with planted bugs of the kinds that published code has, and what must be observed of them.

The bugs are those of published losses: a gather that cuts the graph or keeps the local slice, a reduction with the
backward of the identity, statistics of local rows, a mean of means, and so on. Each loss is made by a function that
returns a program of `verdicts`.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from field import (
    alone,
    identity,
    of_rows,
    of_statistics,
    own_block_kept,
    own_slice,
    pearson,
    plain_gather,
    program,
    redundancy,
    right_gather,
    rows_of_all,
)
from torch.autograd import Function
from verdicts import numbers, rows, ruled, summed

import diffcoll as dc


class Temperature(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.3, dtype=torch.double))


def pair(n):
    return numbers(n, 4), numbers(n, 4, seed=1)


def _of_one(module, image, text):
    logits = module.scale * F.normalize(image) @ F.normalize(text).T
    return F.cross_entropy(logits, torch.arange(len(image)))


def clip(gather, scale=lambda s: s):
    """A CLIP-like loss of each rank's rows against the gathered ones; right under "mean" if the gather is."""

    def distributed(module, image, text):
        first, total = rows_of_all(image)
        logits = scale(module.scale) * F.normalize(image) @ gather(F.normalize(text)).T
        target = first + torch.arange(len(image))
        return F.cross_entropy(logits, target, reduction="sum") * dc.get_world_size() / total

    return distributed, _of_one, pair, {"module": Temperature()}


def _sum_of_rows(reduce, power=1, **more):
    def distributed(x):
        return reduce(x.sum(0)).sin().sum() / dc.get_world_size() + (x**3).sum()

    def single(x):
        return (x.sum(0) ** power).sin().sum() + (x**3).sum()

    return summed(distributed, single, **more)


def mean(x):
    return (x**2).mean()


def _nan_on_empty():
    def distributed(x):
        return mean(x) * len(x) * dc.get_world_size() / rows_of_all(x)[1]

    return distributed, mean, rows, {}


def _ring_sum():
    """A step of a ring whose backward sends the gradient on, instead of back."""
    shift = ruled(lambda x: dc.shift(x, 1), lambda g: dc.shift(g, 0 if dc.get_world_size() == 2 else 1))

    def distributed(x):
        return (x * shift(x).sin()).sum()

    def single(x):
        return (x * x.roll(4, 0).sin()).sum()

    return summed(distributed, single)


without_rank_zero = ruled(dc.all_gather, lambda g: dc.reduce_scatter(g if dc.get_rank() else torch.zeros_like(g)))
#: Sums the gradient of a parameter that the averager reduces again.
summed_again = ruled(torch.clone, dc.all_reduce)


def detached_on_rank_1(x):
    return right_gather(x.detach() + 0 * x.sum() if dc.get_rank() == 1 else x)


class CubedSum(Function):
    """(Σ_s x_s)³; the backward is right, but reduces outside of autograd: wrong in second order."""

    @staticmethod
    def forward(ctx, x):
        total = dc.all_reduce(x)
        ctx.save_for_backward(total)
        return total**3

    @staticmethod
    def backward(ctx, g):
        (total,) = ctx.saved_tensors
        g = g.clone()
        dist.all_reduce(g)
        return g * 3 * total**2


EVEN = {2: [(4, 4)], 3: [(4, 4, 4)]}
UNEVEN = {2: [(4, 4), (5, 3)], 3: [(3, 3, 3), (5, 3, 1)]}
EMPTY = {2: [(4, 4), (8, 0)], 3: [(4, 4, 4), (5, 0, 3)]}
#: name: (the loss, its rows by N, words that must be observed)
PLANTED = {
    "plain gather": (lambda: clip(plain_gather), EVEN, "text: zero on every rank"),
    "own block kept": (partial(program, of_rows, pearson, own_block_kept), EVEN, "= 1/N times .*, exact under .sum."),
    "local slice": (lambda: clip(own_slice), EVEN, "text: no other rank's loss reaches it"),
    "not reduced": (lambda: _sum_of_rows(identity), EVEN, "x: no other rank's loss reaches it"),
    "rank missing": (lambda: clip(without_rank_zero), EVEN, "text: the loss of rank 0 reaches it on no rank"),
    "ranks swapped": (_ring_sum, EVEN, "x: backward does not give the derivative of what the ranks return"),
    "detached on rank 1": (lambda: clip(detached_on_rank_1), EVEN, "text: right if the calls of detach"),
    "N times": (lambda: clip(right_gather, summed_again), UNEVEN, "scale: [23] = N times that of one process"),
    "local statistics": (partial(program, of_statistics, redundancy, alone), EVEN, "it is the forward that differs"),
    "mean of means": (
        lambda: (mean, mean, rows, {}),
        UNEVEN,
        r"the ranks 1/[23] each \(equally\); one process weighs them .* \(by their rows\)",
    ),
    "equal blocks": (lambda: clip(dc.all_gather), UNEVEN, "right if all ranks have equally many rows, wrong if not"),
    "not finite": (_nan_on_empty, EMPTY, "not finite"),
    "second order": (lambda: _sum_of_rows(CubedSum.apply, 3, order=2), EVEN, "first order is right"),
}
#: Right code, which must not be flagged.
RIGHT = {
    "clip": lambda: clip(right_gather),
    "redundancy": partial(program, of_statistics, redundancy, dc.all_reduce),
    "sum of rows": lambda: _sum_of_rows(dc.all_reduce),
}
