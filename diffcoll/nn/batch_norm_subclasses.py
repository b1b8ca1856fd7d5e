"""Subclasses of torch's batch norm, with their own forward, over the values of all ranks.

A subclass may do more than batch norm, as timm's `BatchNormAct2d`, which ends in an activation. Its own forward runs
here, and its call of `torch.nn.functional.batch_norm` that normalizes with the statistics of the batch uses those of
all ranks.

note  notes/training/batch-norm.md
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, new_class
from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from diffcoll.core.errors import message
from diffcoll.engines.types import Group
from diffcoll.nn.batch_norm import Synchronized, check_input, node_of, refuse_one_value, update
from diffcoll.nn.normalize import batch_norm

_CONVERT = "convert_sync_batchnorm"
_REMEDY = "replace this module yourself"


class SynchronizedSubclass(Synchronized):
    """First base of a class whose second base is a subclass of batch norm; `_own_forward` is the forward of that."""

    def _forward(self, *args: Any, **more: Any) -> Any:
        if any(isinstance(x, fx.Proxy) for x in (*args, *more.values())):
            return node_of(self, *args, **more)
        calls: list[bool] = []
        with _Replacing(partial(_normalized, self.group, calls)):
            y = self._own_forward(*args, **more)
        if self.training and not calls:
            assert self.converted_from is not None
            got = f"{self.converted_from.__name__}, whose forward does not call torch.nn.functional.batch_norm"
            raise TypeError(message(_CONVERT, "module", got, "a forward that calls it", _REMEDY))
        return y

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles make the class again."""
        return _empty, (self.converted_from,), self.__dict__


class _Replacing(TorchFunctionMode):
    """Calls a function instead of `torch.nn.functional.batch_norm`, in this thread."""

    def __init__(self, by: Callable[..., Tensor]) -> None:
        super().__init__()
        self.by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.by if func is functional.batch_norm else func)(*args, **(kwargs or {}))


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
    """`torch.nn.functional.batch_norm` with the statistics of all ranks' batches; adds `training` to calls."""
    if not training:
        calls.append(False)
        return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if True in calls:  # as ghost batch norm does; each rank may have another number of batches
        got = "a forward that normalizes a second batch"
        raise TypeError(message(_CONVERT, "module", got, "one batch in each forward", _REMEDY))
    calls.append(True)
    own = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    check_input(input, next((len(t) for t in own.values() if t is not None), None), **own)

    def track(count: float | Tensor, mean: Tensor, var: Tensor) -> None:
        local = refuse_one_value(input.shape, count, group)
        if running_mean is not None and running_var is not None:
            update(running_mean, running_var, momentum, local, count, mean, var)

    return batch_norm(input, weight, bias, eps, group, track)


_classes: dict[type[nn.Module], type[SynchronizedSubclass]] = {}


def synchronized_class(kind: type[nn.Module]) -> type[SynchronizedSubclass]:
    """Return the class that a subclass of batch norm is converted to."""
    if kind not in _classes:
        _classes[kind] = _make(kind)
    return _classes[kind]


def _make(kind: type[nn.Module]) -> type[SynchronizedSubclass]:
    own = kind.forward
    # torch.jit.script compiles it under the name of the function.
    named = FunctionType(own.__code__, own.__globals__, "_own_forward", own.__defaults__, own.__closure__)
    named.__kwdefaults__, named.__annotations__ = own.__kwdefaults__, own.__annotations__
    body: dict[str, Any] = {"_own_forward": named, "converted_from": kind, "__module__": __name__}
    if len(inspect.signature(own).parameters) != 2:
        body["forward"] = SynchronizedSubclass._forward  # which cannot be scripted
    return new_class(f"Sync{kind.__name__}", (SynchronizedSubclass, kind), exec_body=lambda scope: scope.update(body))


def _empty(kind: type[nn.Module]) -> SynchronizedSubclass:
    made = synchronized_class(kind)
    return made.__new__(made)
