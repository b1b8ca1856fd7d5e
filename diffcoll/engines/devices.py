"""Accelerators: which device has streams, which stream is current, what memory can be pinned.

`torch.accelerator` serves CUDA, XPU, MTIA, HPU, MPS and what a package registers as PrivateUse1, such as NPU. It serves
one type of device per process; if there are tensors of another, as CUDA's beside a PrivateUse1 device, the type's own
module is asked. The library names no type of device elsewhere, except where MPI reads CUDA memory (engines/mpi.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from diffcoll.core.errors import message


def accelerator_type() -> str | None:
    """Return the type of device that `torch.accelerator` serves, such as "cuda"; None: no accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream of a tensor's device; None if it has no streams, as the CPU.

    Call it for tensors that are not on the CPU: `x.is_cpu` is faster.
    """
    current = stream_source(device)
    return None if current is None else current()


def stream_source(device: torch.device) -> Callable[[], torch.Stream] | None:
    """Return the function that returns the current stream of a tensor's device; None if it has no streams."""
    if device.type == accelerator_type():
        return partial(torch.accelerator.current_stream, device.index)
    if device.type in ("cpu", "meta"):
        return None
    current = getattr(_module(device.type), "current_stream", None)
    return None if current is None else partial(current, device)


@cache
def can_pin(kind: str) -> bool:
    """Whether host memory can be pinned for this type of device, for copies that do not block the host.

    A PrivateUse1 device need not have an allocator of such memory; PyTorch then raises.
    """
    if kind == "cpu" or kind != accelerator_type():
        return False  # memory is pinned for the accelerator
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:
        return False


def is_capturing() -> bool:
    """Whether a CUDA graph captures the current stream, where the host must not wait."""
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def synchronize_streams() -> None:
    """Wait for what any stream of the accelerator's current device has queued, if this process uses it."""
    kind = accelerator_type()
    if kind is not None and getattr(_module(kind), "is_initialized", bool)():
        torch.accelerator.synchronize()


def cuda_is_missing() -> bool:
    """Whether PyTorch is built for CUDA, and this host has no GPU."""
    return torch.version.cuda is not None and not torch.cuda.is_available()


def _module(kind: str) -> Any:
    try:
        return torch.get_device_module(kind)
    except RuntimeError:  # a type of device without a module
        return None


# ── backends of torch.distributed ────────────────────────────────────────────────────────────────────────


def needs_accelerator(backend: str) -> bool:
    """Whether a backend, or one of several as in "cpu:gloo,cuda:nccl", moves no CPU tensors: NCCL, XCCL, HCCL, …."""
    names = (part.rpartition(":")[2].lower() for part in backend.split(","))
    return any("cpu" not in dist.Backend.backend_capability.get(name, ["cpu"]) for name in names)


def device_of_backend(backend: str) -> str:
    """Return the type of device on which tensors are sent through a backend."""
    return (accelerator_type() or "cpu") if needs_accelerator(backend) else "cpu"


def expect_device(backend: str, operation: str = "spawn", argument: str = "backend", remedy: str = "") -> None:
    """Raise if there is no such backend, or it needs an accelerator and this host has none."""
    if needs_accelerator(backend) and not torch.accelerator.device_count():
        raise RuntimeError(f"backend {backend!r} moves tensors of an accelerator, and this host has none; use 'gloo'")
    names = (part.rpartition(":")[2].lower() for part in backend.split(","))
    if unknown := [name for name in names if not dist.is_backend_available(name)]:
        raise ValueError(message(operation, argument, repr(unknown[0]), "'gloo', or another of this PyTorch's", remedy))


def select_device(backend: str, rank: int) -> None:
    """Let ranks of such a backend use the accelerators of the host in turn, before their group is made."""
    if needs_accelerator(backend):
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
