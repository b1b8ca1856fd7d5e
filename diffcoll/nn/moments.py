"""Moments and weighted means over the ranks and dimensions of a tensor.

Each rank r sends the number n_r of its values, a shift k_r, which is their mean, and the sums a_r = Σ (x − k_r) and
b_r = Σ (x − k_r)².

    mean = Σ_r (n_r k_r + a_r) / n      e_r = k_r − mean      variance = Σ_r (b_r + 2 e_r a_r + n_r e_r²) / n

The mean is computed from differences of shifts, so neither loses precision if it is large.

note  notes/training/batch-norm.md
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor

from diffcoll.collectives.all_gather import all_gather
from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.collectives.sum_gradients import sum_gradients
from diffcoll.core import expect
from diffcoll.core.blocks import as_row
from diffcoll.core.dtypes import wider
from diffcoll.core.errors import message
from diffcoll.core.groups import get_rank, get_world_size
from diffcoll.engines.types import Group
from diffcoll.nn.convention import same_options
from diffcoll.nn.followers import sent


class Moments(NamedTuple):
    """Count, mean and biased variance over ranks and dimensions; the same on every rank."""

    #: Number of values, or the sum of their weights. 0-d without weights, otherwise of the mean's shape.
    count: Tensor  # type: ignore[assignment]  # tuple.count, which nobody calls here
    #: Σ w x / Σ w.
    mean: Tensor
    #: Σ w (x − mean)² / Σ w.
    variance: Tensor


def moments(
    x: Tensor,
    dim: int | Sequence[int],
    *,
    weight: Tensor | None = None,
    group: Group = None,
    keepdim: bool = False,
) -> Moments:
    """Normalization layers: count, mean and biased variance over all ranks and some dimensions of x.

    One collective in forward, of 3 C + 2 values from each rank for C means, and one all_reduce of 2 C in backward.
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
    name = "moments"
    _check_real(name, x)
    reduced = _dims(name, dim, x)
    same_options(name, group, dim=reduced, weight=weight, keepdim=keepdim)
    shape = [1 if d in reduced else size for d, size in enumerate(x.shape)]
    row, c = row_of(x, reduced, None if weight is None else _weight(name, weight, x))
    results = merged(sent(name, partial(gathered, group=group), row, row.requires_grad, group), c)
    if not keepdim:
        shape = [size for d, size in enumerate(x.shape) if d not in reduced]
    if weight is None:  # the count is a constant
        mean, variance = sum_gradients(torch.stack(results[1:]), group=group).unbind()
        return Moments(results[0].detach().view(()), mean.view(shape), variance.view(shape))
    return Moments(*(y.view(shape) for y in sum_gradients(torch.stack(results), group=group)))


def weighted_mean(
    x: Tensor, dim: int | Sequence[int] = 0, *, weight: Tensor | None = None, group: Group = None
) -> Tensor:
    """Losses over unequal batches: Σ w x / Σ w over all ranks and a dimension, differentiable in x and in the weights.

    One all_reduce in forward, one in backward.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> losses, tokens = [torch.tensor([2.0, 5.0]), torch.tensor([8.0])], [torch.tensor([3, 1]), torch.tensor([4])]
    >>> simulate(lambda x, n: dc.nn.functional.weighted_mean(x, weight=n), losses, tokens)  # (3·2 + 1·5 + 4·8) / 8
    [tensor(5.3750), tensor(5.3750)]

    Args:
        x: floating-point or complex. Its size along `dim` may differ between ranks and may be zero; the others are the
            same.
        dim: the dimension, or dimensions, to reduce besides the ranks.
        weight: None: each value counts once. Otherwise non-negative weights of any real dtype, of shape
            `(x.shape[dim],)`, or with as many dimensions as x and broadcasting to it. A non-finite value of weight zero
            is ignored.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        x's shape without `dim`, the same on every rank. Half precision is computed and returned in float32. If all
        weights are zero, the mean and its gradients are zero. Each rank may compute its own loss from the mean; the
        gradients are summed over the ranks.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/training/batch-norm.md.
    """
    name = "weighted_mean"
    expect.floating(name, "x", x, "x.float() is one", or_complex=True)
    reduced = _dims(name, dim, x)
    same_options(name, group, dim=reduced, weight=weight)
    values = x.to(wider(x.dtype))
    if weight is None:
        n = prod([x.shape[d] for d in reduced])
        sums, counts = values.sum(reduced), torch.full((), n, dtype=values.dtype, device=x.device)
    else:
        w = _weight(name, _along(name, weight, reduced, x), x)
        sums = (w * finite_where_it_counts(values, w)).sum(reduced)
        counts = w.expand(x.shape).sum(reduced).to(values.dtype)
    row = as_row([sums, counts])
    total = sent(name, partial(all_reduce, group=group), row, row.requires_grad, group)
    top, bottom = total[: sums.numel()], total[sums.numel() :]
    mean: Tensor = top / _divisor(bottom.real if x.is_complex() else bottom)
    return mean.view(sums.shape)


# ── sums of each rank, and their merge ───────────────────────────────────────────────────────────────────


def gathered(row: Tensor, group: Group) -> Tensor:
    """Return the rows of all ranks; their gradient is the same on every rank.

    Each rank sends k, a = Σ w (x − k), b = Σ w (x − k)², n = Σ w, where the shift k is near its mean; the results of
    `merged` do not depend on k. Every rank computes them from the same rows, and sum_gradients, applied to them, adds
    up the gradients of the ranks' losses: 2 C values in backward, where the adjoint of a plain all_gather would send
    N (3 C + 2).
    """
    if get_world_size(group) != 2:
        return all_gather(row, 0, group=group, stack=True, grad_placement="replicate")
    # On two ranks the sum of padded rows is the same, and gloo sends it in half the time.
    rows = [torch.zeros_like(row), row] if get_rank(group) else [row, torch.zeros_like(row)]
    return all_reduce(torch.stack(rows), "sum", group=group, grad_placement="replicate")


def merged(rows: Tensor, c: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and variance from the rows of all ranks."""
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


def row_of(x: Tensor, dims: tuple[int, ...], weight: Tensor | None = None) -> tuple[Tensor, int]:
    """Return k, a, b and n of this rank in one 1-d tensor, and the number of means; of weights one n for each mean."""
    dtype = wider(x.dtype)
    values, n = x.to(dtype), torch.full((1,), prod([x.shape[d] for d in dims]), dtype=dtype, device=x.device)
    if weight is not None:
        values, n = finite_where_it_counts(values, weight), weight.expand(x.shape).sum(dims, keepdim=True)
    with torch.no_grad():
        k = (values if weight is None else weight * values).sum(dims, keepdim=True) / _divisor(n)
    k = k.detach()
    centered = values - k
    weighted = centered if weight is None else weight * centered
    return as_row([k, weighted.sum(dims), (weighted * centered).sum(dims), n]), k.numel()


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────


def _divisor(total: Tensor) -> Tensor:
    """Return the total, and infinity in place of zero: quotients and their gradients are then zero."""
    return torch.where(total == 0, inf, total)


def finite_where_it_counts(x: Tensor, weight: Tensor) -> Tensor:
    """Return x with zeros for the non-finite values of weight zero, as 0 · NaN is NaN."""
    return torch.where((weight == 0) & ~torch.isfinite(x), 0.0, x)


def _check_real(name: str, x: object) -> None:
    if isinstance(x, Tensor) and x.is_complex():
        remedy = "pass torch.view_as_real(x) for the moments of both parts"
        raise TypeError(message(name, "x", x.dtype, "a floating-point tensor", remedy))
    expect.floating(name, "x", x, "x.float() is one")


def _dims(name: str, dims: object, x: Tensor) -> tuple[int, ...]:
    """Return the dimensions to reduce, counted from the front."""
    if isinstance(dims, Tensor):
        expected, remedy = "an integer or a sequence of integers", "weights are passed as weight=…"
        raise TypeError(message(name, "dim", "Tensor", expected, remedy))
    return expect.dims(name, "dim", dims, x)


def weight_of(name: str, weight: object, x: Tensor, of: str = "x's") -> Tensor:
    """Return the weights; raise unless they are real and broadcast to the shape of x, which is `of` in words."""
    if not isinstance(weight, Tensor) or weight.is_complex():
        got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(message(name, "weight", got, "a real tensor, or None"))
    try:
        broadcasts = weight.expand(x.shape) is not None
    except RuntimeError:
        broadcasts = False
    if not broadcasts:
        got, expected = f"shape {tuple(weight.shape)}", f"a shape that broadcasts to {of}, {tuple(x.shape)}"
        raise ValueError(message(name, "weight", got, expected, "weight.unsqueeze(-1) adds a dimension"))
    return weight


def _weight(name: str, weight: object, x: Tensor) -> Tensor:
    """Return the weights in the dtype that x is summed in."""
    dtype = wider(x.dtype)
    return weight_of(name, weight, x).to(dtype.to_real() if dtype.is_complex else dtype)


def _along(name: str, weight: object, dims: tuple[int, ...], x: Tensor) -> object:
    """Return weights of one dimension as weights that broadcast to x; a 1-d tensor would do so along the last one."""
    if not isinstance(weight, Tensor) or weight.dim() in (0, x.dim()):
        return weight
    if len(dims) != 1 or weight.shape != x.shape[dims[0] : dims[0] + 1]:
        got = f"shape {tuple(weight.shape)}"
        expected = f"shape ({x.shape[dims[0]]},)" if len(dims) == 1 else f"{x.dim()} dimensions"
        remedy = f"or {x.dim()} dimensions that broadcast to x's {tuple(x.shape)}"
        raise ValueError(message(name, "weight", got, expected, remedy))
    return weight.view([-1 if d == dims[0] else 1 for d in range(x.dim())])
