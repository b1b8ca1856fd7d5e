"""Facts about tensors and modules, and kernels, that have no public name in torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn.modules import batchnorm

#: Libraries recognize batch norm by this class.
BatchNormBase = batchnorm._BatchNorm


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


def has_hooks(x: Tensor) -> bool:
    """Whether hooks are registered on this leaf tensor; pickling drops them without a word."""
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


#: Autograd's version counter of a tensor, which every in-place modification increments.
version: Callable[[Tensor], int] = attrgetter("_version")


#: Copy each tensor of the second list into that of the first; no public function does it in one call.
copy_each: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_

#: Move each tensor of the first list towards that of the second by a weight, or by weights; in one launch, as above.
move_each: Callable[[list[Tensor], list[Tensor], float | list[Tensor]], None] = torch._foreach_lerp_


def storage_uses(x: Tensor) -> int:
    """Return the number of references to the storage of x, its own included; no public API tells.

    Every tensor on the storage counts, views too; NumPy arrays and DLPack capsules hold the tensor they were made from.
    Python code that holds the storage itself shares one object, whose references count as well.
    """
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)
