"""Which numbers of a whole tensor each rank holds: their flat positions, in the shape of what the rank has.

The positions of a batch are those of the placements that the user states. Those of a module are found: a copy of it is
filled with consecutive integers, the user's function shards the copy, and the integers that a rank then has say which
numbers of which tensor they are, whatever the function has cut, merged, interleaved, padded or renamed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import torch
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
#: The first integer of a module: larger than what a module is usually initialized with.
_START = 2**20
#: Up to which integer numbers of a dtype are exact. A module with more numbers is filled with their digits.
_EXACT = {torch.float64: 2**53, torch.int64: 2**53, torch.int32: 2**31, torch.float32: 2**24, torch.float16: 2**11}
_BASE = 2**8

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

    def __str__(self) -> str:
        if self.rows:
            return f"rows {', '.join(map(str, self.rows))}"
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
    expected = (
        'the rows of each rank, such as (5, 3), the axes of a mesh, such as {"dp": 2, "tp": 2}, or a list of such'
    )
    wrong = TypeError(message(NAME, "ranks", repr(ranks), expected))
    if isinstance(ranks, Mapping) or (isinstance(ranks, Sequence) and all(isinstance(k, int) for k in ranks)):
        ranks = [ranks]
    if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not ranks:
        raise wrong
    found = []
    for one in ranks:
        numbers = (
            list(one.values() if isinstance(one, Mapping) else one) if isinstance(one, (Mapping, Sequence)) else []
        )
        if not numbers or not all(isinstance(k, int) and not isinstance(k, bool) for k in numbers):
            raise wrong
        if isinstance(one, Mapping):
            if min(numbers) < 1 or not all(isinstance(axis, str) for axis in one):
                raise ValueError(message(NAME, "ranks", repr(one), "axes by name, each with at least one rank"))
            found.append(Ranks(dict(one)))
        else:
            if min(numbers) < 0 or not any(numbers):
                raise ValueError(message(NAME, "ranks", repr(one), "rows, not negative and not all zero"))
            found.append(Ranks({RANKS: len(numbers)}, tuple(numbers)))
    return found


# ── placements ───────────────────────────────────────────────────────────────────────────────────────────


def parsed_placements(operation: str, placements: object, axes: Sequence[str]) -> dict[str, Placement]:
    """Return the argument `placements`, after a check of its form."""
    if placements is None:
        return {}
    if not isinstance(placements, Mapping):
        raise TypeError(message(operation, "placements", repr(placements), "placements by the name of a tensor"))
    each = "Shard(dim), Replicate() or Partial() of torch.distributed.tensor, or a function (whole, {axis: i}) -> piece"
    for name, said in placements.items():
        if not isinstance(name, str):
            raise TypeError(message(operation, "placements", repr(name), "the name of a tensor, or a pattern"))
        for axis, placement in said.items() if isinstance(said, Mapping) else [("", said)]:
            if axis:
                expect.choice(operation, f"placements[{name!r}]", axis, tuple(axes))
            if not (callable(placement) or (isinstance(said, Mapping) and _is_placement(placement))):
                raise TypeError(message(operation, f"placements[{name!r}]", repr(placement), f"by axis, {each}"))
    return dict(placements)


def _is_placement(x: object) -> bool:
    from torch.distributed.tensor.placement_types import Placement as Known

    return isinstance(x, Known)


def said_of(placements: Mapping[str, Placement], name: str) -> Placement | None:
    """Return what is said of a tensor: by its name, by the argument that holds it, else by the first pattern.

    In patterns * and ? are special; brackets are those of names, such as x[0].
    """
    for key in (name, name.partition("[")[0]):
        if key in placements:
            return placements[key]
    return next((said for key, said in placements.items() if fnmatchcase(name, key.replace("[", "[[]"))), None)


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


def split_axes(held: Sequence[Sequence[Tensor]], ranks: Ranks) -> tuple[str, ...]:
    """Return the axes along which ranks hold other positions, given those of each rank."""
    sets = [_unique(mine) if mine else torch.empty(0) for mine in held]
    return tuple(
        axis
        for axis in ranks.sizes
        if any(not torch.equal(sets[r], sets[s]) for r in range(ranks.size) for s in ranks.along([axis], r) if s > r)
    )


def _unique(each: Sequence[Tensor]) -> Tensor:
    found: Tensor = torch.unique(torch.cat([x.flatten() for x in each]))
    return found


# ── what the shapes of tensors leave open ────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Fit:
    """A way in which the tensors of the ranks may be pieces of a whole."""

    words: str
    index: list[Tensor | None]


def fits(shape: Sequence[int], shapes: Sequence[Sequence[int] | None], ranks: Ranks) -> Iterator[Fit]:
    """Yield the ways in which tensors of these shapes may be pieces of one shape; None: the rank has none."""
    every, free = torch.arange(math.prod(shape)).view(tuple(shape)), [axis for axis, n in ranks.sizes.items() if n > 1]
    seen: list[list[Tensor | None]] = []  # where some ranks have none, several ways may be one
    for dims in itertools.product([None, *range(len(shape))], repeat=len(free)):
        along = {axis: dim for axis, dim in zip(free, dims, strict=True) if dim is not None}
        found = _blocks(every, shapes, along, ranks)
        if found is not None and not any(_equal(found, other) for other in seen):
            seen.append(found)
            yield Fit(" and ".join(f"Shard({dim}) on {axis}" for axis, dim in along.items()), found)


def _equal(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    return all((x is y) if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _blocks(
    every: Tensor, shapes: Sequence[Sequence[int] | None], along: Mapping[str, int], ranks: Ranks
) -> list[Tensor | None] | None:
    """Return the positions of each rank if it has a block of the length that its shape says; None: they do not fit."""
    found: list[Tensor | None] = []
    for r, shape in enumerate(shapes):
        if shape is None:
            found.append(None)
            continue
        if len(shape) != every.dim():
            return None
        block = every
        for dim, length in enumerate(shape):
            axes = [axis for axis, d in along.items() if d == dim]
            peers = ranks.along(axes, r)
            of_peers = [shapes[s] for s in peers]
            if any(mine is not None and len(mine) != every.dim() for mine in of_peers):
                return None
            lengths = [0 if mine is None else mine[dim] for mine in of_peers]
            if sum(lengths) != every.shape[dim]:
                return None
            block = block.narrow(dim, sum(lengths[: peers.index(r)]), length)
        found.append(block)
    return found


def settled_output(name: str, whole: Tensor, got: Sequence[Tensor], said: Placement | None, ranks: Ranks) -> Fit | None:
    """Return the positions of an output, by what is said, its shapes, and if these leave several, its numbers."""
    if said is not None:
        index = placed(name, whole, said, ranks)
        return Fit("", list(index)) if all(x.shape == i.shape for x, i in zip(got, index, strict=True)) else None

    def distance(fit: Fit) -> float:
        pieces = zip(got, fit.index, strict=True)
        return max(largest(x.to(whole.dtype) - whole.flatten()[i]) for x, i in pieces if i is not None)

    ways = list(fits(whole.shape, [tuple(x.shape) for x in got], ranks))
    return min(ways, key=distance) if len(ways) > 1 and whole.dtype != torch.bool else next(iter(ways), None)


# ── the numbers of a module ──────────────────────────────────────────────────────────────────────────────


class Span(NamedTuple):
    """A tensor of the whole module, and where its numbers begin among those of all; tied ones begin at one place."""

    name: str
    kind: str
    start: int
    tensor: Tensor

    @property
    def end(self) -> int:
        """Where they end."""
        return self.start + self.tensor.numel()


#: What wrappers of modules put into the names of parameters; Fabric's has the module twice, with and without DDP.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_original_module")


def tensors_of(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield kind, name and tensor of each parameter and buffer; tied ones by each of their names."""
    for kind, each in (("parameter", module.named_parameters), ("buffer", module.named_buffers)):
        for name, x in each(remove_duplicate=False):
            yield kind, unwrapped(module, name), x


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
    """Return the span of each tensor, in the order of `tensors_of`."""
    found: list[Span] = []
    starts: dict[int, int] = {}
    end = 0
    for kind, name, x in tensors_of(module):
        if id(x) not in starts:
            starts[id(x)] = end
            end += x.numel()
        found.append(Span(name, kind, starts[id(x)], x))
    return found


class Code(NamedTuple):
    """How positions are written into the tensors of a module: as integers, or in passes as digits and a check."""

    total: int
    #: How many passes write digits; 0: one pass writes all.
    digits: int = 0

    @property
    def passes(self) -> range:
        """The passes."""
        return range(self.digits + 1)

    def written(self, position: Tensor, step: int) -> Tensor:
        """Return what one pass writes."""
        if not self.digits:
            return position + _START
        return position // _BASE**step % _BASE if step < self.digits else self._check(position)

    def read(self, values: Sequence[Tensor]) -> Tensor:
        """Return the positions from what each pass has left; −1 where there is none."""
        if not self.digits:
            position = values[0].nan_to_num(-1.0).sub(_START)
            ok = (position >= 0) & (position < self.total) & (position == position.round())
        else:
            position = sum((v.nan_to_num(0.0) * _BASE**step for step, v in enumerate(values[:-1])), torch.zeros(()))
            ok = (position >= 0) & (position < self.total) & (self._check(position) == values[-1])
        return torch.where(ok, position, -1.0).long()

    def _check(self, position: Tensor) -> Tensor:
        return (position * 31 + 7) % 251


def code_of(module: nn.Module) -> Code:
    """Return the code that the dtypes of a module can hold."""
    each = spans(module)
    total = max((span.end for span in each), default=0)
    exact = min((_EXACT.get(span.tensor.dtype, _BASE) for span in each if _holds(span.tensor)), default=2**53)
    return Code(total) if _START + total < exact else Code(total, max(1, math.ceil(math.log(total + 1, _BASE))))


def _holds(x: Tensor) -> bool:
    return (x.dtype in _EXACT or x.dtype == torch.bfloat16) and x.layout == torch.strided and not x.is_meta


def fill(module: nn.Module, code: Code, step: int) -> None:
    """Write the positions of its numbers into a module."""
    with torch.no_grad():
        for span in spans(module):
            if _holds(span.tensor):
                position = torch.arange(span.start, span.end, dtype=torch.double)
                span.tensor.copy_(code.written(position, step).view(span.tensor.shape))


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
class Fact:
    """A tensor of one rank's module."""

    name: str
    kind: str
    #: Positions among the numbers of the whole module, −1 where there is none.
    index: Tensor
    requires_grad: bool
    #: Groups of ranks over which something reduces the gradient.
    groups: tuple[tuple[int, ...], ...]
    #: The index of the first tensor of the module that is the same one.
    tied: int


@dataclass(frozen=True)
class Held:
    """A tensor of one rank's module, settled among all ranks."""

    name: str
    index: Tensor
    #: The axes over which the program itself has reduced its gradient.
    reduced: tuple[str, ...]
    #: Whether the numbers of the whole have to be written into it: the user's function has made it anew.
    write: bool
    #: See `Fact`.
    tied: int = -1

    def of(self, whole: Tensor) -> Tensor:
        """Return its part of the numbers of all tensors of the module; zero where it has none of them."""
        return torch.where(self.index >= 0, whole[self.index.clamp(min=0)], 0) if len(whole) else whole


def local(x: Any) -> Tensor:
    """Return this rank's numbers of a tensor, which may be a DTensor."""
    from torch.distributed.tensor import DTensor

    found: Tensor = x.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def facts_of(module: nn.Module, index: Sequence[Tensor]) -> list[Fact]:
    """Return what there is to say of the tensors of this rank's module."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Replicate

    of_id: dict[int, set[tuple[int, ...]]] = {}
    for each in module.modules():
        groups = []
        if isinstance(each, nn.parallel.DistributedDataParallel):
            groups = [each.process_group]
        elif isinstance(each, FullyShardedDataParallel):
            groups = groups_of_fsdp(each)
        for group in groups:
            for p in each.parameters():
                of_id.setdefault(id(p), set()).add(tuple(dist.get_process_group_ranks(group)))
    found, first = [], dict[int, int]()
    for k, ((kind, name, x), i) in enumerate(zip(tensors_of(module), index, strict=True)):
        said = set(of_id.get(id(x), ()))
        if isinstance(x, DTensor):
            said |= {
                tuple(dist.get_process_group_ranks(x.device_mesh.get_group(d)))
                for d, p in enumerate(x.placements)
                if isinstance(p, Replicate) and x.device_mesh.size(d) > 1
            }
        found.append(Fact(name, kind, i, x.requires_grad, tuple(sorted(said)), first.setdefault(id(x), k)))
    return found


def settled(
    whole: Sequence[Span], facts: Sequence[Sequence[Fact]], placements: Mapping[str, Placement], ranks: Ranks
) -> tuple[list[list[Held]], list[str]]:
    """Return what each rank holds of a module, and notes of what was taken from shapes.

    Raises:
        ValueError: a tensor holds no number of the whole and nothing says what it is, or a number twice; a reducer's
            group is along no axes; a parameter of the whole is on no rank.
    """
    found: list[list[Held]] = [[] for _ in facts]
    notes: dict[str, None] = {}
    anew: dict[str, list[Tensor | None]] = {}
    by_name = {span.name: span for span in whole}
    for r, mine in enumerate(facts):
        for fact in mine:
            known = fact.index[fact.index >= 0]
            if len(known) != len(_unique([known])):
                got = f"a tensor {fact.name} that holds a number of the whole twice"
                raise ValueError(message(NAME, "shard", got, "each number once"))
            index, write = fact.index, fact.index.numel() > 0 and not len(known)
            if write:
                if fact.name not in anew:
                    anew[fact.name] = _by_name(by_name, fact, facts, placements, ranks, notes)
                known_by_name = anew[fact.name][r]
                index, write = (index, False) if known_by_name is None else (known_by_name, True)
            found[r].append(Held(fact.name, index, _axes(fact, ranks), write, fact.tied))
    held = [h.index.flatten() for mine in found for h in mine]
    every = _unique(held) if held else torch.empty(0)
    for span in whole:
        if span.kind == "parameter" and span.tensor.requires_grad and span.tensor.numel():
            if not ((every >= span.start) & (every < span.end)).any():
                got = f"no {span.name} on any rank"
                raise ValueError(
                    message(NAME, "shard", got, "every parameter of the whole", "or freeze it in the whole")
                )
    return found, list(notes)


def _axes(fact: Fact, ranks: Ranks) -> tuple[str, ...]:
    found: list[str] = []
    for group in fact.groups:
        axes = ranks.axes_of(group)
        if axes is None:
            got = f"a reducer of {fact.name} whose group is ranks {list(group)}"
            raise ValueError(message(NAME, "shard", got, f"the ranks along axes of {ranks}"))
        found += axes
    return tuple(dict.fromkeys(found))


def _by_name(
    whole: Mapping[str, Span],
    fact: Fact,
    facts: Sequence[Sequence[Fact]],
    placements: Mapping[str, Placement],
    ranks: Ranks,
    notes: dict[str, None],
) -> list[Tensor | None]:
    """Return the positions of a tensor made anew: that of its name, divided as is said, or as its shapes say."""
    if fact.name not in whole:
        if fact.requires_grad:
            got, expected = f"a module with {fact.name}, made anew", f"names of the whole: {', '.join(whole)}"
            raise ValueError(message(NAME, "shard", got, expected, "copy its numbers, or keep its name"))
        return [None] * ranks.size
    span, said = whole[fact.name], said_of(placements, fact.name)
    shapes = [next((tuple(f.index.shape) for f in mine if f.name == fact.name), None) for mine in facts]
    if said is not None and (callable(said) or set(said) - set(partial_axes(said))):
        index: list[Tensor | None] = list(placed(fact.name, span.tensor, said, ranks))
        for shape, i in zip(shapes, index, strict=True):
            if shape is not None and i is not None and shape != tuple(i.shape):
                got, expected = f"shape {shape}", f"{tuple(i.shape)}, the piece of {tuple(span.tensor.shape)}"
                raise ValueError(message(NAME, f"placements[{fact.name!r}]", got, expected))
    else:
        ways = list(fits(span.tensor.shape, shapes, ranks))
        if len(ways) != 1:
            got = f"shapes {', '.join(map(str, dict.fromkeys(shapes)))} of {tuple(span.tensor.shape)} on {ranks}"
            if ways:
                got += f", which may be {' or '.join(way.words or 'Replicate' for way in ways)}"
            remedy = f"copy its numbers in shard, or say placements[{fact.name!r}]"
            raise ValueError(message(NAME, fact.name, got, "one way to divide it", remedy))
        index = ways[0].index
        if ways[0].words:
            notes[f"{fact.name}: taken to be {ways[0].words}, by its shape; placements= may say otherwise"] = None
    return [None if i is None else i + span.start for i in index]
