"""Precision of dtypes: the wider one in which half precision is computed, and the rounding that comparisons allow."""

from __future__ import annotations

import math

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the library computes sums of this one; others than half precisions are their own."""
    return _WIDER.get(dtype, dtype)


def rounding(dtype: torch.dtype) -> float:
    """Return the relative difference below which two results are equal up to rounding; 0 for exact dtypes."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return min(math.sqrt(torch.finfo(dtype).eps), 0.5)  # float8_e8m0fnu has an eps of 1
