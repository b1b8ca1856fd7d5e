"""The product over dim 0 of a stack, y = Π_k s_k, with a gradient that does not divide: gs_j = gy · conj(Π_{k≠j} s_k).

So zeros need no special case. No partial product overflows or underflows, gy included, see `diffcoll.core.factors`.

Differentiated L times, a factor is a polynomial a_k = Σ_A ε^A a_k^A in ε_1 … ε_L, where ε_i² = 0 and A is a subset of
1 … L. The derivative is the coefficient of ε^full = ε_1 ⋯ ε_L:

    y     = [ε^full] Π_k a_k                     ty     = [ε^full ε] Π_k (a_k + ε ta_k)
    h_j^A = [ε^(full∖A)] g Π_{k≠j} a_k           th_j^A = [ε^(full∖A) ε] (g + ε tg) Π_{k≠j} (a_k + ε ta_k)

y has the gradient h, for the conjugates of a_k and for g = gy. A tangent is again a y or an h. So is a gradient of h,
because second derivatives are symmetric: ga_j^A is th_j^A for tg = 0 and ta = gh, and gg^B is
[ε^(full∖B) ε] Π_k (a_k + ε gh_k), both for the conjugates. So two Functions have all derivatives, in both modes.

note      notes/collectives/reductions.md       truth  diffcoll.truth.all_reduce
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from diffcoll.core.factors import Polynomial, factors, number
from diffcoll.core.over_ranks import Rule, gradient_in_pieces, value_in_pieces
from diffcoll.core.torch_private.transforms import apply_rule, batch_last, carries_tangents, is_batched_by_autograd

#: The coefficients a^A of all factors; the bits of the index are A. None: zero.
Parts = Sequence[Tensor | None]


def product(s: Tensor) -> Tensor:
    """y = Π_k s_k over dim 0."""
    if not (s.is_floating_point() or s.is_complex()):
        return s.prod(0, dtype=s.dtype)
    if torch.compiler.is_compiling():
        from diffcoll.core import compiled_product  # imports this module

        return compiled_product.product(s)
    return apply_rule(_Product, s)


class _Product(Function):
    """The parts a^A ↦ y = [ε^full] Π_k a_k."""

    @staticmethod
    def forward(*a: Tensor | None) -> Tensor:
        return _product(a) if len(a) > 1 or a[0] is None else value_in_pieces(a[0], PRODUCT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:
        a = ctx.saved_tensors
        if len(a) == 1 and not (torch.is_grad_enabled() or carries_tangents()):
            return gradient_in_pieces(a[0], gy, gy, PRODUCT)
        wanted = _present(a)
        g = (gy, *[None] * (len(a) - 1))
        return tuple(_placed(wanted, _apply(_Gradient, wanted, *g, *_conjugates(a)), len(a)))

    @staticmethod
    def jvp(ctx: Any, *ta: Tensor | None) -> Any:
        return _apply(_Product, *ctx.saved_tensors, *ta)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *a: Tensor | None) -> tuple[Tensor, int]:
        return batch_last(_apply(_Product, *_batch_last(info, in_dims, a)))


class _Gradient(Function):
    """The parts of g and a, equally many, ↦ h^A for every A that is wanted."""

    @staticmethod
    def forward(wanted: tuple[int, ...], *parts: Tensor | None) -> tuple[Tensor, ...]:
        return _gradient(wanted, parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.wanted, *parts = inputs
        ctx.save_for_backward(*parts)
        ctx.save_for_forward(*parts)

    @staticmethod
    def backward(ctx: Any, *gh: Tensor) -> Any:
        parts = _conjugates(ctx.saved_tensors)
        count = len(parts) // 2
        g, a = parts[:count], parts[count:]
        a = (*a, *_placed(ctx.wanted, gh, count))  # a + ε gh
        wanted = _present(a[:count])
        ga = _apply(_Gradient, wanted, *g, *[None] * count, *a)
        gg = [_apply(_Product, *_below(2 * count - 1 - b, a)) for b in _present(g)]
        return None, *_placed(_present(g), gg, count), *_placed(wanted, ga, count)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        parts = ctx.saved_tensors
        count = len(parts) // 2
        g, a, tg, ta = parts[:count], parts[count:], tangents[:count], tangents[count:]
        return _apply(_Gradient, ctx.wanted, *g, *tg, *a, *ta)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], wanted: tuple[int, ...], *parts: Tensor | None) -> Any:
        found = _apply(_Gradient, wanted, *_batch_last(info, in_dims[1:], parts))
        return tuple(found), tuple(h.dim() - 1 for h in found)


def _apply(rule: Any, *inputs: Any) -> Any:
    if any(isinstance(x, Tensor) and is_batched_by_autograd(x) for x in inputs):
        return rule.forward(*inputs)  # its operations are differentiated: a Function would be applied to the batch
    return rule.apply(*inputs)


def _present(parts: Parts) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(parts) if x is not None)


def _placed(where: Sequence[int], xs: Sequence[Tensor], count: int) -> list[Tensor | None]:
    """Return `count` parts, of which these are not zero."""
    found = dict(zip(where, xs, strict=True))
    return [found.get(i) for i in range(count)]


def _below(top: int, parts: Parts) -> Parts:
    """Return the coefficients of which that of ε^top is a function."""
    return [x for i, x in enumerate(parts) if i & ~top == 0]


def _conjugates(parts: Parts) -> Parts:
    return [x if x is None else x.conj() for x in parts]


def _batch_last(info: Any, in_dims: Sequence[int | None], parts: Parts) -> Parts:
    """Return the parts with a batch as last dimension."""

    def one(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None or dim is None:
            return x if x is None else x.unsqueeze(-1).expand(*x.shape, info.batch_size)
        return x.movedim(dim, -1)

    return [one(x, dim) for x, dim in zip(parts, in_dims, strict=True)]


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────


def _product(a: Parts) -> Tensor:
    like = next(x for x in a if x is not None)
    if len(a) == len(like) == 1:
        return like[0].clone()
    ((*of_ranks,),) = factors(a, most=len(like))
    y = reduce(mul, of_ranks)  # not starting from 1: 1 · m_0 is NaN for a complex infinity
    return _coefficient(y, len(a) - 1, like[0])


def _gradient(wanted: Sequence[int], parts: Parts) -> tuple[Tensor, ...]:
    """h_j is the product of g, the factors before j and the factors after j."""
    count = len(parts) // 2
    g, a = parts[:count], parts[count:]
    like = next(x for x in a if x is not None)
    (first,), of_ranks = factors([x if x is None else x.unsqueeze(0) for x in g], a, most=len(like))
    before = [*accumulate(of_ranks[:-1], mul, initial=first)]
    after = [*accumulate(of_ranks[:0:-1], mul)][::-1]
    h = [*map(mul, before, after), before[-1]]
    return tuple(torch.stack([_coefficient(x, count - 1 - part, like[0]) for x in h]) for part in wanted)


def _coefficient(x: Any, part: int, like: Tensor) -> Tensor:
    """Return [ε^part] x in the dtype of `like`."""
    x = x.parts[part] if isinstance(x, Polynomial) else x
    return torch.zeros_like(like) if x is None else number(x).to(like.dtype)


PRODUCT = Rule(lambda s: _product([s]), lambda s, y, gy: _gradient((0,), (gy, s.conj().resolve_conj()))[0])
