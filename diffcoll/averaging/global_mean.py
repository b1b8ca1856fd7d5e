"""A mean over ranks for logging."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.core.errors import message
from diffcoll.core.expect import is_number, not_negative
from diffcoll.core.groups import resolve
from diffcoll.engines.types import Group


def global_mean(value: float | Tensor, weight: float | Tensor | None = None, *, group: Group = None) -> Tensor:
    """Logging: mean of a value over the ranks, Σ_r w_r v_r / Σ_r w_r, without a gradient.

    >>> import diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda loss, tokens: dc.global_mean(loss, tokens).item(), [2.0, 5.0], [100, 50])
    [3.0, 3.0]

    Args:
        value: a number or a 0-d tensor, or a tensor of the same shape on all ranks. It is averaged in float64, complex
            values in complex128; ranks may differ in dtype, if all are real or all complex.
        weight: None: every rank counts the same. Otherwise a non-negative number or a 0-d tensor. The value of a rank
            of weight zero is ignored, even if it is NaN; if all weights are zero, the mean is NaN.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        A tensor of the value's shape and dtype, float64 for a number, float32 for an integer or half-precision tensor,
        complex64 for complex32; the same on every rank but for the dtype.

    Raises:
        TypeError, ValueError: an argument is wrong on its own.

    Source: notes/training/averaging.md.
    """
    if not isinstance(value, Tensor) and not is_number(value):
        raise TypeError(message("global_mean", "value", type(value).__name__, "a number or a tensor"))
    # A number is put on the group's control device: not every backend can send CPU tensors.
    device = resolve(group, "global_mean").control_device
    v = value.detach() if isinstance(value, Tensor) else _number(value, device)
    w = _number(checked_count("global_mean", "weight", 1.0 if weight is None else weight), v.device)
    wide = v.to(torch.promote_types(v.dtype, torch.float64))  # messages of two dtypes end a gloo process
    weighted = torch.where(w == 0, torch.zeros_like(wide), wide * w)
    total = all_reduce(torch.stack([weighted, w.to(wide).expand(v.shape)]), "sum", group=group)
    return (total[0] / total[1]).to(torch.promote_types(v.dtype, torch.float32))


def _number(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a 0-d tensor; a Python number is filled in on the device, since a copy would block the host."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def checked_count(name: str, argument: str, value: float | Tensor) -> float | Tensor:
    """Return a non-negative number, or a 0-d tensor, whose value is not checked."""
    expected = "a number or a 0-d tensor"
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(message(name, argument, f"a tensor of {tuple(value.shape)} {value.dtype}", expected))
        return value.detach().reshape(())
    not_negative(name, expected, **{argument: value})
    return value
