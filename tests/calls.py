"""Calls of collectives: any arguments, uneven and empty blocks, any dimension, 0-d, complex, memory layouts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from properties import LAYOUTS, LaidOut

from diffcoll.core.reductions import REDUCTIONS
from diffcoll.testing.cases import Case, Shape, two_steps

__all__ = ["cases", "drawn", "each"]

Draw = Callable[..., Any]


def cases(names: str | Sequence[str] | None = None, most: int = 6, size: int | None = None) -> st.SearchStrategy[Case]:
    """Calls of collectives with valid arguments, on `size` ranks or on any number up to `most`.

    Of a case, `case.x(r, seed)` is rank r's input, `case.call(x, r)` makes the call on rank r, and `case.truth(xs)`
    returns all ranks' results by definition.
    """
    chosen = list(_CALLS) if names is None else [names] if isinstance(names, str) else list(names)
    return _cases(st.sampled_from(chosen), st.integers(1, most) if size is None else st.just(size))


def each(strategy: st.SearchStrategy[Any], count: int, check: Callable[[Any], Any], **more: Any) -> None:
    """Check examples of a strategy; hypothesis shrinks one that fails."""

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), **more)
    @given(strategy)
    def holds(example: Any) -> None:
        note(str(example))
        check(example)

    holds()


def drawn(strategy: st.SearchStrategy[Any], count: int, **more: Any) -> list[Any]:
    """Return examples of a strategy, to check them all in one run."""
    found: list[Any] = []
    each(strategy, count, found.append, phases=[Phase.generate], **more)
    return found


@st.composite
def _cases(draw: Draw, names: st.SearchStrategy[str], ranks: st.SearchStrategy[int]) -> Case:
    name, n = draw(names), draw(ranks)
    shapes, arguments, per_rank = _CALLS[name](draw, n)
    if name not in _NOT_ASYNC and draw(st.booleans()):
        arguments = {**arguments, "async_op": True}
    dtypes = [torch.float64] if arguments.get("op") in _ORDERED else [torch.float64, torch.complex128]
    return LaidOut(
        name,
        tuple(shapes),
        arguments,
        per_rank,
        dtype=draw(st.sampled_from(dtypes)),
        layout=draw(st.sampled_from([*LAYOUTS])),
        few="op" in arguments and draw(st.booleans()),
    )


# ── one function per collective: (shapes, arguments, per-rank arguments) ─────────────────────────────────

_Call = tuple[list[Shape], dict[str, Any], dict[str, list[Any]]]


def _shape(draw: Draw, least: int = 0) -> Shape:
    return tuple(draw(st.lists(st.integers(0, 3), min_size=least, max_size=3)))


def _dim(draw: Draw, shape: Shape) -> int:
    """A dimension of the shape, negative ones included."""
    return int(draw(st.integers(-len(shape), len(shape) - 1)))


def _with(shape: Shape, dim: int, size: int) -> Shape:
    dim %= len(shape)
    return (*shape[:dim], size, *shape[dim + 1 :])


def _sizes(draw: Draw, n: int) -> list[int]:
    return list(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))


_GRAD_PLACEMENTS = ["partial", "replicate"]
_NOT_ASYNC = ("scan", "sum_gradients", "split")
_ORDERED = ["max", "min"]  # not defined for complex numbers
_OPS = [*REDUCTIONS]


def _with_arguments(shapes: Callable[[Draw, int], _Call], **listed: Any) -> Callable[[Draw, int], _Call]:
    """Add a value for each argument, of those listed, which may depend on the number of ranks."""

    def call(draw: Draw, n: int) -> _Call:
        found, arguments, per_rank = shapes(draw, n)
        for key, values in listed.items():
            arguments = {**arguments, key: draw(st.sampled_from(values(n) if callable(values) else values))}
        return found, arguments, per_rank

    return call


def _ranks(n: int) -> list[int]:
    return list(range(n))


def _same(draw: Draw, n: int) -> _Call:
    """Blocks of one shape."""
    return [_shape(draw)] * n, {}, {}


def _gathered(draw: Draw, n: int) -> _Call:
    """The blocks that the ranks concatenate along a dimension."""
    shape = _shape(draw)
    if not shape:
        return [shape] * n, {}, {}
    dim, form = _dim(draw, shape), draw(st.sampled_from(["equal", "listed", "auto"]))
    if form == "equal":
        return [shape] * n, {"dim": dim}, {}
    each = _sizes(draw, n)
    return [_with(shape, dim, size) for size in each], {"dim": dim, "sizes": each if form == "listed" else "auto"}, {}


def _gathered_or_stacked(draw: Draw, n: int) -> _Call:
    if draw(st.booleans()):
        return _gathered(draw, n)
    shape = _shape(draw)
    return [shape] * n, {"stack": True, "dim": _dim(draw, (*shape, 1))}, {}


def _cut(draw: Draw, n: int) -> _Call:
    """An input that is split into N blocks along a dimension."""
    shape = _shape(draw, least=1)
    dim = _dim(draw, shape)
    if draw(st.booleans()):
        each = _sizes(draw, n)
        return [_with(shape, dim, sum(each))] * n, {"dim": dim, "sizes": each}, {}
    return [_with(shape, dim, n * draw(st.integers(0, 2)))] * n, {"dim": dim}, {}


def _all_to_all(draw: Draw, n: int) -> _Call:
    shape = _shape(draw, least=1)
    d, c = _dim(draw, shape), _dim(draw, shape)
    dims = {"split_dim": d, "concat_dim": c}
    if draw(st.booleans()):  # equal blocks
        return [_with(shape, d, n * draw(st.integers(0, 2)))] * n, dims, {}
    auto = draw(st.booleans())
    if (d - c) % len(shape) == 0:
        matrix = [_sizes(draw, n) for _ in range(n)]
        received: list[Any] = ["auto"] * n if auto else [[row[r] for row in matrix] for r in range(n)]
        shapes = [_with(shape, d, sum(row)) for row in matrix]
        return shapes, dims, {"split_sizes": matrix, "concat_sizes": received}
    to, offered = _sizes(draw, n), _sizes(draw, n)
    shapes = [_with(_with(shape, d, sum(to)), c, size) for size in offered]
    return shapes, dims, {"split_sizes": [to] * n, "concat_sizes": ["auto" if auto else offered] * n}


def _permute(draw: Draw, n: int) -> _Call:
    """Each rank at most once on each side."""
    count = draw(st.integers(0, n))
    sources, targets = draw(st.permutations(range(n))), draw(st.permutations(range(n)))
    return [_shape(draw)] * n, {"pairs": list(zip(sources[:count], targets[:count], strict=True))}, {}


def _scan(draw: Draw, n: int) -> _Call:
    """Sums, also exclusive, and steps of a recurrence."""
    if draw(st.booleans()):
        return [(2, *_shape(draw))] * n, {"op": two_steps}, {}
    return [_shape(draw)] * n, {"exclusive": draw(st.booleans())}, {}


_CALLS: dict[str, Callable[[Draw, int], _Call]] = {
    "all_reduce": _with_arguments(_same, op=_OPS, grad_placement=_GRAD_PLACEMENTS),
    "all_gather": _with_arguments(_gathered_or_stacked, grad_placement=_GRAD_PLACEMENTS),
    "reduce_scatter": _with_arguments(_cut, op=_OPS),
    "all_to_all": _all_to_all,
    "broadcast": _with_arguments(_same, src=_ranks, grad_placement=_GRAD_PLACEMENTS),
    "reduce": _with_arguments(_same, dst=_ranks, op=_OPS),
    "gather": _with_arguments(_gathered, dst=_ranks),
    "scatter": _with_arguments(_cut, src=_ranks),
    "permute": _permute,
    "shift": _with_arguments(_same, offset=lambda n: list(range(-n - 1, n + 2)), wrap=[True, False]),
    "scan": _with_arguments(_scan, reverse=[True, False]),
    "sum_gradients": _same,
    "split": _cut,
}
