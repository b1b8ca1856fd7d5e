"""Prefix sums over ranks, and prefixes by a function of one's own: the state of a recurrence.

forward   y_r  = Σ_{s≤r} x_s         exclusive: s<r; reverse: s≥r (s>r)
adjoint   gx_r = Σ_{s≥r} gy_s        scan, reversed
note      notes/collectives/collectives.md#scan   truth  diffcoll.truth.scan
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from diffcoll.collectives.shift import shift
from diffcoll.core.arguments import Call, Tree
from diffcoll.core.errors import message
from diffcoll.core.maps import Scan
from diffcoll.core.reductions import spelled
from diffcoll.core.tree_calls import by_message
from diffcoll.core.trees import tensors_of
from diffcoll.engines.types import Group


def scan(
    x: Tree,
    op: Literal["sum"] | Callable[[Tree, Tree], Tree] = "sum",
    *,
    group: Group = None,
    reverse: bool = False,
    exclusive: bool = False,
    empty: Tree | None = None,
) -> Tree:
    """Return the inclusive prefix sum over ranks (MPI_Scan): the sum of x on ranks 0 to r.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> xs = [torch.tensor(v) for v in (1.0, 10.0, 100.0)]
    >>> simulate(dc.scan, xs)
    [tensor(1.), tensor(11.), tensor(111.)]
    >>> simulate(lambda x: dc.scan(x, reverse=True, exclusive=True), xs)
    [tensor(110.), tensor(100.), tensor(0.)]

    A function in place of the sum passes on the state of a recurrence, such as h_t = a_t h_{t−1} + b_t over a sequence
    that is split over ranks. Steps (a, b) and (c, d) are together the step (c a, c b + d):

    >>> from functools import reduce
    >>> from itertools import accumulate
    >>> def both(before, own):
    ...     return before[0] * own[0], own[0] * before[1] + own[1]
    >>> def recurrence(a, b):
    ...     nothing = a[:0].prod(0), b[:0].sum(0)  # (1, 0); it requires a gradient if a and b do
    ...     own = reduce(both, zip(a, b), nothing)
    ...     before = dc.scan(own, both, exclusive=True, empty=nothing)
    ...     return torch.stack([h for _, h in accumulate(zip(a, b), both, initial=before)])[1:]
    >>> a, b = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([1.0, 1.0, 1.0])
    >>> simulate(recurrence, a.split([2, 0, 1]), b.split([2, 0, 1]))
    [tensor([1., 2.]), tensor([]), tensor([7.])]

    Args:
        x: any shape, the same on all ranks; any dtype but bool, with a function any dtype. Sums of half precisions are
            accumulated in float32. Nested tuples, lists and dicts of tensors: one message per dtype.
        op: "sum", or an associative function `(before, own) -> both` of two such x. It is called ⌈log₂ N⌉ times on
            every rank; where no rank is before this one, as f(own, own), whose result is not used, and its gradient
            is zero unless it overflows.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        reverse: over ranks r to N − 1 instead; `before` is then of the ranks behind.
        exclusive: do not include this rank's x (MPI_Exscan).
        empty: with a function and `exclusive`: what the first rank gets, the last one if reversed; like x.

    Returns:
        A new tensor, shape and dtype of x, or a tree of them.

    Raises:
        TypeError, ValueError: an argument is invalid, or the function's result is not like x.

    Source: notes/collectives/collectives.md#scan.
    """
    call = Call("scan", x, group, False, {"op": op, "reverse": reverse, "exclusive": exclusive})
    y: Tree
    if callable(op) and spelled(op) is None:  # torch's ReduceOp can be called, too
        y = _by_function(call, op, empty)
    elif op != "sum":
        raise call.error("op", '"sum" or a function (before, own) -> both')
    elif empty is not None:
        raise call.error("empty", "None, since the first rank gets zeros", got=empty)
    else:
        y = _sum(call) if isinstance(x, Tensor) else by_message(call, _sum)
    return y


def _sum(call: Call) -> Any:
    call.dtype(call.x, "numbers")
    return call.perform(Scan(call.engine, call.flag("reverse"), call.flag("exclusive")), call.x)


def _by_function(call: Call, f: Callable[[Any, Any], Any], empty: Any) -> Any:
    """Return the prefixes by f, in ⌈log₂ N⌉ rounds: after round k, y_r is of the last 2^k ranks.

    Every rank calls f in every round, so all ranks' graphs have the same messages, whatever f captures.
    """
    n, rank = call.engine.size, call.engine.rank
    step, exclusive = -1 if call.flag("reverse") else 1, call.flag("exclusive")
    leaves, rebuild = tensors_of(call.name, "x", call.x)
    own = [call.tensor(leaf).clone(memory_format=torch.contiguous_format) for leaf in leaves.values()]
    if exclusive == (empty is None):
        raise call.error("empty", "a tree like x with exclusive=True, else None", got=empty)
    first = _like(call.x, "empty", empty) if exclusive else own

    def received(by: int) -> list[Tensor]:
        tree = Call(call.name, own, call.group, False, {})
        found: list[Tensor] = by_message(tree, lambda row: shift(row.x, by, wrap=False, group=call.group))
        return found

    def where_received(by: int, xs: list[Tensor], others: list[Tensor]) -> list[Tensor]:
        has = 0 <= rank - by < n
        conditions = [torch.full((), has, dtype=torch.bool, device=x.device) for x in xs]  # filled there, not copied
        return [*map(torch.where, conditions, xs, others)]

    for k in range((n - 1).bit_length()):
        by = step * 2**k
        before = where_received(by, received(by), own)
        both = f(rebuild(before), rebuild([x.clone() for x in own]))  # f may modify its arguments
        own = where_received(by, _like(call.x, "op(before, own)", both), own)
    return rebuild(where_received(step, received(step), first) if exclusive else own)


def _like(x: Any, argument: str, tree: Any) -> list[Tensor]:
    """Return the leaves of an argument; raise unless its paths, dtypes and shapes are those of x."""
    found, expected = (tensors_of("scan", argument, each)[0] for each in (tree, x))
    got, wanted = ([(path, leaf.dtype, leaf.shape) for path, leaf in of.items()] for of in (found, expected))
    if got != wanted:
        remedy = "y.to(x.dtype).expand_as(x) changes dtype and shape"
        raise ValueError(message("scan", argument, got, f"{wanted}, as x has", remedy))
    return [leaf.contiguous() for leaf in found.values()]
