"""Batch norm over the values of all ranks, in training.

    std = √(var + eps)    x̂ = (x − mean) / std    s = w / std    y = w x̂ + b
    gw = Σ g x̂            gb = Σ g                               over this rank's values
    gmean = Σ_r −s gb     gstd = Σ_r −s gw                       all_reduce
    gx = s g + (gmean + gstd x̂) / n

    eager, on the CPU    one autograd Function, whose forward and backward call torch's kernels of batch norm
    otherwise            operations and collectives that PyTorch differentiates; higher orders too

Both send the same messages.

note  notes/training/batch-norm.md
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.collectives.sum_gradients import sum_gradients
from diffcoll.core.check_mode import is_on
from diffcoll.core.dtypes import wider
from diffcoll.core.groups import collectives_only
from diffcoll.core.torch_private.tensors import batch_norm_statistics, batch_norm_sums
from diffcoll.core.torch_private.transforms import is_eager
from diffcoll.engines.types import Group
from diffcoll.nn.followers import any_needs, leaf, needs_gradient, number, refuse_absent_of, sent
from diffcoll.nn.moments import gathered, merged, row_of
from diffcoll.nn.recomputed import gradients

#: Is called, without grad mode, with count (a number or a 1-d tensor), mean and biased variance of all ranks' values.
Track = Callable[[float | Tensor, Tensor, Tensor], None]

#: If a mean exceeds so many standard deviations, its rounding error is measured: a = Σ (x − k), otherwise 0.
_FAR = 16


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group, track: Track) -> Tensor:
    """Return y in the dtype of x; `track` is called before y is computed, where a checkpoint repeats it."""
    dtype = wider(x.dtype)
    weight = None if weight is None else weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    parameters = [p for p in (weight, bias) if p is not None]
    if collectives_only(group) or is_on() or not x.is_cpu or not is_eager(x, *parameters):
        return _composed(x, weight, bias, eps, group, track)
    needs = needs_gradient(x, *parameters)
    follower, ranks = torch.is_grad_enabled() and not needs, [number(needs, x)]
    x = leaf(x) if follower else x
    y: Tensor = _BatchNorm.apply(x, weight, bias, eps, group, track, ranks)  # type: ignore[no-untyped-call]
    return y.detach() if follower and not any_needs(ranks) else y


def _composed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group, track: Track | None = None
) -> Tensor:
    """Return y by differentiable operations."""
    row, c = row_of(x, _dims(x))
    needs = needs_gradient(x, weight, bias)
    count, mean, var = merged(sent("SyncBatchNorm", partial(gathered, group=group), row, needs, group), c)
    if track is not None:
        with torch.no_grad():
            track(count, mean, var)
    mean, std = sum_gradients(torch.stack([mean, (var + eps).sqrt()]), group=group).unbind()
    scale = std.reciprocal() if weight is None else weight / std
    y = (x - _along(mean, x)) * _along(scale, x)
    return (y if bias is None else y + _along(bias, x)).to(x.dtype)


def _row(x: Tensor) -> Tensor:
    """Return k, a, b and n of this rank in one tensor, as `row_of`."""
    c = x.shape[1]
    if x.numel():
        k, var = batch_norm_statistics(x.to(wider(x.dtype)))
        if torch.addcmul(var, k, k, value=-1 / _FAR**2).min().item() >= 0:
            n = x.numel() // c
            return torch.cat([k, torch.zeros_like(k), var.mul_(n), k.new_full((1,), n)])
    return row_of(x, _dims(x))[0]


def _merged(rows: Tensor, c: int) -> tuple[float, Tensor, Tensor]:
    """`merged` in fewer operations, of rows that end in another number."""
    k, a, b, n, _ = rows.split_with_sizes([c, c, c, 1, 1], 1)
    counts: list[float] = n.view(-1).tolist()
    count, origin = sum(counts), k[counts.index(max(counts))]
    if not count:
        return count, origin, origin
    d = k - origin
    offset = torch.addcmul(a, n, d).sum(0).div_(count)
    e = d.sub_(offset)
    var = torch.addcmul(b, e, torch.addcmul(a, n, e, value=0.5), value=2).sum(0).div_(count)
    return count, offset.add_(origin), var.clamp_min_(0)


class _BatchNorm(Function):
    """(x, weight, bias) ↦ y. `ranks`: what this rank sends of `followers.number`; then, what all ranks do."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Group,
        track: Track,
        ranks: list[float],
    ) -> Tensor:
        row = _row(x)
        rows = gathered(torch.cat([row, row.new_full((1,), ranks[0])]), group)
        ranks[:] = rows[:, -1].tolist()
        refuse_absent_of("SyncBatchNorm", ranks, group)
        count, mean, var = _merged(rows, x.shape[1])
        track(count, mean, var)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.has_bias, ctx.count, ctx.eps, ctx.group = bias is not None, count, eps, group
        return torch.batch_norm(x.to(mean.dtype), weight, bias, mean, var, False, 0.0, eps, False).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_eager(g):
            bias = torch.zeros(x.shape[1], dtype=mean.dtype, device=x.device) if ctx.has_bias else None
            repeated = partial(_composed, eps=ctx.eps, group=ctx.group)  # sends the forward message again
            return *gradients(repeated, (x, weight, bias), g), None, None, None, None
        layout, dtype = _format(x), mean.dtype
        values = x.to(dtype).contiguous(memory_format=layout)
        g = g.to(dtype).contiguous(memory_format=layout)
        s = var.add(ctx.eps).rsqrt_()
        s = s if weight is None else s.mul_(weight)
        if x.numel():  # the kernel does not accept an empty x
            gw, gb = batch_norm_sums(g, values, mean, var, ctx.eps)
        else:
            gw = gb = torch.zeros_like(mean)
        gmean, gstd = all_reduce(torch.stack([gb, gw]).mul_(s).neg_(), group=ctx.group).div_(ctx.count).unbind()
        gx = None
        if ctx.needs_input_grad[0]:
            gx = torch.batch_norm(values, gstd, gmean, mean, var, False, 0.0, ctx.eps, False)
            gx = gx.addcmul_(g, _along(s, x)).to(x.dtype)
        return gx, None if weight is None else gw, gb if ctx.has_bias else None, None, None, None, None


def _dims(x: Tensor) -> tuple[int, ...]:
    return tuple(d for d in range(x.dim()) if d != 1)


def _along(value: Tensor, x: Tensor) -> Tensor:
    """Return a value for each channel in a shape that broadcasts to x."""
    return value.view([1, -1] + [1] * (x.dim() - 2))


def _format(x: Tensor) -> torch.memory_format:
    """Return the memory format of torch's kernels for x."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format
