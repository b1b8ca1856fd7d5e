"""Reduction over ranks; every rank receives it.

forward   y_r  = Σ_s x_s        shape unchanged; mean: Σ_s x_s / N
adjoint   gx_r = Σ_s gy_s       self-adjoint
          gx_r = gy_r           replicated: sum_gradients
note      notes/collectives/collectives.md#all_reduce   truth  diffcoll.truth.all_reduce
"""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from diffcoll.core.arguments import Call, Tree
from diffcoll.core.maps import AllReduce
from diffcoll.core.pending import Pending
from diffcoll.core.reduce_calls import reduced
from diffcoll.core.reductions import Op
from diffcoll.core.tree_calls import by_message
from diffcoll.engines.types import GradPlacement, Group


@overload
def all_reduce(
    x: Tree, op: Op = ..., *, group: Group = ..., grad_placement: GradPlacement = ..., async_op: Literal[False] = ...
) -> Tree: ...


@overload
def all_reduce(
    x: Tree, op: Op = ..., *, group: Group = ..., grad_placement: GradPlacement = ..., async_op: Literal[True]
) -> Pending[Tree]: ...


def all_reduce(
    x: Tree, op: Op = "sum", *, group: Group = None, grad_placement: GradPlacement = "partial", async_op: bool = False
) -> Tree | Pending[Tree]:
    """Reduce all ranks' x to their sum, mean, product, maximum, …, on every rank.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(dc.all_reduce, [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
    [tensor([11., 22.]), tensor([11., 22.])]

    Args:
        x: any shape, the same on all ranks; any dtype that `op` supports.
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        op: `"sum"`, `"product"` (`"prod"`): any dtype but bool. `"mean"` (`"avg"`), `"logsumexp"`: floating-point or
            complex. `"max"`, `"min"`: not complex; the gradient is shared evenly among ties, as by `torch.amax`. Or a
            `torch.distributed.ReduceOp`. Half precisions: a sum is accumulated in float32 where the library sums (gloo,
            MPI), else as the backend does it; mean, product and logsumexp are computed in float32 and rounded once. For
            a function f of your own: `f(dc.all_gather(x, stack=True))`.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        grad_placement: of the gradient of y, in DTensor's words. `"partial"` or `Partial()`: each rank has its own loss
            and the objective is their sum; the backward sums the ranks' gradients. `"replicate"` or `Replicate()`:
            every rank computes the same loss from y (tensor parallelism), which counts once; the backward of the sum
            and the mean has no communication.
        async_op: return a `Pending` at once, whose `wait()` gives the result; the adjoint overlaps in backward too.

    Returns:
        A new tensor, shape and dtype of x, bitwise the same on every rank.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#all_reduce.
    """
    call = Call("all_reduce", x, group, async_op, {"op": op, "grad_placement": grad_placement})
    return _of_tensor(call) if isinstance(x, Tensor) else by_message(call, _of_tensor)


def _of_tensor(call: Call) -> Any:
    return reduced(call, call.x, AllReduce(call.engine, call.replicated()))
