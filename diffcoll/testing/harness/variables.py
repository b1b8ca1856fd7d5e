"""Which tensors of the ranks are one variable, and whether the ranks return one loss, for `check_gradients`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.core.trees import tree_flatten
from diffcoll.testing.harness.measure import Constant
from diffcoll.testing.harness.parts import named_tensors, tensor_names
from diffcoll.testing.sharding.placements import (
    REPLICATE,
    SHARD,
    is_placement,
    kind_of,
    refuse_unused,
    said_of,
    short_name,
)

OUTPUT = "output"
_EXPECTED = "Replicate(), Partial() or Shard(dim) of torch.distributed.tensor"


@dataclass(frozen=True)
class Variables:
    """What the ranks share. Without an entry a tensor of each rank is a variable of its own."""

    #: REPLICATE or PARTIAL, by the name of an input or parameter: what the ranks' gradients of the variable are.
    shared: Mapping[str, str]
    #: Whether all ranks return the same outputs, which count once.
    once: bool = False

    def __bool__(self) -> bool:
        return bool(self.shared) or self.once

    def own(self, fn: Callable[..., Any], parts: Sequence[Any]) -> list[Any]:
        """Return each rank's part without what is shared, for the comparison of ranks."""
        return [_replaced(fn, part, dict.fromkeys(self.shared)) for part in parts]


def variables(
    name: str, placements: object, fn: Callable[..., Any], parts: Sequence[Any], parameters: Sequence[str]
) -> Variables:
    """Return what the argument `placements` of a check says, after a comparison of the ranks' inputs.

    Raises:
        TypeError, ValueError: it is no placement, nothing has this name, or the ranks of a variable have other numbers.
    """
    if placements is None:
        return Variables({})
    if not isinstance(placements, Mapping):
        raise TypeError(message(name, "placements", repr(placements), "placements by the name of a tensor"))
    for which, said in placements.items():
        if not is_placement(said):
            raise TypeError(message(name, f"placements[{which!r}]", repr(said), _EXPECTED))
    each = [named_tensors(fn, part) for part in parts]
    known = [*each[0], *(f"parameter {which}" for which in parameters), OUTPUT]
    refuse_unused(name, placements, known)
    found = {short_name(which): said_of(placements, which) for which in known[:-1]}
    shared = {which: kind_of(said) for which, said in found.items() if said is not None and kind_of(said) != SHARD}
    output = placements.get(OUTPUT)  # a pattern for all tensors says nothing about the losses
    if output is not None and kind_of(output) != REPLICATE:
        remedy = "leave it out where each rank has a loss of its own: they are summed"
        raise ValueError(message(name, f"placements[{OUTPUT!r}]", repr(output), "Replicate(), for one loss", remedy))
    for which in shared.keys() & each[0].keys():
        if differ := [r for r, mine in enumerate(each) if not _equal(mine.get(which), each[0][which])]:
            got = f"other numbers on rank {differ[0]} than on rank 0"
            raise ValueError(message(name, which, got, "the same on every rank, as placements= says"))
    return Variables(shared, output is not None)


def shared(placements: object, fn: Callable[..., Any], parts: Sequence[Any]) -> list[Any]:
    """Return the ranks' parts with rank 0's numbers in the tensors that are one variable."""
    if not isinstance(placements, Mapping):
        return list(parts)
    each = {name: (x, said_of(placements, name)) for name, x in named_tensors(fn, parts[0]).items()}
    first = {name: x for name, (x, said) in each.items() if said is not None and kind_of(said) != SHARD}
    return [_replaced(fn, part, first) for part in parts]


def _replaced(fn: Callable[..., Any], part: Any, by: Mapping[str, Any]) -> Any:
    """Return a part with something in the place of the tensors of some names."""
    leaves, rebuild = tree_flatten(part)
    names = iter(tensor_names(fn, part))
    return rebuild([by.get(next(names), x) if isinstance(x, (Tensor, Constant)) else x for x in leaves])


def _equal(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
