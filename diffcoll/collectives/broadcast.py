"""One rank's tensor on every rank.

forward   y_r  = x_src                           shape unchanged
adjoint   gx_src = Σ_s gy_s; 0 elsewhere         reduce
          gx_src = gy_src; 0 elsewhere           replicated: local, its adjoint is this broadcast
note      notes/collectives/broadcast.md                     truth  diffcoll.truth.broadcast
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.collectives import reduce
from diffcoll.core import trees
from diffcoll.core.arguments import Call, Tree
from diffcoll.core.bound import Bound, BoundTree
from diffcoll.core.call import perform
from diffcoll.core.linear import Linear, linear_map, then
from diffcoll.core.pending import Pending
from diffcoll.engines.types import GradPlacement, Group


@linear_map
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

    @cached_property
    def adjoint(self) -> Linear:
        """gx_src = Σ_s gy_s (replicated: gy_src); 0 elsewhere."""
        return Keep(self.engine, self.src) if self.replicated else reduce.Reduce(self.engine, self.src)

    @property
    @override
    def shared(self) -> tuple[bool, bool]:
        return False, self.replicated


@linear_map
class Keep(Linear):
    """y_src = x_src, x replicated; 0 elsewhere: the adjoint of the replicated broadcast."""

    name: ClassVar[str] = "broadcast"
    reads_at_once: ClassVar[bool] = True
    src: int

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        dense = torch.contiguous_format
        y = x.clone(memory_format=dense) if self.engine.rank == self.src else torch.zeros_like(x, memory_format=dense)
        return lambda: y

    @cached_property
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
    *,
    group: Group = ...,
    grad_placement: GradPlacement = ...,
    async_op: Literal[False] = ...,
) -> Tree: ...


@overload
def broadcast(
    x: Tree,
    src: int = ...,
    *,
    group: Group = ...,
    grad_placement: GradPlacement = ...,
    async_op: Literal[True],
) -> Pending[Tree]: ...


@overload
def broadcast(
    x: Tree,
    src: int = ...,
    *,
    group: Group = ...,
    grad_placement: GradPlacement = ...,
    async_op: bool,
) -> Tree | Pending[Tree]: ...


def broadcast(
    x: Tree,
    src: int = 0,
    *,
    group: Group = None,
    grad_placement: GradPlacement = "partial",
    async_op: bool = False,
) -> Tree | Pending[Tree]:
    """Send rank src's x to every rank.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda x: dc.broadcast(x, src=1), [torch.tensor(1.0), torch.tensor(2.0)])
    [tensor(2.), tensor(2.)]

    Args:
        x: any shape and dtype, the same on all ranks; only the values on rank src are used. If x requires a gradient on
            src, it should on all ranks, because all take part in the backward; on the others its gradient is zero.
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        src: the rank within the group that sends.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        grad_placement: of the gradient of y, in DTensor's words. `"partial"` or `Partial()`: each rank has its own loss
            and the objective is their sum; the backward sums the ranks' gradients on rank src. `"replicate"` or
            `Replicate()`: every rank computes the same loss from y (tensor parallelism), which counts once; the
            backward has no communication.
        async_op: do not block: return a `Pending`, whose `wait()` gives the result. Communication overlaps with
            computation in the backward too.

    Returns:
        A new tensor, shape and dtype of x.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/broadcast.md.
    """
    return perform(_broadcast, "broadcast", x, group, async_op, src=src, grad_placement=grad_placement)


def _broadcast(call: Call, x: Any) -> Bound | BoundTree:
    f = Broadcast(call.engine, call.root("src"), call.replicated())
    return Bound(call, f, x) if isinstance(x, Tensor) else trees.by_message(call, _broadcast)
