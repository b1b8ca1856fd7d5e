"""Dice, IoU and Tversky losses of a segmentation: ratios of three sums over the batch of all ranks.

forward   T = Σ_r Σ p t,  P = Σ_r Σ p,  Q = Σ_r Σ t; the loss is 1 − (T + s) / (T + α (P − T) + β (Q − T) + s)
          Dice: α = β = 1/2 and half the smooth; IoU: α = β = 1
note      notes/training/segmentation.md
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.core import expect
from diffcoll.core.blocks import as_row
from diffcoll.core.errors import message
from diffcoll.core.groups import get_world_size
from diffcoll.engines.types import Group
from diffcoll.nn.convention import RankReduction, check_options, returned
from diffcoll.nn.followers import sent
from diffcoll.nn.inputs import (
    check_fractions,
    check_rows,
    dtype_of_messages,
    in_full_precision,
    no_fractions,
    without_autocast,
)
from diffcoll.nn.loss_module import Dims, LossModule

_LOGITS = "apply torch.sigmoid to logits of one class, torch.softmax over the classes to those of several"
_CODES = "divide a mask of 0 and 255 by 255; for class indices, F.one_hot(targets, C).movedim(-1, 1)"


def dice_loss(
    probabilities: Tensor,
    targets: Tensor,
    *,
    smooth: float = 1.0,
    dims: Dims = None,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
) -> Tensor:
    """Dice loss of the whole batch, 1 − (2 Σ p t + s) / (Σ p + Σ t + s), with sums over the batch of all ranks.

    It is a ratio of sums, so the mean of the ranks' own Dice losses is another loss. The ranks send three sums for each
    ratio and four numbers, in float64.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> p, t = torch.tensor([0.9, 0.8, 0.6, 0.3, 0.2]), torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    >>> dc.nn.functional.dice_loss(p, t)
    tensor(0.2414)
    >>> simulate(dc.nn.functional.dice_loss, p.split([3, 2]), t.split([3, 2]))
    [tensor(0.2414), tensor(0.2414)]

    Args:
        probabilities: p, of this rank's part of the batch, for example (b, C, H, W), in [0, 1]: after a sigmoid or
            softmax. Dim 0 is the batch, its length may differ between ranks and may be 0; the other dimensions that are
            not summed are equal on all ranks. Half precisions are computed in float32, also under autocast, which does
            not include the sigmoid: `logits.float().sigmoid()` keeps the gradient of values near 1.
        targets: t, of the same shape, any dtype, in [0, 1]. For class indices: `F.one_hot(t, C).movedim(-1, 1)`.
        smooth: s, added to numerator and denominator. If it is 0, a ratio without targets and predictions is NaN.
        dims: what one ratio is of. Segmentation into several classes, p of shape (b, C, H, W): use "per class", one
            ratio for each class over all images, and the loss is the mean of the C losses. None, one ratio of
            everything, is for one class; with several, a large background hides that a small class is never found.
            Otherwise the dimensions to sum over, and the mean of the loss over the remaining ones: (0, 2, 3) is "per
            class" there; (2, 3), without dim 0, is one ratio for each image and class, and the mean is over the images
            of all ranks.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: "mean" if gradients are averaged over the ranks afterwards (DDP, `GradientAverager`), "sum" if
            they are summed.

    Returns:
        A 0-d tensor, whose mean or sum over the ranks, as `rank_reduction` says, is the loss of the whole batch;
        gradients are exact after the same reduction.

    Raises:
        TypeError, ValueError: an argument is invalid, or the batch of all ranks together is empty. Values outside
            [0, 1] on one rank, such as logits, are an error on all ranks; it is known after the message, so that a GPU
            makes the host wait. In a compiled function it is a RuntimeError, and within torch.vmap and torch.func.grad
            there the loss is NaN.

    Source: notes/training/segmentation.md.
    """
    numbers, weights = {"smooth": smooth}, (0.5, 0.5, 0.5)
    return _loss("dice_loss", numbers, weights, probabilities, targets, dims, group, rank_reduction)


def iou_loss(
    probabilities: Tensor,
    targets: Tensor,
    *,
    smooth: float = 1.0,
    dims: Dims = None,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
) -> Tensor:
    """IoU or Jaccard loss of the whole batch, 1 − (Σ p t + s) / (Σ p + Σ t − Σ p t + s).

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> p, t = torch.tensor([0.9, 0.8, 0.6, 0.3, 0.2]), torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    >>> simulate(dc.nn.functional.iou_loss, p.split([3, 2]), t.split([3, 2]))
    [tensor(0.3415), tensor(0.3415)]

    Args:
        probabilities: as of `dice_loss`.
        targets: as of `dice_loss`.
        smooth: s, added to numerator and denominator.
        dims: "per class", None or the dimensions to sum over; see `dice_loss`.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: "mean" or "sum"; see `dice_loss`.

    Returns:
        As `dice_loss`.

    Raises:
        TypeError, ValueError: as `dice_loss`.

    Source: notes/training/segmentation.md.
    """
    numbers, weights = {"smooth": smooth}, (1.0, 1.0, 1.0)
    return _loss("iou_loss", numbers, weights, probabilities, targets, dims, group, rank_reduction)


def tversky_loss(
    probabilities: Tensor,
    targets: Tensor,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    smooth: float = 1.0,
    dims: Dims = None,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
) -> Tensor:
    """Tversky loss of the whole batch: weights false positives by alpha and false negatives by beta.

    1 − (T + s) / (T + α · Σ p (1 − t) + β · Σ (1 − p) t + s) with T = Σ p t. With α = β = 1 it is the IoU loss, with
    α = β = 1/2 and half the smooth the Dice loss.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> p, t = torch.tensor([0.9, 0.8, 0.6, 0.3, 0.2]), torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    >>> simulate(lambda p, t: dc.nn.functional.tversky_loss(p, t, smooth=0.5), p.split([3, 2]), t.split([3, 2]))
    [tensor(0.2414), tensor(0.2414)]

    Args:
        probabilities: as of `dice_loss`.
        targets: as of `dice_loss`.
        alpha: weight of false positives, Σ p (1 − t).
        beta: weight of false negatives, Σ (1 − p) t.
        smooth: s, added to numerator and denominator.
        dims: "per class", None or the dimensions to sum over; see `dice_loss`.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: "mean" or "sum"; see `dice_loss`.

    Returns:
        As `dice_loss`.

    Raises:
        TypeError, ValueError: as `dice_loss`.

    Source: notes/training/segmentation.md.
    """
    numbers, weights = {"smooth": smooth, "alpha": alpha, "beta": beta}, (alpha, beta, 1.0)
    return _loss("tversky_loss", numbers, weights, probabilities, targets, dims, group, rank_reduction)


class DiceLoss(LossModule, of=dice_loss):
    """`dice_loss` as a module; its arguments are the options, `forward` takes the tensors.

    >>> import diffcoll as dc
    >>> dc.nn.DiceLoss(dims="per class")
    DiceLoss(smooth=1.0, dims='per class', rank_reduction='mean')
    """

    def forward(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, as `dice_loss` does."""
        return dice_loss(probabilities, targets, **self.options)


class IoULoss(LossModule, of=iou_loss):
    """`iou_loss` as a module; its arguments are the options, `forward` takes the tensors.

    >>> import diffcoll as dc
    >>> dc.nn.IoULoss(smooth=0.0)
    IoULoss(smooth=0.0, dims=None, rank_reduction='mean')
    """

    def forward(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, as `iou_loss` does."""
        return iou_loss(probabilities, targets, **self.options)


class TverskyLoss(LossModule, of=tversky_loss):
    """`tversky_loss` as a module; its arguments are the options, `forward` takes the tensors.

    >>> import diffcoll as dc
    >>> dc.nn.TverskyLoss(alpha=0.3, beta=0.7)
    TverskyLoss(alpha=0.3, beta=0.7, smooth=1.0, dims=None, rank_reduction='mean')
    """

    def forward(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, as `tversky_loss` does."""
        return tversky_loss(probabilities, targets, **self.options)


def _loss(
    name: str,
    numbers: dict[str, float],
    weights: tuple[float, float, float],
    probabilities: Tensor,
    targets: Tensor,
    dims: Dims,
    group: Group,
    rank_reduction: RankReduction,
) -> Tensor:
    """Return 1 minus the mean of Tversky's ratios, as one rank returns it.

    `numbers` are passed to the loss; `weights` are α, β, and what the smooth is multiplied by.
    """
    expect.not_negative(name, **numbers)
    check_options(name, group, rank_reduction, dims=dims, **numbers)
    alpha, beta, unit = weights

    def ratio(overlap: Tensor, predicted: Tensor, there: Tensor) -> Tensor:
        s = unit * numbers["smooth"]
        return (overlap + s) / (overlap + alpha * (predicted - overlap) + beta * (there - overlap) + s)

    p, t = _segmentation(name, probabilities, targets)
    summed = _dims(name, dims, p)
    with without_autocast(p):
        wide = dtype_of_messages(p, group)
        sums = [x.sum(summed).to(wide) for x in (p * t, p, t)]
        rounding = max(4 * torch.finfo(x.dtype).eps for x in (probabilities, targets) if x.is_floating_point())
        # The number of samples, and of ranks whose values are no probabilities or no targets.
        wrong = [no_fractions(x, rounding) for x in (p, t)]
        facts = torch.stack([torch.full((), len(p), dtype=wide, device=p.device), *(w.to(wide) for w in wrong)])
        if 0 in summed:
            row = as_row([*sums, facts])
            total = sent(name, partial(all_reduce, group=group), row, row.requires_grad, group)
            facts = total[-3:].detach()
            share = (1 - ratio(*total[:-3].view(3, *sums[0].shape))).mean() / get_world_size(group)
        else:
            losses = 1 - ratio(*sums)
            facts = all_reduce(facts, group=group)
            share = losses.sum() / (facts[0] * math.prod(losses.shape[1:]))
        check_rows(name, len(p), facts[0], 1)
        share = check_fractions(name, share, facts[1:], rounding, probabilities=(p, _LOGITS), targets=(t, _CODES))
        return returned(share, rank_reduction, group).to(p.dtype)


def _segmentation(name: str, probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities and targets in one dtype, float32 or float64."""
    if isinstance(targets, Tensor) and isinstance(probabilities, Tensor) and not targets.is_floating_point():
        targets = targets.to(probabilities.dtype)
    p, t = in_full_precision(name, probabilities=probabilities, targets=targets)
    if p.ndim == 0 or 0 in p.shape[1:]:
        expected = "(b, …): dim 0 is the batch, the others are not empty"
        raise ValueError(message(name, "probabilities", f"shape {tuple(p.shape)}", expected))
    if t.shape != p.shape:
        expected = f"{tuple(p.shape)}, the shape of probabilities"
        remedy = "for class indices, F.one_hot(targets, C).movedim(-1, 1)"
        raise ValueError(message(name, "targets", f"shape {tuple(t.shape)}", expected, remedy))
    return p, t


def _dims(name: str, dims: Dims, p: Tensor) -> tuple[int, ...]:
    """Return the dimensions to sum over, none of them negative."""
    if dims is None:
        return tuple(range(p.ndim))
    if dims == "per class":
        if p.ndim < 2:
            got, expected = f"'per class' for shape {tuple(p.shape)}", "(b, C, …), with the classes in dim 1"
            raise ValueError(message(name, "dims", got, expected))
        return tuple(d for d in range(p.ndim) if d != 1)
    types = '"per class", None, an integer or a sequence of integers'
    return expect.dims(name, "dims", dims, p, types, "different dimensions of {2}, at least one")
