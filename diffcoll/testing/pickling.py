"""Pickles functions, closures and tensors for the ranks' processes, by cloudpickle."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch

#: What cloudpickle 3.1.3 and later write in place of the file of a function.
_NO_FILE = "<dynamic-code>"


def dumps(x: object, reduce: Callable[[Any], Any] = lambda obj: NotImplemented) -> bytes:
    """Return x, pickled, with the names of the files that its functions are from, and tensors of any dtype.

    Args:
        x: what to pickle.
        reduce: the `reducer_override` for objects that cloudpickle pickles in another way than needed.
    """
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):
                kind, arguments = self.dispatch_table[CodeType](obj)
                return kind, tuple(obj.co_filename if a == _NO_FILE else a for a in arguments)
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
                return import_module, (obj.__name__,)  # such as torch._dynamo.config, which has a class of its own
            found = reduce(obj)
            return super().reducer_override(obj) if found is NotImplemented else found

    buffer = io.BytesIO()
    torch.save(x, buffer, pickle_module=SimpleNamespace(Pickler=Pickler, __name__="cloudpickle"))
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """Return what was pickled."""
    return torch.load(io.BytesIO(data), weights_only=False)


@contextlib.contextmanager
def by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Let cloudpickle copy what these modules define, instead of its name."""
    import cloudpickle

    registered = cloudpickle.list_registry_pickle_by_value()
    with contextlib.ExitStack() as stack:
        for module in {module.__name__: module for module in modules if module.__name__ not in registered}.values():
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield
