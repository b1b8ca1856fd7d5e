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
LABELS = torch.arange(ROWS) * 5 % 7
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


def contrastive(kind):
    """A loss of `references.CONTRASTIVE` with a scale and, of one, a bias."""
    loss = references.CONTRASTIVE[kind]

    def of(call):
        def with_marks(x, y, labels, scale, bias=0.0, **options):
            return call(x, y, scale, bias, **{mark: labels for mark in loss.marks[0]}, **options)

        return with_marks

    parameters = (2.5, -2.0) if kind == "siglip" else (2.5,)
    features = (lambda x: x) if loss.normalize else F.normalize
    return Loss(of(loss.ours), of(loss.whole), parameters, features, chunks=True)


def of_views(call):
    return lambda x, y, labels: call(x, y)


def mask(x):
    """A target of Dice's loss, of the shape of x."""
    return (torch.arange(x.shape[1], device=x.device) % 3 == 0).expand(x.shape).to(x.dtype)


def tokens(x, y):
    return torch.stack([x[:, 0], y[:, 0]])


LOSSES = {
    **{kind: contrastive(kind) for kind in ("info_nce", "nt_xent", "clip", "siglip", "supcon")},
    "barlow_twins": Loss(of_views(functional.barlow_twins_loss), of_views(references.barlow_twins)),
    "vicreg": Loss(of_views(functional.vicreg_loss), of_views(references.vicreg)),
    "dice": Loss(
        lambda x, y, labels: functional.dice_loss(x * y, mask(x)),
        lambda x, y, labels: references.ratio("dice", x * y, mask(x)),
        features=torch.sigmoid,
    ),
    "token_mean": Loss(
        lambda x, y, labels: functional.token_mean(tokens(x, y), torch.stack([labels > 2, labels > 3])),
        lambda x, y, labels: tokens(x, y)[torch.stack([labels > 2, labels > 3])].mean(),
    ),
}


def with_gradients(call, loss, dtype, rows=slice(None), device="cpu", **options):
    """Return the value and the gradients with respect to both views of these rows, rounded to dtype, and parameters."""
    make = torch.Generator().manual_seed(3)
    xs = [torch.randn(ROWS, DIM, generator=make, dtype=torch.float64) for _ in range(2)]
    rounded = [loss.features(x).to(dtype)[rows] for x in xs]
    if call is loss.whole:
        rounded, dtype = [x.double() for x in rounded], torch.float64
    wide = torch.promote_types(dtype, torch.float32)
    parameters = [torch.tensor(number, dtype=wide, device=device, requires_grad=True) for number in loss.parameters]
    leaves = [x.to(device).requires_grad_() for x in rounded]
    value = call(*leaves, LABELS[rows].to(device), *parameters, **options)
    gradients = torch.autograd.grad(value, [*leaves, *parameters])
    return value.detach(), gradients[:2], gradients[2:]


def slices(sizes):
    """Return each rank's rows of the batch."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def total(x):
    """Return the sum over the ranks."""
    x = x.clone()
    dist.all_reduce(x)
    return x


@row(2, seconds=90)
def losses(rank):
    """Losses in four dtypes, also in chunks, of ranks with unequal batches."""
    rows = slices([29, 19])[rank.r]
    for name, loss in LOSSES.items():
        for dtype, (of_value, of_gradients) in BOUNDS.items():
            right, right_views, right_parameters = with_gradients(loss.whole, loss, dtype)
            for options in ({}, {"chunk_size": 16}) if loss.chunks else ({},):
                with rank.part(f"{name} {str(dtype)[6:]}{' in chunks' * bool(options)}"):
                    value, views, parameters = with_gradients(loss.ours, loss, dtype, rows, rank.device, **options)
                    rank.check("value", distance(value, right), of_value)  # on every rank
                    for g, right_g in zip(views, right_views, strict=True):
                        rank.check("gradient", distance(g / rank.n, right_g[rows]), of_gradients)
                    for g, right_g in zip(parameters, right_parameters, strict=True):
                        rank.check("gradient of a parameter", distance(total(g) / rank.n, right_g), of_value)


@row(1, starts_ranks=True)
def simulated_losses(rank):
    """Four ranks, one without rows, simulated on the device in this process."""
    rows, bound = slices([20, 5, 0, 23]), BOUNDS[torch.float64][0]
    for name, loss in LOSSES.items():
        with rank.part(name):
            right, *right_gradients = with_gradients(loss.whole, loss, torch.float64)

            def on_each(rows, loss=loss):
                return with_gradients(loss.ours, loss, torch.float64, rows, rank.device)

            values, *gradients = zip(*simulate(on_each, rows), strict=True)
            rank.check("value", max(distance(value, right) for value in values), bound)
            for of_ranks, rights, joined in zip(gradients, right_gradients, (torch.cat, sum), strict=True):
                for gs, right_g in zip(zip(*of_ranks, strict=True), rights, strict=True):
                    rank.check("gradient", distance(joined(gs) / len(rows), right_g), bound)
