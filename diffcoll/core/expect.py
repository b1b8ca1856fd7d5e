"""Checks of arguments: a choice, a flag, a number, an integer, dimensions of x, a tensor with a gradient."""

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


def fraction(name: str, argument: str, value: float) -> None:
    """Raise unless the value is a number from 0 to 1."""
    not_negative(name, **{argument: value})
    if value > 1:
        raise ValueError(message(name, argument, value, "a number from 0 to 1"))


def integer(name: str, argument: str, value: Any, least: int | None = None) -> int:
    """Return an integer, which may be of NumPy or a symbol of the compiler; raise if it is below `least`."""
    expected = "an integer" if least is None else f"an integer of at least {least}"
    try:
        number = _index(value)
    except TypeError:
        got = type(value).__name__ if least is None else repr(value)
        raise TypeError(message(name, argument, got, expected)) from None
    if least is not None and number < least:
        raise ValueError(message(name, argument, number, expected))
    return number


def dims(
    name: str,
    argument: str,
    value: Any,
    x: Tensor,
    types: str = "an integer or a sequence of integers",
    values: str = "different dimensions from {0} to {1}, at least one, since x has shape {2}",
) -> tuple[int, ...]:
    """Return one or several different dimensions of x, counted from the front, in ascending order."""
    n = x.dim()
    try:
        listed = [_index(d) for d in (value if isinstance(value, Sequence) else (value,))]
    except TypeError:
        raise TypeError(message(name, argument, repr(value), types)) from None
    if not listed or not all(-n <= d < n for d in listed) or len({d % n for d in listed}) < len(listed):
        raise ValueError(message(name, argument, repr(value), values.format(-n, n - 1, tuple(x.shape))))
    return tuple(sorted(d % n for d in listed))


def floating(name: str, argument: str, x: object, remedy: str, or_complex: bool = False) -> Tensor:
    """Return x; raise unless it is a tensor of floating-point numbers, or of complex ones if they are accepted too."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or (or_complex and x.is_complex())):
        expected = "a floating-point or complex tensor" if or_complex else "a floating-point tensor"
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(message(name, argument, got, expected, remedy))
    return x


def _index(value: Any) -> int:
    if type(value) is int or isinstance(value, torch.SymInt):
        return cast(int, value)  # index() would turn a symbol of the compiler into a constant
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)
