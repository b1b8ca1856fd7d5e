"""The law of tolerance: what is right, wrong or not decided, by the rounding that one process was measured to have.

An error up to the tolerance t of the dtype is right. Otherwise one process runs again with other last digits of its
inputs, parameters and buffers, and the root mean square of the changes is the noise. Of what one rank has,

    the slope s = ⟨got, wanted⟩ / ⟨wanted, wanted⟩ has a noise n above 1/10           not decided, or wrong if it
                                                                                       is 10 times the noise off
    a number, row or column is too far from what is wanted, in terms of its noise      wrong
    |s − 1| > max(t, 5 n)                                                              wrong
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffcoll.core.torch_private.tracing import TorchDispatchMode
from diffcoll.core.trees import tree_flatten
from diffcoll.testing.numbers import differentiable

#: How often one process runs with other last digits, and again before anything is wrong, in dtypes less precise than
#: float64: there the noise of few samples is sometimes ten times too small.
SAMPLES = 4, 16
#: How many times its noise a number, and the root mean square of a row or column, may be off.
_NUMBER, _BLOCK = 10.0, 5.0
#: The noise of a block counts so many samples of the whole tensor, too.
_SHARED = 8
#: A slope is not decided if its noise is above this, and may be off by so many times its noise.
_UNDECIDED, _SLOPE = 0.1, 5.0


def tolerance_of(tensors: Iterable[Tensor]) -> float:
    """Return the default tolerance, by the least precise dtype: float64 4e-10, float32 2e-4, halves 4 eps."""
    eps = eps_of(least_precise(tensors))
    return float(4 * eps if eps > 1e-5 else 10 * eps ** (2 / 3))


def least_precise(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of these tensors that rounds most."""
    return max((x.dtype for x in tensors if differentiable(x)), key=eps_of, default=torch.float64)


def eps_of(dtype: torch.dtype) -> float:
    """Return the distance of 1 to the next number."""
    return torch.finfo(dtype).eps


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the least precise dtype of a computation; integers in a floating-point dtype are no computation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        for x in filter(differentiable, tree_flatten(y)[0] if isinstance(y, (list, tuple)) else [y]):
            rounds_more = self.dtype is None or eps_of(x.dtype) > eps_of(self.dtype)
            if rounds_more and not x.is_meta and not bool((x.abs().double() % 1 == 0).all()):
                self.dtype = x.dtype
        return y


class Verdict(NamedTuple):
    """What is said of the numbers that one rank has of a quantity."""

    ok: bool
    decided: bool = True
    #: Factors nearer to 1 are not seen.
    seen: float = 0.0


def judged(
    got: Tensor, wanted: Tensor, changes: Tensor, shared: float, blocks: Sequence[Tensor], tolerance: float
) -> Verdict:
    """Judge what one rank has, whose error is above the tolerance.

    Args:
        got: the rank's numbers, flat.
        wanted: what they should be.
        changes: how each of them changed on one process, by sample.
        shared: the root mean square of the changes of the whole tensor.
        blocks: for each way to divide the numbers the block that each is in; the first is each number alone.
        tolerance: t.
    """
    if not got.isfinite().all():
        return Verdict(ok=False)
    if got.is_complex():
        blocks = [block.repeat_interleave(2) for block in blocks]
    got, wanted, changes = map(as_real, (got, wanted, changes))
    squares, of_samples = (got - wanted).square(), changes.square().sum(0)
    norm = float(wanted @ wanted)
    of_slope = float((changes @ wanted / norm).square().mean().sqrt()) if norm else math.inf
    if not of_slope <= _UNDECIDED:  # the errors of its numbers depend on each other: only a gross one is wrong
        return Verdict(float(squares.mean()) <= _NUMBER**2 * max(float(changes.square().mean()), shared**2), False)
    for block, most in zip(blocks, (_NUMBER, _BLOCK, _BLOCK), strict=False):
        error, samples, count = (torch.bincount(block, x) for x in (squares, of_samples, torch.ones_like(squares)))
        noise = (samples + _SHARED * shared**2) / (len(changes) * count + _SHARED)
        if bool((error > most**2 * noise * count).any()):
            return Verdict(ok=False)
    slope, seen = float(got @ wanted) / norm, max(tolerance, _SLOPE * of_slope)
    return Verdict(abs(slope - 1) <= seen, seen=seen)


def as_real(x: Tensor) -> Tensor:
    """Return numbers as real ones in float64; the last dimension of complex ones becomes twice as long."""
    return torch.view_as_real(x.resolve_conj()).flatten(-2).double() if x.is_complex() else x.double()
