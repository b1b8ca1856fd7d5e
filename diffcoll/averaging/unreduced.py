"""A forgotten block is an error: an optimizer's step on gradients that no block has reduced raises."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diffcoll.averaging.messages import NAME
from diffcoll.core.torch_private.tracing import untraced


class Watch:
    """Whether the gradients of an averager's parameters are this rank's own."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._ids = {id(p) for p in parameters}
        #: The parameter whose hook tells for all.
        self.witness: Tensor | None = None
        #: Whether a block is open, and whether backward has run outside of one since the last.
        self.is_open = self.is_local = False
        _watches.add(self)

    def after_block(self) -> None:
        """Record that a block has reduced or dropped the gradients; for other averagers of its parameters too."""
        self.is_open = False
        for watch in _watches:
            if id(watch.witness) in self._ids:
                watch.is_local = False

    def close(self) -> None:
        """Let optimizers step on local gradients."""
        _watches.discard(self)

    def forbids(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer would use a gradient that is not reduced."""
        is_local = self.is_local and self.witness is not None and self.witness.grad is not None
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return (self.is_open or is_local) and any(id(p) in self._ids for p in parameters)


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


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
    if any(watch.forbids(optimizer) for watch in _watches):
        raise RuntimeError(
            f"{NAME}: {type(optimizer).__name__}.step on gradients of this rank alone: a block is open, or since the "
            "last one backward has run outside of a block; call averager.backward(loss) instead of loss.backward(), "
            "with micro-batches for the last one, and step after it; to step on local gradients, call averager.close()"
        )


register_optimizer_step_pre_hook(untraced(_before_step))
