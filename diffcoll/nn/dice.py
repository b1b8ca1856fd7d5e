"""Dice, IoU and Tversky losses of a segmentation: ratios of three sums over the batch of all ranks.

    T = Σ_r Σ p t,  P = Σ_r Σ p,  Q = Σ_r Σ t;   L = 1 − (T + s) / (T + α (P − T) + β (Q − T) + s)
    Dice: α = β = 1/2 and half the smooth;   IoU: α = β = 1

note  notes/training/segmentation.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import in_full_precision, without_autocast
from diffcoll.nn.whole import of_sums

#: What one ratio of a segmentation is of.
Dims = int | Sequence[int] | Literal["per class"] | None


def dice_loss(
    probabilities: Tensor, targets: Tensor, *, smooth: float = 1.0, dims: Dims = None, group: Group = None
) -> Tensor:
    """Dice loss of the whole batch, 1 − (2 Σ p t + s) / (Σ p + Σ t + s), with sums over the batch of all ranks.

    It is a ratio of sums, so the mean of the ranks' own Dice losses is another loss. One message of three numbers for
    each ratio, and one number in backward.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> p, t = torch.tensor([0.9, 0.8, 0.6, 0.3, 0.2]), torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    >>> dc.nn.functional.dice_loss(p, t)
    tensor(0.2414)
    >>> [round(x.item(), 4) for x in simulate(dc.nn.functional.dice_loss, p.split([3, 2]), t.split([3, 2]))]
    [0.2414, 0.2414]

    Args:
        probabilities: p, of this rank's part of the batch, for example (b, C, H, W), in [0, 1]: after a sigmoid or
            softmax; of logits, which are not refused, the loss is meaningless. Dim 0 is the batch, its length may
            differ between ranks and may be 0. Half precision is computed in float32, also under autocast;
            `logits.float().sigmoid()` keeps the gradient of values near 1.
        targets: t, of the same shape, any dtype, in [0, 1]. For class indices: `F.one_hot(t, C).movedim(-1, 1)`.
        smooth: s, added to numerator and denominator. If it is 0, a ratio without targets and predictions is NaN.
        dims: what one ratio is of. Several classes, p of shape (b, C, H, W): use "per class", one ratio for each class
            over all images, and the loss is the mean of the C losses. None, one ratio of everything, is for one class:
            p of up to three dimensions, or with C = 1; in a ratio of several, a large background hides that a small
            class is never found. Otherwise the dimensions to sum over, and the mean of the loss over the remaining
            ones: (2, 3), without dim 0, is one ratio for each image and class, and the mean is over the images of all
            ranks.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        The loss of the whole batch, as `loss_of_sums` returns it, of float32, or float64 if an argument is.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/training/segmentation.md.
    """
    return _loss("dice_loss", probabilities, targets, 0.5, 0.5, smooth, smooth / 2, dims, group)


def iou_loss(
    probabilities: Tensor, targets: Tensor, *, smooth: float = 1.0, dims: Dims = None, group: Group = None
) -> Tensor:
    """IoU or Jaccard loss of the whole batch, 1 − (Σ p t + s) / (Σ p + Σ t − Σ p t + s).

    >>> import torch, diffcoll as dc
    >>> p, t = torch.tensor([0.9, 0.8, 0.6, 0.3, 0.2]), torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    >>> dc.nn.functional.iou_loss(p, t)
    tensor(0.3415)

    Arguments, result and errors are those of `dice_loss`.

    Source: notes/training/segmentation.md.
    """
    return _loss("iou_loss", probabilities, targets, 1.0, 1.0, smooth, smooth, dims, group)


def tversky_loss(
    probabilities: Tensor,
    targets: Tensor,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    smooth: float = 1.0,
    dims: Dims = None,
    group: Group = None,
) -> Tensor:
    """Tversky loss of the whole batch: weights false positives by alpha and false negatives by beta.

    1 − (T + s) / (T + α · Σ p (1 − t) + β · Σ (1 − p) t + s) with T = Σ p t. With α = β = 1 it is the IoU loss, with
    α = β = 1/2 and half the smooth the Dice loss.

    >>> import torch, diffcoll as dc
    >>> p, t = torch.tensor([0.9, 0.8, 0.6, 0.3, 0.2]), torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    >>> dc.nn.functional.tversky_loss(p, t, smooth=0.5)
    tensor(0.2414)

    The other arguments, result and errors are those of `dice_loss`.

    Source: notes/training/segmentation.md.
    """
    expect.not_negative("tversky_loss", alpha=alpha, beta=beta)
    return _loss("tversky_loss", probabilities, targets, alpha, beta, smooth, smooth, dims, group)


def _loss(
    name: str, p: Tensor, t: Tensor, alpha: float, beta: float, smooth: float, s: float, dims: Dims, group: Group
) -> Tensor:
    """Return the loss with s in numerator and denominator; `smooth` is what the function `name` was given."""
    expect.not_negative(name, smooth=smooth)
    if isinstance(t, Tensor) and not t.is_floating_point():
        t = t.float()
    p, t = in_full_precision(name, probabilities=p, targets=t)
    if p.ndim == 0 or p.shape != t.shape:
        remedy = "for class indices, F.one_hot(targets, C).movedim(-1, 1)"
        raise ValueError(message(name, "targets", f"shape {tuple(t.shape)}", "(b, …), as of probabilities", remedy))
    over = _dims(name, dims, p)

    def of_ratios(both: Tensor, predicted: Tensor, there: Tensor) -> Tensor:
        return 1 - (both + s) / (both + alpha * (predicted - both) + beta * (there - both) + s)

    with without_autocast(p):
        sums = [(p * t).sum(over), p.sum(over), t.sum(over)]
        if 0 in over:
            return of_sums(lambda *sums: of_ratios(*sums).mean(), *sums, group=group)
        losses = of_ratios(*sums)
        n = torch.full((), losses.numel(), dtype=p.dtype, device=p.device)
        return of_sums(torch.div, losses.sum(), n, group=group)


def _dims(name: str, dims: Dims, p: Tensor) -> tuple[int, ...]:
    """Return the dimensions to sum over, none of them negative."""
    if dims is None:
        if p.ndim > 3 and p.shape[1] > 1:
            got, expected = f"None for shape {tuple(p.shape)}", '"per class" for classes in dim 1'
            raise ValueError(message(name, "dims", got, expected, f"{(*range(p.ndim),)} is one ratio of everything"))
        return tuple(range(p.ndim))
    if dims == "per class":
        if p.ndim < 2:
            got, expected = f"'per class' for shape {tuple(p.shape)}", "(b, C, …), with the classes in dim 1"
            raise ValueError(message(name, "dims", got, expected))
        return tuple(d for d in range(p.ndim) if d != 1)
    return expect.dims(name, "dims", dims, p)
