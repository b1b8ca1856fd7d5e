"""The floor of Python: the raw calls of a backend in a two-line `autograd.Function`.

It checks nothing, knows no second derivative, no transform and no other layout. What a collective of the library costs
above it is what those cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

Raw = Callable[[Tensor], Tensor]
#: The adjoint of each collective that has a floor.
_ADJOINTS = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "broadcast": "reduce",
}


class Floor(Function):
    """y = raw(x);  gx = adjoint(gy): what somebody writes who needs one collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, raw: Raw, adjoint: Raw) -> Tensor:
        ctx.adjoint = adjoint
        return raw(x)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gy), None, None


def floor(name: str, engine: str) -> Raw | None:
    """Return the floor of a collective for contiguous float32 rows, along dim 0 or from rank 0; None: it has none."""
    if name not in _ADJOINTS:
        return None
    calls = _on_mpi() if engine == "mpi" else _on_gloo()
    raw, adjoint = calls[name], calls[_ADJOINTS[name]]
    return lambda x: Floor.apply(x, raw, adjoint)  # type: ignore[no-untyped-call]


def _on_gloo() -> dict[str, Raw]:
    group: Any = dist.group.WORLD
    rank, n = dist.get_rank(), dist.get_world_size()
    others = [s for s in range(n) if s != rank]

    def all_reduce(x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    def all_gather(x: Tensor) -> Tensor:  # by messages, which on gloo take less time than its own collective
        y = x.new_empty(n * len(x))
        blocks = y.chunk(n)
        works = [group.send([x], s, 1) for s in others] + [group.recv([blocks[s]], s, 1) for s in others]
        blocks[rank].copy_(x)
        for work in works:
            work.wait()
        return y

    def reduce_scatter(x: Tensor) -> Tensor:
        blocks = x.chunk(n)
        parts = torch.empty(n, len(blocks[rank]))
        works = [group.send([blocks[s]], s, 1) for s in others] + [group.recv([parts[s]], s, 1) for s in others]
        parts[rank].copy_(blocks[rank])
        for work in works:
            work.wait()
        return parts.sum(0)

    def broadcast(x: Tensor) -> Tensor:
        y = x.clone()
        dist.broadcast(y, 0)
        return y

    def reduce(x: Tensor) -> Tensor:
        if rank:
            group.send([x], 0, 1).wait()
            return torch.zeros_like(x)
        parts = torch.empty(n, len(x))
        works = [group.recv([parts[s]], s, 1) for s in others]
        parts[0].copy_(x)
        for work in works:
            work.wait()
        return parts.sum(0)

    return {f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, broadcast, reduce)}


def _on_mpi() -> dict[str, Raw]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    rank, n = world.Get_rank(), world.Get_size()
    others = [s for s in range(n) if s != rank]

    def memory(x: Tensor) -> list[Any]:
        return [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), MPI.FLOAT]

    def all_reduce(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        world.Allreduce(memory(x), memory(y))
        return y

    def all_gather(x: Tensor) -> Tensor:
        y = x.new_empty(n * len(x))
        world.Allgather(memory(x), memory(y))
        return y

    def reduce_scatter(x: Tensor) -> Tensor:  # by messages, which take less time than MPI's own
        blocks = x.chunk(n)
        parts = torch.empty(n, len(blocks[rank]))
        requests = [world.Irecv(memory(parts[s]), s) for s in others]
        requests += [world.Isend(memory(blocks[s]), s) for s in others]
        parts[rank].copy_(blocks[rank])
        MPI.Request.Waitall(requests)
        return parts.sum(0)

    def broadcast(x: Tensor) -> Tensor:
        y = x.clone()
        world.Bcast(memory(y), 0)
        return y

    def reduce(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        world.Reduce(memory(x), memory(y) if rank == 0 else None, MPI.SUM, 0)
        return y

    return {f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, broadcast, reduce)}
