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

_SPACE = "_c10d_functional"


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
def meta_kernels(module: Any, kernels: Mapping[str, Callable[..., Any]], applies: Callable[[], bool]) -> Iterator[None]:
    """Replace the Meta kernels of functional collectives, which also compute FakeTensors, below all modes.

    Args:
        module: torch.distributed._functional_collectives.
        kernels: by the name of the op, called as kernel(original, *args); `original` is PyTorch's kernel, which sends
            nothing. Ops that this release of PyTorch lacks are ignored.
        applies: whether to call them now; else PyTorch's own.
    """

    def call(original: Callable[..., Any], kernel: Callable[..., Any], *args: Any, **more: Any) -> Any:
        return kernel(original, *args, **more) if applies() and not is_recorded() else original(*args, **more)

    def quiet(record: object) -> bool:  # FakeTensorMode logs what a kernel raises, on each rank
        return not applies()

    log = logging.getLogger(FakeTensor.__module__)
    log.addFilter(quiet)
    known = {*torch._C._dispatch_get_all_op_names()}
    library = torch.library.Library(_SPACE, "IMPL")  # type: ignore[no-untyped-call]
    try:
        for op, kernel in kernels.items():
            original = _original(module, op)
            if f"{_SPACE}::{op}" in known and original is not None:
                library.impl(op, partial(call, original, kernel), "Meta", allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        log.removeFilter(quiet)
        library._destroy()  # type: ignore[no-untyped-call]


def _original(module: Any, op: str) -> Callable[..., Any] | None:
    """Return PyTorch's Meta kernel; None: this release has none.

    `torch.library.get_kernel` returns one that within modes calls what was registered last.
    """
    if op == "_wrap_tensor_autograd":
        return torch.empty_like
    names = f"_{op}_native_meta", f"_{op}_meta"
    return next((kernel for name in names if (kernel := getattr(module, name, None))), None)
