"""One rank's tensor on every rank.

forward   y_r  = x_src                           shape unchanged
adjoint   gx_src = Σ_s gy_s; 0 elsewhere         reduce
          gx_src = gy_src; 0 elsewhere           replicated: local, its adjoint is this broadcast
note      notes/collectives/collectives.md#broadcast   truth  diffcoll.truth.broadcast
"""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from diffcoll.core.arguments import Call, Tree
from diffcoll.core.maps import Broadcast
from diffcoll.core.pending import Pending
from diffcoll.core.tree_calls import by_message
from diffcoll.engines.types import GradPlacement, Group


@overload
def broadcast(
    x: Tree, src: int = ..., *, group: Group = ..., grad_placement: GradPlacement = ..., async_op: Literal[False] = ...
) -> Tree: ...


@overload
def broadcast(
    x: Tree, src: int = ..., *, group: Group = ..., grad_placement: GradPlacement = ..., async_op: Literal[True]
) -> Pending[Tree]: ...


def broadcast(
    x: Tree, src: int = 0, *, group: Group = None, grad_placement: GradPlacement = "partial", async_op: bool = False
) -> Tree | Pending[Tree]:
    """Send rank src's x to every rank.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda x: dc.broadcast(x, src=1), [torch.tensor(1.0), torch.tensor(2.0)])
    [tensor(2.), tensor(2.)]

    Args:
        x: any shape and dtype, the same on all ranks; only the values on rank src are used. If x requires a gradient on
            src, it must on all ranks, because all take part in the backward; on the others its gradient is zero.
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        src: the rank within the group that sends.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        grad_placement: as in `all_reduce`. `"partial"`: the backward sums the ranks' gradients on rank src.
            `"replicate"`: it has no communication.
        async_op: return a `Pending` at once, whose `wait()` gives the result; the adjoint overlaps in backward too.

    Returns:
        A new tensor, shape and dtype of x.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#broadcast.
    """
    call = Call("broadcast", x, group, async_op, {"src": src, "grad_placement": grad_placement})
    return _of_tensor(call) if isinstance(x, Tensor) else by_message(call, _of_tensor)


def _of_tensor(call: Call) -> Any:
    return call.perform(Broadcast(call.engine, call.root("src"), call.replicated()), call.x)
