"""Which transforms of torch.func, vmap of autograd and levels of forward mode are active; private torch API."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

#: Whether a torch.func transform has wrapped x; no public API tells. The levels of a transform belong to one thread.
is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
#: Whether `is_grads_batched` of torch.autograd.grad has batched x; its vmap is older than torch.func's.
is_batched_by_autograd: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
#: Whether code runs within a transform of torch.func, vmap included.
is_within_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active


def without_transforms(x: Tensor) -> Tensor:
    """Return the tensor that torch.func transforms have wrapped, with all batches of vmap; no public API does."""
    while is_transformed(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def batch_sizes(x: Tensor) -> list[int]:
    """Return the sizes of the batches of torch.func.vmap, which x.shape lacks; no public API tells."""
    sizes = []
    while is_transformed(x):
        dim = torch._C._functorch.maybe_get_bdim(x)
        x = torch._C._functorch.get_unwrapped(x)
        sizes += [x.shape[dim]] if dim >= 0 else []
    return sizes


def is_differentiating() -> bool:
    """Whether code runs within torch.func.grad, vjp, jvp and the like, or a level of forward mode.

    Ops of torch.library have no rules for these; they drop tangents silently.
    """
    stack = torch._C._functorch.get_interpreter_stack() or []
    within = any(i.key() != torch._C._functorch.TransformType.Vmap for i in stack)
    return within or is_in_dual_level()


def is_in_dual_level() -> bool:
    """Whether code runs within a level of forward mode; no public API tells."""
    return forward_ad._current_level >= 0


def carries_tangents() -> bool:
    """Whether operations propagate tangents: within a level of forward mode, outside jvp rules and inference mode."""
    return is_in_dual_level() and torch._C._is_fwd_grad_enabled()
