"""Replace the batch norms of a model by synchronized ones, and back. Parameters and buffers are shared, not copied.

A subclass of batch norm may do more than normalize, as timm's `BatchNormAct2d`, which ends in an activation. Its own
forward runs, and its call of `torch.nn.functional.batch_norm` normalizes with the statistics of all ranks.

note  notes/training/batch-norm.md
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diffcoll.core.errors import message
from diffcoll.core.torch_private.tensors import BatchNormBase
from diffcoll.engines.types import Group
from diffcoll.nn.batch_norm import SyncBatchNorm, batch_norm, check_input, update
from diffcoll.nn.in_group import InGroup

_Module = TypeVar("_Module", bound=nn.Module)
_CONVERT, _REMEDY = "convert_sync_batchnorm", "replace this module yourself"


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

    Submodules are replaced in place. The new modules have the same parameters and buffers (the same tensors, so an
    optimizer that exists keeps working), hooks, mode and attributes. A submodule used in several places stays one.

    A subclass of batch norm with its own forward, such as timm's `BatchNormAct2d`, becomes a subclass of that class.
    Its forward runs unchanged, except that `torch.nn.functional.batch_norm` (which `super().forward` calls) normalizes
    with the batch of all ranks. What else the forward computes from the batch is of this rank.

    Args:
        module: the model, or a batch norm itself.
        group: as for `SyncBatchNorm`. For `torch.nn.SyncBatchNorm`, None keeps its process group.

    Returns:
        The module; if it is a batch norm itself, the one that replaces it.

    Raises:
        TypeError: a submodule is lazy, is of a subclass of `torch.nn.SyncBatchNorm`, or has a `forward` that was
            assigned to the module. Nothing is replaced then. In training, the forward of a converted subclass raises
            if it did not call `torch.nn.functional.batch_norm`, or calls it for a second batch.

    Source: notes/training/batch-norm.md.
    """
    for name, found in module.named_modules():
        if isinstance(found, BatchNormBase) and not isinstance(found, InGroup):
            _check_convertible(found, name)

    def convert(old: nn.Module) -> nn.Module:
        if not isinstance(old, BatchNormBase) or isinstance(old, InGroup):
            return old
        kind = type(old)
        new = _with_state_of(old, SyncBatchNorm if kind in _CONVERTED else _synchronized(kind))
        own = new.__dict__.pop("process_group", None)
        new.__dict__["group"] = own if group is None else group
        new.__dict__["converted_from"] = None if kind is nn.SyncBatchNorm else kind
        return new

    return _replaced(module, convert, {})


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Export, or inference in one process: undo `convert_sync_batchnorm`.

    >>> import torch, diffcoll as dc
    >>> net = dc.nn.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(8)))
    >>> type(dc.nn.revert_sync_batchnorm(net)[0])
    <class 'torch.nn.modules.batchnorm.BatchNorm1d'>

    A module that `convert_sync_batchnorm` made gets its class back. Another `SyncBatchNorm` becomes a
    `diffcoll.nn.conversion.BatchNorm`, a batch norm for x of any number of dimensions. Parameters, buffers, hooks and
    mode are kept as by `convert_sync_batchnorm`.

    Args:
        module: the model, or a batch norm itself.

    Returns:
        The module; if it is a `SyncBatchNorm` itself, the one that replaces it.
    """

    def revert(old: nn.Module) -> nn.Module:
        if not isinstance(old, BatchNormBase) or not isinstance(old, InGroup):
            return old
        kind: type[nn.Module] = getattr(old, "converted_from", None) or BatchNorm
        new = _with_state_of(old, kind)
        for attribute in ("group", "converted_from"):
            new.__dict__.pop(attribute, None)
        return new

    return _replaced(module, revert, {})


def _check_convertible(module: nn.Module, name: str) -> None:
    remedy = _REMEDY
    got, expected = type(module).__name__, "BatchNorm1d, 2d, 3d, a subclass, or SyncBatchNorm"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        remedy = "call the model on one batch first"
    elif "forward" in module.__dict__:
        got, expected = f"{got} with a forward assigned to the module", "the forward of its class"
    elif type(module) is nn.SyncBatchNorm or not isinstance(module, nn.SyncBatchNorm):
        return
    raise TypeError(message(_CONVERT, "module", f"{got} at {name or 'the root'}", expected, remedy))


def _with_state_of(old: nn.Module, kind: type[_Module]) -> _Module:
    """Return a module of this class with the parameters, buffers, hooks and attributes of old."""
    new = kind.__new__(kind)
    new.__dict__.update(old.__dict__)
    for registry in ("_parameters", "_buffers", "_modules"):  # those of hooks are shared, so that handles remove them
        new.__dict__[registry] = old.__dict__[registry].copy()
    return new


def _replaced(
    module: nn.Module, replacement: Callable[[nn.Module], nn.Module], done: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Return the replacement of a module, after those of its children were put in place; each module once."""
    if module not in done:
        done[module] = new = replacement(module)
        for name, child in new._modules.items():
            if child is not None:
                new._modules[name] = _replaced(child, replacement, done)
    return done[module]


# ── subclasses with a forward of their own ───────────────────────────────────────────────────────────────


class _Subclass(InGroup):
    """First base of a class whose second base is a subclass of batch norm."""

    converted_from: type[nn.Module]

    def forward(self, *args: Any, **more: Any) -> Any:
        """Run the forward of the subclass; within it, `F.batch_norm` normalizes with all ranks' batches."""
        calls: list[bool] = []
        with _Replacing(partial(_normalized, self.group, calls)):
            y = super().forward(*args, **more)
        if self.training and not calls:
            got = f"{self.converted_from.__name__}, whose forward does not call torch.nn.functional.batch_norm"
            raise TypeError(message(_CONVERT, "module", got, "a forward that calls it", _REMEDY))
        return y

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make the class again where a pickle is read."""
        return _empty, (self.converted_from,), self.__dict__


class _Replacing(TorchFunctionMode):
    """Calls a function instead of `torch.nn.functional.batch_norm`, in this thread."""

    def __init__(self, by: Callable[..., Tensor]) -> None:
        super().__init__()
        self.by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.by if func is F.batch_norm else func)(*args, **(kwargs or {}))


def _normalized(
    group: Group,
    calls: list[bool],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return `torch.nn.functional.batch_norm` with the statistics of all ranks' batches; adds `training` to calls."""
    calls.append(training)
    if calls[:-1]:  # as ghost batch norm does; each rank may have another number of batches
        got = "a forward that normalizes a second batch"
        raise TypeError(message(_CONVERT, "module", got, "one batch in each forward", _REMEDY))
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    check_input(input, None)

    def track(local: int, n: Tensor, mean: Tensor, var: Tensor) -> None:
        if running_mean is not None and running_var is not None:
            update(running_mean, running_var, momentum, local, n, mean, var)

    return batch_norm(input, weight, bias, eps, group, track)


_classes: dict[type[nn.Module], type[_Subclass]] = {}


def _synchronized(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a subclass of batch norm is converted to."""
    if kind not in _classes:
        _classes[kind] = type(f"Sync{kind.__name__}", (_Subclass, kind), {"converted_from": kind})
    return _classes[kind]


def _empty(kind: type[nn.Module]) -> nn.Module:
    made = _synchronized(kind)
    return made.__new__(made)
