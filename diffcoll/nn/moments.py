"""Moments and weighted means over the ranks and dimensions of a tensor.

Each rank r sends the number n_r of its values, a shift k_r, which is their mean, and the sums a_r = Σ (x − k_r) and
b_r = Σ (x − k_r)².

    mean = Σ_r (n_r k_r + a_r) / n      e_r = k_r − mean      variance = Σ_r (b_r + 2 e_r a_r + n_r e_r²) / n

The mean is computed from differences of shifts, so neither loses precision if it is large.

note  notes/training/batch-norm.md
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor

from diffcoll.collectives.all_gather import all_gather
from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.collectives.sum_gradients import sum_gradients
from diffcoll.core import expect
from diffcoll.core.dtypes import wider
from diffcoll.core.errors import message
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import in_full_precision
from diffcoll.nn.whole import of_sums


class Moments(NamedTuple):
    """Count, mean and biased variance over ranks and dimensions; the same on every rank."""

    #: Number of values, or the sum of their weights. 0-d without weights, otherwise of the mean's shape.
    count: Tensor  # type: ignore[assignment]  # tuple.count, which nobody calls here
    #: Σ w x / Σ w.
    mean: Tensor
    #: Σ w (x − mean)² / Σ w.
    variance: Tensor


def moments(
    x: Tensor, dim: int | Sequence[int], *, weight: Tensor | None = None, group: Group = None, keepdim: bool = False
) -> Moments:
    """Normalization layers: count, mean and biased variance over all ranks and some dimensions of x.

    One collective in forward, of 3 C + 1 values from each rank for C means, and one all_reduce of 2 C in backward.
    Differentiable to any order in x and in the weights.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> x = [torch.tensor([[1.0], [3.0]]), torch.empty(0, 1), torch.tensor([[8.0]])]
    >>> count, mean, variance = simulate(lambda x: dc.nn.functional.moments(x, 0), x)[0]
    >>> count, mean, variance  # of 1, 3 and 8
    (tensor(3.), tensor([4.]), tensor([8.6667]))

    Args:
        x: floating-point. Its sizes along `dim` may differ between ranks and may be zero; the others are the same.
        dim: the dimension, or dimensions, to reduce besides the ranks.
        weight: None: each value counts once. Otherwise a tensor that broadcasts to x, with non-negative weights of any
            real dtype, e.g. a mask; None on all ranks or on none. A non-finite value of weight zero is ignored.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        keepdim: keep the reduced dimensions, of size 1, in mean and variance (and in the count, if there are weights).

    Returns:
        `(count, mean, variance)`, the same on every rank. Half precision is computed and returned in float32, other
        dtypes in their own. Without any value, or if all weights are zero, all three are zero, and so are their
        gradients. Each rank may compute its own loss from them; the gradients are summed over the ranks.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/training/batch-norm.md.
    """
    expect.floating("moments", "x", x, "pass torch.view_as_real(x) for the moments of both parts of complex numbers")
    reduced = expect.dims("moments", "dim", dim, x)
    row, c = _row_of(x, reduced, None if weight is None else _weight("moments", weight, x))
    count, *others = _merged(all_gather(row, group=group, stack=True, grad_placement="replicate"), c)
    shape = [1 if d in reduced else size for d, size in enumerate(x.shape) if keepdim or d not in reduced]
    if weight is None:  # the count is a constant
        mean, variance = sum_gradients(torch.stack(others), group=group)
        return Moments(count.detach().view(()), mean.view(shape), variance.view(shape))
    return Moments(*(y.view(shape) for y in sum_gradients(torch.stack([count, *others]), group=group)))


def weighted_mean(
    x: Tensor, dim: int | Sequence[int] = 0, *, weight: Tensor | None = None, group: Group = None
) -> Tensor:
    """Statistics of unequal batches: Σ w x / Σ w over all ranks and a dimension, for any use of the mean on each rank.

    One all_reduce in forward, one in backward. Differentiable in x and in the weights. For a loss, take `token_mean`.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> losses, tokens = [torch.tensor([2.0, 5.0]), torch.tensor([8.0])], [torch.tensor([3, 1]), torch.tensor([4])]
    >>> simulate(lambda x, n: dc.nn.functional.weighted_mean(x, weight=n), losses, tokens)  # (3·2 + 1·5 + 4·8) / 8
    [tensor(5.3750), tensor(5.3750)]

    x is floating-point or complex. `weight` is of shape `(x.shape[dim],)`, 0-d, or has as many dimensions as x. The
    other arguments and errors are those of `moments`, and so are the mean's dtype and gradients. The result has x's
    shape without `dim`, the same on every rank. A mean of nothing, as of a class that no rank has, is 0 with zero
    gradients, also in `moments` and `token_mean`.

    Source: notes/training/batch-norm.md.
    """
    name = "weighted_mean"
    expect.floating(name, "x", x, "x.float() is one", or_complex=True)
    reduced = expect.dims(name, "dim", dim, x)
    if isinstance(weight, Tensor) and len(reduced) == 1 and weight.shape == x.shape[reduced[0] : reduced[0] + 1]:
        weight = weight.view([-1 if d == reduced[0] else 1 for d in range(x.dim())])
    total, count = all_reduce(_sums(name, x.to(wider(x.dtype)), weight, reduced), group=group)
    return total / _divisor(count.real if x.is_complex() else count)


def token_mean(losses: Tensor, weight: Tensor | None = None, *, group: Group = None) -> Tensor:
    """Language models: the mean loss over the tokens of all ranks, which have different numbers of them.

    Ranks that average their own tokens weight those of short batches more. Here each token of all ranks counts once.
    One all_reduce of two numbers, and one number in backward. If all ranks know the number of all tokens, micro-batches
    included, `N * (losses * weight).sum() / total` is the same after a mean over ranks, without any message.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def loss(losses, labels):  # losses: F.cross_entropy(logits, labels, reduction="none")
    ...     return dc.nn.functional.token_mean(losses, weight=(labels != -100))
    >>> losses, labels = torch.tensor([3.0, 3.0, 3.0, 1.0, 0.0]), torch.tensor([8, 2, 5, 4, -100])
    >>> [value.item() for value in simulate(loss, losses.split([3, 2]), labels.split([3, 2]))]  # (3 + 3 + 3 + 1) / 4
    [2.5, 2.5]

    Args:
        losses: of this rank's tokens, any shape, floating-point, as `F.cross_entropy(…, reduction="none")` returns
            them; not 0-d. The shapes may differ between ranks, and may be empty. Half precision is computed in float32.
        weight: None: each token counts once. Otherwise a mask, or non-negative weights of any real dtype, which are
            differentiated, too; of the losses' shape, 0-d, or with as many dimensions and broadcasting to it. A
            non-finite loss of weight zero is ignored, and its gradient is zero.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        Σ w l / Σ w over all ranks, a loss of the whole batch as that of `loss_of_sums`, of float32, or float64 if the
        losses are; 0 with zero gradients if all weights are zero.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/how-to/recipes.md#token-weighted-loss-as-in-a-trainer.
    """
    (values,) = in_full_precision("token_mean", losses=losses)
    if not values.ndim:
        remedy = 'F.cross_entropy(…, reduction="none") returns them; a mean of means is another loss'
        raise ValueError(message("token_mean", "losses", "a 0-d tensor", "the loss of each token", remedy))
    sums = _sums("token_mean", values, weight, tuple(range(losses.dim())))
    return of_sums(lambda total, count: total / _divisor(count), *sums, group=group)


# ── sums of each rank, and their merge ───────────────────────────────────────────────────────────────────


def _merged(rows: Tensor, c: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and variance from the rows k, a, b and n of all ranks."""
    k, a, b, n = rows[:, :c], rows[:, c : 2 * c], rows[:, 2 * c : 3 * c], rows[:, 3 * c :]
    total = n.sum(0)
    divisor = _divisor(total)
    with torch.no_grad():  # mean and variance do not depend on the shifts
        origin = (n * k).sum(0) / divisor
        d = k - origin
    offset = torch.addcmul(a, n, d).sum(0) / divisor
    e = d - offset
    variance = torch.addcmul(b, e, torch.add(n * e, a, alpha=2)).sum(0) / divisor
    return total, origin + offset, variance.clamp_min(0)


def _row_of(x: Tensor, dims: tuple[int, ...], weight: Tensor | None) -> tuple[Tensor, int]:
    """Return k, a, b and n of this rank in one 1-d tensor, and the number of means; of weights one n for each mean."""
    dtype = wider(x.dtype)
    values, n = x.to(dtype), torch.full((1,), prod([x.shape[d] for d in dims]), dtype=dtype, device=x.device)
    if weight is not None:
        values, n = _finite_where_it_counts(values, weight), weight.expand(x.shape).sum(dims, keepdim=True)
    with torch.no_grad():
        k = (values if weight is None else weight * values).sum(dims, keepdim=True) / _divisor(n)
    k = k.detach()
    centered = values - k
    weighted = centered if weight is None else weight * centered
    row = [k, weighted.sum(dims), (weighted * centered).sum(dims), n]
    return torch.cat([part.flatten() for part in row]), k.numel()


def _sums(name: str, x: Tensor, weight: Tensor | None, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return Σ w x and Σ w over these dimensions, in the dtype of x."""
    if weight is None:
        count = torch.full((), prod([x.shape[d] for d in dims]), dtype=x.dtype, device=x.device)
        return (x.sum(dims) if dims else x), count
    if isinstance(weight, Tensor) and weight.dim() not in (0, x.dim()):  # (b,) would weight the columns of (b, b)
        expected = f"0 or {x.dim()} dimensions, as x has"
        raise ValueError(message(name, "weight", f"shape {tuple(weight.shape)}", expected))
    w = _weight(name, weight, x)
    total, count = w * _finite_where_it_counts(x, w), w.expand(x.shape).to(x.dtype)
    return (total.sum(dims), count.sum(dims)) if dims else (total, count)


def _divisor(total: Tensor) -> Tensor:
    """Return the total, and infinity in place of zero: quotients and their gradients are then zero."""
    return torch.where(total == 0, inf, total)


def _finite_where_it_counts(x: Tensor, weight: Tensor) -> Tensor:
    """Return x with zeros for the non-finite values of weight zero, as 0 · NaN is NaN."""
    return torch.where((weight == 0) & ~torch.isfinite(x), 0.0, x)


def _weight(name: str, weight: object, x: Tensor) -> Tensor:
    """Return the weights in the dtype that x is summed in; raise unless they are real and broadcast to its shape."""
    if not isinstance(weight, Tensor) or weight.is_complex():
        got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(message(name, "weight", got, "a real tensor, or None"))
    try:
        weight.expand(x.shape)
    except RuntimeError:
        got, expected = f"shape {tuple(weight.shape)}", f"a shape that broadcasts to {tuple(x.shape)}"
        raise ValueError(message(name, "weight", got, expected, "weight.unsqueeze(-1) adds a dimension")) from None
    dtype = wider(x.dtype)
    return weight.to(dtype.to_real() if dtype.is_complex else dtype)
