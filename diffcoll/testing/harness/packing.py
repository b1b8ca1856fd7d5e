"""The user's function, copied for each rank together with the module that it uses, as real processes receive it."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from diffcoll.core.errors import is_users_file, message
from diffcoll.core.torch_private.tensors import has_hooks
from diffcoll.core.torch_private.trees import tree_flatten
from diffcoll.testing._calls import missing
from diffcoll.testing.pickling import dumps


@dataclass(frozen=True)
class Subject:
    """A copy of the user's function, and of the module or the tensors that it uses."""

    fn: Callable[..., Any]
    module: Any

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters that require gradients, by name."""
        if isinstance(self.module, nn.Module):
            return {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        return {f"module[{i}]": p for i, p in enumerate(self.module or ())}

    @property
    def tensors(self) -> list[Tensor]:
        """All parameters and buffers."""
        return [*self.parameters.values(), *self.buffers.values()]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers, by name."""
        return dict(self.module.named_buffers()) if isinstance(self.module, nn.Module) else {}

    def call(self, part: Any) -> list[Tensor]:
        """Call the function on one rank's part of the batch. Returns the leaves of its result as tensors."""
        if isinstance(part, (tuple, list)) and not hasattr(part, "_fields"):
            y = self.fn(*part)
        else:
            y = self.fn(**part) if isinstance(part, dict) else self.fn(part)
        return [leaf if isinstance(leaf, Tensor) else _number(leaf) for leaf in tree_flatten(y)[0]]


@dataclass(frozen=True)
class Packed:
    """A function and its module, pickled together, so that a copy of one refers to the copy of the other."""

    data: bytes

    def unpack(self) -> Subject:
        """Return a new copy."""
        fn, module = pickle.loads(self.data)
        return Subject(fn, module)


def pack(name: str, argument: str, fn: Callable[..., Any], module: Any) -> Packed:
    """Pickle a function and its module as a real process would receive them.

    Functions of the user's own modules are pickled by value, with the globals that they use: a model that is a global
    of the caller's module is the same object in the function and in `module` then.
    """
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise missing(name, "cloudpickle", "test") from error
    if not callable(fn):
        raise TypeError(message(name, argument, type(fn).__name__, "a function"))
    if not isinstance(module, nn.Module) and module is not None:
        module = _parameters(name, module)
    _refuse_hooks(name, module)
    with _by_value(cloudpickle, fn):
        try:
            return Packed(dumps((fn, module), _reduce))
        except Exception as error:
            raise ValueError(
                f"{name}: {argument}: cannot be copied for each rank ({type(error).__name__}: {error}); create what "
                "cannot be pickled (process groups, open files, non-leaf tensors) inside the function"
            ) from error


def _reduce(obj: Any) -> Any:
    """Pickle by name what users' autograd Functions refer to."""
    if obj is torch._C._functions:  # what `once_differentiable` uses; no module that can be imported
        return getattr, (torch._C, "_functions")
    cls = getattr(obj, "__self__", None)
    if isinstance(cls, type) and issubclass(cls, Function) and getattr(obj, "__name__", "") == "apply":
        return getattr, (cls, "apply")  # else its code is copied, which some releases cannot
    return NotImplemented


def _parameters(name: str, module: Any) -> list[Tensor]:
    expected = "an nn.Module, or a list of leaf tensors that require gradients"
    try:
        tensors = list(module)
    except TypeError:
        raise TypeError(message(name, "module", type(module).__name__, expected)) from None
    for i, p in enumerate(tensors):
        if not (isinstance(p, Tensor) and p.is_leaf and p.requires_grad):
            kind = type(p).__name__
            if isinstance(p, Tensor):
                kind = "a tensor that requires no gradient" if not p.requires_grad else "a non-leaf tensor"
            raise TypeError(message(name, f"module[{i}]", kind, expected, "module.parameters() is such a list"))
    return tensors


def _refuse_hooks(name: str, module: Any) -> None:
    """Raise if a parameter has hooks, such as those of a GradientAverager: the copies would not have them."""
    named = module.named_parameters() if isinstance(module, nn.Module) else enumerate(module or ())
    for which, p in named:
        if has_hooks(p):
            got, expected = f"parameter {which} with hooks on its gradient", "none, since copies have no such hooks"
            remedy = "register them in the function, or pass the module before a GradientAverager is attached"
            raise ValueError(message(name, "module", got, expected, remedy))


@contextlib.contextmanager
def _by_value(cloudpickle: Any, fn: Callable[..., Any]) -> Iterator[None]:
    """Pickle functions and classes of the module that defines fn by value, if it is not an installed package."""
    seen: list[ModuleType] = []
    part: Any = fn
    while part is not None:
        for holder in (part, type(part)):
            module = sys.modules.get(getattr(holder, "__module__", None) or "")
            file = getattr(module, "__file__", None)
            if module is not None and file is not None and module.__name__ != "__main__" and is_users_file(file):
                seen.append(module)
        part = getattr(part, "func", None) or getattr(part, "__self__", None) or getattr(part, "__wrapped__", None)
    registered = cloudpickle.list_registry_pickle_by_value()
    added = [m for m in dict.fromkeys(seen) if m.__name__ not in registered]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _number(leaf: Any) -> Tensor:
    """Return a result that is not a tensor as one, without gradient."""
    if isinstance(leaf, (bool, int, float, complex)):
        wide = {float: torch.float64, complex: torch.complex128}.get(type(leaf))
        return torch.tensor(leaf, dtype=wide)
    raise TypeError(
        f"the function returned {type(leaf).__name__}, expected a loss (a 0-d tensor), or a tree of tensors with one "
        "row for each row of its input"
    )
