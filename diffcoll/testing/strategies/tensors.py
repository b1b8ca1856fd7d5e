"""One tensor per rank: numbers of rows, values, dtypes and memory layouts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.core.expect import integer
from diffcoll.testing.layouts import LAYOUTS, PerRank, layouts_of, same, with_layout
from diffcoll.testing.strategies.sizes import Draw, integers, worlds

_NAME = "per_rank_tensors"
#: Number of values drawn for one tensor; larger tensors repeat them. A prime: rows of other lengths do not repeat.
_DRAWN = 61

_Rows = Literal["uneven", "equal"] | Sequence[int] | None


def per_rank_tensors(
    n: int | st.SearchStrategy[int] | None = None,
    shape: Sequence[int] | st.SearchStrategy[Sequence[int]] | None = None,
    *,
    rows: _Rows = "uneven",
    least: int = 0,
    most: int = 3,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float64,
    elements: st.SearchStrategy[Any] | None = None,
    extremes: bool = False,
    nonfinite: bool = False,
    distinct: bool = True,
    layouts: Sequence[str] = LAYOUTS,
    requires_grad: bool = False,
) -> st.SearchStrategy[list[Tensor]]:
    """Local batches: a list with one tensor per rank, different on every rank.

    >>> import torch
    >>> from hypothesis import find
    >>> from diffcoll.testing import strategies
    >>> find(strategies.per_rank_tensors(3, (2,)), lambda xs: len(xs[0]) == len(xs[2]) == 1)
    [torch.tensor([[0.0, 0.0]], dtype=torch.float64), torch.empty((0, 2), dtype=torch.float64), \
torch.tensor([[0.0, 1.0]], dtype=torch.float64)]

    Features with labels have the same numbers of rows:

    >>> from hypothesis import strategies as st
    >>> @st.composite
    ... def batches(draw):
    ...     rows = draw(strategies.sizes(2))
    ...     features = draw(strategies.per_rank_tensors(shape=(4,), rows=rows))
    ...     more = {"dtype": torch.int64, "elements": st.integers(0, 9), "distinct": False}
    ...     return features, draw(strategies.per_rank_tensors(shape=(), rows=rows, **more))
    >>> features, labels = find(batches(), lambda batch: 3 in batch[1][1])
    >>> labels[1], [len(x) for x in features] == [len(x) for x in labels]
    (tensor([3]), True)

    Args:
        n: the world size N, or a strategy for it; None: the length of `rows`, or 1 to 6.
        shape: of one row, or a strategy for it; None: up to three dimensions of size 1 to 3.
        rows: `"uneven"`: each rank's number of rows is drawn, zero included. All ranks may be empty; exclude this by
            `.filter(lambda xs: sum(map(len, xs)))`. `"equal"`: one number for all ranks, as `all_reduce` needs. A
            list: each rank's number. None: tensors have exactly `shape`, which may be ().
        least: smallest number of rows to draw.
        most: largest number of rows to draw.
        dtype: one dtype, or several to draw from; the same on all ranks.
        elements: a strategy for one value; None: integers up to 4, and for floating-point and complex dtypes also
            multiples of 1/8 up to 8. Zeros and ties are frequent.
        extremes: also the largest and the smallest numbers of the dtype, subnormal numbers and -0.0. Sums of these
            depend on the order of the ranks.
        nonfinite: also infinities and NaN.
        distinct: no two ranks have equal tensors, unless they are empty. False if there may be too few values, as for
            labels and masks.
        layouts: memory layouts to draw from, see `with_layout`; each rank has its own. Layouts that need more
            dimensions than the drawn tensors have are left out. Without `"expanded"` the test may write to the tensors.
        requires_grad: whether the tensors are leaves that require gradients.

    Returns:
        A strategy for lists of CPU tensors. Their repr is code that makes them again. Hypothesis reduces a failure to
        few rows and values close to zero.

    Raises:
        TypeError, ValueError: an argument is not as described, or arguments contradict each other.
    """
    leading = _leading(n, rows, integers(_NAME, least, most, 0))
    if isinstance(layouts, str) or not layouts or not set(layouts) <= set(LAYOUTS):
        raise ValueError(message(_NAME, "layouts", repr(layouts), f"names among {', '.join(LAYOUTS)}"))
    if not isinstance(elements, st.SearchStrategy | None):
        raise TypeError(message(_NAME, "elements", repr(elements), "a strategy of hypothesis"))
    if elements is not None and (extremes or nonfinite):
        raise ValueError(message(_NAME, "elements", repr(elements), "None with extremes=True or nonfinite=True"))
    values = {
        each: _values(each, extremes, nonfinite) if elements is None else elements
        for each in _dtypes(dtype, requires_grad)
    }
    if shape is None:
        shape = st.lists(st.integers(1, 3), max_size=3)
    elif not isinstance(shape, st.SearchStrategy):
        shape = st.just(_shape(shape))
    lists = _lists(leading, shape, values, list(layouts), distinct)
    return lists.map(lambda xs: PerRank(x.requires_grad_(requires_grad) for x in xs))


def _leading(
    n: int | st.SearchStrategy[int] | None, rows: _Rows, count: st.SearchStrategy[int]
) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Return a strategy for the leading dimensions of each rank's tensor: (rows,), or () if rows is None."""
    if rows is not None and rows not in ("uneven", "equal"):
        if isinstance(rows, str) or not isinstance(rows, Sequence):
            raise ValueError(message(_NAME, "rows", repr(rows), '"uneven", "equal", None, or a list'))
        listed: list[tuple[int, ...]] = [(integer(_NAME, "rows", k, 0),) for k in rows]
        if not listed or (n is not None and n != len(listed)):
            ranks = "per rank" if n is None else f"for each of n={n} ranks"
            raise ValueError(message(_NAME, "rows", repr(rows), f"one number {ranks}"))
        return st.just(listed)
    if n is None:
        n = worlds()
    elif not isinstance(n, st.SearchStrategy):
        n = st.just(integer(_NAME, "n", n, 1))
    return _drawn_leading(n, rows, count)


@st.composite
def _drawn_leading(
    draw: Draw, number: st.SearchStrategy[int], rows: _Rows, count: st.SearchStrategy[int]
) -> list[tuple[int, ...]]:
    n = integer(_NAME, "n", draw(number), 1)
    if rows is None:
        return [()] * n
    return [(draw(count),)] * n if rows == "equal" else [(draw(count),) for _ in range(n)]


@st.composite
def _lists(
    draw: Draw,
    leading: st.SearchStrategy[list[tuple[int, ...]]],
    shapes: st.SearchStrategy[Sequence[int]],
    values: dict[torch.dtype, st.SearchStrategy[Any]],
    layouts: list[str],
    distinct: bool,
) -> list[Tensor]:
    each, shape, dtype = draw(leading), _shape(draw(shapes)), draw(st.sampled_from(list(values)))
    dims = len(each[0]) + len(shape)
    possible = layouts_of(dims)
    fitting = [layout for layout in layouts if layout in possible]
    if not fitting:
        expected = f"one that {dims}-D tensors can have: {', '.join(possible)}"
        raise ValueError(message(_NAME, "layouts", layouts, expected))
    xs: list[Tensor] = []
    for first in each:
        one = _tensors((*first, *shape), dtype, values[dtype], fitting)
        if distinct:
            one = one.filter(lambda x: x.numel() == 0 or not any(same(x, other) for other in xs))
        xs.append(draw(one))
    return xs


@st.composite
def _tensors(
    draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, values: st.SearchStrategy[Any], layouts: list[str]
) -> Tensor:
    layout = draw(st.sampled_from(layouts))
    drawn = shape if layout != "expanded" else (min(shape[0], 1), *shape[1:])
    count = min(prod(drawn), _DRAWN)
    few = draw(st.lists(values, min_size=count, max_size=count))
    x = torch.tensor([few[i % count] for i in range(prod(drawn))], dtype=dtype).reshape(drawn)
    return with_layout(x.expand(shape), layout)


def _values(dtype: torch.dtype, extremes: bool, nonfinite: bool) -> st.SearchStrategy[Any]:
    """Return a strategy for one value of a dtype."""
    if dtype == torch.bool:
        return st.booleans()
    if dtype.is_complex:
        part = _values(dtype.to_real(), extremes, nonfinite)
        return st.builds(complex, part, part)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        small = st.integers(max(limits.min, -4), 4)
        return small | st.sampled_from([limits.max, limits.min]) if extremes else small
    found = st.integers(-4, 4).map(float) | st.integers(-64, 64).map(lambda k: k / 8)
    if extremes:
        limit = torch.finfo(dtype)
        sizes = [limit.smallest_normal * limit.eps, limit.smallest_normal, limit.max]
        found |= st.sampled_from([-0.0, *sizes, *(-size for size in sizes)])
    return found | st.sampled_from([torch.inf, -torch.inf, torch.nan]) if nonfinite else found


def _dtypes(dtype: Any, requires_grad: bool) -> list[torch.dtype]:
    dtypes = list(dtype) if isinstance(dtype, Sequence) else [dtype]
    if not all(isinstance(each, torch.dtype) for each in dtypes):
        raise TypeError(message(_NAME, "dtype", dtype, "a torch.dtype, or several"))
    if not dtypes:
        raise ValueError(message(_NAME, "dtype", dtype, "at least one dtype"))
    if requires_grad and not all(each.is_floating_point or each.is_complex for each in dtypes):
        raise ValueError(message(_NAME, "dtype", dtype, "floating-point or complex dtypes, because requires_grad=True"))
    return dtypes


def _shape(shape: Any) -> tuple[int, ...]:
    try:
        return tuple(integer(_NAME, "shape", size, 0) for size in shape)
    except TypeError:
        raise TypeError(message(_NAME, "shape", repr(shape), "a sequence of sizes of at least 0")) from None
