"""Compares gradients with what common mistakes would give, by finite differences.

D[s, r] is the derivative of rank s's loss by rank r's tensor:

    right                      g_r = Σ_s D[s, r]
    not reduced, local slice   g_r = D[r, r]
    the loss of rank q lost    g_r = Σ_{s≠q} D[s, r]
    ranks swapped              g_r = Σ_s D[s, π(r)]

each up to a factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcoll.testing.harness.causes import Kind
from diffcoll.testing.harness.comparison import is_near, multiple
from diffcoll.testing.harness.differences import Difference, along
from diffcoll.testing.harness.report import ratio_in_words

#: Relative error at which a finite difference confirms a cause.
_SURE = {torch.float64: 1e-5, torch.complex128: 1e-5}


@dataclass
class Evidence:
    """Finite differences of the losses, and the gradients that backward gave, for one run."""

    sizes: tuple[int, ...]
    #: Names of the leaves of a rank: inputs, then parameters.
    names: list[str]
    #: Each rank's gradients, in the order of the names.
    gradients: list[list[Tensor]]
    differences: list[Difference]
    #: Names of the collectives that ran in the forward.
    seen: Sequence[str] = ()

    def cause(self, name: str) -> tuple[Kind, str] | None:
        """Return the name of the cause that explains the gradient of this leaf, and words for what was seen."""
        each = [d for d in self.differences if self.names[d.direction.leaf] == name and not d.kink]
        if not each:
            return None
        n = len(self.sizes)
        leaf = each[0].direction.leaf
        dtype = self.gradients[0][leaf].dtype
        got = torch.tensor([along(self.gradients[d.direction.rank][leaf], d.direction) for d in each]).double()
        sure = _SURE.get(dtype, 3e-2)

        def explains(predicted: Iterable[float]) -> float | None:
            return multiple(got, torch.tensor(list(predicted)).double(), sure / 10)

        ratio = explains(d.total for d in each)
        if ratio is not None:
            return (
                Kind.CONSISTENT,
                f"it is {ratio_in_words(ratio, n)} times the derivative of the losses that the ranks return",
            )
        ratio = explains(float(d.partials[d.direction.rank]) for d in each)
        if ratio is not None:
            of_one = "it is the derivative of the rank's own loss alone"
            return (Kind.LOCAL_SLICE if any("gather" in s for s in self.seen) else Kind.NOT_REDUCED), of_one + _times(
                ratio, n
            )
        for q in range(n):
            ratio = explains(d.total - float(d.partials[q]) for d in each)
            if ratio is not None:
                return Kind.RANK_MISSING, f"it lacks the loss of rank {q}{_times(ratio, n)}"
        return self._swapped(each, leaf, sure)

    def _swapped(self, each: Sequence[Difference], leaf: int, sure: float) -> tuple[Kind, str] | None:
        """Whether ranks have each other's gradients, or each other's parts of them from other ranks' losses."""
        n = len(self.sizes)
        if n == 1 or n > 6 or len({tuple(g[leaf].shape) for g in self.gradients}) > 1:
            return None
        of = [[d for d in each if d.direction.rank == r] for r in range(n)]
        if len({tuple(replace(d.direction, rank=0) for d in ds) for ds in of}) > 1:
            return None
        got = torch.tensor([[along(self.gradients[r][leaf], d.direction) for d in of[r]] for r in range(n)]).double()
        total = torch.tensor([[d.total for d in ds] for ds in of]).double()
        own = torch.tensor([[float(d.partials[r]) for d in of[r]] for r in range(n)]).double()
        ratio = multiple(got, total.mean(0).expand_as(got), sure / 10)
        for right, word in ((1.0, "mean"), (float(n), "sum")):
            if is_near(ratio, right):
                return Kind.AVERAGED, f"it is the {word} of all ranks' gradients on every rank"
        powers = (1.0, float(n), 1.0 / n)
        for a, b, part, known in (
            (got, total, "", powers),
            (got - own, total - own, "of the part that comes from other ranks' losses, ", powers[:1]),
        ):
            ratios = {order: multiple(a[list(order)], b, sure / 10) for order in itertools.permutations(range(n))}
            found = [(order, ratio) for order, ratio in ratios.items() if any(is_near(ratio, x) for x in known)]
            if len(found) == 1 and found[0][0] != tuple(range(n)):  # else they are equal, and do not say whose they are
                ((order, ratio),) = found
                where = ", ".join(f"rank {q} has that of rank {r}" for r, q in enumerate(order) if r != q)
                return Kind.RANKS_SWAPPED, part + where + _times(ratio or 0.0, n)
        return None


def _times(ratio: float, n: int) -> str:
    return "" if is_near(ratio, 1.0) else f", times {ratio_in_words(ratio, n)}"
