"""Functional collectives of tensors without memory, as of DTensor: they meet as those of tensors with memory do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._library import simple_registry
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import _functional_collectives as functional

from diffcoll.core.torch_private.without_memory import is_recorded
from diffcoll.engines.rank_state import THREAD

_c: Any = torch._C._distributed_c10d
#: What communicates: the ops of two namespaces, and one of DTensor's.
_OPS = "_c10d_functional::", "_c10d_functional_autograd::", "_dtensor::shard_dim_alltoall"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@contextmanager
def met() -> Iterator[None]:
    """Let functional collectives of tensors without memory meet on ranks, as those of tensors with memory do.

    PyTorch's Meta kernels, which also compute FakeTensors, send nothing. Its kernels for the CPU work for such tensors,
    too, and are called in their place, below all modes, unless a tracer records the call.
    """
    with ExitStack() as undo:
        log = logging.getLogger(FakeTensor.__module__)
        log.addFilter(_quiet)
        undo.callback(log.removeFilter, _quiet)
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith(_OPS) and torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
                space, op = name.split("::")
                fake = simple_registry.singleton.find(name).fake_impl
                kernel = _KERNELS.get(op) or partial(getattr(getattr(torch.ops, space), op).default.redispatch, _CPU)
                # `torch.library.get_kernel` returns a kernel that within modes calls what was registered last.
                names = f"_{op}_native_meta", f"_{op}_meta"
                known = (getattr(functional, name) for name in names if hasattr(functional, name))
                original = fake.kernel or next(known, kernel)
                library = torch.library.Library(space, "IMPL")  # type: ignore[no-untyped-call]
                undo.callback(library._destroy)
                library.impl(op, partial(_call, original, kernel), "Meta", allow_override=True)  # type: ignore[no-untyped-call]
                undo.callback(setattr, fake, "kernels", fake.kernels)
                fake.kernels = []  # else FakeTensorMode calls these, and no Meta kernel
        yield


def _call(original: Callable[..., Any], kernel: Callable[..., Any], *args: Any, **more: Any) -> Any:
    return (original if THREAD.rank is None or is_recorded() else kernel)(*args, **more)


def _quiet(record: object) -> bool:
    return THREAD.rank is None  # FakeTensorMode logs what a kernel raises, on each rank


def forget(works: Iterable[Any]) -> None:
    """Remove works from PyTorch's table: when the process ends, it warns of all that nobody has waited for."""
    for x in (y for work in works for y in work.outputs):
        with suppress(RuntimeError):
            torch.ops._c10d_functional.wait_tensor.default.redispatch(_CPU, x)


def _batch(ops: Sequence[str], peers: Any, tags: Any, xs: Sequence[Tensor], group: Any) -> list[Tensor]:
    calls = zip(ops, xs, peers, tags, strict=True)
    return [getattr(torch.ops._c10d_functional, op)(x, peer, tag, group) for op, x, peer, tag in calls]


def _shard_dim_alltoall(x: Tensor, gather_dim: int, shard_dim: int, group: Any) -> Tensor:
    group = _c._resolve_process_group(group) if isinstance(group, str) else group
    parts = [part.contiguous() for part in x.chunk(group.size(), shard_dim)]
    group.alltoall(received := [torch.empty_like(part) for part in parts], parts).wait()
    return torch.cat(received, gather_dim)


#: Of ops whose kernel for the CPU calls what a group written in Python does not have.
_KERNELS: dict[str, Callable[..., Any]] = {"batch_p2p_ops": _batch, "shard_dim_alltoall": _shard_dim_alltoall}
