"""Reductions that are not linear, brought to the linear core.

    all_to_all: the ranks' blocks come together, block r on rank r, stacked     (N, block r)
    reduction over dim 0 of the stack, locally, with PyTorch's own derivative    (block r)
    all_gather, or gather, or nothing                                            y

That moves what an all-reduce moves, each rank keeps one stack of the size of x, and every derivative and every
transform comes from the parts. Small tensors are gathered whole instead, which is one message.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diffcoll._torch import is_view
from diffcoll.collectives.all_gather import AllGather
from diffcoll.collectives.all_to_all import AllToAll
from diffcoll.collectives.gather import Gather
from diffcoll.collectives.linear import Linear, apply
from diffcoll.engines.engine import Engine, even_sizes
from diffcoll.errors import message
from diffcoll.reductions import Reduction, acts_position_by_position

__all__ = ["Reducing", "Steps"]

#: A linear map, the last one that moves anything, what it is applied to, and what is done with its result.
Steps = tuple[Linear, Tensor, Callable[[Tensor], Tensor]]


class Reducing:
    """One reduction of all ranks' x.

    Every rank builds the same graph, also for an empty block: a rank whose graph were shorter would leave the
    others waiting in a backward of higher order.
    """

    def __init__(self, operation: str, reduction: Reduction, engine: Engine, x: Tensor) -> None:
        self.operation, self.reduction, self.engine, self.x = operation, reduction, engine, x

    def everywhere(self, replicated: bool) -> Steps:
        """y on every rank."""
        sizes = even_sizes(self.x.numel(), self.engine.size)
        if self._whole(sizes) or self.x.numel() * self.x.element_size() <= self.engine.small(self.x.device.type):
            return AllGather(self.engine, 0, self._ones, replicated), self.x.unsqueeze(0), self._over
        last = AllGather(self.engine, 0, sizes, replicated)
        return last, self._row_block(sizes), lambda y: y.view(self.x.shape)

    def at(self, dst: int) -> Steps:
        """y on rank dst, zeros elsewhere."""
        sizes = even_sizes(self.x.numel(), self.engine.size)

        def shaped(y: Tensor) -> Tensor:
            if self.engine.rank != dst:  # nothing came, and it stays in the graph: as (0, 1), for cat drops a (0,)
                y = torch.cat([y, y.new_zeros(self.x.numel(), 1)])
            return y.view(self.x.shape)

        return Gather(self.engine, dst, 0, sizes), self._row_block(sizes).unsqueeze(1), shaped

    def block(self, dim: int, sizes: tuple[int, ...]) -> Steps:
        """Block r of y along dim, on rank r."""
        x = self.x.unsqueeze(0)
        if self._whole(sizes):
            gather = AllGather(self.engine, 0, self._ones)
            return gather, x, lambda stack: self._block_of(self._over(stack), dim, sizes).clone()
        return AllToAll(self.engine, dim + 1, 0, sizes, self._ones), x, self._over

    def _row_block(self, sizes: tuple[int, ...]) -> Tensor:
        """Block r of y as one row, on rank r."""
        if self._whole(sizes):
            stack = apply(AllGather(self.engine, 0, self._ones), self.x.unsqueeze(0))
            return self._block_of(self._over(stack).reshape(-1), 0, sizes)
        return self._over(apply(AllToAll(self.engine, 1, 0, sizes, self._ones), self.x.reshape(1, -1)))

    def _whole(self, sizes: tuple[int, ...]) -> bool:
        """Whether all ranks' x must be in one stack: for a function that looks at several positions, or at none."""
        if not self.reduction.users:
            return False
        return 0 in sizes or not acts_position_by_position(self.reduction, self.x, self.engine.size)

    def _block_of(self, y: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Block r of y; not by split_with_sizes, whose derivative forgets an empty row."""
        return y.narrow(dim, sum(sizes[: self.engine.rank]), sizes[self.engine.rank])

    @property
    def _ones(self) -> tuple[int, ...]:
        return (1,) * self.engine.size

    def _over(self, stack: Tensor) -> Tensor:
        """Reduce dim 0; the result is not a view of the stack, which is ours."""
        if self.reduction.users and not stack.numel():
            return stack.sum(0, dtype=stack.dtype)
        y = self.reduction(stack)
        if not isinstance(y, Tensor) or y.shape != stack.shape[1:]:
            got = f"a function that makes {tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__}"
            expected = f"{tuple(stack.shape[1:])}: dim 0 of {tuple(stack.shape)} reduced, the others kept"
            raise ValueError(message(self.operation, "op", got, expected, "reduce with dim=0"))
        may_be_view = self.reduction.users and (torch.compiler.is_compiling() or is_view(y))
        return y.clone() if may_be_view else y
