"""Which numbers of a whole tensor each rank holds: their flat positions, in the shape of what the rank has.

The positions of a batch are those of the placements that the user states. Those of a module are found: a float64 copy
of it is filled with consecutive integers, the user's function shards the copy, and the integers that a rank then has
say which numbers of which tensor they are, whatever the function has cut, merged, interleaved, padded or renamed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.core.torch_private.fsdp import groups_of_fsdp
from diffcoll.testing.numbers import largest

#: What errors begin with.
NAME = "assert_matches_single_process"
#: The axis of a run whose ranks have rows of the batch.
RANKS = "ranks"
#: The number that is written for position 0; modules are initialized with smaller ones.
_FIRST = 2**23
#: Up to which integer the numbers of a dtype are exact.
_EXACT = {torch.float64: 2**53, torch.float32: 2**24, torch.int64: 2**53, torch.int32: 2**31}

#: A placement of torch.distributed.tensor, or a function (whole, {axis: coordinate}) -> piece.
Placement: TypeAlias = Any


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────


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
        fixed = {axis: i for axis, i in self.at(rank).items() if axis not in axes}
        return [r for r in range(self.size) if fixed.items() <= self.at(r).items()]

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


def _is_run(one: object) -> bool:
    """Whether these are rows of ranks, or a mesh."""
    if isinstance(one, Mapping):
        return all(isinstance(axis, str) for axis in one) and _is_run(list(one.values()))
    return isinstance(one, Sequence) and all(isinstance(k, int) and not isinstance(k, bool) for k in one)


# ── placements ───────────────────────────────────────────────────────────────────────────────────────────


def parsed_placements(operation: str, placements: object, axes: Sequence[str]) -> dict[str, Placement]:
    """Return the argument `placements`, after a check of its form."""
    from torch.distributed.tensor.placement_types import Placement as Known

    if placements is None:
        return {}
    if not isinstance(placements, Mapping) or not all(isinstance(name, str) for name in placements):
        expected = "placements by the name of a tensor, or a pattern"
        raise TypeError(message(operation, "placements", repr(placements), expected))
    for name, said in placements.items():
        of_axes = isinstance(said, Mapping) and all(callable(p) or isinstance(p, Known) for p in said.values())
        if not (of_axes or callable(said)):
            expected = "by axis, Shard(dim), Replicate() or Partial(), or a function (whole, {axis: i}) -> piece"
            raise TypeError(message(operation, f"placements[{name!r}]", repr(said), expected))
        for axis in said if isinstance(said, Mapping) else ():
            expect.choice(operation, f"placements[{name!r}]", axis, tuple(axes))
    return dict(placements)


def said_of(placements: Mapping[str, Placement], name: str) -> Placement | None:
    """Return what is said of a tensor: by its name, by the argument that holds it, else by the first pattern.

    In patterns * and ? are special; brackets are those of names, such as x[0].
    """
    for key in (name, name.partition("[")[0]):
        if key in placements:
            return placements[key]
    return next((said for key, said in placements.items() if fnmatchcase(name, key.replace("[", "[[]"))), None)


def refuse_unknown(operation: str, placements: Mapping[str, Placement], known: Sequence[str]) -> None:
    """Raise if a placement is of no tensor that is known."""
    for key in placements:
        if not any(said_of({key: key}, name) for name in known):
            raise ValueError(message(operation, "placements", repr(key), f"one of {', '.join(known)}"))


def partial_axes(said: Placement | None) -> tuple[str, ...]:
    """Return the axes along which a placement says that ranks have parts of a sum."""
    from torch.distributed.tensor import Partial

    return tuple(axis for axis, p in said.items() if isinstance(p, Partial)) if isinstance(said, Mapping) else ()


def placed(name: str, whole: Tensor, said: Placement | None, ranks: Ranks) -> list[Tensor]:
    """Return the positions of each rank under this placement; all of them if nothing is said."""
    every = torch.arange(whole.numel()).view(whole.shape)
    if ranks.rows:
        return list(torch.split_with_sizes(every, list(ranks.rows)))
    return [_piece(name, every, said, ranks.at(r)) for r in range(ranks.size)]


def _piece(name: str, x: Tensor, said: Placement | None, at: Coordinates) -> Tensor:
    """Return the piece of one rank. Shard divides as `torch.chunk` does, so the last ranks may have less."""
    from torch.distributed.tensor import Shard

    for axis, placement in said.items() if isinstance(said, Mapping) else [("", said)]:
        if isinstance(placement, Shard):
            dim, n = placement.dim, at.mesh[axis]
            if not -x.dim() <= dim < x.dim():
                got = f"Shard({dim}) of a tensor of shape {tuple(x.shape)}"
                raise ValueError(message(NAME, f"placements[{name!r}]", got, f"a dim of {x.dim()}"))
            most = -(-x.shape[dim] // n)
            start = min(at[axis] * most, x.shape[dim])
            x = x.narrow(dim, start, min(most, x.shape[dim] - start))
        elif callable(placement):
            found: object = placement(x, at)
            if not isinstance(found, Tensor):
                got = f"a function that returned {type(found).__name__}"
                raise TypeError(message(NAME, f"placements[{name!r}]", got, "the piece of the whole, a tensor"))
            x = found
    return x


def split_axes(held: Sequence[Tensor], ranks: Ranks) -> list[str]:
    """Return the axes along which ranks hold other positions, given those of each rank."""
    sets = [torch.unique(index) for index in held]
    pairs = [(r, s) for r in range(ranks.size) for s in range(r) if not torch.equal(sets[r], sets[s])]
    return [axis for axis in ranks.sizes if any(s in ranks.along([axis], r) for r, s in pairs)]


# ── what the shapes of tensors leave open ────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Fit:
    """A way in which tensors may be pieces of one tensor."""

    words: str
    #: Their positions; None: the rank has none.
    index: list[Tensor | None]


def fits(shape: Sequence[int], shapes: Sequence[Sequence[int] | None], ranks: Ranks) -> list[Fit]:
    """Return the ways in which tensors of these shapes may be pieces of one shape; None: the rank has none."""
    every = torch.arange(math.prod(shape)).view(tuple(shape))
    found: dict[object, Fit] = {}  # where some ranks have none, several ways may be one
    if any(of_rank is not None and len(of_rank) != len(shape) for of_rank in shapes):
        return []
    for dims in itertools.product([None, *range(len(shape))], repeat=len(ranks.axes)):
        along = {axis: dim for axis, dim in zip(ranks.axes, dims, strict=True) if dim is not None}
        index = _blocks(every, shapes, along, ranks)
        if index is not None:
            key = tuple(None if i is None else (i.storage_offset(), i.shape) for i in index)
            words = " and ".join(f"Shard({dim}) on {axis}" for axis, dim in along.items())
            found.setdefault(key, Fit(words, index))
    return list(found.values())


def _blocks(
    every: Tensor, shapes: Sequence[Sequence[int] | None], along: Mapping[str, int], ranks: Ranks
) -> list[Tensor | None] | None:
    """Return the positions of each rank if it has a block of the length that its shape says; None: they do not fit."""
    found: list[Tensor | None] = []
    for r, shape in enumerate(shapes):
        block = every
        for dim, length in enumerate(shape or ()):
            peers = ranks.along([axis for axis, d in along.items() if d == dim], r)
            lengths = [0 if (of_peer := shapes[s]) is None else of_peer[dim] for s in peers]
            if sum(lengths) != every.shape[dim]:
                return None
            block = block.narrow(dim, sum(lengths[: peers.index(r)]), length)
        found.append(None if shape is None else block)
    return found


def ways_of(
    name: str, whole: Tensor, shapes: Sequence[Sequence[int] | None], said: Placement | None, ranks: Ranks
) -> list[Fit]:
    """Return the way to divide a tensor that a placement says, if it fits the shapes, or all that they allow."""
    if said is None:
        return fits(whole.shape, shapes, ranks)
    index = placed(name, whole, said, ranks)
    fit = all(shape is None or tuple(shape) == i.shape for shape, i in zip(shapes, index, strict=True))
    return [Fit("", list(index))] if fit else []


def settled_output(name: str, whole: Tensor, got: Sequence[Tensor], said: Placement | None, ranks: Ranks) -> Fit | None:
    """Return the positions of an output, by what is said, its shapes, and if these leave several, its numbers."""

    def distance(fit: Fit) -> float:
        pieces = zip(got, fit.index, strict=True)
        return max(largest(x.to(whole.dtype) - whole.flatten()[i]) for x, i in pieces if i is not None)

    ways = ways_of(name, whole, [x.shape for x in got], said, ranks)
    return min(ways, key=distance) if len(ways) > 1 and whole.dtype != torch.bool else next(iter(ways), None)


# ── the numbers of a module ──────────────────────────────────────────────────────────────────────────────


class Span(NamedTuple):
    """A tensor of the whole, and where its numbers begin among those of all; tied ones begin at one place."""

    name: str
    #: "input", "parameter" or "buffer".
    kind: str
    start: int
    tensor: Tensor
    #: Whether this is the first name of a tied tensor.
    first: bool

    @property
    def end(self) -> int:
        """Where they end."""
        return self.start + self.tensor.numel()

    @property
    def trained(self) -> bool:
        """Whether it is an input, or a parameter with a gradient, under its first name."""
        return self.kind == "input" or (self.first and self.kind == "parameter" and self.tensor.requires_grad)

    def holds(self, index: Tensor) -> Tensor:
        """Whether positions are those of this tensor."""
        return (index >= self.start) & (index < self.end)


#: What wrappers of modules put into the names of parameters; Fabric's has the module twice, with and without DDP.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_original_module")


def unwrapped(module: nn.Module, name: str) -> str:
    """Return the name of a tensor or submodule without what wrappers have put into it."""
    kept: list[str] = []
    holder: Any = module
    for part in name.split("."):
        inner = part == "module" and isinstance(holder, nn.parallel.DistributedDataParallel)
        if part not in _WRAPPERS and not inner:
            kept.append(part)
        holder = getattr(holder, part, None)
    return ".".join(kept)


def spans(module: nn.Module) -> list[Span]:
    """Return the span of each parameter and buffer; tied ones by each of their names."""
    found: list[Span] = []
    starts: dict[int, int] = {}
    end = 0
    for kind, each in (("parameter", module.named_parameters), ("buffer", module.named_buffers)):
        for name, x in each(remove_duplicate=False):
            first = id(x) not in starts
            found.append(Span(unwrapped(module, name), kind, starts.setdefault(id(x), end), x, first))
            end = max(end, found[-1].end)
    return found


def _holds(x: Tensor, total: int) -> bool:
    """Whether a tensor's numbers may be positions."""
    return _FIRST + total <= _EXACT.get(x.dtype, 0) and x.layout == torch.strided and not x.is_meta


def filled(module: nn.Module) -> int:
    """Write the positions of its numbers into a module, in float64; return how many there are."""
    each = spans(module.double())
    total = max((span.end for span in each), default=0)
    with torch.no_grad():
        for span in each:
            if _holds(span.tensor, total):
                span.tensor.copy_(_FIRST + torch.arange(span.start, span.end).view(span.tensor.shape))
    return total


def _positions(x: Tensor, total: int) -> Tensor:
    """Return the positions that a tensor's numbers are; −1 where one is none."""
    if not _holds(x, total):
        return torch.full(x.shape, -1)
    position = x.cpu().double() - _FIRST
    ok = (position == position.round()) & (position >= 0) & (position < total)
    return torch.where(ok, position, -1.0).long()


class FreshIsNan(TorchFunctionMode):
    """Fills memory that nobody has written to with NaN: it may hold old integers."""

    _MAKE = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = func(*args, **(kwargs or {}))
        if func in self._MAKE and x.is_floating_point() and not x.is_meta:
            with torch.no_grad():
                x.detach().fill_(math.nan)
        return x


# ── the positions of a sharded module ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Held:
    """A tensor of one rank's module."""

    name: str
    #: Positions among the numbers of the whole module, −1 where there is none.
    index: Tensor
    requires_grad: bool = True
    #: Groups of ranks over which something reduces the gradient.
    groups: tuple[tuple[int, ...], ...] = ()
    #: Whether this is the first name of a tied tensor.
    first: bool = True
    #: The numbers of the whole, to be written into it, if the user's function has made it anew.
    write: Tensor | None = None

    @property
    def is_new(self) -> bool:
        """Whether it holds no number of the whole."""
        return self.index.numel() > 0 and bool((self.index < 0).all())

    def written(self, span: Span, index: Tensor | None) -> Held:
        """Return it with the numbers at these positions of a tensor of the whole."""
        if index is None:
            return self
        return replace(self, index=index + span.start, write=span.tensor.detach().flatten()[index])


def local(x: Any) -> Tensor:
    """Return this rank's numbers of a tensor, which may be a DTensor."""
    from torch.distributed.tensor import DTensor

    found: Tensor = x.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def held_on_rank(module: nn.Module, total: int) -> list[Held]:
    """Return what this rank holds of so many numbers, which are their positions."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Replicate

    groups: dict[int, list[Any]] = {}
    for each in module.modules():
        is_ddp, is_fsdp = (isinstance(each, c) for c in (nn.parallel.DistributedDataParallel, FullyShardedDataParallel))
        for p in each.parameters() if is_ddp or is_fsdp else ():
            groups.setdefault(id(p), []).extend([each.process_group] if is_ddp else groups_of_fsdp(each))
    found: list[Held] = []
    for span in spans(module):
        x, of_tensor = span.tensor, list(groups.get(id(span.tensor), ()))
        if isinstance(x, DTensor):
            mesh = x.device_mesh
            replicated = [d for d, p in enumerate(x.placements) if isinstance(p, Replicate) and mesh.size(d) > 1]
            of_tensor += [mesh.get_group(d) for d in replicated]
        of_ranks = sorted({tuple(dist.get_process_group_ranks(group)) for group in of_tensor})
        found.append(Held(span.name, _positions(local(x), total), x.requires_grad, tuple(of_ranks), span.first))
    return found


def settled(
    whole: Sequence[Span], each: Sequence[Sequence[Held]], placements: Mapping[str, Placement], ranks: Ranks
) -> tuple[list[list[Held]], list[str]]:
    """Return what each rank holds of a module, and notes of what was taken from shapes.

    Raises:
        ValueError: a tensor holds no number of the whole and nothing says what it is, or a number twice; a reducer's
            group is along no axes; a parameter of the whole is on no rank.
    """
    for held in itertools.chain(*each):
        known = held.index[held.index >= 0]
        if len(known) != len(torch.unique(known)):
            got = f"a tensor {held.name} that holds a number of the whole twice"
            raise ValueError(message(NAME, "shard", got, "each number once"))
        for group in held.groups:
            if ranks.axes_of(group) is None:
                got = f"a reducer of {held.name} whose group is ranks {list(group)}"
                raise ValueError(message(NAME, "shard", got, f"the ranks along axes of {ranks}"))
    found, notes = [list(mine) for mine in each], []
    of_name = {span.name: span for span in whole}
    for name, trained in {h.name: h.requires_grad for h in itertools.chain(*each) if h.is_new}.items():
        span = of_name.get(name)
        if span is None and trained:
            got, expected = f"a module with {name}, made anew", f"names of the whole: {', '.join(of_name)}"
            raise ValueError(message(NAME, "shard", got, expected, "copy its numbers, or keep its name"))
        if span is not None:
            way = _way_of(span, [next((h for h in mine if h.name == name), None) for mine in each], placements, ranks)
            notes += [f"{name}: taken to be {way.words}, by its shape; placements= may say otherwise"] * bool(way.words)
            for mine, index in zip(found, way.index, strict=True):
                mine[:] = [h.written(span, index) if h.name == name and h.is_new else h for h in mine]
    for span in whole:
        if span.trained and span.tensor.numel() and not any(span.holds(h.index).any() for mine in found for h in mine):
            got = f"no {span.name} on any rank"
            raise ValueError(message(NAME, "shard", got, "every parameter of the whole", "or freeze it in the whole"))
    return found, notes


def _way_of(span: Span, each: Sequence[Held | None], placements: Mapping[str, Placement], ranks: Ranks) -> Fit:
    """Return how a tensor made anew is divided: as is said, or as its shapes say."""
    said = said_of(placements, span.name)
    if isinstance(said, Mapping) and set(said) <= set(partial_axes(said)):
        said = None  # which divides nothing
    shapes = [None if held is None else tuple(held.index.shape) for held in each]
    ways = ways_of(span.name, span.tensor, shapes, said, ranks)
    if len(ways) != 1:
        got = f"shapes {', '.join(map(str, dict.fromkeys(shapes)))} of {tuple(span.tensor.shape)} on {ranks}"
        if ways:
            got += f", which may be {' or '.join(way.words or 'Replicate' for way in ways)}"
        remedy = f"copy its numbers in shard, or say what they are in placements[{span.name!r}]"
        raise ValueError(message(NAME, span.name, got, "one way to divide it", remedy))
    return ways[0]
