"""Reductions of a stack (N, …) over dim 0, with derivatives that need little memory and time.

PyTorch's own derivatives of `amax` and `logsumexp` go through several tensors of the size of the stack. Here the stack
is processed in pieces that stay in cache, and the gradient is written to one new tensor. A rule states the function
and its gradient once; the `Function` derives the rest. In forward mode the derivatives are PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from diffcoll.core.torch_private.tracing import is_observed, is_traced, unobserved
from diffcoll.core.torch_private.transforms import apply_rule, batch_last, carries_tangents, is_eager, is_plain


class Rule(NamedTuple):
    """A function y of a stack s, in which each position of y depends on the same position of each s_k only."""

    #: y of s, in PyTorch's operations; differentiable in forward mode.
    value: Callable[[Tensor], Tensor]
    #: gs of s, y and gy, in PyTorch's differentiable operations; linear in gy: gs_k = gy · conj(∂y/∂s_k).
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]


def over_ranks(s: Tensor, rule: Rule) -> Tensor:
    """Return rule.value(s), differentiable to any order and in both modes.

    Not a Function in forward mode: PyTorch does not differentiate the operations of its jvp in an outer level.
    """
    if not (s.is_floating_point() or s.is_complex()) or torch.compiler.is_compiling() or carries_tangents():
        return rule.value(s)
    return apply_rule(_OverRanks, s, rule)


class _OverRanks(Function):
    """y = value(s);  gs = gradient(s, y, gy)."""

    @staticmethod
    def forward(s: Tensor, rule: Rule) -> Tensor:
        return value_in_pieces(s, rule)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Rule], output: Tensor) -> None:
        s, ctx.rule = inputs
        ctx.save_for_backward(s, output)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        s, y = ctx.saved_tensors
        if torch.is_grad_enabled() or carries_tangents():  # it may be differentiated again
            return ctx.rule.gradient(s, y, gy), None
        return gradient_in_pieces(s, y, gy, ctx.rule), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], s: Tensor, rule: Rule) -> tuple[Tensor, int]:
        return batch_last(over_ranks(s.movedim(in_dims[0], -1), rule))


# ── pieces ───────────────────────────────────────────────────────────────────────────────────────────────

#: Numbers of a stack that a thread processes at a time, few enough for them and the intermediate results to stay in
#: cache.
_PIECE = 1 << 17
#: Stacks of so many pieces or fewer are processed at once: with cold caches a Python statement takes several µs.
_FEW = 4


def value_in_pieces(s: Tensor, rule: Rule) -> Tensor:
    """Return rule.value(s); without derivatives."""
    if is_observed() and not is_traced(s):
        with unobserved():
            return value_in_pieces(s, rule)
    if not _is_cut(s):
        return rule.value(s)
    y = s.new_empty(s.shape[1:])
    for part, piece in _pieces(s, y.unsqueeze(0), s):
        part.copy_(rule.value(piece).unsqueeze(0))
    return y


def gradient_in_pieces(s: Tensor, y: Tensor, gy: Tensor, rule: Rule) -> Tensor:
    """Return rule.gradient(s, y, gy); without derivatives."""
    if is_observed() and not is_traced(s):
        with unobserved():
            return gradient_in_pieces(s, y, gy, rule)
    if not _is_cut(s) or not is_plain(gy):
        return rule.gradient(s, y, gy)
    gs = torch.empty_like(s, memory_format=torch.contiguous_format)
    for part, piece, (of_y,), (of_gy,) in _pieces(s, gs, s, y.unsqueeze(0), gy.unsqueeze(0)):
        part.copy_(rule.gradient(piece, of_y, of_gy))
    return gs


def _is_cut(s: Tensor) -> bool:
    return s.numel() > _FEW * _PIECE and s.is_cpu and is_eager(s)


def _pieces(s: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors (m, …) in pieces (m, k) of a few columns."""
    columns = max(1, _PIECE * torch.get_num_threads() // len(s))
    return zip(*(torch.split(t.reshape(len(t), -1), columns, 1) for t in tensors), strict=True)


# ── PyTorch's functions ──────────────────────────────────────────────────────────────────────────────────


def _may_overwrite(*tensors: Tensor) -> bool:
    """Whether results of operations on these tensors may be modified in place: nothing records the operations."""
    return not torch.is_grad_enabled() and is_eager(*tensors)


def _gradient_of_extreme(s: Tensor, y: Tensor, gy: Tensor) -> Tensor:
    """gy where s_k = y, in equal parts among ties: the gradient of amax and amin."""
    if not _may_overwrite(s, y, gy):
        held = (s == y).to(s.dtype)
        return gy * held / held.sum(0)
    held = s.clone().eq_(y)  # several times as fast as a comparison to bool
    ties = held.sum(0)
    return held.mul_(gy).div_(ties)


def _gradient_of_logsumexp(s: Tensor, y: Tensor, gy: Tensor) -> Tensor:
    """gy · exp(s_k − y), as gy · exp(d) · exp(d) for d = (s_k − y)/2: exp(s_k − y) may be 0 where this is not."""
    if s.is_complex() or not _may_overwrite(s, y, gy):
        root = ((s - y) / 2).exp().conj()
        return gy * root * root
    root = torch.add(-y / 2, s, alpha=0.5).exp_()
    return (root * gy).mul_(root)


def _logsumexp(s: Tensor) -> Tensor:
    # PyTorch's replaces infinite maxima by 0 with `where`, which takes as long as all the rest.
    limits = torch.finfo(s.dtype)
    largest = s.detach().real.amax(0).clamp(limits.min, limits.max)
    if s.is_complex() or torch.compiler.is_compiling() or carries_tangents():
        # Squares, so that a derivative multiplies by exp(d) twice, as the gradient does.
        return ((s - largest) / 2).exp().square().sum(0).log() + largest
    return (s - largest).exp_().sum(0).log_().add_(largest)


LARGEST = Rule(lambda s: s.amax(0), _gradient_of_extreme)
SMALLEST = Rule(lambda s: s.amin(0), _gradient_of_extreme)
LOGSUMEXP = Rule(_logsumexp, _gradient_of_logsumexp)
