"""Batch normalization with the statistics of all ranks' batches.

    mean, var over samples, positions and ranks;   x̂ = (x − mean) / √(var + eps);   y = w x̂ + b
    gb = Σ g,  gw = Σ g x̂ over this rank's values;   gx = w / √(var + eps) · (g − (Σ_r gb + x̂ Σ_r gw) / n)

    forward sends    mean, variance and count of each rank, 2 C + 1 numbers
    backward sends   Σ g and Σ g (x − mean), added up, 2 C numbers; none if x needs no gradient

In eager code one Function calls the kernels of torch.nn.SyncBatchNorm, which read x once for the statistics and once
for y; the CPU has stand-ins for three of them. Elsewhere (transforms, forward mode, graphs, joint_backward), and where
a graph of the gradient is wanted, the same numbers come from differentiable operations, with the same messages.

note  notes/training/batch-norm.md
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from diffcoll.collectives.all_gather import all_gather
from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.collectives.sum_gradients import sum_gradients
from diffcoll.core import expect
from diffcoll.core.dtypes import wider
from diffcoll.core.errors import message
from diffcoll.core.groups import collectives_only, get_world_size
from diffcoll.core.torch_private.tensors import BatchNormBase, batch_norm_sums, move_each
from diffcoll.engines.types import Group
from diffcoll.nn.in_group import InGroup

_NAME = "SyncBatchNorm"


class SyncBatchNorm(InGroup, BatchNormBase):
    """Small batches on each rank: batch norm over the samples of all ranks, as one process with the whole batch.

    It has the parameters, buffers and `state_dict` of `torch.nn.BatchNorm1d`, `2d` and `3d`, and replaces any of them:
    x is (N, C), (N, C, L), (N, C, H, W) or (N, C, D, H, W). `convert_sync_batchnorm` replaces those of a model.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> x = torch.randn(6, 3, 4, 4)
    >>> norm = dc.nn.SyncBatchNorm(3, track_running_stats=False)
    >>> ys = simulate(norm, [x[:1], x[1:1], x[1:]])  # 1, 0 and 5 samples
    >>> torch.allclose(torch.cat(ys), torch.nn.BatchNorm2d(3)(x), atol=1e-5)
    True

    Training has one collective in forward, of 2 C + 1 values from each rank, and one all_reduce of 2 C in backward;
    evaluation with running statistics has none. The ranks may have different numbers of samples, and none, but all of
    them call the layer, in the same mode. Differentiable to any order.

    The gradients of weight and bias are this rank's part; reduced over the ranks as the loss is (mean, sum), they are
    those of the whole batch. Running statistics are the same on all ranks, and the running variance is unbiased. A
    checkpoint updates them twice, as with BatchNorm. Before an export, call `revert_sync_batchnorm`.

    All arguments but `group` are those of `torch.nn.BatchNorm2d`. Without `track_running_stats`, evaluation uses the
    statistics of all ranks' batch too. Statistics of float16 and bfloat16 x are computed in float32. `group` is None, a
    `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`. Copies of the module use
    the same group, and only a module with None can be pickled.

    Raises:
        TypeError, ValueError: x has the wrong dtype or shape, or, in a group of one rank, one value for each channel.

    Source: notes/training/batch-norm.md.
    """

    #: The class that `revert_sync_batchnorm` restores; None: one for any number of dimensions.
    converted_from: type[nn.Module] | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        group: Group = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized x, of its shape, dtype and memory format."""
        check_input(input, self.num_features)
        if not self.training and self.running_mean is not None:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        running = None
        if self.training and self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            running = Running(self.running_mean, self.running_var, self.momentum, self.num_batches_tracked)
        return batch_norm(input, self.weight, self.bias, self.eps, self.group, running)


def check_input(x: Tensor, channels: int | None) -> None:
    """Raise unless x can be normalized, and has so many channels."""
    expect.floating(_NAME, "x", x, "x.float() is one")
    if x.dim() < 2 or channels not in (None, x.shape[1]):
        expected = f"(N, {'C' if channels is None else channels}, …)"
        raise ValueError(message(_NAME, "x", f"shape {tuple(x.shape)}", expected))


class Running(NamedTuple):
    """Statistics that each batch moves towards its own, by `momentum`; None: by 1 / number of batches."""

    mean: Tensor
    var: Tensor
    momentum: float | None
    batches: Tensor | None = None


@torch.no_grad()
def _track(running: Running, local: int, n: Tensor, mean: Tensor, var: Tensor) -> None:
    """Move the statistics, unless no rank has a value: this rank has `local` of each channel, all ranks n, (1,).

    The host waits for nothing.
    """
    factor: float | Tensor = 0.0 if running.momentum is None else running.momentum
    if running.batches is not None:
        running.batches.add_(1 if local else (n > 0).long().squeeze())
        if running.momentum is None:
            factor = (1 / running.batches.clamp(min=1)).to(running.mean.dtype)
    unbiased = torch.addcdiv(var, var, n - 1 if local > 1 else (n - 1).clamp(min=1))
    old = [running.mean, running.var]
    new = [(y if local else torch.where(n > 0, y, x)).to(x.dtype) for x, y in zip(old, (mean, unbiased), strict=True)]
    move_each(old, new, [factor, factor] if isinstance(factor, Tensor) else factor)


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group, running: Running | None
) -> Tensor:
    """Return y in the dtype and layout of x; `running` is moved once in each forward."""
    if x.numel() == x.shape[1] and get_world_size(group) == 1:
        got = f"one value per channel, shape {tuple(x.shape)}"
        raise ValueError(message(_NAME, "x", got, "more than 1 value when training", "call module.eval()"))
    fused = x.device.type in _KERNELS and not collectives_only(group)
    y: Tensor = (_Fused.apply if fused else _composed)(x, weight, bias, eps, group, running)
    return y


# ── by differentiable operations ─────────────────────────────────────────────────────────────────────────


def _composed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group, running: Running | None
) -> Tensor:
    dtype, x = x.dtype, x.to(wider(x.dtype))
    _, mean, var = _moments(x, group, running)
    scale = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
    y = (x - _along(mean, x)) * _along(scale, x)
    return (y if bias is None else y + _along(bias, x)).to(dtype)


def _moments(x: Tensor, group: Group, running: Running | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return n, mean and variance of all ranks' values of each channel; their gradients are summed over ranks."""
    dims, local = _dims(x), x.numel() // max(x.shape[1], 1)
    if local:
        var, mean = torch.var_mean(x, dims, correction=0)
    else:
        mean, var = x.sum(dims), x.square().sum(dims)  # zeros, whose derivatives depend on x as those of others do
    row = torch.cat([mean, var, torch.full((1,), local, dtype=x.dtype, device=x.device)])
    n, mean, var = _merged(all_gather(row, stack=True, group=group, grad_placement="replicate"), local)
    if running is not None:
        _track(running, local, n.detach(), mean.detach(), var.detach())
    mean, var = sum_gradients(torch.stack([mean, var]), group=group).unbind()
    return n, mean, var


def _merged(rows: Tensor, local: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return n, mean and variance of all ranks, of which this one has `local` values of each channel.

    From differences of means, so that large ones lose no digits. Launches count: each operation is of C numbers.
    """
    c = rows.shape[1] // 2
    means, variances, counts = rows.split_with_sizes([c, c, 1], 1)
    n = counts.sum(0)
    share, d = counts / (n if local else n.clamp(min=1)), means - means[0]
    offset = (share * d).sum(0)  # no matmul, which may round to TF32
    e = d - offset
    return n, means[0] + offset, (share * torch.addcmul(variances, e, e)).sum(0)


def _dims(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _along(value: Tensor, x: Tensor) -> Tensor:
    return value.view([1, -1] + [1] * (x.dim() - 2))


# ── by torch's kernels ───────────────────────────────────────────────────────────────────────────────────


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """As torch.batch_norm_elemt; F.batch_norm of torch 2.11 refuses an eps of 0."""
    return torch.batch_norm(x, weight, bias, mean, invstd.pow(-2), False, 0.0, 0.0, False)


def _sums(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """As torch.batch_norm_backward_reduce: Σ g and Σ g (x − mean)."""
    gw, gb = batch_norm_sums(g, x, mean, invstd.pow(-2), 0.0)
    return gb, gw.to(mean.dtype) / invstd


def _elements(
    g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, gb: Tensor, gxc: Tensor, counts: Tensor
) -> Tensor:
    """As torch.batch_norm_backward_elemt: gx."""
    n, scale = counts.sum(), invstd if weight is None else invstd * weight
    gx = _normalized(x, -scale * invstd * gxc / n, -scale * gb / n, mean, invstd, 0.0)
    return gx.addcmul_(g, _along(scale, x))


#: By type of device: mean and variance of this rank; y; Σ g and Σ g (x − mean); gx.
_KERNELS: dict[str, tuple[Callable[..., Any], ...]] = {
    "cuda": (
        torch.batch_norm_update_stats,
        torch.batch_norm_elemt,
        torch.batch_norm_backward_reduce,
        torch.batch_norm_backward_elemt,
    ),
    "cpu": (torch.batch_norm_update_stats, _normalized, _sums, _elements),
}


class _Fused(Function):
    """The same y by kernels. Its backward is the adjoint by kernels, or by operations if a graph of it is wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Group,
        running: Running | None,
    ) -> Tensor:
        statistics, normalize, _, _ = _KERNELS[x.device.type]
        ctx.eps, ctx.group, ctx.last = eps, group, not x.is_contiguous() and x.movedim(1, -1).is_contiguous()
        dtype, local = wider(x.dtype), x.numel() // max(x.shape[1], 1)
        if local:
            flat = _flat(x, ctx.last)
            found = statistics(flat if x.is_cuda else flat.to(dtype), None, None, 0.0)
            row = torch.cat([*found, x.new_full((1,), local, dtype=dtype)])
        else:
            row = x.new_zeros(2 * x.shape[1] + 1, dtype=dtype)
        rows = all_gather(row, stack=True, group=group)
        n, mean, var = _merged(rows, local)
        if running is not None:
            _track(running, local, n, mean, var)
        invstd = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, invstd, rows[:, -1].to(torch.int32))
        if not local:
            return torch.empty_like(x)
        weight, bias = (None if p is None else p.to(dtype).contiguous() for p in (weight, bias))
        y = _like(normalize(flat, weight, bias, mean, invstd, eps), x, ctx.last)
        return y.detach()  # a view that a Function returns cannot be modified in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, counts = ctx.saved_tensors  # before any message: a checkpoint sends forward's here
        if torch.is_grad_enabled() or collectives_only(ctx.group):
            return *_gradients(x, weight, g, ctx), None, None, None
        _, _, sums, elements = _KERNELS[x.device.type]
        weight = None if weight is None else weight.to(mean.dtype).contiguous()
        if x.numel():
            flat, g = _flat(x, ctx.last), _flat(g, ctx.last)  # of one layout, which the kernels do not check
            gb, gxc, *_ = sums(g, flat, mean, invstd, None, True, False, False)
        else:
            gb = gxc = torch.zeros_like(mean)
        gx = None
        if ctx.needs_input_grad[0]:
            total = all_reduce(torch.cat([gb, gxc]), group=ctx.group)
            if x.numel():
                gx = _like(elements(g, flat, mean, invstd, weight, *total.chunk(2), counts), x, ctx.last)
            else:
                gx = torch.empty_like(x)
        return gx, None if weight is None else gxc * invstd, gb if ctx.needs_input_grad[2] else None, None, None, None


def _gradients(x: Tensor, weight: Tensor | None, g: Tensor, ctx: Any) -> tuple[Tensor | None, ...]:
    """Return the adjoint as a function of x, weight and g to differentiate; forward's message is sent again."""
    dims, dtype, x, g = _dims(x), x.dtype, x.to(wider(x.dtype)), g.to(wider(x.dtype))
    n, mean, var = _moments(x, ctx.group)
    invstd = (var + ctx.eps).rsqrt()
    xhat = (x - _along(mean, x)) * _along(invstd, x)
    gb, gw, gx = g.sum(dims), (g * xhat).sum(dims), None
    if ctx.needs_input_grad[0]:
        w = torch.ones_like(gb) if weight is None else weight.to(x.dtype)
        mb, mw = (all_reduce(torch.stack([w * gb, w * gw]), group=ctx.group) / n.clamp(min=1)).unbind()
        gx = xhat * _along(-mw, x) - _along(mb, x) + g * _along(w, x)  # x̂ first, for its layout
        gx = (_along(invstd, x) * gx).to(dtype)
    return gx, None if weight is None else gw, gb if ctx.needs_input_grad[2] else None


def _flat(x: Tensor, last: bool) -> Tensor:
    """Return (values, C) if channels are last in memory, otherwise (N, C, positions); contiguous."""
    return (x.movedim(1, -1).reshape(-1, x.shape[1]) if last else x.reshape(*x.shape[:2], -1)).contiguous()


def _like(y: Tensor, x: Tensor, last: bool) -> Tensor:
    """Return y in the shape and layout of x."""
    return y.view(x.movedim(1, -1).shape).movedim(-1, 1) if last else y.view(x.shape)
