"""One rank's tensor on every rank.

forward   y_r  = x_src                           shape unchanged
adjoint   gx_src = Σ_s gy_s; 0 elsewhere         reduce
          gx_src = gy_src; 0 elsewhere           replicated: local, its adjoint is this broadcast
note      notes/broadcast.md                     truth  diffcoll.truth.broadcast
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.collectives import reduce
from diffcoll.core import trees
from diffcoll.core.arguments import Cotangent, Group, Tree
from diffcoll.core.call import Call, perform
from diffcoll.core.linear import Linear, then
from diffcoll.core.pending import Pending

__all__ = ["Broadcast", "broadcast"]


@dataclass(frozen=True)
class Broadcast(Linear):
    """y_r = x_src."""

    name: ClassVar[str] = "broadcast"
    reads_at_once: ClassVar[bool] = True
    src: int
    replicated: bool = False

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        if self.engine.rank == self.src:
            y = x.clone(memory_format=torch.contiguous_format)
        else:
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
        return then(self.engine.broadcast(y, self.src), y)

    @property
    def adjoint(self) -> Linear:
        """gx_src = Σ_s gy_s (replicated: gy_src); 0 elsewhere."""
        return Keep(self.engine, self.src) if self.replicated else reduce.Reduce(self.engine, self.src)

    @property
    @override
    def shared(self) -> tuple[bool, bool]:
        return False, self.replicated


@dataclass(frozen=True)
class Keep(Linear):
    """y_src = x_src, x replicated; 0 elsewhere: the adjoint of the replicated broadcast."""

    name: ClassVar[str] = "broadcast"
    reads_at_once: ClassVar[bool] = True
    src: int

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        y = x.clone() if self.engine.rank == self.src else torch.zeros_like(x)
        return lambda: y

    @property
    def adjoint(self) -> Linear:
        """gx_r = gy_src."""
        return Broadcast(self.engine, self.src, replicated=True)

    @property
    @override
    def shared(self) -> tuple[bool, bool]:
        return True, False


@overload
def broadcast(
    x: Tree,
    src: int = ...,
    group: Group = ...,
    *,
    cotangent: Cotangent = ...,
    async_op: Literal[False] = ...,
) -> Tree: ...


@overload
def broadcast(
    x: Tree,
    src: int = ...,
    group: Group = ...,
    *,
    cotangent: Cotangent = ...,
    async_op: Literal[True],
) -> Pending[Tree]: ...


def broadcast(
    x: Tree,
    src: int = 0,
    group: Group = None,
    *,
    cotangent: Cotangent = "partial",
    async_op: bool = False,
) -> Any:
    """Rank src's x, on every rank.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda x: dc.broadcast(x, src=1), [torch.tensor(1.0), torch.tensor(2.0)])
    [tensor(2.), tensor(2.)]

    Args:
        x: any shape and dtype, the same on all ranks; its values count on rank src alone. It should require
            a gradient on all ranks if it does on src, for all take part in the backward; off src it is zero.
            Or a tree: nested tuples, lists and dicts of such tensors; those of one dtype travel in one message.
        src: the rank within the group that sends.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        cotangent: `"partial"`: each rank has a loss of its own, the objective is the sum of them, and the
            backward sums on rank src the gradients that arrive on the ranks. `"replicated"`: all ranks
            compute one and the same loss from y, and it counts once; the backward moves nothing.
        async_op: return a `Pending` at once, whose `wait()` gives the result; the backward overlaps likewise.

    Returns:
        A new tensor, shape and dtype of x.

    Raises:
        TypeError, ValueError: an argument is wrong on its own.

    Source: notes/broadcast.md.
    """
    return perform(_broadcast, "broadcast", x, group, async_op, src=src, cotangent=cotangent)


def _broadcast(call: Call, x: Any) -> Any:
    f = Broadcast(call.engine, call.root("src"), call.cotangent())
    return call.submit(f, x) if isinstance(x, Tensor) else trees.by_message(call, _broadcast)
