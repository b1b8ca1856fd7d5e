"""Random numbers that depend on the rank, and how far tensors are from each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Users draw their numbers from small seeds.
_SALT = 0x6469_6666_636F_6C6C


def real_inner(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩, a real number."""
    total = (a.conj() * b).sum()
    return total.real if total.is_complex() else total


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, rank: int, stream: int) -> Tensor:
    """Return random numbers that depend on the seed, the rank and the stream."""
    generator = torch.Generator().manual_seed(_SALT + (seed * 1000 + rank) * 10 + stream)
    return torch.randn(shape, dtype=dtype, generator=generator)


def relative_errors(got: Tensor, expected: Tensor, unit: float | Tensor) -> Tensor:
    """Return |got − expected| / unit; inf if shapes differ, or where one is not finite and the other another number."""
    if got.shape != expected.shape:
        return torch.full((1,), math.inf)
    # Equal infinities are right, and so are NaNs in the same places.
    same = (got == expected) | (got.isnan() & expected.isnan())
    difference = torch.where(same, 0, got - expected).abs().double() / unit
    return difference.nan_to_num(nan=math.inf, posinf=math.inf)


def largest(*tensors: Tensor) -> float:
    """Return the largest finite |x| of these tensors, 0 if there is none."""
    finite = [t.detach().abs()[t.isfinite()] for t in tensors if t.dtype != torch.bool]
    return max((float(x.max()) for x in finite if x.numel()), default=0.0)


def differentiable(x: object) -> bool:
    """Whether x is a tensor that can have a gradient."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and the same numbers, up to rounding."""
    if a.shape != b.shape or not differentiable(b):
        return torch.equal(a, b.to(a.dtype))
    eps = torch.finfo(b.dtype).eps ** (2 / 3)
    return torch.allclose(a, b.to(a.dtype), rtol=10 * eps, atol=eps * largest(b))
