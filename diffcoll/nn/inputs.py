"""Checks of what a loss is given, and the precision it is computed in."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from diffcoll.core._torch import is_vmapped
from diffcoll.core.errors import message

__all__ = ["FLOATS", "HALF", "check_number", "check_rows", "in_full_precision", "without_autocast"]

#: Dtypes whose sums are computed in float32.
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)


def check_number(name: str, **arguments: float) -> None:
    """Raise unless all these arguments of the loss `name` are finite numbers, not negative."""
    for argument, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(message(name, argument, type(value).__name__, "a number"))
        if not 0 <= value < math.inf:
            raise ValueError(message(name, argument, repr(value), "a finite non-negative number"))


def in_full_precision(name: str, **arguments: Tensor) -> list[Tensor]:
    """Return these arguments of the loss `name` in their common dtype, which is float32 or float64."""
    for argument, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(message(name, argument, type(x).__name__, "a tensor"))
        if x.dtype not in FLOATS:
            raise TypeError(message(name, argument, str(x.dtype), "a floating-point tensor", "pass x.float()"))
    dtype = reduce(torch.promote_types, (x.dtype for x in arguments.values()), torch.float32)
    return [x.to(dtype) for x in arguments.values()]


def without_autocast(x: Tensor) -> torch.autocast:
    """Return a context in which autocast does not cast the products of tensors like x to half precision."""
    return torch.autocast(x.device.type, enabled=False)


def check_rows(name: str, rows: int, count: Tensor, least: int) -> None:
    """Raise, on all ranks, if the ranks together have fewer rows than a loss is defined for.

    Only a rank with few rows reads the count, which on a GPU makes the host wait: if a rank has enough, all have.

    Args:
        name: of the loss.
        rows: number of this rank's rows.
        count: number of all ranks' rows, 0-d.
        least: number of rows that are enough.
    """
    # A traced or batched count cannot be read. The loss is what the formula gives then, NaN for no rows.
    if rows >= least or torch.compiler.is_compiling() or is_vmapped(count):
        return
    total = int(count)
    if total < least:
        remedy = "skip this step on all ranks"
        raise ValueError(message(name, "batch", f"{total} rows on all ranks together", f"at least {least}", remedy))
