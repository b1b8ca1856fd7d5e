"""The product over dim 0 of a stack, with a gradient that does not divide: gs_k = gy · conj(Π_{j≠k} s_j).

So zeros need no special case. No partial product overflows or underflows: factors are split into m · 2^e where their
sizes require it.

note      notes/reductions.md       truth  diffcoll.truth.all_reduce
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from math import inf, log2, nan
from operator import mul
from typing import Any

import torch
from torch import Tensor

from diffcoll.core._torch import is_eager
from diffcoll.core.over_ranks import Rule, over_ranks

__all__ = ["PRODUCT", "leave_one_out", "product"]


def product(s: Tensor) -> Tensor:
    """y = Π_k s_k over dim 0."""
    if torch.compiler.is_compiling() and (s.is_floating_point() or s.is_complex()):
        from diffcoll.core import compiled  # imports this module

        return compiled.product(s)
    return over_ranks(s, PRODUCT)


def _value(s: Tensor) -> Tensor:
    if not (s.is_floating_point() or s.is_complex()):
        return s.prod(0, dtype=s.dtype)
    if len(s) == 1:
        return s[0].clone()
    factors: Any = _factors(s)
    return _number(reduce(mul, factors)).to(s.dtype)  # not starting from 1: 1 · m_0 is NaN for a complex infinity


def leave_one_out(s: Tensor) -> Tensor:
    """L_k = Π_{j≠k} s_j over dim 0: the product of the factors before k times that of the factors after k.

    Consists of multiplications, so it is differentiable to any order.
    """
    factors: Any = _factors(s)
    if len(factors) == 1:
        return torch.ones_like(s)
    before = [*accumulate(factors[:-1], mul)]
    after = [*accumulate(factors[:0:-1], mul)][::-1]
    between = map(mul, before[:-1], after[1:])
    return torch.stack([*map(_number, (after[0], *between, before[-1]))]).to(s.dtype)


PRODUCT = Rule(_value, lambda s, y, gy: gy * leave_one_out(s).conj())


# ── factors of any size ──────────────────────────────────────────────────────────────────────────────────

#: Number of factors, of modulus below 2√2, that are multiplied before the product is scaled again: products of so many
#: are below 2^48, and a product of two such products is below 2^96 (float32: < 2^128).
_RESCALE_AT = 32


@dataclass(frozen=True)
class _Scaled:
    """A number m · 2^e, where m is a product of `count` factors with 1 ≤ |m_k| < 2 and e is an integer.

    If m_k is complex, the larger of |Re m_k| and |Im m_k| is between 1 and 2.

    Autograd treats the exponents as constants. Multiplication by a power of two does not round, so a product of the m_k
    is rounded as the product of the s_k would be.
    """

    m: Tensor
    e: Tensor
    count: int = 1

    @classmethod
    def of(cls, s: Tensor) -> _Scaled:
        with torch.no_grad():
            x = s.detach()
            # Not the modulus of a complex number, which may overflow although neither part does.
            e = _size(x).log2().floor()
            e = torch.where(e.isfinite(), e, 0.0)  # leaves zeros, infinities and NaN unscaled
        return cls(_times_power_of_two(s, -e), e)

    def __mul__(self, other: _Scaled) -> _Scaled:
        m, e, count = self.m * other.m, self.e + other.e, self.count + other.count
        if count < _RESCALE_AT:
            return _Scaled(m, e, count)
        rescaled = _Scaled.of(m)
        return _Scaled(rescaled.m, e + rescaled.e)


def _factors(s: Tensor) -> Sequence[Tensor] | Sequence[_Scaled]:
    """Return numbers of which no product of some overflows or underflows, unless it is the result."""
    dtype = _sufficient(s)
    if dtype is not None:
        return s.to(dtype).unbind()
    scaled = _Scaled.of(s)
    return [*map(_Scaled, scaled.m, scaled.e)]


def _number(x: Tensor | _Scaled) -> Tensor:
    return x if isinstance(x, Tensor) else _times_power_of_two(x.m, x.e)


#: The dtype with more exponents than float32.
_WITH_MORE_EXPONENTS = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _sufficient(s: Tensor) -> torch.dtype | None:
    """Return a dtype in which every product of some of the factors is in range; None if there is none.

    Or if it would take long to tell: values on a GPU, in a graph and in a batch are not read.
    """
    n = len(s)
    if n <= 2 and not s.is_complex():
        return s.dtype  # the only product is the result
    if not (s.is_cpu and is_eager(s.detach()) and s.numel()):  # in a graph the size may be unknown
        return None
    size = _size(s.detach())
    size += size.clone().eq_(0)  # a zero makes no other product leave the range
    least, largest = (log2(x) if 0 < x < inf else nan for x in torch.stack(size.aminmax()).tolist())
    for dtype in (s.dtype, _WITH_MORE_EXPONENTS.get(s.dtype, s.dtype)):
        limits = torch.finfo(dtype)
        # A product of complex numbers is a sum of two products of parts.
        fits = n * max(largest + s.is_complex(), 0) < log2(limits.max)
        if fits and n * min(least, 0) > log2(limits.tiny):
            return dtype
    return None


def _size(x: Tensor) -> Tensor:
    """|x|; of a complex number the larger of |Re x| and |Im x|."""
    return torch.maximum(x.real.abs(), x.imag.abs()) if x.is_complex() else x.abs()


def _times_power_of_two(x: Tensor, e: Tensor) -> Tensor:
    """x · 2^e in two multiplications, neither of which overflows or underflows unless the result does."""
    if x.is_complex():  # each part alone: in a complex multiplication an infinite part makes the other NaN
        x = x.resolve_conj()
        return torch.complex(_times_power_of_two(x.real, e), _times_power_of_two(x.imag, e))
    most = -2 * log2(torch.finfo(e.dtype).tiny)
    e = e.clamp(-most, most)
    half = (e / 2).floor()
    return x * half.exp2() * (e - half).exp2()
