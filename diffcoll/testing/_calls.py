"""Checks the arguments of `simulate` and `spawn`, which are called like `map`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.core.joint import is_joint
from diffcoll.core.torch_private.transforms import is_within_transform

_EXPECTED = "a sequence with one element for each rank"
#: Iterators with more elements are taken to be endless, e.g. itertools.count().
_MOST = 1 << 16


def per_rank_arguments(name: str, per_rank: tuple[Sequence[Any], ...]) -> list[tuple[Any, ...]]:
    """Return the arguments of each rank's call."""
    _refuse_surroundings(name)
    if not per_rank:
        raise TypeError(f"{name}: got no per-rank arguments, expected at least one sequence; pass e.g. range(3)")
    columns = [_elements(name, number, column) for number, column in enumerate(per_rank)]
    rows: list[tuple[Any, ...]] = []
    ended = [False]
    while not any(ended) and len(rows) <= _MOST:
        row = [next(column, _end) for column in columns]
        ended = [element is _end for element in row]
        rows.append(tuple(row))
    rows.pop()
    n = len(rows)
    if n == _MOST:
        raise ValueError(f"{name}: got sequences of {n} or more elements, expected N, one for each rank")
    if not all(ended) or n == 0:
        lengths = [_length(column, n + (not end)) for column, end in zip(per_rank, ended, strict=True)]
        words = ", ".join(lengths)
        raise ValueError(f"{name}: got sequences of lengths [{words}], expected N elements in each, one for each rank")
    return rows


def seconds(name: str, timeout: object) -> float:
    """Return a timeout; the system's calls accept no longer ones."""
    expected = "a number of seconds above 0, at most a million"
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(message(name, "timeout", repr(timeout), expected))
    if not 0 < (given := float(timeout)) <= 1e6:
        raise ValueError(message(name, "timeout", repr(timeout), expected))
    return given


def missing(name: str, what: str, extra: str) -> ModuleNotFoundError:
    """Return the error for a package of an optional extra that is not installed."""
    return ModuleNotFoundError(
        f"{name}: {what} is not installed; from a checkout of diffcoll: pip install '.[{extra}]'"
    )


def _refuse_surroundings(name: str) -> None:
    """Raise within contexts that belong to the calling thread and would not apply to the ranks."""
    if is_within_transform():
        raise RuntimeError(
            f"{name}: called within a transform of torch.func (grad, vjp, jvp, jacrev, vmap, …), expected a call "
            "outside of transforms: they belong to one thread, and ranks are other threads or processes; transform "
            "within the function that each rank runs, or differentiate the results of simulate by torch.autograd"
        )
    if is_joint():
        raise RuntimeError(
            f"{name}: called within joint_backward(), expected a call outside of it: the region belongs to this "
            "thread, and ranks are other threads or processes; enter it in the function that each rank runs"
        )


_end = object()


def _elements(name: str, number: int, column: object) -> Iterator[Any]:
    """Iterate over the elements of one per-rank argument."""
    got, remedy = type(column).__name__, "for one value on all ranks pass [value] * N, or use it in fn"
    if isinstance(column, Mapping):
        remedy = f"list(d.values()) if it holds one value for each rank; {remedy}"
    elif isinstance(column, (set, frozenset)):
        remedy = "a set has no order; pass a sorted list"
    elif isinstance(column, Tensor) and column.dim() == 0:
        got = "a 0-d tensor"
    else:
        try:
            return iter(column)  # type: ignore[call-overload,no-any-return]  # raises TypeError if not iterable
        except TypeError:
            if not isinstance(column, bool) and hasattr(column, "__index__") and column.__index__() > 0:
                got, n = repr(column), column.__index__()
                remedy = f"range({n}) gives each of {n} ranks its number; {remedy}"
    raise TypeError(message(name, f"per_rank[{number}]", got, _EXPECTED, remedy))


def _length(column: object, at_least: int) -> str:
    """Return the length of one per-rank argument, of which `at_least` elements were read."""
    try:
        return str(len(column))  # type: ignore[arg-type]
    except TypeError:
        return str(at_least)
