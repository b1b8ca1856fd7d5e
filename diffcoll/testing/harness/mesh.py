"""The ranks of a run: a mesh of named axes, or one axis along which rows are divided."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

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
    #: The rows of each micro-batch of each rank; (): a rank gets its part of the batch, and not a list of such.
    micro: tuple[tuple[int, ...], ...] = ()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def axes(self) -> list[str]:
        """The axes along which there are several ranks."""
        return [axis for axis, n in self.sizes.items() if n > 1]

    def __str__(self) -> str:
        each = [" + ".join(map(str, mine)) or "none" for mine in self.micro] or [str(k) for k in self.rows]
        if [*self.sizes] == [RANKS]:
            return f"rows {', '.join(each)}" if each else ""
        mesh = f"mesh {', '.join(f'{axis}={n}' for axis, n in self.sizes.items())}"
        return f"{mesh}, micro-batches {each[0]}" if each else mesh

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


def parsed_ranks(ranks: object, micro_batches: Sequence[int] | None = None) -> list[Ranks]:
    """Return the runs that the arguments `ranks` and `micro_batches` ask for."""
    each = [ranks] if isinstance(ranks, Mapping) or _are_numbers(ranks) else ranks
    runs = [_parsed(one) for one in each] if isinstance(each, Sequence) else []
    if not runs or None in runs:
        expected = 'the rows of each rank, such as (5, 3), the axes of a mesh, such as {"dp": 2}, or a list of such'
        raise TypeError(message(NAME, "ranks", repr(ranks), f"{expected} or of rows of micro-batches"))
    found = [run for run in runs if run is not None]
    for run in found:
        numbers = [*itertools.chain(*run.micro), *(run.rows or run.sizes.values())]
        if min(numbers, default=-1) < (not run.rows) or not any(numbers):
            expected = "rows, not negative and not all zero, or axes, each with at least one rank"
            raise ValueError(message(NAME, "ranks", repr(ranks), expected))
        if micro_batches is not None and (
            run.rows or not _are_numbers(micro_batches) or min(micro_batches, default=-1) < 0
        ):
            got, expected = f"{micro_batches!r} with {run}", "the rows of each, such as (1, 3), on a mesh"
            raise ValueError(message(NAME, "micro_batches", got, expected, "use ranks=[((2, 2), (4,))] without a mesh"))
    return [replace(run, micro=(tuple(micro_batches),) * run.size) for run in found] if micro_batches else found


def ranks_of_rows(rows: int) -> list[tuple[int, ...]]:
    """Return equal, uneven and empty ranks, two to four, that have so many rows in all."""
    half, quarter = divmod(rows, 2)[0], rows // 4
    each = [(half, half), (half + 1, rows - half - 1), (0, half + 1, rows - half - 1), (quarter,) * 4]
    return [run for run in each if sum(run) == rows and min(run) >= 0 and any(run)]


def _parsed(one: object) -> Ranks | None:
    """Return the run that this asks for; None: it is none."""
    if isinstance(one, Mapping):
        is_mesh = all(isinstance(axis, str) for axis in one) and _are_numbers([*one.values()])
        return Ranks(dict(one)) if is_mesh else None
    if _are_numbers(one):
        return Ranks({RANKS: len(one)}, tuple(one))
    if isinstance(one, Sequence) and all(_are_numbers(mine) or _are_numbers([mine]) for mine in one):
        micro = tuple((mine,) if isinstance(mine, int) else tuple(mine) for mine in one)
        return Ranks({RANKS: len(micro)}, tuple(map(sum, micro)), micro)
    return None


def _are_numbers(x: object) -> TypeGuard[Sequence[int]]:
    """Whether these are rows of ranks, sizes of axes, or rows of micro-batches."""
    return isinstance(x, Sequence) and all(isinstance(k, int) and not isinstance(k, bool) for k in x)
