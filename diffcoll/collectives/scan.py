"""Prefix sums over ranks.

forward   y_r  = Σ_{s≤r} x_s         exclusive: s<r; reverse: s≥r (s>r)
adjoint   gx_r = Σ_{s≥r} gy_s        scan, reversed
note      notes/collectives/scan.md              truth  diffcoll.truth.scan
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core import trees
from diffcoll.core.arguments import Call, Tree
from diffcoll.core.bound import Bound, BoundTree
from diffcoll.core.call import perform
from diffcoll.core.dtypes import wider
from diffcoll.core.linear import Linear, linear_map
from diffcoll.core.pending import Pending
from diffcoll.engines.engine import Wait, done
from diffcoll.engines.types import Group


@linear_map
class Scan(Linear):
    """y_r = Σ_{s≤r} x_s; exclusive: s<r; reverse: s≥r or s>r."""

    name: ClassVar[str] = "scan"
    reads_at_once: ClassVar[bool] = True
    reverse: bool = False
    exclusive: bool = False

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        # ⌈log₂ N⌉ rounds. After round k, y_r is the sum of the last 2^k terms. The last round may be in flight.
        y = x.to(wider(x.dtype), copy=True, memory_format=torch.contiguous_format)
        memory = self.engine.scratch.take(y.numel(), like=y)
        wait: Wait = done
        if self.exclusive:
            mine, y = y, torch.zeros_like(y)
            wait = self._shift(mine, y, 1)[1]
        distance, dtype = 1, x.dtype
        while distance < self.engine.size:
            wait()
            wait = self._add_shifted(y, memory.view(y.shape), distance)
            distance *= 2

        def finish() -> Tensor:
            wait()
            self.engine.scratch.give(memory)
            return y.to(dtype)

        return finish

    def _add_shifted(self, y: Tensor, before: Tensor, distance: int) -> Wait:
        """Add to y that of the rank `distance` before this one, by way of `before`."""
        received, wait = self._shift(y, before, distance)

        def finish() -> None:
            wait()
            if received:
                y.add_(before)

        return finish

    def _shift(self, y: Tensor, before: Tensor, distance: int) -> tuple[bool, Wait]:
        """Receive in `before` the y of the rank `distance` before this one. Returns whether there is one."""
        n, rank = self.engine.size, self.engine.rank
        step = -distance if self.reverse else distance
        sends: list[Tensor | None] = [None] * n
        recvs: list[Tensor | None] = [None] * n
        if 0 <= rank + step < n:
            sends[rank + step] = y
        if received := 0 <= rank - step < n:
            recvs[rank - step] = before
        return received, self.engine.exchange(sends, recvs)

    @cached_property
    def adjoint(self) -> Linear:
        """gx_r = Σ_{s≥r} gy_s."""
        return Scan(self.engine, not self.reverse, self.exclusive)


@overload
def scan(
    x: Tree,
    *,
    group: Group = ...,
    reverse: bool = ...,
    exclusive: bool = ...,
    async_op: Literal[False] = ...,
) -> Tree: ...


@overload
def scan(
    x: Tree,
    *,
    group: Group = ...,
    reverse: bool = ...,
    exclusive: bool = ...,
    async_op: Literal[True],
) -> Pending[Tree]: ...


@overload
def scan(
    x: Tree,
    *,
    group: Group = ...,
    reverse: bool = ...,
    exclusive: bool = ...,
    async_op: bool,
) -> Tree | Pending[Tree]: ...


def scan(
    x: Tree,
    *,
    group: Group = None,
    reverse: bool = False,
    exclusive: bool = False,
    async_op: bool = False,
) -> Tree | Pending[Tree]:
    """Return the inclusive prefix sum over ranks (MPI_Scan): the sum of x on ranks 0 to r.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> xs = [torch.tensor(v) for v in (1.0, 10.0, 100.0)]
    >>> simulate(dc.scan, xs)
    [tensor(1.), tensor(11.), tensor(111.)]
    >>> simulate(lambda x: dc.scan(x, reverse=True, exclusive=True), xs)
    [tensor(110.), tensor(100.), tensor(0.)]

    Args:
        x: any shape, the same on all ranks; any dtype but bool. float16 and bfloat16 are accumulated in
            float32.
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        reverse: sum over ranks r to N − 1 instead.
        exclusive: do not include this rank's x (MPI_Exscan).
        async_op: do not block: return a `Pending`, whose `wait()` gives the result. Communication overlaps with
            computation in the backward too.

    Returns:
        A new tensor, shape and dtype of x.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/scan.md.
    """
    return perform(_scan, "scan", x, group, async_op, reverse=reverse, exclusive=exclusive)


def _scan(call: Call, x: Any) -> Bound | BoundTree:
    if not isinstance(x, Tensor):
        return trees.by_message(call, _scan)
    call.adds(x)
    return Bound(call, Scan(call.engine, call.flag("reverse"), call.flag("exclusive")), x)
