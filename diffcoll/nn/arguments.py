"""What losses are given, and the precision they are computed in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from diffcoll.core import expect
from diffcoll.core.dtypes import FLOATS
from diffcoll.core.errors import message


def check_features(name: str, dims: tuple[int, ...] = (2,), **features: Tensor) -> None:
    """Raise unless all features are floating-point tensors of one shape, dtype and device, with a row per sample."""
    (first, x), *others = features.items()
    shape = "(b, D)" if dims == (2,) else "(b, D) or (b, views, D)"
    for argument, y in features.items():
        check_floats(name, argument, y, shape)
        if y.ndim not in dims:
            remedy = "flatten the features to one row per sample: x.flatten(1)"
            raise ValueError(message(name, argument, f"shape {tuple(y.shape)}", f"shape {shape}", remedy))
    for argument, y in others:
        if y.shape != x.shape:
            remedy = f"row i of {argument} belongs to row i of {first}"
            got = f"shape {tuple(y.shape)}"
            raise ValueError(message(name, argument, got, f"shape {tuple(x.shape)}, as {first} has", remedy))
        check_alike(name, argument, y, first, x)


def check_floats(name: str, argument: str, x: Tensor, shape: str) -> None:
    """Raise unless x is a tensor of floating-point numbers; `shape` is the expected one in words."""
    if not isinstance(x, Tensor):
        raise TypeError(message(name, argument, type(x).__name__, f"a tensor of shape {shape}"))
    if x.dtype not in FLOATS:
        expected = "float16, bfloat16, float32 or float64"
        raise TypeError(message(name, argument, str(x.dtype), expected, f"pass {argument}.float()"))


def check_alike(name: str, argument: str, y: Tensor, first: str, x: Tensor) -> None:
    """Raise unless y has the dtype and the device of x, the argument `first`."""
    if y.dtype != x.dtype:
        raise TypeError(message(name, argument, str(y.dtype), f"{x.dtype}, as {first} has", "convert one of them"))
    if y.device != x.device:
        raise ValueError(message(name, argument, f"on {y.device}", f"{x.device}, as {first} is", "move one of them"))


def check_marks(name: str, argument: str, x: Tensor, rows: Tensor) -> Tensor:
    """Return labels or ids as int64; raise unless they are integers, one for each row of the features."""
    if not isinstance(x, Tensor) or x.shape != rows.shape[:1]:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        expected = f"a tensor of shape ({len(rows)},), an integer for each row"
        raise (ValueError if isinstance(x, Tensor) else TypeError)(message(name, argument, got, expected))
    if x.is_floating_point() or x.is_complex():  # NaN equals no number, and large numbers are rounded to the same one
        raise TypeError(message(name, argument, str(x.dtype), "integers or bool", f"pass {argument}.long()"))
    if x.device != rows.device:
        raise ValueError(message(name, argument, f"on {x.device}", f"{rows.device}, as the features are"))
    return x.detach().long()


def scalar(name: str, argument: str, x: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """Return a number, or a tensor with one element as a 0-d tensor of this dtype."""
    expected = "a number, or a floating-point tensor with one element"
    if isinstance(x, Tensor):
        if x.numel() != 1 or not x.is_floating_point():
            raise ValueError(message(name, argument, f"a {x.dtype} tensor of shape {tuple(x.shape)}", expected))
        return x.reshape(()).to(dtype)
    if not expect.is_number(x):
        raise TypeError(message(name, argument, type(x).__name__, expected))
    return x


def in_full_precision(name: str, **arguments: Tensor) -> list[Tensor]:
    """Return these arguments of the loss `name` in their common dtype, which is float32 or float64."""
    for argument, x in arguments.items():
        check_floats(name, argument, x, "(b, …)")
    dtype = reduce(torch.promote_types, (x.dtype for x in arguments.values()), torch.float32)
    return [x.to(dtype) for x in arguments.values()]


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast does not cast the products of tensors like x to half precision."""
    if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(x.device.type):
        return nullcontext()  # an autocast that is off already takes longer than a small product
    return torch.autocast(x.device.type, enabled=False)
