"""Identity forward, all-reduce backward: for a replicated tensor that is used in per-rank computation.

forward   y_r  = x_r               x replicated
adjoint   gx_r = Σ_s gy_s          all_reduce, replicated
note      notes/collectives/all_reduce.md#sum_gradients   truth  diffcoll.truth.sum_gradients
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.collectives import all_reduce
from diffcoll.core import trees
from diffcoll.core.arguments import Call, Tree
from diffcoll.core.bound import Bound, BoundTree
from diffcoll.core.call import perform
from diffcoll.core.linear import Linear, linear_map
from diffcoll.engines.types import Group


@linear_map
class SumGradients(Linear):
    """y_r = x.

    y is a copy: it may be modified in place, and autograd may pass one gradient to several inputs, which must not share
    memory.
    """

    name: ClassVar[str] = "sum_gradients"
    reads_at_once: ClassVar[bool] = True
    deterministic: bool = False

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        y = x.clone(memory_format=torch.contiguous_format)
        return lambda: y

    @cached_property
    def adjoint(self) -> Linear:
        """gx_r = Σ_s gy_s."""
        return all_reduce.AllReduce(self.engine, True, self.deterministic)

    @property
    @override
    def shared(self) -> tuple[bool, bool]:
        return True, False


def sum_gradients(x: Tree, *, group: Group = None) -> Tree:
    """Return a copy of x, which is equal on all ranks; the backward sums the gradient over ranks.

    For a weight or an activation that all ranks hold and each uses on its own data, or in its own part of a layer.
    Megatron's f and JAX's pvary. No communication in the forward.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> w = [torch.tensor(2.0, requires_grad=True) for _ in range(2)]  # one weight, a copy on each rank
    >>> losses = simulate(lambda w, x: dc.sum_gradients(w) * x, w, [3.0, 4.0])
    >>> torch.autograd.backward(losses)
    >>> [copy.grad for copy in w]
    [tensor(7.), tensor(7.)]

    Args:
        x: any shape and dtype, equal on all ranks.
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        A copy of x.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/all_reduce.md#sum_gradients.
    """
    return perform(_sum_gradients, "sum_gradients", x, group)


def _sum_gradients(call: Call, x: Any) -> Bound | BoundTree:
    if isinstance(x, Tensor):
        return Bound(call, SumGradients(call.engine), x)
    return trees.by_message(call, _sum_gradients)
