"""Which piece of a whole tensor each rank of a mesh holds, in the words of `torch.distributed.tensor`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.testing.harness.comparison import near

#: What a tensor is along an axis.
SHARD, REPLICATE, PARTIAL = "shard", "replicate", "partial"

#: What errors of sharded programs begin with.
NAME = "assert_matches_single_process"
_EXPECTED = (
    "Shard(dim), Replicate() or Partial() of torch.distributed.tensor, or a function (whole, {axis: coordinate})"
)


class Coordinates(dict[str, int]):
    """The coordinates {axis: coordinate} of a rank. `mesh` has the sizes of the axes."""

    def __init__(self, at: Mapping[str, int], mesh: Mapping[str, int]) -> None:
        super().__init__(at)
        self.mesh = dict(mesh)


@dataclass(frozen=True)
class Mesh:
    """The axes of a mesh with their sizes. The last axis varies fastest, as in `init_device_mesh`."""

    sizes: dict[str, int]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        return ", ".join(f"{axis}={n}" for axis, n in self.sizes.items())

    def at(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank."""
        found = {}
        for axis, n in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, n)
        return Coordinates({axis: found[axis] for axis in self.sizes}, self.sizes)

    def along(self, axes: Sequence[str], rank: int) -> list[int]:
        """Return the ranks whose coordinates are those of this rank but for these axes, in order."""
        held = {axis: i for axis, i in self.at(rank).items() if axis not in axes}
        return [r for r in range(self.size) if held.items() <= self.at(r).items()]


@dataclass(frozen=True)
class Layout:
    """What each rank holds of a tensor."""

    #: SHARD, REPLICATE or PARTIAL for each axis of the mesh.
    kinds: dict[str, str]
    #: The piece of this rank, of any tensor of the whole's shape.
    piece: Callable[[Tensor], Tensor]
    #: What was taken from the shape of the tensor, in words; "": nothing, or Replicate.
    found: str = ""

    def has(self, kind: str) -> list[str]:
        """Return the axes along which the tensor is this."""
        return [axis for axis, each in self.kinds.items() if each == kind]


#: A placement of torch.distributed.tensor, or a function (whole, coordinates) -> piece.
Placement: TypeAlias = Any


def parsed_mesh(mesh: object) -> list[Mesh]:
    """Return the meshes of the argument `mesh`, each of which is a run."""
    expected = 'the sizes of the axes by name, such as {"dp": 2, "tp": 2}, or a list of such'
    each = [mesh] if isinstance(mesh, Mapping) else mesh
    if not isinstance(each, Sequence) or isinstance(each, str) or not each:
        raise TypeError(message(NAME, "mesh", repr(mesh), expected))
    for one in each:
        if not isinstance(one, Mapping) or not one:
            raise TypeError(message(NAME, "mesh", repr(one), expected))
        for axis, n in one.items():
            if not isinstance(axis, str) or isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise ValueError(message(NAME, "mesh", f"{axis!r}: {n!r}", f"{expected}, each size at least 1"))
        if list(one) != list(each[0]):
            raise ValueError(message(NAME, "mesh", f"axes {list(one)}", f"those of the first mesh, {list(each[0])}"))
    return [Mesh(dict(one)) for one in each]


def parsed_reduction(rank_reduction: object, mesh: Mesh) -> dict[str, str]:
    """Return the argument `rank_reduction` of a mesh: "mean" or "sum" for some axes."""
    if rank_reduction is None:
        return {}
    if not isinstance(rank_reduction, Mapping):
        expected = f'"mean" or "sum" by axis, such as {{"{next(iter(mesh.sizes))}": "mean"}}'
        raise TypeError(message(NAME, "rank_reduction", repr(rank_reduction), expected))
    for axis, how in rank_reduction.items():
        expect.choice(NAME, "rank_reduction", axis, tuple(mesh.sizes))
        expect.choice(NAME, f"rank_reduction[{axis!r}]", how, ("mean", "sum"))
    return dict(rank_reduction)


def parsed_placements(placements: object, mesh: Mesh) -> dict[str, Placement]:
    """Return the argument `placements`, after a check of its form."""
    if placements is None:
        return {}
    if not isinstance(placements, Mapping):
        raise TypeError(message(NAME, "placements", repr(placements), "placements by the name of a tensor"))
    for name, said in placements.items():
        where = f"placements[{name!r}]"
        if not isinstance(name, str):
            raise TypeError(message(NAME, where, repr(name), "the name of an input, parameter, buffer or output"))
        if isinstance(said, Mapping):
            for axis, placement in said.items():
                expect.choice(NAME, where, axis, tuple(mesh.sizes))
                if not (is_placement(placement) or callable(placement)):
                    raise TypeError(message(NAME, f"{where}[{axis!r}]", repr(placement), _EXPECTED))
        elif not callable(said):
            expected = "placements by axis, or one function for all axes"
            raise TypeError(message(NAME, where, repr(said), expected))
    return dict(placements)


def said_of(placements: Mapping[str, Placement], name: str) -> Placement | None:
    """Return what is said of a tensor: by its name, by the argument that holds it, else by the first pattern.

    A parameter or buffer comes as "parameter image.weight": an argument that is called image does not hold it. In
    patterns * and ? are special; brackets are those of names, such as module[0].weight.
    """
    short = short_name(name)
    for key in (short, *((short.partition("[")[0], short.partition(".")[0]) if short == name else ())):
        if key in placements:
            return placements[key]
    return next((said for key, said in placements.items() if fnmatchcase(short, key.replace("[", "[[]"))), None)


def short_name(name: str) -> str:
    """Return the name without what kind of tensor it is."""
    return name.removeprefix("parameter ").removeprefix("buffer ")


def refuse_unused(operation: str, placements: Mapping[str, Placement], names: Sequence[str]) -> None:
    """Raise if nothing has one of these names."""
    for key in placements:
        if not any(said_of({key: key}, name) for name in names):
            known = ", ".join(dict.fromkeys(map(short_name, names)))
            raise ValueError(message(operation, "placements", repr(key), f"one of {known}"))


def by_function(name: str, said: Placement | None, whole: Tensor, mesh: Mesh, rank: int) -> Layout:
    """Return the layout that the user said; Replicate if nothing is said."""
    said = said or {}

    def cut(x: Tensor, at: Coordinates) -> Tensor:
        if not isinstance(said, Mapping):
            return _called(name, said, x, at)
        for axis, n in mesh.sizes.items():
            x = _placed(name, said.get(axis), x, axis, n, at)
        return x

    if isinstance(said, Mapping):
        kinds = {axis: kind_of(said.get(axis)) for axis in mesh.sizes}
    else:  # an axis is sharded if the pieces along it differ
        index = torch.arange(1.0, whole.numel() + 1, dtype=torch.double).view(whole.shape)
        pieces = [cut(index, mesh.at(r)) for r in range(mesh.size)]
        kinds = {
            axis: REPLICATE
            if all(torch.equal(pieces[r], pieces[s]) for r in range(mesh.size) for s in mesh.along([axis], r))
            else SHARD
            for axis in mesh.sizes
        }
    return Layout(kinds, lambda x: cut(x, mesh.at(rank)))


def candidates(whole: Tensor, mesh: Mesh, *more: Placement) -> list[dict[str, Placement]]:
    """Return the placements that a shape may mean: each axis is Replicate, one of some more, or Shard of a dim."""
    from torch.distributed.tensor import Shard

    each = [None, *more, *(Shard(dim) for dim in range(whole.dim()))]
    every = itertools.product(*(each if n > 1 else [None] for n in mesh.sizes.values()))
    return [{axis: p for axis, p in zip(mesh.sizes, some, strict=True) if p is not None} for some in every]


def fitting(name: str, whole: Tensor, mine: Tensor, mesh: Mesh, rank: int) -> tuple[set[int], set[int]]:
    """Return which candidates this rank's tensor may be by its shape, and which by its numbers too."""
    found, equal = set(), set()
    for i, said in enumerate(candidates(whole, mesh)):
        piece = by_function(name, said, whole, mesh, rank).piece(whole)
        if piece.shape == mine.shape:
            found.add(i)
            if near(mine, piece):
                equal.add(i)
    return found, equal


def chosen(
    name: str, fits: Sequence[tuple[set[int], set[int]]], shapes: Sequence[object], whole: Tensor, mesh: Mesh
) -> dict[str, Placement]:
    """Return the one candidate that fits on all ranks, by the numbers if the shapes leave several.

    Raises:
        ValueError: there is none, or several.
    """
    shaped, equal = (set.intersection(*(fit[k] for fit in fits)) for k in (0, 1))
    left = equal if len(shaped) > 1 and len(equal) == 1 else shaped
    every = candidates(whole, mesh)
    if len(left) == 1:
        return every[left.pop()]
    got = f"shapes {', '.join(map(str, dict.fromkeys(shapes)))} of {tuple(whole.shape)} on the ranks of {mesh}"
    if not left:
        raise ValueError(message(NAME, name, got, "pieces along some axes", f"say what it is: placements[{name!r}]"))
    words = " or ".join(in_words(every[i]) for i in sorted(left))
    raise ValueError(message(NAME, name, f"{got}, which may be {words}", "one of them", f"say placements[{name!r}]"))


def in_words(said: Mapping[str, Placement]) -> str:
    """Return placements by axis as one reads them."""
    each = {axis: f"Shard({p.dim})" if hasattr(p, "dim") else type(p).__name__ for axis, p in said.items()}
    return " and ".join(f"{p} on {axis}" for axis, p in each.items()) or "Replicate"


def is_placement(x: object) -> bool:
    """Whether this is a placement of torch.distributed.tensor."""
    from torch.distributed.tensor.placement_types import Placement as Known

    return isinstance(x, Known)


def kind_of(placement: Placement | None) -> str:
    """Return what a placement says of a tensor along its axis."""
    from torch.distributed.tensor import Partial, Replicate

    if placement is None or isinstance(placement, Replicate):
        return REPLICATE
    return PARTIAL if isinstance(placement, Partial) else SHARD


def _placed(name: str, placement: Placement | None, x: Tensor, axis: str, n: int, at: Coordinates) -> Tensor:
    """Return the piece along one axis. Shard divides as `torch.chunk` does, so the last ranks may have less."""
    from torch.distributed.tensor import Shard

    if placement is None or kind_of(placement) != SHARD:
        return x
    if not isinstance(placement, Shard):
        return _called(name, placement, x, at)
    if not -x.dim() <= placement.dim < x.dim():
        got = f"Shard({placement.dim}) on {axis} of a tensor of shape {tuple(x.shape)}"
        raise ValueError(message(NAME, f"placements[{name!r}]", got, f"a dim of {x.dim()}"))
    length = x.shape[placement.dim]
    most = -(-length // n)
    start = min(at[axis] * most, length)
    return x.narrow(placement.dim, start, min(most, length - start))


def _called(name: str, f: Callable[..., Any], x: Tensor, at: Coordinates) -> Tensor:
    piece = f(x, at)
    if not isinstance(piece, Tensor):
        got = f"a function that returned {type(piece).__name__}"
        raise TypeError(message(NAME, f"placements[{name!r}]", got, "the piece of the whole, a tensor"))
    return piece
