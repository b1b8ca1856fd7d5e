"""Reduction over ranks; every rank receives it.

forward   y_r  = Σ_s x_s        shape unchanged; mean: Σ_s x_s / N
adjoint   gx_r = Σ_s gy_s       self-adjoint, as is the mean
          gx_r = gy_r           replicated: sum_gradients
note      notes/collectives/all_reduce.md   truth  diffcoll.truth.all_reduce
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.collectives import sum_gradients
from diffcoll.core import trees
from diffcoll.core.arguments import Call, Tree
from diffcoll.core.bound import Bound, BoundTree, bind_reduction
from diffcoll.core.call import perform
from diffcoll.core.linear import Linear, linear_map, then
from diffcoll.core.pending import Pending
from diffcoll.core.reductions import Op, Ties
from diffcoll.engines.types import GradPlacement, Group


@linear_map
class AllReduce(Linear):
    """y_r = Σ_s x_s; mean: Σ_s x_s / N, bit by bit that of the sum divided by N, unless a term is subnormal."""

    name: ClassVar[str] = "all_reduce"
    reads_at_once: ClassVar[bool] = True
    replicated: bool = False
    deterministic: bool = False
    mean: bool = False

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        y = torch.empty_like(x) if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
        n = self.engine.size
        add = self.engine.all_reduce_in_order if self.deterministic else self.engine.all_reduce
        if not self.mean:
            return then(add(x, y), y)
        if n & (n - 1) or self.deterministic:  # division of the terms would round each of them
            return then(add(x, y), lambda: y.div_(n))
        return then(add(torch.div(x, n, out=y), y), y)  # divided while they are copied

    @cached_property
    def adjoint(self) -> Linear:
        """gx_r = Σ_s gy_s, or their mean; replicated: gx_r = gy_r."""
        return sum_gradients.SumGradients(self.engine, self.deterministic) if self.replicated else self

    @property
    @override
    def averaging(self) -> Linear | None:
        return None if self.replicated else AllReduce(self.engine, deterministic=self.deterministic, mean=True)

    @property
    @override
    def shared(self) -> tuple[bool, bool]:
        return False, self.replicated


@overload
def all_reduce(
    x: Tree,
    op: Op = ...,
    *,
    group: Group = ...,
    grad_placement: GradPlacement = ...,
    ties: Ties = ...,
    deterministic: bool = ...,
    async_op: Literal[False] = ...,
) -> Tree: ...


@overload
def all_reduce(
    x: Tree,
    op: Op = ...,
    *,
    group: Group = ...,
    grad_placement: GradPlacement = ...,
    ties: Ties = ...,
    deterministic: bool = ...,
    async_op: Literal[True],
) -> Pending[Tree]: ...


@overload
def all_reduce(
    x: Tree,
    op: Op = ...,
    *,
    group: Group = ...,
    grad_placement: GradPlacement = ...,
    ties: Ties = ...,
    deterministic: bool = ...,
    async_op: bool,
) -> Tree | Pending[Tree]: ...


def all_reduce(
    x: Tree,
    op: Op = "sum",
    *,
    group: Group = None,
    grad_placement: GradPlacement = "partial",
    ties: Ties = "even",
    deterministic: bool = False,
    async_op: bool = False,
) -> Tree | Pending[Tree]:
    """Reduce all ranks' x to their sum, mean, product, maximum, …, on every rank.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(dc.all_reduce, [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
    [tensor([11., 22.]), tensor([11., 22.])]

    Args:
        x: any shape, the same on all ranks; any dtype that `op` supports.
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        op: `"sum"`, `"product"`: any dtype but bool. `"mean"`, `"logsumexp"`: floating-point or complex.
            `"max"`, `"min"`: not complex. Other common spellings and `torch.distributed.ReduceOp` are accepted.
            Or a function that reduces dim 0 of the stack (N, *x.shape) of all ranks' x: `lambda s: s.median(0).values`.
            Every rank gathers the stack, N times the size of x, and calls the function on it. It must be the same
            function on all ranks and draw no random numbers, or the results differ. If each element of its result
            depends on the same element of each x only, `dc.elementwise(f)` needs as little memory and communication
            as `"max"`. Half precisions: a sum is accumulated in float32 where the library sums (gloo, MPI), else as
            the backend does it; mean, product and logsumexp are computed in float32 and rounded once. A mean overflows
            where the sum does, unless N is a power of two and `deterministic` and `"replicate"` are not given.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        grad_placement: of the gradient of y, in DTensor's words. `"partial"` or `Partial()`: each rank has its own loss
            and the objective is their sum; the backward sums the ranks' gradients. `"replicate"` or `Replicate()`:
            every rank computes the same loss from y (tensor parallelism), which counts once; the backward has no
            communication.
        ties: where several ranks hold the maximum or minimum, which of them receive the gradient of `"max"` and
            `"min"`: `"even"`, all of them in equal parts, as `torch.amax`; `"first"`, the lowest of these ranks.
        deterministic: add in the order of ranks, ((x_0 + x_1) + x_2) + …, and the gradients in the backward too. Each
            element of a sum or mean then has the same bits on every engine, whatever the size of x and the position of
            the element in it. Slower than a backend's own sum where it has one; see notes/collectives/deterministic.md.
        async_op: do not block: return a `Pending`, whose `wait()` gives the result. Communication overlaps with
            computation in the backward too.

    Returns:
        A new tensor, shape and dtype of x, bitwise the same on every rank.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/all_reduce.md.
    """
    name = "all_reduce"
    return perform(
        _all_reduce,
        name,
        x,
        group,
        async_op,
        op=op,
        grad_placement=grad_placement,
        ties=ties,
        deterministic=deterministic,
    )


def _all_reduce(call: Call, x: Any) -> Bound | BoundTree:
    how = call.replicated(), call.flag("deterministic")
    if isinstance(x, Tensor):
        return bind_reduction(call, AllReduce(call.engine, *how), x, lambda reducing: reducing.on_all_ranks(*how))
    return trees.for_op(call)(call, _all_reduce)
