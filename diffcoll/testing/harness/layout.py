"""What each rank holds of a tensor by what the user states, or by its shapes: flat positions in the whole tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.testing.harness.mesh import NAME, Coordinates, Ranks
from diffcoll.testing.numbers import largest

#: A placement of torch.distributed.tensor, a function (whole, {axis: coordinate}) -> piece, or a tuple of such.
Placement: TypeAlias = Any


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
        each = itertools.chain(*map(_each, said.values())) if isinstance(said, Mapping) else ()
        of_axes = isinstance(said, Mapping) and all(callable(p) or isinstance(p, Known) for p in each)
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


def _each(said: Placement) -> tuple[Placement, ...]:
    """Return what is said of one axis: one placement or several."""
    return said if isinstance(said, tuple) else (said,)


def partial_axes(said: Placement | None, ranks: Ranks) -> tuple[str, ...]:
    """Return the axes along which a placement says that ranks have parts of a sum."""
    from torch.distributed.tensor import Partial

    of_axes = said if isinstance(said, Mapping) else {}
    return tuple(a for a, p in of_axes.items() if a in ranks.sizes and any(isinstance(x, Partial) for x in _each(p)))


def placed(name: str, whole: Tensor, said: Placement | None, ranks: Ranks) -> list[Tensor]:
    """Return the positions of each rank under this placement; all of them if nothing is said."""
    every = torch.arange(whole.numel()).view(whole.shape)
    if ranks.rows:
        return list(torch.split_with_sizes(every, list(ranks.rows)))
    return [_piece(name, every, said, ranks.at(r)) for r in range(ranks.size)]


def _piece(name: str, x: Tensor, said: Placement | None, at: Coordinates) -> Tensor:
    """Return the piece of one rank. Shard divides as `torch.chunk` does, so the last ranks may have less."""
    from torch.distributed.tensor import Shard

    of_axes = said.items() if isinstance(said, Mapping) else [("", said)]
    for axis, placement in ((a, p) for a, each in of_axes if a in ("", *at.mesh) for p in _each(each)):
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
        dtype = torch.double if whole.dtype == torch.bool else whole.dtype
        return max(largest(x.to(dtype) - whole.flatten()[i].to(dtype)) for x, i in pieces if i is not None)

    ways = ways_of(name, whole, [x.shape for x in got], said, ranks)
    return min(ways, key=distance) if len(ways) > 1 else next(iter(ways), None)


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
