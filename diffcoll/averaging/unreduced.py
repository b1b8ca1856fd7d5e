"""What blocks have reduced, and forgotten blocks: an optimizer's step on gradients that no block reduced raises."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diffcoll.averaging.messages import NAME
from diffcoll.core.torch_private.tensors import version
from diffcoll.core.torch_private.tracing import untraced

#: The `Reducer` of each averager that is not closed.
reducers: weakref.WeakSet[Any] = weakref.WeakSet()


class Gradient:
    """`.grad` of a parameter as the last block has left it, whichever averager's block that was."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        #: `.grad` as the block has assigned it, and its version then; backward outside of a block advances that.
        self.assigned: Tensor | None = None
        self.version = 0
        #: Whether backward has run outside of a block since.
        self.is_local = False

    def after_accumulate(self) -> None:
        """Record that autograd has accumulated outside of a block."""
        grad, self.is_local = self.tensor.grad, True
        if grad is not None and grad is self.assigned and version(grad) == self.version + 1:
            self.version += 1  # not zeroed before: what was reduced is still in it

    def is_reduced(self) -> bool:
        """Whether `.grad` is what the last block assigned, neither zeroed nor modified nor frozen since."""
        grad = self.tensor.grad
        is_same = grad is not None and grad is self.assigned and version(grad) == self.version
        return is_same and self.tensor.requires_grad

    def assign(self, grad: Tensor | None) -> None:
        """Make the result of a block `.grad`; None: the block has failed."""
        if grad is not None or self.tensor.requires_grad:
            self.tensor.grad = grad
        self.assigned, self.is_local = grad, False
        self.version = 0 if grad is None else version(grad)


#: By the id of the parameter, which its `Gradient` keeps alive.
_gradients: weakref.WeakValueDictionary[int, Gradient] = weakref.WeakValueDictionary()


def gradient_of(tensor: Tensor) -> Gradient:
    """Return the one `Gradient` of a parameter, which all averagers share."""
    return _gradients.setdefault(id(tensor), Gradient(tensor))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Judge a step; one with a closure when that has returned, since it runs backward."""
    if not reducers:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _refuse(optimizer)
        return None

    def judged(*arguments: Any, **options: Any) -> Any:
        loss = closure(*arguments, **options)
        _refuse(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": judged}
    return (args[0], judged, *args[2:]), kwargs


def _refuse(optimizer: Optimizer) -> None:
    if any(reducer.forbids(optimizer) for reducer in reducers):
        raise RuntimeError(
            f"{NAME}: {type(optimizer).__name__}.step on gradients that no block has reduced: a block is open, or "
            "since the last one backward has run outside of a block. Call averager.backward(loss) instead of "
            "loss.backward(), with micro-batches for the last one, and step after it. If DDP averages these gradients "
            "already, use DDP or the averager, not both. To step on local gradients, call averager.close()"
        )


register_optimizer_step_pre_hook(untraced(_before_step))
