"""The backward of an autograd Function as a function that can be differentiated again: it repeats the forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gradients(
    forward: Callable[..., Tensor | Sequence[Tensor]], xs: Sequence[Tensor | None], gys: Tensor | Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `forward(*xs)`, as functions of xs and gys if grad mode is on.

    Every rank sends gradients, also if its own xs require none: messages depend on nothing that ranks differ in.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that the gradient of one x does not include what reaches it through another, which may depend on it.
        views = [None if x is None else _view(x) for x in xs]
        ys = forward(*views)
    found = iter(torch.autograd.grad(ys, [x for x in views if x is not None], gys, create_graph=create_graph))
    return tuple(None if x is None else next(found) for x in views)


def _view(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
