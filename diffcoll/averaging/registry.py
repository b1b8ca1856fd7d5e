"""Registry of all averagers; it finds those that average the same parameters.

The module holds its averager, in a forward hook, and the two are freed together; the registry holds it weakly. An
averager of bare parameters keeps itself and them alive until `detach()`. Hooks of parameters hold it weakly:
a strong reference would be a cycle through the autograd engine, which Python's garbage collector cannot see.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from diffcoll.averaging.state import NAME
from diffcoll.core.errors import message
from diffcoll.engines import local

Named = list[tuple[str, Tensor]]


@dataclass(eq=False)
class Claim:
    """The parameters of one averager, its reducer, and the function that detaches it."""

    named: Named
    reducer: Any
    module: weakref.ref[nn.Module] | None
    #: The simulated rank that made the averager; None: not simulated.
    rank: Any
    detach: Callable[[], None]

    def is_same(self, module: nn.Module | None, named: Named) -> bool:
        """Whether the averager is on this module or on exactly these parameters, so that a new one replaces it."""
        of_module = module is not None and self.module is not None and self.module() is module
        return of_module or {id(p) for _, p in named} == {id(p) for _, p in self.named}


_numbers = itertools.count()
#: In order of construction, by number.
_claims: dict[int, weakref.ref[Claim]] = {}
#: Those of bare parameters.
_kept: dict[int, Claim] = {}


def enter(claim: Claim) -> int:
    """Add a claim until it is freed; returns its number."""
    number = next(_numbers)
    if claim.module is None:
        _kept[number] = claim
    _claims[number] = weakref.ref(claim, partial(_freed, number))
    return number


def _freed(number: int, _: object) -> None:
    leave(number)


def leave(number: int) -> None:
    """Remove a claim."""
    _claims.pop(number, None)
    _kept.pop(number, None)


def claims() -> list[Claim]:
    """Return all claims in order of construction."""
    return [claim for ref in list(_claims.values()) if (claim := ref()) is not None]


def averaged() -> set[int]:
    """Return the ids of all parameters that are averaged."""
    return {id(t) for claim in claims() for _, t in claim.named}


def claims_on(named: Named) -> list[Claim]:
    """Return the claims on any of these parameters."""
    ids = {id(p) for _, p in named}
    return [claim for claim in claims() if any(id(p) in ids for _, p in claim.named)]


def refuse_shared(named: Named) -> None:
    """Raise if another simulated rank, a thread of this process, averages the same parameters."""
    me: Any = local.here()
    for claim in claims_on(named) if me is not None else ():
        if claim.rank is not None and claim.rank is not me and claim.rank.world is me.world:
            remedy = "make the module in the function that each rank runs"
            got = "parameters that another simulated rank holds as well"
            raise ValueError(message(NAME, "module_or_params", got, "parameters of this rank's own", remedy))


def status(p: Tensor, of_others: list[Claim], module: nn.Module | None, named: Named) -> str:
    """Return words for the averager that p already has; all ranks must agree on them."""
    for claim in of_others:
        if any(p is q for _, q in claim.named):
            return ", taken over" if claim.is_same(module, named) else ", averaged by another"
    return ""


def detach_replaced(of_others: list[Claim], module: nn.Module | None, named: Named) -> None:
    """Detach the averagers that a new one replaces; raise if one of them has some of the parameters and others too."""
    ids = {id(p) for _, p in named}
    for claim in of_others:
        if not claim.is_same(module, named):
            first = next(name for name, p in claim.named if id(p) in ids)
            got = f"{first}, which another {NAME} averages, together with others than these"
            remedy = "call detach() on that one first, or make one for all of them"
            raise ValueError(message(NAME, "module_or_params", got, "parameters of which no other has some", remedy))
    for claim in of_others:
        claim.detach()
