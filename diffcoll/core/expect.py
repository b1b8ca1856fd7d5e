"""Reads one argument: a choice, a flag, a number, an integer, sizes, dimensions of x, a tensor with a gradient."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import inf
from typing import Any, cast

import torch
from torch import Tensor

from diffcoll.core.errors import message


def choice(name: str, argument: str, value: object, allowed: Sequence[object], remedy: str = "") -> None:
    """Raise unless the value is one of those allowed."""
    if value not in allowed:
        *others, last = (f'"{each}"' if isinstance(each, str) else str(each) for each in allowed)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(message(name, argument, repr(value), expected, remedy))


def flag(name: str, argument: str, value: object) -> bool:
    """Return True or False; raise for anything else, also for 1 and 0."""
    if value is not True and value is not False:
        raise TypeError(message(name, argument, type(value).__name__, "True or False"))
    return value


def of_group(value: object) -> str:
    """Return the remedy if the value is a group, which mpi4py and torch.distributed take at other positions."""
    kinds = {kind.__name__ for kind in type(value).__mro__}
    return "pass the group by name, group=…" if kinds & {"ProcessGroup", "DeviceMesh", "Comm"} else ""


def is_number(value: object) -> bool:
    """Whether the value is an int or a float; bool is an int of Python, and no number here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def not_negative(name: str, expected: str = "a number", /, **arguments: float) -> None:
    """Raise unless all these arguments are finite and not negative; `expected` names all types that may be passed."""
    for argument, value in arguments.items():
        if not is_number(value):
            raise TypeError(message(name, argument, type(value).__name__, expected))
        if not 0 <= value < inf:
            raise ValueError(message(name, argument, repr(value), "a finite non-negative number"))


def integer(name: str, argument: str, value: Any, least: int | None = None) -> int:
    """Return an integer, which may be of NumPy or a symbol of the compiler; raise if it is below `least`."""
    expected = "an integer" if least is None else f"an integer of at least {least}"
    if type(value) is int or isinstance(value, torch.SymInt):
        number = cast(int, value)  # index() would turn a symbol of the compiler into a constant
    else:
        try:
            if isinstance(value, bool):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise TypeError(message(name, argument, type(value).__name__, expected, of_group(value))) from None
    if least is not None and number < least:
        raise ValueError(message(name, argument, number, expected))
    return number


def sizes(name: str, argument: str, value: Any, n: int, own: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Return a list of n sizes, one per rank; `own`: this rank, and its size, where "auto" could ask for it."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        either = " or None" if own is None else ', "auto" or None'
        got = repr(value) if isinstance(value, str) else type(value).__name__
        raise ValueError(message(name, argument, got, f"a list of {n} sizes, one per rank{either}"))
    listed = tuple(integer(name, argument, size) for size in value)
    if len(listed) != n or any(size < 0 for size in listed):
        raise ValueError(message(name, argument, list(listed), f"{n} sizes of zero or more, one per rank"))
    if own is not None and listed[own[0]] != own[1]:
        expected, remedy = f"{own[1]} at position {own[0]}, the size of this rank's block", '"auto" asks every rank'
        raise ValueError(message(name, argument, list(listed), expected, remedy))
    return listed


def dim(name: str, argument: str, value: Any, x: Tensor, new: bool = False) -> int:
    """Return a dimension counted from the front; `new`: of the result, which has one dimension more than x."""
    n = x.dim() + new
    if n == 0:
        raise ValueError(message(name, "x", "a 0-d tensor", "at least one dimension", "x.reshape(1) has one"))
    d = integer(name, argument, value)
    if not -n <= d < n:
        expected = f"a dimension from {-n} to {n - 1}, since x has shape {tuple(x.shape)}"
        raise ValueError(message(name, argument, d, expected))
    return d % n


def dims(name: str, argument: str, value: Any, x: Tensor) -> tuple[int, ...]:
    """Return one or several different dimensions of x, counted from the front, in ascending order."""
    found = sorted([dim(name, argument, d, x) for d in (value if isinstance(value, Sequence) else (value,))])
    if not found or len({*found}) < len(found):
        raise ValueError(message(name, argument, repr(value), "different dimensions, at least one"))
    return tuple(found)


def floating(name: str, argument: str, x: object, remedy: str, or_complex: bool = False) -> Tensor:
    """Return x; raise unless it is a tensor of floating-point numbers, or of complex ones if they are accepted too."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or (or_complex and x.is_complex())):
        expected = "a floating-point or complex tensor" if or_complex else "a floating-point tensor"
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(message(name, argument, got, expected, remedy))
    return x
