"""Which numbers of the whole module each rank holds, found by two fills.

A copy of the module is filled with the digits of its numbers' positions, another with their mirror, base − 1 − digit,
and the user's function shards both. A rank's number whose two digits mirror each other is one of the whole, at the
position that its digits say, whatever the function has cut, merged, interleaved, padded or renamed. One that is the
same in both is made anew. Any other was computed with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diffcoll.core.errors import message
from diffcoll.core.torch_private.fsdp import groups_of_fsdp
from diffcoll.testing.harness.layout import Fit, Placement, Span, partial_axes, said_of, spans, ways_of
from diffcoll.testing.harness.mesh import NAME, Ranks

#: A dtype that holds fewer integers carries no positions.
_FEWEST, _MOST = 16, 2**53


def _exact(x: Tensor) -> int:
    """Return how many integers from 0 a tensor's dtype holds exactly; 0: it carries no positions."""
    if x.layout != torch.strided or x.is_meta or x.is_complex() or x.dtype == torch.bool:
        return 0
    count = int(2 / torch.finfo(x.dtype).eps) if x.is_floating_point() else torch.iinfo(x.dtype).max + 1
    return min(count, _MOST) if count >= _FEWEST else 0


@dataclass(frozen=True)
class Code:
    """How positions are written: digits to an even base, which the module's dtypes hold exactly."""

    base: int
    #: How many numbers there are, and how many digits the last one has.
    total: int
    digits: int

    @classmethod
    def of(cls, each: Sequence[Span]) -> Code:
        """Return the code of a module's tensors."""
        total = max((span.end for span in each), default=0)
        base = min([max(2, total + total % 2), *filter(None, (_exact(span.tensor) for span in each))])
        digits = 1
        while base**digits < total:
            digits += 1
        return cls(base, total, digits)

    def write(self, each: Sequence[Span], k: int) -> None:
        """Write digit k into the tensors; the last fill is the mirror of digit 0."""
        with torch.no_grad():
            for span in filter(lambda span: _exact(span.tensor), each):
                index = torch.arange(span.start, span.end).view(span.tensor.shape)
                span.tensor.copy_(index // self.base**k % self.base if k < self.digits else self.mirror(index))

    def mirror(self, index: Tensor) -> Tensor:
        """Return the mirror of digit 0."""
        return self.base - 1 - index % self.base

    def read(self, fills: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the position of each number, −1 where it is none of the whole, and whether it was computed with."""
        if not _exact(fills[0]):
            return torch.full(fills[0].shape, -1), torch.zeros(fills[0].shape, dtype=torch.bool)
        *digits, mirror = (x.cpu().double() for x in fills)
        index = sum(digit * self.base**k for k, digit in enumerate(digits))
        whole = torch.stack([(x == x.round()) & (x >= 0) & (x < self.base) for x in digits]).all(0)
        moved = whole & (digits[0] + mirror == self.base - 1) & (index < self.total)
        anew = (digits[0] == mirror) | (digits[0].isnan() & mirror.isnan())
        return torch.where(moved, index, -1.0).long(), ~moved & ~anew

    def factor(self, fills: Sequence[Tensor], span: Span | None) -> float | None:
        """Return what the numbers of a tensor were multiplied by, if that is one factor."""
        a, b = fills[0].cpu().double(), fills[-1].cpu().double()
        got, width = a + b, torch.full_like(a, self.base - 1.0)
        if span is not None and span.tensor.shape == a.shape:  # the difference is right also if something was added
            index = torch.arange(span.start, span.end).view(a.shape)
            got, width = b - a, self.mirror(index) - index % self.base
        factor = float((got * width).sum() / width.double().square().sum())
        rounding = 4 * torch.finfo(fills[0].dtype).eps if fills[0].is_floating_point() else 0.0
        return factor if bool(((got - factor * width).abs() <= rounding * abs(factor) * self.base).all()) else None


@dataclass(frozen=True)
class Held:
    """A tensor of one rank's module."""

    name: str
    #: Positions among the numbers of the whole module, −1 where there is none.
    index: Tensor
    requires_grad: bool
    #: Groups of ranks over which something reduces the gradient.
    groups: tuple[tuple[int, ...], ...] = ()
    #: Whether this is the first name of a tied tensor.
    first: bool = True
    #: The numbers of the whole, to be written into it, if the user's function has made it anew.
    write: Tensor | None = None
    #: What was done to numbers that it was computed from, in words; "": it was not computed.
    computed: str = ""

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


def held_on_rank(whole: Sequence[Span], code: Code | None, modules: Sequence[nn.Module]) -> list[Held]:
    """Return what this rank holds, given its modules after each fill; no code: names and shapes alone say it."""
    groups = _groups(modules[-1])
    of_name, found = {span.name: span for span in whole}, list[Held]()
    for each in zip(*map(spans, modules), strict=True):
        span, fills = each[-1], [local(s.tensor) for s in each]
        index, computed, words = torch.full(fills[0].shape, -1), torch.tensor(False), ""
        if code is not None:
            index, computed = code.read(fills)
        if code is not None and computed.any():
            factor = code.factor(fills, of_name.get(span.name))
            words = f"{span.name} is {factor:.3g} times the whole's" if factor is not None else ""
            words = words or f"{span.name} is computed from several numbers, rounded, or memory that nothing wrote"
        of_ranks = groups.get(id(span.tensor), ())
        found.append(Held(span.name, index, span.tensor.requires_grad, of_ranks, span.first, computed=words))
    return found


def _groups(module: nn.Module) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return the groups over which something reduces the gradients of a module's parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Replicate

    groups: dict[int, list[Any]] = {}
    for each in module.modules():
        is_ddp, is_fsdp = (isinstance(each, c) for c in (nn.parallel.DistributedDataParallel, FullyShardedDataParallel))
        for p in each.parameters() if is_ddp or is_fsdp else ():
            groups.setdefault(id(p), []).extend([each.process_group] if is_ddp else groups_of_fsdp(each))
    for x in (*module.parameters(), *module.buffers()):
        if isinstance(x, DTensor):
            mesh = x.device_mesh
            replicated = [d for d, p in enumerate(x.placements) if isinstance(p, Replicate) and mesh.size(d) > 1]
            groups.setdefault(id(x), []).extend(mesh.get_group(d) for d in replicated)
    ranks_of = dist.get_process_group_ranks
    return {key: tuple(sorted({tuple(ranks_of(group)) for group in each})) for key, each in groups.items()}


def settled(
    whole: Sequence[Span], each: Sequence[Sequence[Held]], placements: Mapping[str, Placement], ranks: Ranks
) -> tuple[list[list[Held]], list[str]]:
    """Return what each rank holds of a module, and notes of what was taken from shapes.

    Raises:
        ValueError: `shard` computed with numbers; a tensor holds no number of the whole and nothing says what it is,
            or a number twice; a reducer's group is along no axes; a parameter of the whole is on no rank.
    """
    for held in itertools.chain(*each):
        if held.computed:
            expected = "each number of the whole, or one made anew: shard cuts, moves and pads"
            raise ValueError(message(NAME, "shard", held.computed, expected, "scale it in the function, or in both"))
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
    if isinstance(said, Mapping) and set(said) <= set(partial_axes(said, ranks)):
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
