"""The sums over all columns, with the features of one other rank at a time.

In N steps the blocks of columns of all ranks move once around the ring of ranks, while each rank adds up its sums over
the block that it holds. In backward the blocks move around again, each followed by the gradient that the ranks add up
for it; the logits are computed again. Each rank keeps a few blocks, whatever N.

    first order      an autograd Function, whose forward and backward are loops of shifts
    higher orders    the same forward as a differentiable loop of shifts; all derivatives come from theirs

note  notes/training/contrastive.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcoll.composed.ring import passed_on, ring
from diffcoll.core.groups import resolve
from diffcoll.engines.types import Group
from diffcoll.nn.chunks import Work, recomputed
from diffcoll.nn.logits import Sums, merged

_FIRST_ORDER, _ALL_ORDERS = "backward without create_graph", "backward with create_graph=True"


@dataclass(frozen=True)
class Ring:
    """The computation of one call."""

    #: Of this rank's rows and all ranks' columns.
    work: Work
    #: Number of columns of each rank.
    sizes: list[int]
    group: Group
    #: The dtype in which k is sent in first order, exact for it.
    sent: torch.dtype
    #: Whether a rank needs the gradient of its columns.
    trained: bool
    #: Whether this is differentiated as a loop of shifts to any order.
    loop: bool

    @property
    def needed(self) -> tuple[bool, ...]:
        """Which sums are computed."""
        return self.work.needed

    def sums(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Sums:
        """Return the sums of this rank's rows over all ranks' k; k is this rank's."""
        if self.loop:
            return self._forward(q, k, bias, "forward")
        return recomputed(q, k, bias, self)

    def once(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Sums:
        """Return the sums, which are not differentiated."""
        return self._forward(q, k.to(self.sent), bias, "forward")

    def again(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Sums:
        """Return the sums, differentiable to any order, in backward."""
        return self._forward(q, k, bias, _ALL_ORDERS)

    def _forward(self, q: Tensor, k: Tensor, bias: Tensor | None, purpose: str) -> Sums:
        """Return the sums, differentiable if grad mode is on."""
        found = {source: work.sums(q, held, bias) for source, held, work, _ in self._around(k, purpose)}
        return merged([found[source] for source in range(len(self.sizes))])

    def backward(
        self, q: Tensor, k: Tensor, bias: Tensor | None, whole: Sums, g: Sums, of_k: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the gradients of q, k and bias from the sums and their gradients; of k, if a rank wants it."""
        gq, gbias = torch.zeros_like(q), q.new_zeros(())
        gk: Callable[[], Tensor] | None = None  # of the block that arrives, from the ranks that have held it
        for step, (_, held, work, part) in enumerate(self._around(k.to(self.sent), _FIRST_ORDER)):
            of_sums = whole.of_columns(*part), g.of_columns(*part)
            found, mine, of_bias = work.backward(q, held, bias, *of_sums, self.trained)
            gq, gbias = gq + found, gbias + of_bias
            if mine is not None:
                gk = self._pass_on(mine if gk is None else gk() + mine, step)
        return gq, None if gk is None else gk(), gbias  # gk is back on its owner

    def _around(self, k: Tensor, purpose: str) -> Iterator[tuple[int, Tensor, Work, tuple[int, int]]]:
        """Iterate over all ranks' k: the rank, its k, the work of its columns, and the first and number of these.

        Ranks with different purposes send different messages: all raise an error.
        """
        for source, tree in ring({purpose: k}, group=self.group):
            part = sum(self.sizes[:source]), len(tree[purpose])
            yield source, tree[purpose], self.work.of_columns(*part), part

    def _pass_on(self, x: Tensor, step: int) -> Callable[[], Tensor]:
        """Start to send to the next rank the gradient of the block that this rank holds in a step."""
        n = len(self.sizes)
        held = [self.sizes[(r - step) % n] * x.shape[1:].numel() for r in range(n)]
        pending, shape = passed_on(x.reshape(-1), held, resolve(self.group, "ring"), self.group), x.shape[1:]
        return lambda: pending.wait().view(-1, *shape)
