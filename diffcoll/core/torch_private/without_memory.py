"""Tensors without memory, and what records operations on them; private torch API."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor


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
