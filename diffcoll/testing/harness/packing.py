"""The user's function, copied for each rank together with the module that it uses, as real processes receive it."""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from diffcoll.core.errors import is_users_file, message
from diffcoll.core.torch_private.tensors import has_hooks
from diffcoll.core.trees import tree_flatten
from diffcoll.testing._calls import missing
from diffcoll.testing.pickling import by_value, dumps

#: Types of locks, and what makes a new one.
_LOCKS: dict[type, Callable[[], Any]] = {type(make()): make for make in (threading.Lock, threading.RLock)}


@dataclass(frozen=True)
class Subject:
    """A copy of the user's function, and of the module or the tensors that it uses."""

    fn: Callable[..., Any]
    #: Modules and tensors, by the prefix of their names.
    modules: dict[str, nn.Module | Tensor]
    #: Indices of the results that are losses if they have shape (1,), and no row.
    losses: tuple[int, ...] = ()

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters that require gradients, by name."""
        return {name: p for name, p in self.named("named_parameters") if p.requires_grad}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers, by name."""
        return dict(self.named("named_buffers"))

    @property
    def state(self) -> dict[str, Tensor]:
        """Copies of what a call may change: buffers and parameters, frozen ones too, by what they are."""
        every = [("buffer", each) for each in self.named("named_buffers")]
        every += [("parameter", each) for each in self.named("named_parameters")]
        found = {f"{kind} {name}": x.detach().cpu().clone() for kind, (name, x) in every}
        return {name: x if x.layout == torch.strided else x.to_dense() for name, x in found.items()}

    @property
    def attributes(self) -> dict[str, Tensor]:
        """Dense tensors that modules hold as plain attributes, by name."""
        return {
            f"{prefix}{name}{'.' * bool(name)}{attribute}": x.detach()
            for prefix, module in self.modules.items()
            if isinstance(module, nn.Module)
            for name, each in module.named_modules()
            for attribute, x in vars(each).items()
            if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested
        }

    @property
    def tensors(self) -> list[Tensor]:
        """All parameters that require gradients, and buffers."""
        return [*self.parameters.values(), *self.buffers.values()]

    def named(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield what this method of modules yields, "named_parameters" or "named_buffers"."""
        for prefix, module in self.modules.items():
            if isinstance(module, nn.Module):
                yield from ((f"{prefix}{name}", x) for name, x in getattr(module, kind)())
            elif kind == "named_parameters":
                yield prefix.removesuffix("."), module

    def call(self, part: Any) -> list[Tensor]:
        """Call the function on one rank's part of the batch. Returns the leaves of its result as tensors."""
        args, kwargs = arguments_of(part)
        y = self.fn(*args, **kwargs)
        return [y[0] if i in self.losses and y.shape == (1,) else y for i, y in enumerate(_results(y))]


def arguments_of(part: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the positional and the keyword arguments that a part of the batch is."""
    if isinstance(part, (tuple, list)) and not hasattr(part, "_fields"):
        return part, {}
    return ((), part) if isinstance(part, dict) else ((part,), {})


@dataclass(frozen=True)
class Packed:
    """A function and its module, pickled together, so that a copy of one refers to the copy of the other."""

    data: bytes
    losses: tuple[int, ...] = ()
    #: The parts of the batch of the steps that come before what is measured.
    before: tuple[Any, ...] = ()

    def unpack(self) -> Subject:
        """Return a new copy."""
        fn, modules = pickle.loads(self.data)
        return Subject(fn, modules, self.losses)


def pack(name: str, argument: str, fn: Callable[..., Any], module: Any) -> Packed:
    """Pickle a function and its module as a real process would receive them.

    Functions of the user's own modules are pickled by value, with the globals that they use: a model that is a global
    of the caller's module is the same object in the function and in `module` then.
    """
    if find_spec("cloudpickle") is None:
        raise missing(name, "cloudpickle", "test")
    if not callable(fn):
        raise TypeError(message(name, argument, type(fn).__name__, "a function"))
    modules = _modules(name, module)
    _refuse(name, modules)
    with by_value(_modules_of(fn)):
        try:
            return Packed(dumps((fn, modules), _reduce))
        except Exception as error:
            raise ValueError(
                f"{name}: {argument}: cannot be copied for each rank ({type(error).__name__}: {error}); create what "
                "cannot be pickled (process groups, open files, non-leaf tensors) inside the function"
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
        return weakref.ref, (obj() if obj() is not None else _Gone(),)
    if isinstance(obj, torch.jit.ScriptModule):
        buffer = io.BytesIO()
        torch.jit.save(obj, buffer)
        return _scripted, (buffer.getvalue(),)
    return NotImplemented


class _Gone:
    """What a dead reference refers to: it is collected at once."""


def _scripted(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]


def _modules(name: str, module: Any) -> dict[str, nn.Module | Tensor]:
    """Return the modules and tensors of the argument `module`, by the prefix of their names."""
    expected = "an nn.Module, or a list of modules and of leaf tensors that require gradients"
    if module is None or isinstance(module, nn.Module):
        return {} if module is None else {"": module}
    try:
        held = {f"module[{i}].": each for i, each in enumerate(module)}
    except TypeError:
        raise TypeError(message(name, "module", type(module).__name__, expected)) from None
    for prefix, p in held.items():
        if not isinstance(p, nn.Module) and not (isinstance(p, Tensor) and p.is_leaf and p.requires_grad):
            kind = type(p).__name__
            if isinstance(p, Tensor):
                kind = "a tensor that requires no gradient" if not p.requires_grad else "a non-leaf tensor"
            remedy = "module.parameters() is such a list"
            raise TypeError(message(name, prefix.removesuffix("."), kind, expected, remedy))
    return held


def _refuse(name: str, modules: dict[str, nn.Module | Tensor]) -> None:
    """Raise if a tensor has no numbers yet, or a parameter hooks, as of a GradientAverager, which copies have not."""
    subject = Subject(id, modules)
    for which, x in {**subject.buffers, **dict(subject.named("named_parameters"))}.items():
        if is_lazy(x):
            got, expected = f"a lazy module, whose {which} has no numbers yet", "the same numbers on all ranks"
            raise ValueError(message(name, "module", got, expected, "call the module once before"))
    for which, p in subject.parameters.items():
        if has_hooks(p):
            got, expected = f"parameter {which} with hooks on its gradient", "none, since copies have no such hooks"
            remedy = "register them in the function, or pass the module before a GradientAverager is attached"
            raise ValueError(message(name, "module", got, expected, remedy))


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


def _results(y: Any) -> Iterator[Tensor]:
    """Yield what a function returned as tensors, numbers without gradient; None and words are no results."""
    for leaf in tree_flatten(y)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, (bool, int, float, complex)):
            yield torch.tensor(leaf, dtype={float: torch.float64, complex: torch.complex128}.get(type(leaf)))
        elif isinstance(leaf, Mapping):  # such as an output of Transformers, which is a dataclass too
            yield from _results(list(leaf.values()))
        elif is_dataclass(leaf):
            yield from _results([getattr(leaf, part.name) for part in fields(leaf)])
        elif leaf is not None and not isinstance(leaf, str):
            raise TypeError(
                f"the function returned {type(leaf).__name__}, expected a loss (a 0-d tensor), or a tree of tensors "
                "with one row for each row of its input"
            )
