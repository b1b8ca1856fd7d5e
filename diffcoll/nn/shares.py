"""This rank's share of a mean over the items of all ranks, micro-batches and axes.

forward   share_r = N Σ_i w_i l_i / W,   W = Σ_r Σ_i w_i over all ranks, micro-batches and axes; "sum": without N
backward  W and w are constants: no message
note      notes/how-to/recipes.md#token-weighted-loss-as-in-a-trainer
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan, prod
from typing import cast

import torch
from torch import Tensor

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.core.torch_private.transforms import is_vmapped, without_transforms
from diffcoll.engines.types import Group
from diffcoll.nn.axes import axes, device_of, reduced
from diffcoll.nn.convention import RankReduction, check_options, check_rank_reduction
from diffcoll.nn.followers import needs_gradient
from diffcoll.nn.inputs import asserted, in_full_precision, is_dtensor, saveable
from diffcoll.nn.moments import finite_where_it_counts, weight_of

_VALID = "finite non-negative weights on every rank"


def share(
    loss: Tensor,
    weight: float | Tensor,
    *,
    total: float | Tensor | None = None,
    groups: Group | Sequence[Group] = None,
    rank_reduction: RankReduction = "mean",
) -> Tensor:
    """Unequal batches: turn a mean over this rank's items into its share of the mean over those of all ranks.

    For a mean that a model returns; of the losses themselves, take `token_mean`. Both return a loss for backward.
    `weighted_mean` returns the mean itself, on every rank, for formulas, and differentiates the weights too;
    `dc.global_mean` is for logging.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> means, rows = [torch.tensor(2.0), torch.tensor(5.0)], [6, 2]  # (6 · 2 + 2 · 5) / 8 = 2.75
    >>> shares = simulate(dc.nn.functional.share, means, rows)
    >>> shares, sum(shares) / 2
    ([tensor(3.), tensor(2.5000)], tensor(2.7500))

    Args:
        loss: 0-d, floating-point: a mean over the items of this rank, or of one of its micro-batches.
        weight: their number, or the sum of their weights: a number or a tensor with one element, of any real dtype, not
            negative; a constant. If it is 0, the loss is not used: the value is 0 and so is the gradient of `loss`,
            also where it is NaN, as the mean of no items. A function that returned NaN may still make NaN of a zero
            gradient, as 0 / 0 does; `token_mean` does not.
        total: None: the sum of the weights that the ranks pass in this call. For micro-batches the sum of the weights
            of all ranks and micro-batches, a number or a tensor with one element, the same in each call: then nothing
            is sent, and ranks may have different numbers of micro-batches. None on all ranks or on none.
        groups: None, a group, or a list of groups, such as `[mesh["dp"], mesh["cp"]]`, over which the sums go one
            after another, with one message of one number for each; N is the product of their sizes. Groups as
            everywhere, and None is the default group; `[]`: this rank alone.
        rank_reduction: "mean" if gradients are averaged over the ranks of all these groups afterwards (DDP,
            `GradientAverager`), "sum" if they are summed.

    Returns:
        N · loss · weight / total for "mean", without N for "sum": 0-d, float32, or float64 if the loss is. The mean or
        sum over the ranks, and the sum over the micro-batches, is the mean over all items. 0 if the total is 0.

    Raises:
        TypeError, ValueError: an argument is invalid. A weight that is negative, not finite or requires a gradient is
            an error on all ranks: it is sent as NaN. With `total`, which sends nothing, it is an error on this rank.
            Where reading a number would make the host wait, on an accelerator, and within torch.vmap the loss is NaN;
            in a compiled function it is a RuntimeError.

    Source: notes/how-to/recipes.md#token-weighted-loss-as-in-a-trainer.
    """
    name = "share"
    _check_plain(name, loss=loss, weight=weight, total=total)
    (value,) = in_full_precision(name, loss=loss)
    if value.dim():
        remedy = "loss.mean(), or token_mean for the losses of tokens"
        raise ValueError(message(name, "loss", f"shape {tuple(loss.shape)}", "a 0-d tensor", remedy))
    return _shared(name, value, _one(name, "weight", weight), total, groups, rank_reduction)


def token_mean(
    losses: Tensor,
    weight: Tensor | None = None,
    *,
    total: float | Tensor | None = None,
    groups: Group | Sequence[Group] = None,
    rank_reduction: RankReduction = "mean",
) -> Tensor:
    """Language models: this rank's share of the mean over the tokens of all ranks and micro-batches.

    For losses of tokens, rows or pixels that ranks have in different numbers; `share` is for a mean of them. Returns a
    loss for backward; `weighted_mean` returns the mean itself, on every rank, and differentiates the weights too.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> losses = [torch.tensor([3.0, 3.0, 3.0]), torch.tensor([1.0, 7.0])]
    >>> mask = [torch.tensor([True, True, True]), torch.tensor([True, False])]  # (3 + 3 + 3 + 1) / 4 = 2.5
    >>> shares = simulate(dc.nn.functional.token_mean, losses, mask)
    >>> shares, sum(shares) / 2
    ([tensor(4.5000), tensor(0.5000)], tensor(2.5000))

    Args:
        losses: of this rank's tokens, any shape, floating-point, as `F.cross_entropy(…, reduction="none")` returns
            them. The shapes may differ between ranks, and may be empty. Half precision is computed in float32.
        weight: None: each token counts once. Otherwise a mask, or non-negative weights of any real dtype; of the
            losses' shape, 0-d, or with as many dimensions and broadcasting to it; constants. A non-finite loss of
            weight zero is ignored, and its gradient is zero.
        total: None: the sum of all ranks' weights in this call. For micro-batches the sum of the weights of all ranks
            and micro-batches, as the Hugging Face Trainer's `num_items_in_batch`; see `share`.
        groups: None, a group, or a list of groups such as `[mesh["dp"], mesh["cp"]]`; see `share`.
        rank_reduction: "mean" or "sum"; see `share`.

    Returns:
        N · Σ w l / total for "mean", without N for "sum": 0-d, float32, or float64 if the losses are. The mean or sum
        over the ranks, and the sum over the micro-batches, is the mean over all tokens. If all weights are zero, it is
        0 and the gradients are zero, as of `weighted_mean`.

    Raises:
        TypeError, ValueError: as of `share`.

    Source: notes/how-to/recipes.md#token-weighted-loss-as-in-a-trainer.
    """
    name = "token_mean"
    _check_plain(name, losses=losses, weight=weight, total=total)
    (values,) = in_full_precision(name, losses=losses)
    if weight is not None:
        weight = weight_of(name, weight, losses, "the losses'")
        if weight.dim() not in (0, losses.dim()):  # of shape (b,), it would weight the columns of losses (b, b)
            got, expected = f"shape {tuple(weight.shape)}", f"{losses.dim()} dimensions, as the losses have"
            raise ValueError(message(name, "weight", got, expected, "weight.unsqueeze(-1) adds a dimension"))
    return _shared(name, values, weight, total, groups, rank_reduction)


def _shared(
    name: str,
    losses: Tensor,
    weight: float | Tensor | None,
    total: float | Tensor | None,
    groups: Group | Sequence[Group],
    rank_reduction: RankReduction,
) -> Tensor:
    """Return N Σ w l / total, or Σ w l / total, of losses in float32 or float64, and of a checked weight."""
    check_rank_reduction(name, rank_reduction)
    total = None if total is None else _one(name, "total", total)
    listed = axes(name, groups)
    sizes = [resolve(group, name).size for group in listed]
    # A number is filled in on the device that sends it, since a copy would make the host wait.
    device = device_of(listed[0], name, losses.device) if total is None and listed else losses.device
    w = _float64(1.0 if weight is None else weight, device)
    mine = _float64(losses.numel(), device) if weight is None else _sum(w, losses.shape)
    constant = not needs_gradient(*(x for x in (weight, total) if isinstance(x, Tensor)))
    mine = mine if constant else torch.full_like(mine, nan)
    if total is None:
        for group in listed:
            check_options(name, group, rank_reduction, sizes=sizes)
        whole = reduced(name, mine, "sum", listed, losses.device)
    else:
        whole = _float64(total, device).to(mine.device)
        whole = torch.where(mine.isfinite() & (whole >= 0) & ((whole > 0) | (mine == 0)), whole, nan)
    traced = torch.compiler.is_compiling() or is_traced(whole)
    # Reading a number on an accelerator would make the host wait; one within vmap has no single value.
    readable = not traced and whole.is_cpu and not is_vmapped(whole)
    if not constant or (readable and not bool(without_transforms(whole.detach()).isfinite())):
        raise ValueError(_invalid(name, weight, total))
    n = prod(sizes) if rank_reduction == "mean" else 1
    whole, w = whole.to(losses.device), w.to(losses.device)
    factor = w / torch.where(whole == 0, 1.0, whole) * n  # in float64: counts above 2²⁴, and weights of any size
    loss = (factor.to(losses.dtype) * finite_where_it_counts(losses, w)).sum()
    if traced:
        return asserted(loss, whole.isfinite(), message(name, "weight or total", "invalid numbers", _VALID))
    return loss if readable else loss.masked_fill(~whole.isfinite(), nan)


def _float64(x: float | Tensor, device: torch.device) -> Tensor:
    """Return x in a dtype in which sums of counts are exact up to 2⁵³."""
    if isinstance(x, Tensor):
        return saveable(x.to(torch.float64))
    return torch.full((), x, dtype=torch.float64, device=device)


def _sum(weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the sum of the weights; not finite if a weight is negative or not finite."""
    return torch.where((weight < 0).any(), nan, weight.expand(shape).sum())


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────


def _check_plain(name: str, **arguments: object) -> None:
    for argument, x in arguments.items():
        if isinstance(x, Tensor) and is_dtensor(x):  # Dynamo cannot ask that of a number
            remedy = "pass x.to_local(), and as groups the mesh dimensions over which it is split"
            raise TypeError(message(name, argument, "a DTensor", "a plain tensor", remedy))


def _one(name: str, argument: str, value: object) -> float | Tensor:
    """Return a number, or a 0-d tensor; raise if it is neither."""
    expected = "a number or a real tensor with one element"
    if isinstance(value, Tensor) and not value.is_complex():
        if value.numel() != 1:
            raise ValueError(message(name, argument, f"shape {tuple(value.shape)}", expected, f"{argument}.sum()"))
        return value.reshape(())
    if not expect.is_number(value):
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(message(name, argument, got, expected))
    return cast(float, value)


def _invalid(name: str, weight: float | Tensor | None, total: float | Tensor | None) -> str:
    """Return why the sum of all weights is not finite, or is not the total: by this rank, or by another one."""
    for argument, x in (("weight", weight), ("total", total)):
        if isinstance(x, Tensor) and needs_gradient(x):
            remedy = f"{argument}.detach() if it is a constant; weighted_mean differentiates weights too"
            return message(name, argument, "a tensor that requires a gradient", "a constant", remedy)
    w = without_transforms(_float64(1.0 if weight is None else weight, torch.device("cpu")).detach())
    if not bool(((w >= 0) & w.isfinite()).all()):
        got = f"values from {w.min().item():.4g} to {w.max().item():.4g}" if w.dim() else f"{w.item():g}"
        return message(name, "weight", got, _VALID)
    if total is None:
        return message(name, "weight", "invalid weights on another rank", _VALID)
    got = f"{without_transforms(_float64(total, torch.device('cpu')).detach()).item():g}"
    return message(name, "total", got, "the finite sum of all ranks' weights, 0 only if all of them are 0")
