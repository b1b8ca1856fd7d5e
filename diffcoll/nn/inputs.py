"""Checks of what a loss is given, and the precision it is computed in."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from diffcoll.core.dtypes import FLOATS
from diffcoll.core.errors import message
from diffcoll.core.groups import get_world_size
from diffcoll.core.torch_private.tracing import assert_in_graph, is_traced
from diffcoll.core.torch_private.transforms import is_vmapped, is_within_transform, without_transforms
from diffcoll.engines.types import Group


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor, without an import of torch.distributed."""
    if torch.compiler.is_compiling():  # Dynamo cannot iterate over the classes of a Parameter
        return type(x).__name__ == "DTensor"
    return any(c.__name__ == "DTensor" for c in type(x).__mro__)


def in_full_precision(name: str, **arguments: Tensor) -> list[Tensor]:
    """Return these arguments of the loss `name` in their common dtype, which is float32 or float64."""
    for argument, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(message(name, argument, type(x).__name__, "a tensor"))
        if x.dtype not in FLOATS:
            raise TypeError(message(name, argument, str(x.dtype), "a floating-point tensor", "pass x.float()"))
    dtype = reduce(torch.promote_types, (x.dtype for x in arguments.values()), torch.float32)
    return [x.to(dtype) for x in arguments.values()]


def dtype_of_messages(x: Tensor, group: Group) -> torch.dtype:
    """Return the dtype in which ranks send statistics of tensors like x; float64, as x may be float32 on other ranks.

    In a message of two dtypes gloo ends a process, and MPI fails on some ranks or gives wrong numbers.
    """
    return torch.float64 if get_world_size(group) > 1 else x.dtype


def saveable(x: Tensor) -> Tensor:
    """Return x, or a copy if it was made in inference mode and autograd, which does not save such tensors, is on."""
    return x.clone() if not torch.compiler.is_compiling() and torch.is_grad_enabled() and x.is_inference() else x


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast does not cast the products of tensors like x to half precision."""
    if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(x.device.type):
        return nullcontext()  # an autocast that is off already takes longer than a small product
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


def no_fractions(x: Tensor, tolerance: float) -> Tensor:
    """Return a 0-d tensor: whether a value of x is outside [0, 1] by more than the tolerance. NaN is not."""
    return ((x.detach() - 0.5).abs() > 0.5 + tolerance).any()


def asserted(loss: Tensor, right: Tensor, text: str) -> Tensor:
    """Return the loss; when it is computed, raise a RuntimeError if the 0-d bool `right` is False, without waiting.

    Within a transform no assertion can be traced: the loss is NaN then.
    """
    if is_within_transform():
        return loss.masked_fill(~right, math.nan)
    assert_in_graph(right, text)
    return loss


def check_fractions(
    name: str, loss: Tensor, wrong: Tensor, tolerance: float, **arguments: tuple[Tensor, str]
) -> Tensor:
    """Return the loss; raise, on all ranks, if values of an argument were outside [0, 1] on any rank.

    Args:
        name: of the loss.
        loss: what is returned.
        wrong: for each argument, the number of ranks where it is `no_fractions`; the same on all ranks.
        tolerance: as of `no_fractions`.
        arguments: each argument on this rank, and the remedy.
    """
    expected = "values in [0, 1] on every rank"
    if torch.compiler.is_compiling() or is_traced(wrong):
        for ranks, (argument, (_, remedy)) in zip(wrong.unbind(), arguments.items(), strict=True):
            text = message(name, argument, "values outside [0, 1]", expected, remedy)
            loss = asserted(loss, ranks == 0, text)
        return loss
    if bool(without_transforms(wrong.detach()).any()):
        for ranks, (argument, (x, remedy)) in zip(wrong.unbind(), arguments.items(), strict=True):
            if bool(without_transforms(ranks.detach()).any()):
                raise ValueError(message(name, argument, _range(x, tolerance), expected, remedy))
    return loss


def _range(x: Tensor, tolerance: float) -> str:
    """Return in words what values outside [0, 1] a rank has."""
    values = without_transforms(x.detach())
    if bool(no_fractions(values, tolerance)):
        return f"values from {values.min().item():.4g} to {values.max().item():.4g}"
    return "values outside [0, 1] on another rank"
