"""Tensors without memory, and PyTorch's functional collectives of them; private torch API."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor

_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)


def has_memory(x: Tensor) -> bool:
    """Whether x is neither on the meta device nor a FakeTensor, which no public API tells."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def is_recorded() -> bool:
    """Whether this process records operations to run them later (make_fx, export, Dynamo, torch.jit).

    Tracers disable their modes while a kernel of theirs runs, so the modes in force do not tell.
    """
    recorder = getattr(proxy_tensor, "_CURRENT_MAKE_FX_TRACER", None) or proxy_tensor.get_proxy_mode()
    compiling = torch._guards.TracingContext.try_get() or torch._guards.CompileContext.current_compile_id()
    return bool(recorder or compiling or torch._C._is_tracing())


@contextmanager
def meta_kernels(kernels: Mapping[str, Callable[..., Any]], applies: Callable[[], bool]) -> Iterator[None]:
    """Replace the Meta kernels of functional collectives, which also compute FakeTensors, below all modes.

    Args:
        kernels: by the name of the op, called as kernel(original, *args); `original` is PyTorch's kernel, which sends
            nothing. Ops that this release of PyTorch lacks are ignored.
        applies: whether to call them now; else PyTorch's own.
    """

    def call(original: Any, kernel: Callable[..., Any], *args: Any, **more: Any) -> Any:
        original = partial(original.call_boxed, _META)
        return kernel(original, *args, **more) if applies() and not is_recorded() else original(*args, **more)

    def quiet(record: object) -> bool:  # FakeTensorMode logs what a kernel raises, on each rank
        return not applies()

    log = logging.getLogger(FakeTensor.__module__)
    libraries: list[Any] = []
    log.addFilter(quiet)
    try:
        for op, kernel in kernels.items():
            if torch._C._dispatch_has_kernel_for_dispatch_key(op, "Meta"):
                libraries.append(torch.library.Library(op.partition("::")[0], "IMPL"))  # type: ignore[no-untyped-call]
                replacement = partial(call, torch.library.get_kernel(op, "Meta"), kernel)
                libraries[-1].impl(op.partition("::")[2], replacement, "Meta", allow_override=True)
        yield
    finally:
        log.removeFilter(quiet)
        for library in libraries:
            library._destroy()
