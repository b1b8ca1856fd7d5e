"""Pickles functions, and tensors of every dtype, for the ranks' processes."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

#: Dtypes of which PyTorch's tensors can be pickled by `pickle`; of the others (float8, uint16, complex32) only the
#: pickling succeeds. torch.save and torch.load handle all.
_PICKLED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


def dumps(x: object, reduce: Callable[[Any], Any] = lambda obj: NotImplemented) -> bytes:
    """Return x, pickled by cloudpickle.

    Args:
        x: what to pickle.
        reduce: the `reducer_override` for objects that cloudpickle pickles in another way than needed.
    """
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Tensor) and obj.dtype not in _PICKLED:
                return load, (save(obj),)
            if isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj and type(obj) is not ModuleType:
                return import_module, (obj.__name__,)  # such as torch.distributed.config, which has a class of its own
            if isinstance(obj, type) and obj.__module__.startswith("torch.") and obj.__qualname__ != obj.__name__:
                name, home = obj.__name__, sys.modules.get(obj.__module__)
                if getattr(home, name, None) is obj:
                    return getattr, (home, name)  # such as torch.nn.attention.SDPBackend, which has another name inside
            found = reduce(obj)
            return super().reducer_override(obj) if found is NotImplemented else found

    buffer = io.BytesIO()
    Pickler(buffer).dump(x)
    return buffer.getvalue()


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


def save(x: object, pickle_module: Any = pickle) -> bytes:
    """Return x as bytes, with tensors of any dtype."""
    buffer = io.BytesIO()
    torch.save(x, buffer, pickle_module=pickle_module)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """Return what was saved."""
    return torch.load(io.BytesIO(data), weights_only=False)
