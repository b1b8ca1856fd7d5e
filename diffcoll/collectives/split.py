"""This rank's block of a replicated tensor: identity on a slice forward, all-gather backward.

forward   y_r  = x_r[block r]            x replicated
adjoint   gx_r = [gy_0 … gy_{N-1}]       all_gather, replicated
note      notes/collectives/all_gather.md#split                 truth  diffcoll.truth.split
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.collectives import all_gather
from diffcoll.core.arguments import Call, Parts
from diffcoll.core.bound import Bound
from diffcoll.core.call import perform
from diffcoll.core.linear import Linear, linear_map
from diffcoll.engines.types import Group


@linear_map
class Split(Linear):
    """y_r = x[block r], with sizes[r] the size of block r along dim."""

    name: ClassVar[str] = "split"
    reads_at_once: ClassVar[bool] = True
    dim: int
    sizes: tuple[int, ...]
    deterministic: bool = False

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        rank = self.engine.rank
        block = x.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank])
        y = block.clone(memory_format=torch.contiguous_format)
        return lambda: y

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        return [*x[: self.dim], self.sizes[self.engine.rank], *x[self.dim + 1 :]]

    @cached_property
    def adjoint(self) -> Linear:
        """gx_r = [gy_0 … gy_{N-1}]."""
        return all_gather.AllGather(self.engine, self.dim, self.sizes, True, self.deterministic)

    @property
    @override
    def shared(self) -> tuple[bool, bool]:
        return True, False


def split(x: Tensor, dim: int = 0, *, group: Group = None, sizes: Parts = None) -> Tensor:
    """Return this rank's block of x, which is equal on all ranks; the backward all-gathers the gradient.

    No communication in the forward.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> simulate(lambda x: dc.split(x, sizes=[1, 2]), [x, x.clone()])
    [tensor([1.]), tensor([2., 3.])]

    Args:
        x: at least one dimension; any dtype; equal on all ranks.
        dim: the dimension to cut along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: None: N equal blocks. A list, the same on all ranks: each rank's size, zeros allowed.

    Returns:
        A new tensor (not a view) with the dtype of x, and its shape except for this rank's size along `dim`.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/all_gather.md#split.
    """
    y: Tensor = perform(_split, "split", x, group, dim=dim, sizes=sizes)
    return y


def _split(call: Call, x: Tensor) -> Bound:
    d = call.dim("dim", x)
    return Bound(call, Split(call.engine, d, call.sizes_of_parts(x, d)), x)
