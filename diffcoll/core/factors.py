"""Factors of which no product overflows or underflows unless it is the result.

Where the sizes of the factors require it, a number is m · 2^e, or is computed in a wider dtype.

note      notes/collectives/reductions.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, isnan, log2, nan
from operator import add
from typing import Any

import torch
from torch import Tensor

from diffcoll.core.torch_private.transforms import is_eager, tangents_ignored


def factors(*stacks: Sequence[Tensor | None], most: int) -> list[list[Any]]:
    """Return the factors in each stack, which can be multiplied in any order.

    Args:
        stacks: the parts of its factors, (N, …) each, see `Polynomial`; None: zero.
        most: the largest number of factors that are multiplied.
    """
    dtype = _sufficient([x for parts in stacks for x in parts if x is not None], most, len(stacks[0]))

    def of(x: Tensor) -> Sequence[Any]:
        if dtype is not None:
            return x.to(dtype).unbind()
        scaled = _Scaled.of(x)
        return [*map(_Scaled, scaled.m, scaled.e)]

    def of_stack(parts: Sequence[Tensor | None]) -> list[Any]:
        if len(parts) == 1 and parts[0] is not None:
            return [*of(parts[0])]
        n = next(len(x) for x in parts if x is not None)
        return [*map(Polynomial, zip(*([None] * n if x is None else of(x) for x in parts), strict=True))]

    return [of_stack(parts) for parts in stacks]


def number(x: Tensor | _Scaled) -> Tensor:
    """Return a product of factors as a tensor."""
    return x if isinstance(x, Tensor) else _times_power_of_two(x.m, x.e)


@dataclass(frozen=True, eq=False, repr=False)
class Polynomial:
    """Σ_A ε^A a^A in ε_1 … ε_L, where ε_i² = 0: the coefficients a^A; the bits of the index are A. None: zero."""

    parts: Sequence[Any]

    def __mul__(self, other: Polynomial) -> Polynomial:
        a, b = self.parts, other.parts

        def part(c: int) -> Any:
            pairs = [(a[i], b[c ^ i]) for i in range(c + 1) if i & ~c == 0]
            terms = [x * y for x, y in pairs if x is not None and y is not None]
            return reduce(add, terms) if terms else None

        return Polynomial([part(c) for c in range(len(a))])


#: Number of factors, of modulus below 2√2, that are multiplied before the product is scaled again: products of so many
#: are below 2^48, and a product of two such products is below 2^96 (float32: < 2^128).
_RESCALE_AT = 32
#: The exponent of zero: below that of any other number.
_OF_ZERO = -1e30


@dataclass(frozen=True, eq=False, repr=False)
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
        with torch.no_grad(), tangents_ignored():
            # Not the modulus of a complex number, which may overflow although neither part does.
            e = _size(s).log2().floor().nan_to_num(0.0, 0.0, _OF_ZERO)  # leaves infinities and NaN unscaled
        return cls(_times_power_of_two(s, -e), e)

    def __mul__(self, other: _Scaled) -> _Scaled:
        m, e, count = self.m * other.m, self.e + other.e, self.count + other.count
        return _Scaled(m, e, count) if count < _RESCALE_AT else _rescaled(m, e)

    def __add__(self, other: _Scaled) -> _Scaled:
        e = torch.maximum(self.e, other.e)
        return _rescaled(_times_power_of_two(self.m, self.e - e) + _times_power_of_two(other.m, other.e - e), e)


def _rescaled(m: Tensor, e: Tensor) -> _Scaled:
    scaled = _Scaled.of(m)
    return _Scaled(scaled.m, e + scaled.e)


#: The dtype with more exponents than float32.
_WITH_MORE_EXPONENTS = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _sufficient(xs: Sequence[Tensor], most: int, parts: int) -> torch.dtype | None:
    """Return a dtype in which every product of up to `most` of the factors is in range; None if there is none.

    Or if it would take long to tell: values on a GPU, in a graph and in a batch are not read.
    """
    dtype, is_complex = xs[0].dtype, xs[0].is_complex()
    if most <= 2 and parts == 1 and not is_complex:
        return dtype  # the only product is the result
    if not all(x.is_cpu and is_eager(x) and x.numel() for x in xs):  # in a graph the size may be unknown
        return None
    bounds = [_bounds(x.detach()) for x in xs]
    if any(isnan(bound) for pair in bounds for bound in pair):
        return None
    least, largest = min(low for low, _ in bounds), max(high for _, high in bounds)
    # A product of polynomials is a sum of up to parts^most products, and one of complex numbers of two.
    largest = max(largest + is_complex + log2(parts), 0)
    for wide in (dtype, _WITH_MORE_EXPONENTS.get(dtype, dtype)):
        limits = torch.finfo(wide)
        lowest = log2(limits.tiny) - (log2(limits.eps) if parts > 1 else 0)  # a sum may be smaller than its terms
        if most * largest < log2(limits.max) and most * min(least, 0) > lowest:
            return wide
    return None


def _bounds(x: Tensor) -> tuple[float, float]:
    """Return log2 of the least and of the largest number; a zero makes no other product leave the range."""
    size = _size(x)
    size += size.clone().eq_(0)
    least, largest = (log2(x) if 0 < x < inf else nan for x in torch.stack(size.aminmax()).tolist())
    return least, largest


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
