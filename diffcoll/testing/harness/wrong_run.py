"""A wrong run, and what can be measured of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from diffcoll.testing.harness.causes import Kind
from diffcoll.testing.harness.comparison import Quantity, is_near, right
from diffcoll.testing.harness.cuts import Cuts
from diffcoll.testing.harness.differences import Evidence
from diffcoll.testing.harness.report import ratio_in_words

#: A quantity is nearly right if its relative error is below this.
LITTLE = 5e-3
#: Powers of N that a missing or repeated reduction multiplies by.
_POWERS = (-2, -1, 0, 1, 2, 3)


class Finding(NamedTuple):
    """What a hypothesis explains."""

    kind: Kind
    #: The names of the quantities that need no other explanation.
    names: list[str]
    #: What was seen, in words.
    seen: str


class WrongRun:
    """A wrong run, and further measurements of it, made when they are asked for."""

    #: What the gradients are compared with, in words.
    reference = "the right gradient"
    #: Under the reduction that was asked for.
    quantities: Sequence[Quantity] = ()
    #: The rows of each rank; without rows 1.
    sizes: tuple[int, ...]
    #: "mean" or "sum"; "": the losses are summed and nothing is reduced afterwards.
    rank_reduction = ""
    tolerance: float
    #: The ranks that returned NaN or infinity.
    not_finite: Sequence[int] = ()
    #: Whether the values or outputs are not those of the reference, compared or not.
    values_differ = False
    #: Whether all ranks should return the same loss, which counts once.
    one_loss = False

    @cached_property
    def cuts(self) -> Cuts:
        """Where tensors leave the graph of a forward."""
        raise NotImplementedError

    @property
    def evidence(self) -> Evidence:
        """Finite differences."""
        raise NotImplementedError

    @property
    def detached(self) -> str | None:
        """Words if the graph of all ranks has these gradients too, so that something is detached."""
        return None

    @property
    def local_statistics(self) -> str | None:
        """Words if the run takes statistics of each rank's rows alone."""
        return None

    @property
    def rounding(self) -> set[str]:
        """The names of what changes as much on one process with the last digits of inputs and parameters."""
        return set()

    @property
    def unstopped(self) -> set[str]:
        """The names of the gradients that the reference has too without its calls of detach()."""
        return set()

    @property
    def replicated(self) -> set[str]:
        """The names of the gradients of one variable that every rank should have whole."""
        return set()

    @property
    def is_random(self) -> bool:
        """Whether the reference changes with the seed."""
        return False

    @cached_property
    def found(self) -> list[Finding]:
        """What hypotheses have explained so far."""
        return []

    @cached_property
    def restored(self) -> set[str]:
        """The names of the gradients that are right if the user's calls of detach() keep the graph."""
        with contextlib.suppress(Exception):
            return right(self.undetached())
        return set()

    def undetached(self) -> Sequence[Quantity]:
        """Measure where the user's calls of detach() keep the graph."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """N."""
        return len(self.sizes)

    @property
    def factor(self) -> float:
        """What the reduction multiplies a sum over ranks by."""
        return 1 / self.size if self.rank_reduction == "mean" else 1.0

    def of(self, name: str) -> list[Quantity]:
        """Return the quantities of one name, on all ranks."""
        return [q for q in self.quantities if q.what == name]

    def left(self, *groups: str) -> list[str]:
        """Return the names in these groups, or in all, of which something is wrong and not explained."""
        known = {name for finding in self.found for name in finding.names}
        wrong = [q.what for q in self.quantities if not q.ok and (not groups or q.group in groups)]
        return [name for name in dict.fromkeys(wrong) if name not in known]

    def has(self, *kinds: Kind) -> bool:
        """Whether one of these causes was found."""
        return any(finding.kind in kinds for finding in self.found)

    def ratios(self, name: str) -> dict[int | None, float | None]:
        """Return got / wanted by rank, without ranks whose wanted gradient is zero or empty if theirs is right."""
        found: dict[int | None, float | None] = {}
        for q in self.of(name):
            idle = q.got.shape == q.wanted.shape and not (q.wanted.abs() > self.tolerance * q.unit).any()
            if not (idle and q.ok):
                found[q.rank] = 0.0 if q.got.shape == q.wanted.shape and not q.got.any() else q.ratio
        return found

    def ratio(self, name: str) -> float | None:
        """Return the ratio that all ranks have; None: they have none in common."""
        first, *others = self.ratios(name).values() or [None]
        return first if all(is_near(other, first or 0.0, self.tolerance) for other in others) else None

    def by_ratio(self, names: Sequence[str]) -> dict[float, list[str]]:
        """Return the names by the ratio that all ranks have, and those of about the same ratio together."""
        groups: dict[float, list[str]] = {}
        for name in names:
            if ratio := self.ratio(name):
                like = next((other for other in groups if is_near(ratio, other, self.tolerance)), ratio)
                groups.setdefault(like, []).append(name)
        return groups

    def is_power(self, ratio: float | None) -> bool:
        """Whether a ratio is a power of N, as a sum or a mean over ranks too many or too few gives."""
        return any(is_near(ratio, float(self.size) ** p, self.tolerance) for p in _POWERS)

    def scaled(self, ratio: float, of: str) -> str:
        """Say in words that something is scaled, and under which reduction it would be exact."""
        number = ratio_in_words(ratio, self.size, max(self.tolerance, 1e-3))
        if not self.rank_reduction:
            return f"it is {number} times {of}"
        under_sum = ratio / self.factor
        exact = [what for what, right in (("sum", 1), ("mean", self.size)) if is_near(under_sum, right, self.tolerance)]
        return f'under "{self.rank_reduction}" {number} times {of}' + (f', exact under "{exact[0]}"' if exact else "")


def short(name: str) -> str:
    """Return the name of a gradient's tensor."""
    return name.removeprefix("gradient of ")


def in_list(names: Sequence[str]) -> str:
    """Return names in words, those of gradients by their tensor."""
    *others, last = map(short, names)
    return f"{', '.join(others)} and {last}" if others else last


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words."""
    return f"rank{'s' * (len(ranks) != 1)} {' and '.join(map(str, ranks))}"
