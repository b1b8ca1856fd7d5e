"""Replace the batch norms of a model by synchronized ones, and back. Parameters and buffers are shared, not copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from diffcoll.core.errors import message
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.tensors import BatchNormBase
from diffcoll.engines.types import Group
from diffcoll.nn.batch_norm import SyncBatchNorm, Synchronized
from diffcoll.nn.batch_norm_subclasses import synchronized_class
from diffcoll.nn.in_group import InGroup

_Module = TypeVar("_Module", bound=nn.Module)


class BatchNorm(BatchNormBase):
    """Batch norm of this process alone for x of any number of dimensions from 2 on.

    `revert_sync_batchnorm` makes it of a `SyncBatchNorm` that was not converted from a `BatchNorm1d`, `2d` or `3d`.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            expected = "(N, C, …), at least 2 dimensions"
            raise ValueError(message("BatchNorm", "x", f"a {input.dim()}-d tensor", expected))


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

    In `eval()` a converted model can be scripted and traced as the original. `torch.fx` keeps the modules as calls,
    which synchronize in training too. A scripted module raises in training.

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
    if group is not None:
        resolve(group, "convert_sync_batchnorm")
    for name, found in module.named_modules():
        if isinstance(found, BatchNormBase) and not isinstance(found, Synchronized):
            _check_convertible(found, name)

    def convert(old: nn.Module) -> nn.Module:
        if not isinstance(old, BatchNormBase) or isinstance(old, Synchronized):
            return old
        kind = type(old)
        made: type[Synchronized] = SyncBatchNorm if kind in _CONVERTED else synchronized_class(kind)
        new = _with_state_of(old, made)
        new._in = InGroup(new.__dict__.pop("process_group", None) if group is None else group, SyncBatchNorm.__name__)
        if isinstance(new, SyncBatchNorm):
            new.converted_from = None if kind is nn.SyncBatchNorm else kind
        return new

    return _replaced(module, convert, {})


def _check_convertible(module: nn.Module, name: str) -> None:
    remedy = "replace this module yourself"
    got, expected = type(module).__name__, "BatchNorm1d, 2d, 3d, a subclass, or SyncBatchNorm"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        remedy = "call the model on one batch first"
    elif "forward" in module.__dict__:
        got, expected = f"{got} with a forward assigned to the module", "the forward of its class"
    elif type(module) is nn.SyncBatchNorm or not isinstance(module, nn.SyncBatchNorm):
        return
    raise TypeError(message("convert_sync_batchnorm", "module", f"{got} at {name or 'the root'}", expected, remedy))


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
        if not isinstance(old, Synchronized):
            return old
        new = _with_state_of(old, old.converted_from or BatchNorm)
        for attribute in ("_in", "converted_from"):
            new.__dict__.pop(attribute, None)
        return new

    return _replaced(module, revert, {})


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
