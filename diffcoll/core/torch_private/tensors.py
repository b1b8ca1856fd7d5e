"""Facts about tensors and modules, and kernels, that have no public name in torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm

#: Libraries recognize batch norm by this class.
BatchNormBase = batchnorm._BatchNorm


def batch_norm_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over all dimensions but 1, by torch's kernel of batch norm.

    It allocates nothing of the size of x and adds up in float64 on the CPU; not documented.
    """
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean, var


def batch_norm_sums(g: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return Σ g x̂ and Σ g over all dimensions but 1.

    By the backward of torch's kernel of batch norm in evaluation, which has no public name. It reads g and x once and
    allocates nothing of their size.
    """
    kernel = torch.ops.aten.native_batch_norm_backward.default
    _, sum_gx, sum_g = kernel(g, x, None, mean, var, None, None, False, eps, [False, True, True])
    return sum_gx, sum_g


def divided(x: Tensor, divisor: int) -> Tensor:
    """Return x / divisor, and save no tensor for backward, which would free it: a second one would raise.

    Python's operator converts the number to a tensor and saves it. This overload has no public name.
    """
    y: Tensor = torch.ops.aten.div.Scalar(x, divisor)
    return y


#: Whether x is a ZeroTensor, which has no memory; autograd makes them in forward mode.
is_zero_without_memory: Callable[[Tensor], bool] = Tensor._is_zerotensor


def has_earlier_hooks(p: Tensor) -> bool:
    """Whether p has post-accumulate hooks that run before the one registered last."""
    return len(p._post_accumulate_grad_hooks or ()) > 1


def is_last_hook(x: Tensor, handle: Any) -> bool:
    """Whether the hook of this handle is the one that was registered last on x; no public API lists hooks."""
    return bool(next(reversed(x._backward_hooks or {}), None) == handle.id)


def has_hooks(x: Tensor) -> bool:
    """Whether hooks are registered on this leaf tensor; pickling drops them without a word."""
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


def registries(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts of parameters and submodules of a module and all submodules; nn.Module's iterators are slow."""
    return [registry for m in module.modules() for registry in (m._parameters, m._modules)]


#: Autograd's version counter of a tensor, which every in-place modification increments.
version: Callable[[Tensor], int] = attrgetter("_version")


def version_and_address(x: Tensor) -> tuple[int, int]:
    """Return the version of x, and its address, which `.data = …` changes alone; called several times a gradient.

    A view has the version of its base, which changes with other views: 0 is returned for it. Sparse tensors have no
    address. No public API tells the version, nor what a view is.
    """
    return 0 if x._is_view() else x._version, x.data_ptr() if x.layout is torch.strided else 0


#: Whether a tensor was made as a view of another one, as a slice of a buffer; no public API tells. Gradients that
#: autograd makes were not, even if they share the memory of the gradient that was passed to backward.
is_view: Callable[[Tensor], bool] = Tensor._is_view

#: Copy each tensor of the second list into that of the first; no public function does it in one call.
copy_each: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_


def base(x: Tensor) -> Tensor | None:
    """Return the tensor of which x is a view, with which it shares its version; no public API tells."""
    return x._base


def storage_uses(x: Tensor) -> int:
    """Return the number of references to the storage of x, its own included; no public API tells.

    Every tensor on the storage counts, views too; NumPy arrays and DLPack capsules hold the tensor they were made from.
    Python code that holds the storage itself shares one object, whose references count as well.
    """
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)
