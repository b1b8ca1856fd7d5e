"""The sums over all columns, with the features of one other rank at a time.

In N steps the blocks of columns of all ranks move once around the ring of ranks, while each rank adds up its sums over
the block that it holds. In backward the blocks move around again, each followed by the gradient that the ranks add up
for it; the logits are computed again. Each rank keeps a few blocks, whatever N.

    first order      an autograd Function, whose forward and backward are loops of shifts
    higher orders    the same forward as a differentiable loop of shifts; all derivatives come from theirs

note  notes/training/contrastive.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from diffcoll.collectives.shift import shift
from diffcoll.composed.ring import ring
from diffcoll.core.pending import Pending
from diffcoll.engines.types import Group
from diffcoll.nn.chunks import Work, gradients_of, sums_of
from diffcoll.nn.inputs import without_autocast
from diffcoll.nn.logits import LossRule, Sums, merged
from diffcoll.nn.marks import Marks
from diffcoll.nn.recomputed import gradients

_FIRST_ORDER, _ALL_ORDERS = "backward without create_graph", "backward with create_graph=True"


@dataclass(frozen=True)
class Ring:
    """The computation of one call."""

    rule: LossRule
    rows: Marks
    #: Of all ranks' columns.
    cols: Marks
    #: Number of columns of each rank.
    sizes: list[int]
    chunk: int | None
    group: Group
    #: The dtype in which k is sent in first order, exact for it.
    sent: torch.dtype
    #: Whether a rank needs the gradient of its columns.
    trained: bool
    #: Whether this is differentiated as a loop of shifts to any order.
    loop: bool

    def sums(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Sums:
        """Return the sums of this rank's rows over all ranks' k; k is this rank's."""
        if self.loop:
            return self.forward(q, k, bias)
        found = iter(_Ring.apply(q, k, bias, self))  # type: ignore[no-untyped-call]
        return Sums(*(next(found) if needed else None for needed in self.needed))

    @property
    def needed(self) -> tuple[bool, ...]:
        """Which sums the rule needs."""
        return self.rule.needs(self.rows)

    def forward(self, q: Tensor, k: Tensor, bias: Tensor | None, purpose: str = "forward") -> Sums:
        """Return the sums, differentiable if grad mode is on."""
        found: dict[int, Sums] = {}
        for source, held in self._around(k, purpose):
            cols = self.cols.part(sum(self.sizes[:source]), len(held))
            found[source] = sums_of(q, held, bias, Work(self.rule, self.rows, cols, self.chunk))
        return merged([found[source] for source in range(len(self.sizes))])

    def repeated(self, q: Tensor, k: Tensor, bias: Tensor | None) -> list[Tensor]:
        """Return the sums that are needed, differentiable to any order, in backward."""
        with without_autocast(q):
            return [x for x in self.forward(q, k, bias, _ALL_ORDERS) if x is not None]

    def backward(
        self, q: Tensor, k: Tensor, bias: Tensor | None, whole: Sums, g: Sums
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of q, k and bias from the sums and their gradients."""
        gq, gbias = torch.zeros_like(q), q.new_zeros(())
        gk: Pending[Tensor] | None = None  # of the block that arrives, from the ranks that have held it
        for step, (source, held) in enumerate(self._around(k.to(self.sent), _FIRST_ORDER)):
            part = sum(self.sizes[:source]), len(held)
            work = Work(self.rule, self.rows, self.cols.part(*part), self.chunk)
            of_sums = whole.of_columns(*part), g.of_columns(*part)
            with without_autocast(q):
                found, mine, of_bias = gradients_of(q, held, bias, work, *of_sums, self.trained)
            gq, gbias = gq + found, gbias + of_bias
            if mine is not None:
                gk = self._pass_on(mine if gk is None else gk.wait() + mine, step)
        return gq, None if gk is None else gk.wait(), None if bias is None else gbias  # gk is back on its owner

    def _around(self, k: Tensor, purpose: str) -> Iterator[tuple[int, Tensor]]:
        """Iterate over all ranks' k. Ranks with different purposes send different messages: all raise an error."""
        return ((source, tree[purpose]) for source, tree in ring({purpose: k}, group=self.group))

    def _pass_on(self, x: Tensor, step: int) -> Pending[Tensor]:
        """Start to send to the next rank the gradient of the block that this rank holds in a step."""
        n = len(self.sizes)
        return shift(x, 1, group=self.group, sizes=[self.sizes[(r - step) % n] for r in range(n)], async_op=True)


class _Ring(Function):
    """(q, k, bias) ↦ the sums that the rule needs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, bias: Tensor | None, work: Ring) -> tuple[Tensor, ...]:
        sums = work.forward(q, k.to(work.sent), bias)
        ctx.work = work
        ctx.save_for_backward(q, k, bias, *sums)
        return tuple(x for x in sums if x is not None)

    @staticmethod
    def backward(ctx: Any, *gys: Tensor) -> tuple[Tensor | None, ...]:
        work: Ring = ctx.work
        q, k, bias, *sums = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *gradients(work.repeated, (q, k, bias), gys), None
        g = iter(gys)
        gs = Sums(*(next(g) if needed else None for needed in work.needed))
        return *work.backward(q, k, bias, Sums(*sums), gs), None
