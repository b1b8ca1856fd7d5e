"""Prefix sums over ranks.

forward   y_r  = Σ_{s≤r} x_s         exclusive: s<r; reverse: s≥r (s>r)
adjoint   gx_r = Σ_{s≥r} gy_s        scan, reversed
note      notes/scan.md              truth  diffcoll.truth.scan
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core.arguments import Group
from diffcoll.core.call import Call, perform
from diffcoll.core.linear import Linear
from diffcoll.engines.engine import WIDER

__all__ = ["Scan", "scan"]


@dataclass(frozen=True)
class Scan(Linear):
    """y_r = Σ_{s≤r} x_s; exclusive: s<r; reverse: s≥r or s>r."""

    name: ClassVar[str] = "scan"
    reads_at_once: ClassVar[bool] = True
    reverse: bool = False
    exclusive: bool = False

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        # ⌈log₂ N⌉ rounds. After round k, y_r is the sum of the last 2^k terms.
        y = x.to(WIDER.get(x.dtype, x.dtype), copy=True, memory_format=torch.contiguous_format)
        if self.exclusive:
            mine, y = y, torch.zeros_like(y)
            self._shift(mine, y, 1)
        memory = self.engine.scratch.take(y.numel(), like=y)
        distance = 1
        while distance < self.engine.size:
            if self._shift(y, before := memory.view(y.shape), distance):
                y += before
            distance *= 2
        self.engine.scratch.give(memory)
        return lambda: y.to(x.dtype)

    def _shift(self, y: Tensor, before: Tensor, distance: int) -> bool:
        """Receive in `before` the y of the rank `distance` before this one. Returns whether there is one."""
        n, rank = self.engine.size, self.engine.rank
        step = -distance if self.reverse else distance
        sends = [y if s == rank + step else None for s in range(n)]
        self.engine.exchange(sends, [before if s == rank - step else None for s in range(n)])()
        return 0 <= rank - step < n

    @cached_property
    def adjoint(self) -> Linear:
        """gx_r = Σ_{s≥r} gy_s."""
        return Scan(self.engine, not self.reverse, self.exclusive)


def scan(x: Tensor, group: Group = None, *, reverse: bool = False, exclusive: bool = False) -> Tensor:
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
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        reverse: sum over ranks r to N − 1 instead.
        exclusive: do not include this rank's x (MPI_Exscan).

    Returns:
        A new tensor, shape and dtype of x.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/scan.md.
    """
    y: Tensor = perform(_scan, "scan", x, group, reverse=reverse, exclusive=exclusive)
    return y


def _scan(call: Call, x: Tensor) -> Any:
    call.adds(x)
    return call.submit(Scan(call.engine, call.flag("reverse"), call.flag("exclusive")), x)
