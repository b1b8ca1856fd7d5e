"""The batch of all ranks: numbers of rows, marks, and features of every rank.

note  notes/training/contrastive.md
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffcoll.collectives.all_gather import all_gather, gathered_as
from diffcoll.core.arguments import Sizes
from diffcoll.core.dtypes import wider
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.exchange import exchanged
from diffcoll.core.expect import integer
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.tracing import assume
from diffcoll.engines.engine import Engine
from diffcoll.engines.types import Group
from diffcoll.nn.whole import loss_of_sums


class Batch:
    """The rows of all ranks, and which of them are this rank's.

    Args:
        name: of the loss.
        x: this rank's features, (b, …, D).
        sizes: numbers of rows, as the loss was given them.
        group: of the loss.
        marks: this rank's labels and ids, (b,), which are sent in one message.
    """

    def __init__(self, name: str, x: Tensor, sizes: Sizes, group: Group, marks: dict[str, Tensor]) -> None:
        self.group, engine = group, resolve(group, name)
        self.sizes = sizes_of_ranks(name, engine, x, sizes)
        self.total = sum(self.sizes)
        #: The number of each of this rank's rows among all rows. A slice of all numbers has no size in a graph.
        self.mine = torch.arange(x.shape[0], device=x.device) + sum(self.sizes[: engine.rank])
        self.marks = self.all_marks = marks
        if marks and engine.size > 1:
            self.all_marks = all_gather(marks, sizes=self.sizes, group=group)

    def features(self, x: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
        """Return this rank's and all ranks' features in float32 or float64, normalized if asked for.

        Half-precision features are sent as they are: normalized ones would be rounded once more. Parts of their
        gradient are added in float32, and rounded once.
        """
        wide = widened(x, False)  # once: the parts of its gradient are added before they are rounded
        own = normalized(wide) if normalize else wide
        if len(self.sizes) == 1:
            return own, own
        if own.dtype == x.dtype:
            return own, all_gather(own, sizes=self.sizes, group=self.group)
        every = gathered_as(x.dtype, wide, self.sizes, self.group)
        return own, normalized(every) if normalize else every

    def mean(self, terms: Tensor, of_each: int = 1) -> Tensor:
        """Return the mean over all ranks' rows from the terms of this rank's, of which each sample has `of_each`."""
        total = of_each * self.total
        if len(self.sizes) == 1:
            return terms.sum() / total
        return loss_of_sums(lambda t: t / total, terms.sum(), group=self.group)


def widened(x: Tensor, normalize: bool) -> Tensor:
    """Return features in float32, or float64 if they are, normalized if asked for."""
    x = x.to(wider(x.dtype))
    return normalized(x) if normalize else x


def normalized(x: Tensor) -> Tensor:
    """Return F.normalize(x, dim=-1). The tangent of that writes in place, which an outer reverse mode refuses."""
    return x * x.square().sum(-1, keepdim=True).clamp(1e-24).rsqrt()


def sizes_of_ranks(name: str, engine: Engine, x: Tensor, sizes: Sizes) -> list[int]:
    """Return each rank's number of rows."""
    rows = x.shape[0]
    if sizes is None or (sizes == "auto" and engine.size == 1):
        return [rows] * engine.size
    if sizes != "auto":
        listed = [integer(name, "sizes", size, least=0) for size in sizes]
        if len(listed) != engine.size or listed[engine.rank] != rows:
            expected = f"{engine.size} sizes, one per rank, {rows} at position {engine.rank}"
            raise ValueError(message(name, "sizes", listed, expected, 'sizes="auto" asks every rank'))
        return listed
    lengths, widths = zip(*exchanged(engine, [rows, x.shape[-1]]), strict=True)
    if torch.compiler.is_compiling():  # which does not know it of numbers that ranks have sent
        for length in lengths:
            assume(length >= 0)
        assume(lengths[engine.rank] == rows)
        return [*lengths]
    for r, width in enumerate(widths):
        if width != widths[0]:
            raise CollectiveMismatchError(f"{name}: rank 0 has D = {widths[0]}, rank {r} has {width}")
    return [*lengths]
