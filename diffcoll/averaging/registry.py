"""Registry of all averagers; it finds those that average the same parameters.

An averager of a module is freed with the module; one of bare parameters keeps itself and them alive until `detach()`.
Hooks hold their averager weakly: a strong reference would be a cycle through the autograd engine, which Python's
garbage collector cannot see.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from diffcoll.averaging.state import NAME
from diffcoll.core.errors import message
from diffcoll.engines import local

__all__ = ["Claim", "averaged", "claims_on", "enter", "refuse_shared", "status", "detach_replaced"]

Named = list[tuple[str, Tensor]]


@dataclass(eq=False)
class Claim:
    """The parameters of one averager, and the function that detaches it."""

    named: Named
    module: weakref.ref[nn.Module] | None
    #: The simulated rank that made the averager; None: not simulated.
    rank: Any
    detach: Callable[[], None]

    def is_same(self, module: nn.Module | None, named: Named) -> bool:
        """Whether the averager is on this module or on exactly these parameters, so that a new one replaces it."""
        of_module = module is not None and self.module is not None and self.module() is module
        return of_module or {id(p) for _, p in named} == {id(p) for _, p in self.named}


_claims: dict[int, Claim] = {}


def enter(claim: Claim) -> Callable[[], object]:
    """Add a claim until its module is freed; returns the function that removes it earlier."""
    module = None if claim.module is None else claim.module()
    end = weakref.finalize(claim.named[0][1] if module is None else module, _claims.pop, id(claim), None)
    end.atexit = False
    _claims[id(claim)] = claim
    return end


def averaged() -> set[int]:
    """Return the ids of all parameters that are averaged."""
    return {id(t) for claim in list(_claims.values()) for _, t in claim.named}


def claims_on(named: Named) -> list[Claim]:
    """Return the claims on any of these parameters."""
    ids = {id(p) for _, p in named}
    return [claim for claim in list(_claims.values()) if any(id(p) in ids for _, p in claim.named)]


def refuse_shared(named: Named) -> None:
    """Raise if another simulated rank, a thread of this process, averages the same parameters."""
    me: Any = local.here()
    for claim in claims_on(named) if me is not None else ():
        if claim.rank is not None and claim.rank is not me and claim.rank.world is me.world:
            remedy = "make the module in the function that each rank runs"
            got = "parameters that another simulated rank holds as well"
            raise ValueError(message(NAME, "module_or_params", got, "parameters of this rank's own", remedy))


def status(p: Tensor, claims: list[Claim], module: nn.Module | None, named: Named) -> str:
    """Return words for the averager that p already has; all ranks must agree on them."""
    for claim in claims:
        if any(p is q for _, q in claim.named):
            return ", taken over" if claim.is_same(module, named) else ", averaged by another"
    return ""


def detach_replaced(claims: list[Claim], module: nn.Module | None, named: Named) -> None:
    """Detach the averagers that a new one replaces; raise if one of them has some of the parameters and others too."""
    ids = {id(p) for _, p in named}
    for claim in claims:
        if not claim.is_same(module, named):
            first = next(name for name, p in claim.named if id(p) in ids)
            got = f"{first}, which another {NAME} averages, together with others than these"
            remedy = "call detach() on that one first, or make one for all of them"
            raise ValueError(message(NAME, "module_or_params", got, "parameters of which no other has some", remedy))
    for claim in claims:
        claim.detach()
