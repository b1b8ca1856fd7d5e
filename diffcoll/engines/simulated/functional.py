"""Functional collectives of tensors without memory, as of DTensor: they meet as those of tensors with memory do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from diffcoll.core.torch_private.without_memory import meta_kernels
from diffcoll.engines.rank_state import THREAD

_c: Any = torch._C._distributed_c10d
#: Of one call: the group of the rank, its output (one or several), its inputs, and the other arguments.
Start = Callable[..., dist.Work]


def _opts(kind: type, **attributes: Any) -> Any:
    opts = kind()
    for name, value in attributes.items():
        setattr(opts, name, value)
    return opts


def _reducing(kind: type, op: str) -> Any:
    return _opts(kind, reduceOp=getattr(dist.ReduceOp, op.upper()))


def _started(original: Callable[..., Any], start: Start, x: Any, *arguments: Any, out: Tensor | None = None) -> Any:
    """Return the output of a call, which `wait_tensor` waits for; the last argument is the group."""
    *others, group = arguments
    y = original(x, *arguments) if out is None else out
    work = start(_c._resolve_process_group(group) if isinstance(group, str) else group, y, x, *others)
    for each in [y] if isinstance(y, Tensor) else y:
        storage = each.untyped_storage()  # autograd makes other tensors of y, on the same storage
        THREAD.rank.in_flight[storage._cdata] = storage, work
    return y


def _wait(original: Callable[..., Any], x: Tensor) -> Any:
    _, work = THREAD.rank.in_flight.pop(x.untyped_storage()._cdata, (None, None))
    if work is not None:
        work.wait()
    return original(x)


def _messages(original: Callable[..., Any], ops: Any, peers: Any, tags: Any, xs: Sequence[Tensor], group: Any) -> Any:
    kernels = {"isend": _STARTS["isend"], "irecv": _STARTS["irecv"]}
    ys = original(ops, peers, tags, xs, group)
    return [
        _started(lambda *_, y=y: y, kernels[op], x, peer, tag, group)
        for op, peer, tag, x, y in zip(ops, peers, tags, xs, ys, strict=True)
    ]


#: By the name of the op; those in place, or with an output argument, do the same.
_STARTS: dict[str, Start] = {
    "all_reduce": lambda group, y, x, op: group.allreduce([x], _reducing(dist.AllreduceOptions, op)),
    "all_reduce_coalesced": lambda group, ys, xs, op: group.allreduce(xs, _reducing(dist.AllreduceOptions, op)),
    "all_gather_into_tensor": lambda group, y, x, n: group._allgather_base(y, x),
    "all_gather_into_tensor_coalesced": lambda group, ys, xs, n: group.allgather_into_tensor_coalesced(ys, xs),
    "reduce_scatter_tensor": lambda group, y, x, op, n: group._reduce_scatter_base(
        y, x, _reducing(dist.ReduceScatterOptions, op)
    ),
    "reduce_scatter_tensor_coalesced": lambda group, ys, xs, op, n: group.reduce_scatter_tensor_coalesced(
        ys, xs, _reducing(dist.ReduceScatterOptions, op)
    ),
    "all_to_all_single": lambda group, y, x, outs, ins: group.alltoall_base(y, x, outs or [], ins or []),
    "broadcast": lambda group, y, x, src: group.broadcast([x], _opts(dist.BroadcastOptions, rootRank=src)),
    "isend": lambda group, y, x, dst, tag: group.send([x], dst, tag),
    "irecv": lambda group, y, x, src, tag: group.recv([y], src, tag),
}


def met() -> AbstractContextManager[None]:
    """Let the functional collectives of a rank meet those of the other ranks."""

    def kernel(start: Start) -> Callable[..., Any]:
        return lambda original, *arguments, **more: _started(original, start, *arguments, **more)

    kernels = {name + suffix: kernel(start) for name, start in _STARTS.items() for suffix in ("", "_", "_out")}
    kernels |= {"batch_p2p_ops": _messages, "wait_tensor": _wait}
    # Its own kernel returns a new tensor, for which nobody would wait (torch 2.13).
    kernels["_wrap_tensor_autograd"] = lambda original, x: functional.AsyncCollectiveTensor(x)
    return meta_kernels(functional, kernels, lambda: THREAD.rank is not None)
