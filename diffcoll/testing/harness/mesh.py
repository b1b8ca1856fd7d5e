"""The ranks of a run: a mesh of named axes, or one axis along which rows are divided."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcoll.core.errors import message

#: What errors begin with.
NAME = "assert_matches_single_process"
#: The axis of a run whose ranks have rows of the batch.
RANKS = "ranks"


class Coordinates(dict[str, int]):
    """The coordinates {axis: coordinate} of a rank. `mesh` has the sizes of the axes."""

    def __init__(self, at: Mapping[str, int], mesh: Mapping[str, int]) -> None:
        super().__init__(at)
        self.mesh = dict(mesh)


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run: a mesh, whose last axis varies fastest; or one axis, along which the rows are divided."""

    sizes: dict[str, int]
    #: The rows of each rank; (): the placements say what each rank has.
    rows: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def axes(self) -> list[str]:
        """The axes along which there are several ranks."""
        return [axis for axis, n in self.sizes.items() if n > 1]

    def __str__(self) -> str:
        if [*self.sizes] == [RANKS]:
            return f"rows {', '.join(map(str, self.rows))}" if self.rows else ""
        return f"mesh {', '.join(f'{axis}={n}' for axis, n in self.sizes.items())}"

    def at(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank."""
        found = {}
        for axis, n in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, n)
        return Coordinates({axis: found[axis] for axis in self.sizes}, self.sizes)

    def along(self, axes: Sequence[str], rank: int) -> list[int]:
        """Return the ranks whose coordinates are those of this rank but for these axes, in order."""
        found = [0]
        for axis, i in self.at(rank).items():
            n = self.sizes[axis]
            found = [n * r + k for r in found for k in (range(n) if axis in axes else (i,))]
        return found

    def named(self, rank: int) -> str:
        """Return the rank, or on a mesh of several axes its coordinates, in words."""
        if len(self.sizes) == 1:
            return str(rank)
        return " ".join(f"{axis}={i}" for axis, i in self.at(rank).items() if self.sizes[axis] > 1)

    def axes_of(self, group: Sequence[int]) -> tuple[str, ...] | None:
        """Return the axes along which these are all the ranks; None: the group is along no axes."""
        for k in range(1, len(self.sizes) + 1):
            for axes in itertools.combinations(self.sizes, k):
                if sorted(group) == self.along(axes, group[0]):
                    return axes
        return None

    @property
    def in_words(self) -> dict[str, int]:
        """The sizes that a factor may be, by what it is in words."""
        sizes = {f"the size of {axis}" if axis != RANKS else "N": self.sizes[axis] for axis in self.axes}
        return {**sizes, **({"the number of ranks": self.size} if len(self.axes) > 1 else {})}

    def split(self, held: Sequence[Tensor]) -> list[str]:
        """Return the axes along which ranks hold other positions than the first rank, given those of each rank."""
        first: dict[int, Tensor] = {}  # one tensor may stand for many ranks
        sets = [first.setdefault(id(index), torch.unique(index)) for index in held]
        peers = ((axis, r, self.along([axis], r)[0]) for axis in self.axes for r in range(self.size))
        other = {axis for axis, r, s in peers if sets[r] is not sets[s] and not torch.equal(sets[r], sets[s])}
        return [axis for axis in self.sizes if axis in other]


def parsed_ranks(ranks: object) -> list[Ranks]:
    """Return the runs that the argument `ranks` asks for."""
    each = [ranks] if _is_run(ranks) else ranks
    if not isinstance(each, Sequence) or not each or not all(map(_is_run, each)):
        expected = 'the rows of each rank, such as (5, 3), the axes of a mesh, such as {"dp": 2}, or a list of such'
        raise TypeError(message(NAME, "ranks", repr(ranks), expected))
    found = []
    for one in each:
        is_mesh = isinstance(one, Mapping)
        numbers = list(one.values() if is_mesh else one)
        if min(numbers, default=-1) < is_mesh or not any(numbers):
            expected = "rows, not negative and not all zero, or axes, each with at least one rank"
            raise ValueError(message(NAME, "ranks", repr(one), expected))
        found.append(Ranks(dict(one)) if is_mesh else Ranks({RANKS: len(numbers)}, tuple(numbers)))
    return found


def ranks_of_rows(rows: int) -> list[tuple[int, ...]]:
    """Return equal, uneven and empty ranks, two to four, that have so many rows in all."""
    half, quarter = divmod(rows, 2)[0], rows // 4
    each = [(half, half), (half + 1, rows - half - 1), (0, half + 1, rows - half - 1), (quarter,) * 4]
    return [run for run in each if sum(run) == rows and min(run) >= 0 and any(run)]


def _is_run(one: object) -> bool:
    """Whether these are rows of ranks, or a mesh."""
    if isinstance(one, Mapping):
        return all(isinstance(axis, str) for axis in one) and _is_run(list(one.values()))
    return isinstance(one, Sequence) and all(isinstance(k, int) and not isinstance(k, bool) for k in one)
