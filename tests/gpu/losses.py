"""Losses against the loss of the whole batch in float64 on the CPU."""

from collections.abc import Callable
from typing import NamedTuple

import references
import torch
import torch.distributed as dist
import torch.nn.functional as F

from diffcoll.nn import functional
from diffcoll.testing import simulate
from gpu.measuring import distance
from gpu.row import row

ROWS, DIM = 48, 16
CHUNKS = {"chunk_size": 16}
#: Bounds of the value and of gradients. Half precision rounds gradients; the value is in float32.
BOUNDS = {
    torch.float64: (1e-11, 1e-11),
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (1e-4, 3 * 2**-8),
    torch.float16: (1e-4, 3 * 2**-11),
}


class Loss(NamedTuple):
    """A loss of two views x and y of all rows, labels, and parameters."""

    ours: Callable
    whole: Callable
    parameters: tuple[float, ...] = ()
    #: What x and y are before they are rounded to the dtype.
    features: Callable = lambda x: x
    chunks: bool = False


def contrastive(kind, *marks, parameters=(2.5,), features=lambda x: x):
    """A loss of `references.CONTRASTIVE` with a scale and, of one, a bias."""
    loss = references.CONTRASTIVE[kind]

    def of(call):
        def with_marks(x, y, labels, scale, bias=0.0, **options):
            return call(x, y, scale, bias, **{mark: labels for mark in marks}, **options)

        return with_marks

    return Loss(of(loss.ours), of(loss.whole), parameters, features, chunks=True)


def mask(x):
    """A target of Dice's loss, of the shape of x."""
    return (torch.arange(x.shape[1], device=x.device) % 3 == 0).expand(x.shape).to(x.dtype)


LOSSES = {
    "info_nce": contrastive("info_nce"),
    "nt_xent": contrastive("nt_xent"),
    "clip": contrastive("clip", features=F.normalize),
    "siglip": contrastive("siglip", parameters=(2.5, -2.0), features=F.normalize),
    "supcon": contrastive("supcon", "labels"),
    "barlow_twins": Loss(
        lambda x, y, labels: functional.barlow_twins_loss(x, y), lambda x, y, labels: references.barlow_twins(x, y)
    ),
    "vicreg": Loss(lambda x, y, labels: functional.vicreg_loss(x, y), lambda x, y, labels: references.vicreg(x, y)),
    "dice": Loss(
        lambda x, y, labels: functional.dice_loss(x * y, mask(x)),
        lambda x, y, labels: references.ratio("dice", x * y, mask(x)),
        features=torch.sigmoid,
    ),
}
LABELS = torch.arange(ROWS) * 5 % 7


def batch(loss, dtype):
    make = torch.Generator().manual_seed(3)
    xs = [torch.randn(ROWS, DIM, generator=make, dtype=torch.float64) for _ in range(2)]
    return [loss.features(x).to(dtype) for x in xs]


def with_gradients(call, xs, labels, numbers, device="cpu", **options):
    """Return the value and the gradients with respect to both views and the parameters."""
    wide = torch.promote_types(xs[0].dtype, torch.float32)
    parameters = [torch.tensor(number, dtype=wide, device=device, requires_grad=True) for number in numbers]
    leaves = [x.to(device).detach().requires_grad_() for x in xs]
    value = call(*leaves, labels.to(device), *parameters, **options)
    return value.detach(), torch.autograd.grad(value, [*leaves, *parameters])


def on_one_process(loss, dtype):
    """Return the same of the whole batch, in float64, of features that are rounded to the dtype."""
    return with_gradients(loss.whole, [x.double() for x in batch(loss, dtype)], LABELS, loss.parameters)


def on_rank(loss, dtype, rows, device, **options):
    xs = [x[rows] for x in batch(loss, dtype)]
    return with_gradients(loss.ours, xs, LABELS[rows], loss.parameters, device, **options)


def slices(sizes):
    """Return each rank's rows of the batch."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def total(x):
    """Return the sum over the ranks."""
    x = x.clone()
    dist.all_reduce(x)
    return x


@row(ranks=(2,), seconds=90)
def losses(rank):
    """Eight losses in four dtypes, also in chunks, of ranks with unequal batches."""
    rows = slices([29, 19])[rank.r]
    for name, loss in LOSSES.items():
        for dtype, (of_value, of_gradients) in BOUNDS.items():
            right, right_gradients = on_one_process(loss, dtype)
            for options in ({}, CHUNKS) if loss.chunks else ({},):
                with rank.part(f"{name} {str(dtype)[6:]}{' in chunks' * bool(options)}"):
                    value, gradients = on_rank(loss, dtype, rows, rank.device, **options)
                    rank.check("value", distance(value, right), of_value)  # on every rank
                    for g, right_g in zip(gradients[:2], right_gradients[:2], strict=True):
                        rank.check("gradient", distance(g / rank.n, right_g[rows]), of_gradients)
                    for g, right_g in zip(gradients[2:], right_gradients[2:], strict=True):
                        rank.check("gradient of a parameter", distance(total(g) / rank.n, right_g), of_value)


@row(seconds=60, starts_ranks=True)
def simulated_losses(rank):
    """Four ranks, one without rows, simulated on the device in this process."""
    sizes = [20, 5, 0, 23]
    n, bound = len(sizes), BOUNDS[torch.float64][0]
    for name, loss in LOSSES.items():
        with rank.part(name):
            right, right_gradients = on_one_process(loss, torch.float64)

            def on_each(rows, loss=loss):
                return on_rank(loss, torch.float64, rows, rank.device)

            values, gradients = zip(*simulate(on_each, slices(sizes)), strict=True)
            rank.check("value", max(distance(value, right) for value in values), bound)
            views, parameters = [each[:2] for each in gradients], [each[2:] for each in gradients]
            for gs, right_g in zip(zip(*views, strict=True), right_gradients[:2], strict=True):
                rank.check("gradient", distance(torch.cat(gs) / n, right_g), bound)
            for gs, right_g in zip(zip(*parameters, strict=True), right_gradients[2:], strict=True):
                rank.check("gradient of a parameter", distance(sum(gs) / n, right_g), bound)
