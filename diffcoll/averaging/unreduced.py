"""A forgotten block is an error: an optimizer's step on gradients that no block has reduced raises."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diffcoll.averaging.buckets import Parameter
from diffcoll.averaging.messages import NAME
from diffcoll.core.torch_private.tracing import untraced


class Watched(Protocol):
    """What this asks of a reducer; `ids` are those of its parameters."""

    ids: set[int]
    witness: Parameter | None
    is_open: bool
    is_unreduced: bool


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_handles: list[Any] = []


def watch(reducer: Watched) -> None:
    """Raise at steps of optimizers on this reducer's parameters whose gradients are not reduced, while it lives."""
    _watched.add(reducer)
    weakref.finalize(reducer, _remove_unneeded)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))


def ignore(reducer: Watched) -> None:
    """End `watch`."""
    _watched.discard(reducer)
    _remove_unneeded()


def is_in_block(tensor: Tensor) -> bool:
    """Whether this parameter is in an open block of any averager."""
    return any(reducer.is_open and id(tensor) in reducer.ids for reducer in _watched)


def after_block(of: Watched) -> None:
    """Record, for other averagers of its parameters too, that a block has reduced or dropped the gradients."""
    for reducer in _watched:
        if reducer.witness is not None and id(reducer.witness.tensor) in of.ids:
            reducer.is_unreduced = False


def _remove_unneeded() -> None:
    while _handles and not _watched:
        _handles.pop().remove()


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

    given: Callable[[], Any] = judged
    if "closure" in kwargs:
        return args, {**kwargs, "closure": given}
    return (*args[:1], given, *args[2:]), kwargs


def _refuse(optimizer: Optimizer) -> None:
    for reducer in _watched:
        witness = reducer.witness
        if not reducer.is_unreduced or witness is None or witness.tensor.grad is None:
            continue
        if any(id(p) in reducer.ids for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                f"{NAME}: {type(optimizer).__name__}.step on gradients of this rank alone: backward has run outside of "
                "a block since the last one; call averager.backward(loss) instead of loss.backward(), or, with "
                "micro-batches, for the last one; to step on local gradients, call averager.close() first"
            )


untraced(_before_step)
