"""Memory layouts of test data, and a list of tensors whose repr is code that makes them again."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from diffcoll.core.errors import message

#: Names for `with_layout`.
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded", "channels_last")


def with_layout(x: Tensor, layout: str) -> Tensor:
    """Copy x into another memory layout; shape and values stay the same.

    >>> import torch
    >>> from diffcoll.testing import strategies
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> y = strategies.with_layout(x, "transposed")
    >>> torch.equal(x, y), y.stride()
    (True, (1, 2))

    Args:
        x: a tensor of any dtype.
        layout: `"contiguous"`; `"transposed"`: the first and the last dimension change places in memory;
            `"strided"`: every second element of a larger tensor; `"offset"`: contiguous, with a non-zero storage
            offset; `"expanded"`: all slices x[i] are the same memory, as after `expand`, so x must not be written to;
            `"channels_last"`: of a 4-D or 5-D tensor.

    Returns:
        A new leaf that requires no gradient. Elements of its memory that do not belong to it are 77.

    Raises:
        ValueError: the layout is unknown, or x cannot have it; `"expanded"` requires that all x[i] are equal.
    """
    x = x.detach().clone(memory_format=torch.contiguous_format)
    if layout not in LAYOUTS:
        raise ValueError(message("with_layout", "layout", repr(layout), f"one of {', '.join(map(repr, LAYOUTS))}"))
    if layout == "channels_last" and x.dim() not in (4, 5):
        raise ValueError(message("with_layout", "x", f'{x.dim()}-D for "channels_last"', "4-D or 5-D"))
    if layout == "expanded" and (x.dim() == 0 or not same(x, x[:1].expand(x.shape))):
        raise ValueError(message("with_layout", "x", 'slices x[i] that differ, for "expanded"', "equal slices"))
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.stack([x, torch.full(x.shape, 77, device=x.device).to(x.dtype)], -1)[..., 0]
    if layout == "offset":
        return torch.cat([torch.full((3,), 77, device=x.device).to(x.dtype), x.reshape(-1)])[3:].view(x.shape)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return x


def layouts_of(dims: int) -> list[str]:
    """Return the layouts that differ from each other for tensors with this number of dimensions."""
    least = {"transposed": 2, "expanded": 1, "channels_last": 4}
    return [name for name in LAYOUTS if dims >= least.get(name, 0) and (name != "channels_last" or dims <= 5)]


class PerRank(list[Tensor]):
    """One tensor per rank; its repr is code with the same values, dtypes and layouts."""

    def __repr__(self) -> str:
        return f"[{', '.join(map(_code, self))}]"


def _code(x: Tensor) -> str:
    """Return code that makes x, for `from diffcoll.testing import strategies` and `import torch`."""
    code = _values(x.detach())
    # Empty tensors have no elements to lay out; of several layouts with equal strides the first is named.
    layout = next((name for name in LAYOUTS if x.numel() and _has(x, name)), "contiguous")
    if layout != "contiguous":
        code = f'strategies.with_layout({code}, "{layout}")'
    return f"{code}.requires_grad_()" if x.requires_grad else code


def _values(x: Tensor) -> str:
    if x.numel() == 0:
        return f"torch.empty({tuple(x.shape)}, dtype={x.dtype})"
    if x.is_complex():
        return f"torch.complex({_values(x.real)}, {_values(x.imag)})"
    values = re.sub(r"\b(inf|nan)\b", r"torch.\1", repr(x.tolist()))
    return f"torch.tensor({values}, dtype={x.dtype})"


def _has(x: Tensor, layout: str) -> bool:
    """Whether x has the strides and the storage offset of a layout."""
    try:
        y = with_layout(x, layout)
    except ValueError:
        return False
    return (x.stride(), x.storage_offset()) == (y.stride(), y.storage_offset())


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have equal shape and values; NaN equals NaN."""
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())
