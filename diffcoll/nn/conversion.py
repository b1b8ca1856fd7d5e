"""Make the batch norms of a model synchronized ones, in place, and back.

A subclass of batch norm may do more than normalize, as timm's `BatchNormAct2d`, which ends in an activation. Its own
forward runs, and its call of `torch.nn.functional.batch_norm` normalizes with the statistics of all ranks.

note  notes/training/batch-norm.md
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diffcoll.core.errors import message
from diffcoll.core.torch_private.tensors import BatchNormBase
from diffcoll.engines.types import Group
from diffcoll.nn.batch_norm import Running, SyncBatchNorm, batch_norm, check_input
from diffcoll.nn.in_group import InGroup


class BatchNorm(BatchNormBase):
    """Batch norm of this process alone for x of any number of dimensions from 2 on.

    `revert_sync_batchnorm` makes it of a `SyncBatchNorm` that was not converted from a `BatchNorm1d`, `2d` or `3d`.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        check_input(input, None)


#: Classes that become a SyncBatchNorm; subclasses have code of their own.
_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNorm)


def convert_sync_batchnorm(module: nn.Module, *, group: Group = None) -> nn.Module:
    """Models with batch norm: synchronize every BatchNorm1d, 2d, 3d, their subclasses and `torch.nn.SyncBatchNorm`.

    >>> import torch, diffcoll as dc
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> type(dc.nn.convert_sync_batchnorm(net)[1])
    <class 'diffcoll.nn.batch_norm.SyncBatchNorm'>

    The modules change their class in place, and keep parameters, buffers, hooks, mode and attributes.

    A subclass of batch norm with its own forward, such as timm's `BatchNormAct2d`, becomes a subclass of that class.
    Its forward runs unchanged, except that `torch.nn.functional.batch_norm` (which `super().forward` calls) normalizes
    with the batch of all ranks. What else the forward computes from the batch is of this rank.

    Args:
        module: the model, or a batch norm itself.
        group: as for `SyncBatchNorm`. For `torch.nn.SyncBatchNorm`, None keeps its process group.

    Returns:
        The module.

    Raises:
        TypeError: a submodule is lazy, is of a subclass of `torch.nn.SyncBatchNorm`, or has a `forward` that was
            assigned to the module. Nothing is converted then. In training, the forward of a converted subclass raises
            if it did not call `torch.nn.functional.batch_norm`.

    Source: notes/training/batch-norm.md.
    """
    norms: list[tuple[str, Any]] = [
        (name, m) for name, m in module.named_modules() if isinstance(m, BatchNormBase) and not _is_ours(m)
    ]
    for name, norm in norms:
        is_own_synchronization = isinstance(norm, nn.SyncBatchNorm) and type(norm) is not nn.SyncBatchNorm
        if is_own_synchronization or isinstance(norm, nn.modules.lazy.LazyModuleMixin) or "forward" in norm.__dict__:
            expected = "an initialized batch norm with the forward of its class, or torch.nn.SyncBatchNorm"
            raise _error(f"{type(norm).__name__} at {name or 'the root'}", expected)
    for _, norm in norms:
        kind: Any = type(norm)
        own_group = norm.__dict__.pop("process_group", None)
        norm.__class__ = SyncBatchNorm if kind in _CONVERTED else _synchronized(kind)
        norm.__dict__["group"] = own_group if group is None else group
        norm.__dict__["converted_from"] = None if kind is nn.SyncBatchNorm else kind
    return module


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Export, or inference in one process: undo `convert_sync_batchnorm`.

    >>> import torch, diffcoll as dc
    >>> net = dc.nn.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(8)))
    >>> type(dc.nn.revert_sync_batchnorm(net)[0])
    <class 'torch.nn.modules.batchnorm.BatchNorm1d'>

    A module that `convert_sync_batchnorm` has converted gets its class back. Another `SyncBatchNorm` becomes a
    `diffcoll.nn.conversion.BatchNorm`, a batch norm for x of any number of dimensions. Returns the module.

    Source: notes/training/batch-norm.md.
    """
    for norm in module.modules():
        if _is_ours(norm):
            norm.__class__ = norm.__dict__.get("converted_from") or BatchNorm
            for attribute in ("group", "converted_from"):
                norm.__dict__.pop(attribute, None)
    return module


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, (SyncBatchNorm, _Subclass))


def _error(got: str, expected: str) -> TypeError:
    return TypeError(message("convert_sync_batchnorm", "module", got, expected, "replace this module yourself"))


# ── subclasses with a forward of their own ───────────────────────────────────────────────────────────────


class _Subclass(InGroup):
    """First base of a class whose second base is a subclass of batch norm."""

    converted_from: type[nn.Module]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the class that it was converted from: this one is made by a function."""
        return _new, (self.converted_from,), self.__dict__

    def forward(self, *args: Any, **more: Any) -> Any:
        """Run the forward of the subclass."""
        calls: list[Any] = []
        with _Synchronizing(self.group, calls):
            y = super().forward(*args, **more)
        if self.training and not calls:
            expected = "a forward that calls torch.nn.functional.batch_norm"
            raise _error(f"{self.converted_from.__name__} with another forward", expected)
        return y


@cache
def _synchronized(kind: type[nn.Module]) -> type[_Subclass]:
    """Return the class that a subclass of batch norm is converted to."""
    return type(f"Sync{kind.__name__}", (_Subclass, kind), {"converted_from": kind})


def _new(kind: Any) -> _Subclass:
    converted = _synchronized(kind)
    return converted.__new__(converted)


class _Synchronizing(TorchFunctionMode):
    """Within it, in this thread, `torch.nn.functional.batch_norm` normalizes with all ranks' batches."""

    def __init__(self, group: Group, calls: list[Any]) -> None:
        super().__init__()
        self.group, self.calls = group, calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.calls.append(func)
        return _normalized(self.group, *args, **(kwargs or {}))


def _normalized(
    group: Group,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return `torch.nn.functional.batch_norm` with the statistics of all ranks' batches."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    check_input(input, None)
    running = None
    if running_mean is not None and running_var is not None:
        running = Running(running_mean, running_var, momentum)
    return batch_norm(input, weight, bias, eps, group, running)
