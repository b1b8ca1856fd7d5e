"""A call whose arguments are read: the map, and the tensor that it is applied to. Executed in `diffcoll.core.call`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diffcoll.core.arguments import Call
from diffcoll.core.linear import Linear
from diffcoll.core.reducing import Reducing, Steps
from diffcoll.core.reductions import Reduction
from diffcoll.core.torch_private.tensors import times


@dataclass(frozen=True, eq=False, repr=False)
class Bound:
    """y = f(before(x)), or the reduction of x that `op` names: f(x) for the sum, the result of `steps` for most."""

    call: Call
    f: Linear
    x: Tensor
    before: Callable[[Tensor], Tensor] | None = None
    reduction: Reduction | None = None
    steps: Callable[[Reducing], Steps] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class BoundTree:
    """joined([y_0, y_1, …]) of the results of several maps, each of which is bound when the one before has started."""

    call: Call
    parts: Iterable[Bound | BoundTree]
    joined: Callable[[list[Tensor]], Any]


def bind_reduction(call: Call, f: Linear, x: Tensor, steps: Callable[[Reducing], Steps]) -> Bound:
    """Read `op`; f is the sum, `steps` compute a reduction that is not linear."""
    named, factor = call.op(x)
    if factor is not None:
        x = times(x, factor)
        call = call.of(x)
    return Bound(call, f, x, reduction=named, steps=steps)
