"""Settles which piece of a whole tensor each rank holds: what is said, what a DTensor says, else what shapes say."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from diffcoll.core.control import Control
from diffcoll.core.errors import message
from diffcoll.core.groups import resolve
from diffcoll.testing.harness.comparison import near
from diffcoll.testing.sharding.placements import (
    NAME,
    PARTIAL,
    REPLICATE,
    SHARD,
    Layout,
    Mesh,
    Placement,
    by_function,
    chosen,
    fitting,
    in_words,
    said_of,
    short_name,
)

T = TypeVar("T")


def whole_of(y: Tensor) -> Tensor:
    """Return a tensor with the numbers of all ranks of its own mesh, if it has one."""
    from torch.distributed.tensor import DTensor

    return y.full_tensor() if isinstance(y, DTensor) else y


def local(x: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    from torch.distributed.tensor import DTensor

    return (x.to_local() if isinstance(x, DTensor) else x).detach()


@dataclass
class _Fact:
    """What one rank knows of a tensor that it holds."""

    shape: tuple[int, ...]
    #: The candidates that fit, by shape and by numbers.
    fits: tuple[set[int], set[int]] | None = None
    #: Which elements of the whole it has, as a DTensor says: a hash of their numbers.
    elements: str = ""

    def packed(self) -> list[Any]:
        """Return what JSON can hold."""
        return [self.shape, self.fits and [sorted(fit) for fit in self.fits], self.elements]

    @staticmethod
    def unpacked(shape: list[int], fits: list[list[int]] | None, elements: str) -> _Fact:
        """Return what was packed."""
        return _Fact(tuple(shape), None if fits is None else (set(fits[0]), set(fits[1])), elements)


def _of_ranks(mine: T) -> list[T]:
    """Return each rank's value, as JSON sends it: what comes through the network is not unpickled."""
    return [json.loads(text) for text in Control(resolve(dist.group.WORLD, NAME), NAME).texts(json.dumps(mine))]


def settled(
    wholes: Mapping[str, Tensor], held: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh, rank: int
) -> dict[str, Layout]:
    """Return the layout of each tensor that this rank holds; all ranks call it, and may hold others."""
    from torch.distributed.tensor import DTensor

    mine, indices = dict[str, _Fact](), dict[str, Tensor]()
    for name, x in held.items():
        short = short_name(name)
        fact = mine[name] = _Fact(tuple(local(x).shape))
        if isinstance(x, DTensor):
            indices[name] = _elements(x)
            fact.elements = blake2b(indices[name].numpy().tobytes()).hexdigest()
        elif said_of(placements, name) is None:
            fact.fits = fitting(short, wholes[name], x.detach().cpu(), mesh, rank)
    packed = _of_ranks({name: fact.packed() for name, fact in mine.items()})
    every = [{name: _Fact.unpacked(*fact) for name, fact in facts.items()} for facts in packed]
    found = {}
    for name, fact in mine.items():
        short = short_name(name)
        others = [facts.get(name) for facts in every]
        said = said_of(placements, name)
        if name in indices:
            found[name] = _of_dtensor(short, indices[name], others, said, mesh, wholes[name])
        elif said is not None:
            found[name] = by_function(short, said, wholes[name], mesh, rank)
        else:
            holding = [other for other in others if other is not None and other.fits is not None]
            fits = [other.fits for other in holding if other.fits is not None]
            said = chosen(short, fits, [other.shape for other in holding], wholes[name], mesh)
            found[name] = replace(by_function(short, said, wholes[name], mesh, rank), found=in_words(said) * bool(said))
        expected = tuple(found[name].piece(wholes[name]).shape)
        if expected != fact.shape:
            got = f"shape {fact.shape} on rank {rank}"
            whole = tuple(wholes[name].shape)
            remedy = f"see placements[{short!r}]" if said is not None else ""
            raise ValueError(message(NAME, short, got, f"{expected}, the piece of {whole}", remedy))
    return found


def _elements(x: Any) -> Tensor:
    """Return which elements of the whole this rank has of a DTensor, as PyTorch places them."""
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor

    index = torch.arange(x.numel(), device=x.device_mesh.device_type).view(x.shape)
    placements = [Replicate() if isinstance(p, Partial) else p for p in x.placements]
    return distribute_tensor(index, x.device_mesh, placements, src_data_rank=None).to_local().cpu()


def _of_dtensor(
    name: str, index: Tensor, others: list[_Fact | None], said: Placement | None, mesh: Mesh, whole: Tensor
) -> Layout:
    """Return the layout of a DTensor; an axis along which ranks have other elements is sharded."""
    kinds: dict[str, str] = {}
    for axis in mesh.sizes:
        rows = [[others[r] for r in mesh.along([axis], s)] for s in range(mesh.size)]
        differ = any(len({fact.elements for fact in row if fact is not None}) > 1 for row in rows)
        kinds[axis] = SHARD if differ else REPLICATE
    if isinstance(said, Mapping):
        for axis, kind in by_function(name, said, whole, mesh, 0).kinds.items():
            if kind == PARTIAL:
                kinds[axis] = PARTIAL
    return Layout(kinds, lambda x: x.flatten()[index.to(x.device).flatten()].view(index.shape))


def refuse_another_order(
    mine: Mapping[str, Tensor], wholes: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh
) -> None:
    """Raise if the ranks together have the numbers of a whole, but not those of the placement found by its shape."""
    facts = {}
    for name, layout in layouts.items():
        if layout.found:
            x, whole = local(mine[name]), wholes[name]
            copies = mesh.size // math.prod(mesh.sizes[axis] for axis in layout.has(SHARD))
            facts[name] = near(x, layout.piece(whole)), bool(torch.isin(x, whole).all()), float(x.sum()) / copies
    every = _of_ranks(facts)
    for name in facts:
        held = [each[name] for each in every if name in each]
        equal, within, sums = zip(*held, strict=True)
        if not all(equal) and all(within) and near(torch.tensor(sum(sums)), wholes[name].sum().float()):
            short = short_name(name)
            got = f"numbers of the whole in another order than {layouts[name].found}, which its shape may mean"
            remedy = f"say placements[{short!r}], such as a function (whole, {{axis: coordinate}}) -> piece"
            raise ValueError(message(NAME, short, got, "a placement", remedy))
