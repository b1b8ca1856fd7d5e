"""A forgotten block is an error: an optimizer's step on gradients that no block has reduced raises."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diffcoll.averaging.messages import NAME
from diffcoll.core.torch_private.tracing import untraced

#: The `Reducer` of each averager that is not closed.
reducers: weakref.WeakSet[Any] = weakref.WeakSet()


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Judge a step; one with a closure when that has returned, since it runs backward."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _refuse(optimizer)
        return None

    def judged() -> Any:
        loss = closure()
        _refuse(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": judged}
    return (args[0], judged, *args[2:]), kwargs


def _refuse(optimizer: Optimizer) -> None:
    if any(reducer.forbids(optimizer) for reducer in reducers):
        raise RuntimeError(
            f"{NAME}: {type(optimizer).__name__}.step on gradients of this rank alone: a block is open, or since the "
            "last one backward has run outside of a block; call averager.backward(loss) instead of loss.backward(), "
            "with micro-batches for the last one, and step after it; to step on local gradients, call averager.close()"
        )


register_optimizer_step_pre_hook(untraced(_before_step))
