"""Checks of what losses are given, and the precision they are computed in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from diffcoll.core import expect
from diffcoll.core.dtypes import wider
from diffcoll.core.errors import message
from diffcoll.core.torch_private.tracing import assume

#: A number, or a tensor with one element.
Number = Tensor | float
_SHAPES = {2: "(b, D)", 3: "(b, n, D)"}


def check_rows(
    name: str, argument: str, x: Tensor, like: Tensor | None = None, dims: tuple[int, ...] = (2,), shared: bool = False
) -> None:
    """Raise unless x is floating-point, with b rows and D features; with `like`, of its b, D and dtype.

    With `shared`, two dimensions are (K, D), of any number of rows.
    """
    expect.floating(name, argument, x, f"pass {argument}.float()")
    like = x if like is None else like
    rows = x.shape[:1] if shared and x.ndim == 2 else like.shape[:1]
    if x.ndim not in dims or x.shape[:1] != rows or x.shape[-1] != like.shape[-1]:
        expected = f"{' or '.join(_SHAPES[n] for n in dims)}, with the b and D of the first argument"
        raise ValueError(message(name, argument, f"shape {tuple(x.shape)}", expected))
    if x.dtype != like.dtype:
        raise TypeError(message(name, argument, x.dtype, f"{like.dtype}, as the first argument", "convert one of them"))


def check_marks(name: str, x: Tensor, **marks: Tensor | None) -> dict[str, Tensor]:
    """Return labels or ids, if there are any, as int64; raise unless they are integers, one for each row of x."""
    found = {}
    for argument, mark in marks.items():
        if mark is None:
            continue
        if not isinstance(mark, Tensor) or mark.is_floating_point() or mark.is_complex():
            got = mark.dtype if isinstance(mark, Tensor) else type(mark).__name__
            raise TypeError(message(name, argument, got, "a tensor of integers"))
        if mark.shape != x.shape[:1]:
            expected = f"shape ({x.shape[0]},), an integer for each row"
            raise ValueError(message(name, argument, f"shape {tuple(mark.shape)}", expected))
        found[argument] = mark.detach().long()
    return found


def check_exclude(
    name: str, argument: str, mask: Tensor | None, rows: int, columns: int | None = None
) -> Tensor | None:
    """Return the mask, if there is one; raise unless it is a bool matrix with so many rows, and columns if given."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(message(name, argument, got, "a bool tensor"))
    if mask.ndim != 2 or mask.shape[0] != rows or columns not in (None, mask.shape[1]):
        expected = f"two dimensions, {rows} rows" + ("" if columns is None else f", {columns} columns")
        raise ValueError(message(name, argument, f"shape {tuple(mask.shape)}", expected))
    return mask


def check_columns(name: str, exclude: Tensor | None, columns: int) -> None:
    """Raise unless the mask, if there is one, has so many columns."""
    if exclude is None:
        return
    if torch.compiler.is_compiling():  # where all ranks' number of columns has no value
        assume(exclude.shape[1] == columns)
    if exclude.shape[1] != columns:
        expected = f"{columns}, one for each row of all ranks"
        raise ValueError(message(name, "exclude", f"{exclude.shape[1]} columns", expected))


def check_chunk_size(name: str, chunk_size: int | None) -> int | None:
    """Return it; raise unless it is None or a positive integer."""
    return None if chunk_size is None else expect.integer(name, "chunk_size", chunk_size, least=1)


def scalar(name: str, argument: str, x: Number, like: Tensor) -> Number:
    """Return a number, or a tensor with one element as a 0-d tensor of the dtype that logits of `like` have."""
    expected = "a number, or a floating-point tensor with one element"
    if isinstance(x, Tensor):
        if x.numel() != 1 or not x.is_floating_point():
            raise ValueError(message(name, argument, f"a {x.dtype} tensor of shape {tuple(x.shape)}", expected))
        return x.reshape(()).to(wider(like.dtype))
    if not expect.is_number(x):
        raise TypeError(message(name, argument, type(x).__name__, expected))
    return x


def in_full_precision(name: str, **arguments: Tensor) -> list[Tensor]:
    """Return these arguments of the loss `name` in their common dtype, which is float32 or float64."""
    for argument, x in arguments.items():
        expect.floating(name, argument, x, f"pass {argument}.float()")
    dtype = reduce(torch.promote_types, (x.dtype for x in arguments.values()), torch.float32)
    return [x.to(dtype) for x in arguments.values()]


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast does not cast the products of tensors like x to half precision."""
    if x.is_meta or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)):
        return nullcontext()  # an autocast that is off already takes longer than a small product
    return torch.autocast(x.device.type, enabled=False)
