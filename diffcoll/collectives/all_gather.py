"""All ranks' tensors joined along a dimension, on every rank.

forward   y_r  = [x_0 … x_{N-1}]          joined along dim
adjoint   gx_r = (Σ_s gy_s)[block r]      reduce_scatter
          gx_r = gy_r[block r]            replicated: split
note      notes/all_gather.md             truth  diffcoll.truth.all_gather
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from diffcoll.collectives import reduce_scatter, split
from diffcoll.collectives.blocks import join
from diffcoll.collectives.call import Call, Cotangent, Group, Sizes
from diffcoll.collectives.linear import Linear, then

__all__ = ["AllGather", "all_gather"]


@dataclass(frozen=True)
class AllGather(Linear):
    """y_r = [x_0 … x_{N-1}], with sizes[s] the size of x_s along dim."""

    name: ClassVar[str] = "all_gather"
    dim: int
    sizes: tuple[int, ...]
    replicated: bool = False

    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """See `Linear.start`."""
        blocks, joined = join(x, x.shape, self.dim, self.sizes, self.engine)
        return then(self.engine.all_gather(x.contiguous(), blocks), joined)

    def shape(self, x: Sequence[int]) -> list[int]:
        """See `Linear.shape`."""
        return [*x[: self.dim], sum(self.sizes), *x[self.dim + 1 :]]

    @property
    def adjoint(self) -> Linear:
        """gx_r = (Σ_s gy_s)[block r]; replicated: gx_r = gy_r[block r]."""
        if self.replicated:
            return split.Split(self.engine, self.dim, self.sizes)
        return reduce_scatter.ReduceScatter(self.engine, self.dim, self.sizes)

    @property
    def shared(self) -> tuple[bool, bool]:
        """See `Linear.shared`."""
        return False, self.replicated


def all_gather(
    x: Tensor,
    dim: int = 0,
    group: Group = None,
    *,
    sizes: Sizes = None,
    stack: bool = False,
    cotangent: Cotangent = "partial",
) -> Tensor:
    """All ranks' x, joined along a dimension in the order of ranks, on every rank.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda x: dc.all_gather(x, sizes=[1, 2]), [torch.tensor([1]), torch.tensor([2, 3])])
    [tensor([1, 2, 3]), tensor([1, 2, 3])]

    Args:
        x: any dtype; any shape, the same on all ranks but for its size along `dim` where `sizes` is given.
            A 0-d x counts as one element of a row: the result has shape (N,).
        dim: the dimension to join along; with `stack`, the place of the new one.
        group: None, a `ProcessGroup` or a one-dimensional `DeviceMesh`; see `set_default_group`.
        sizes: None: x has the same size along `dim` on all ranks. A list: each rank's size, zeros allowed.
            `"auto"`: the ranks tell each other first, in a small message of its own.
        stack: join along a new dimension, of size N, as `torch.stack` does.
        cotangent: `"partial"`: each rank has a loss of its own, the objective is the sum of them, and the
            backward sums what arrives on all ranks for x. `"replicated"`: all ranks compute one and the same
            loss from y, and it counts once; the backward is this rank's slice.

    Returns:
        A new contiguous tensor of x's dtype, the same on every rank.

    Raises:
        TypeError, ValueError: an argument is wrong on its own.

    Source: notes/all_gather.md.
    """
    call = Call("all_gather", x, group, dim=dim, sizes=sizes, stack=stack, cotangent=cotangent)
    replicated = call.cotangent(cotangent)
    if stack and sizes is not None:
        raise call.error("sizes", "None with stack=True, where every rank brings one slice")
    new = stack or x.dim() == 0
    d = call.dim("dim", x, new=new)
    if new:
        x = x.unsqueeze(d)
    return call.apply(AllGather(call.engine, d, call.sizes_of_all(x, d), replicated), x)
