"""Which transforms of torch.func, vmap of autograd and levels of forward mode are active; private torch API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad

#: Whether a torch.func transform has wrapped x; no public API tells. Simulated ranks in one graph must refuse such
#: tensors: the levels of a transform belong to one thread.
is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


#: Whether `is_grads_batched` of torch.autograd.grad has batched x; its vmap is older than torch.func's.
is_batched_by_autograd: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


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


def is_within_transform() -> bool:
    """Whether code runs within a transform of torch.func, vmap included."""
    return bool(torch._C._are_functorch_transforms_active())


def is_differentiating() -> bool:
    """Whether code runs within torch.func.grad, vjp, jvp and the like, or a level of forward mode.

    Ops of torch.library have no rules for these; they drop tangents silently.
    """
    stack = torch._C._functorch.get_interpreter_stack() or []
    within = any(i.key() != torch._C._functorch.TransformType.Vmap for i in stack)
    return within or forward_ad._current_level >= 0


def apply_rule(rule: Any, x: Tensor, *more: object) -> Tensor:
    """Return rule.apply(x, *more) of a Function, with less overhead if no torch.func transform is active.

    Function.apply binds its arguments to the signature of forward, which takes as long as a small message. If nothing
    records x, as in a first-order backward, calling forward alone is equivalent.
    """
    y: Tensor
    if torch._C._are_functorch_transforms_active():
        y = rule.apply(x, *more)
    elif x.requires_grad or forward_ad._current_level >= 0:
        y = super(Function, rule).apply(x, *more)
    else:
        y = rule.forward(x, *more)
    return y


def batch_last(y: Tensor) -> tuple[Tensor, int]:
    """Return the result of a vmap rule, (y, batch dimension), if the batch is y's last dimension.

    The dimension is not -1, because torch 2.9 and before shift a bit by it.
    """
    return y, y.dim() - 1


def carries_tangents() -> bool:
    """Whether operations propagate tangents: within a level of forward mode, outside jvp rules and inference mode."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary tensor with memory, neither traced nor batched; a Parameter is not plain either."""
    return (
        type(x) is Tensor
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_tracing()
        and not is_batched_by_autograd(x)
    )


def is_eager(*xs: Tensor) -> bool:
    """Whether operations on xs are computed at once, with no derivative but reverse mode outside torch.func.

    Then a Function without rules for vmap and forward mode may be applied, which calls kernels and writes in place.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return all(is_plain(x.detach() if type(x) is nn.Parameter else x) for x in xs)
