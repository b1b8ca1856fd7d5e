"""The user's functions, copied for each rank together with the module that they use, as real processes receive them."""

from __future__ import annotations

import copyreg
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.utils.parametrize import is_parametrized

from diffcoll.core.errors import is_users_file, message
from diffcoll.core.torch_private.tensors import has_hooks
from diffcoll.testing._calls import missing
from diffcoll.testing.pickling import by_value, dumps, load

#: Types of locks, and what makes a new one.
_LOCKS: dict[type, Callable[[], Any]] = {type(make()): make for make in (threading.Lock, threading.RLock)}


class Subject(NamedTuple):
    """A copy of the user's function, the module that it uses, what shards it, and the context in which it runs."""

    fn: Callable[..., Any]
    module: nn.Module | None = None
    shard: Callable[..., Any] | None = None
    context: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Packed:
    """A subject, pickled, so that a copy of the function refers to the copy of the module."""

    data: bytes
    #: What the module's numbers are converted to; None: they are not.
    dtype: torch.dtype | None

    def unpack(self) -> Subject:
        """Return a new copy."""
        found: Subject = load(self.data)
        if found.module is not None and self.dtype is not None:
            found.module.to(self.dtype)
            for each in found.module.modules():  # also what it keeps as attributes
                vars(each).update({k: x.to(self.dtype) for k, x in vars(each).items() if _is_constant(x)})
        return found


def pack(name: str, argument: str, subject: Subject, dtype: torch.dtype | None = None) -> Packed:
    """Pickle a function and its module as a real process would receive them, the module's numbers with this dtype.

    Functions of the user's own modules are pickled by value, with the globals that they use: a model that is a global
    of the caller's module is the same object in the function and as `module` then.
    """
    if find_spec("cloudpickle") is None:
        raise missing(name, "cloudpickle")
    for which, f in ((argument, subject.fn), ("shard", subject.shard), ("context", subject.context)):
        if not callable(f) and (f is not None or which == argument):
            raise TypeError(message(name, which, type(f).__name__, "a function"))
    if subject.module is not None:
        _refuse(name, subject.module, dtype)
    try:
        with by_value(_modules_of(subject.fn)):
            return Packed(dumps(subject, _reduce), dtype)
    except Exception as error:
        raise ValueError(
            f"{name}: {argument}: cannot be copied for each rank ({type(error).__name__}: {error}); create what cannot "
            "be pickled (process groups, open files, non-leaf tensors) inside the function"
        ) from error


def _reduce(obj: Any) -> Any:
    """Pickle by name what users' autograd Functions refer to."""
    if obj is torch._C._functions:  # what `once_differentiable` uses; no module that can be imported
        return getattr, (torch._C, "_functions")
    if isinstance(obj, nn.Module) and is_parametrized(obj):  # PyTorch refuses to, because such classes have no name
        return copyreg.__newobj__, (type(obj),), dict(vars(obj))  # type: ignore[attr-defined]
    cls = getattr(obj, "__self__", None)
    if isinstance(cls, type) and issubclass(cls, Function) and getattr(obj, "__name__", "") == "apply":
        return getattr, (cls, "apply")  # else its code is copied, which some releases cannot
    # What modules hold beside tensors: each rank's copy has locks of its own, and refers to its own copies.
    if type(obj) in _LOCKS:
        return _LOCKS[type(obj)], ()
    if type(obj) is weakref.ref:
        return weakref.ref, (set() if obj() is None else obj(),)  # the set is collected at once
    return NotImplemented


def _refuse(name: str, module: Any, dtype: torch.dtype | None) -> None:
    """Raise if a parameter has hooks, which copies have not, or the dtype would drop imaginary parts."""
    if not isinstance(module, nn.Module):
        raise TypeError(message(name, "module", type(module).__name__, "an nn.Module"))
    if dtype is not None and any(x.is_complex() for x in (*module.parameters(), *module.buffers())):
        raise TypeError(message(name, "module", "complex numbers", f"{dtype} ones", "pass dtype=None"))
    for which, p in module.named_parameters():
        if has_hooks(p):
            got, expected = f"parameter {which} with hooks on its gradient", "none, since copies have no such hooks"
            raise ValueError(message(name, "module", got, expected, "register them in the function, or in shard"))


def _is_constant(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and not x.requires_grad


def _modules_of(fn: Callable[..., Any]) -> Iterator[ModuleType]:
    """Yield the modules that define fn and what it wraps, except those of installed packages."""
    part: Any = fn
    while part is not None:
        for holder in (part, type(part)):
            module = sys.modules.get(getattr(holder, "__module__", None) or "")
            file = getattr(module, "__file__", None)
            if module is not None and file is not None and module.__name__ != "__main__" and is_users_file(file):
                yield module
        part = getattr(part, "func", None) or getattr(part, "__self__", None) or getattr(part, "__wrapped__", None)
