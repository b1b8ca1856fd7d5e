"""The same calls made with what PyTorch itself offers.

Private modules are named here to be measured against, not built on. What they do depends on the release of PyTorch
(notes/how-to/migrating.md), so whatever is measured is shown with the release that it was measured on.

An adapter takes a case and a rank and returns a function of x, or None where the system does not offer that
call. Adapters are as kind as can be: they cut, join and choose arguments around the system's own collective.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diffcoll.testing.cases import Case

CompetitorCall = Callable[[Any], Any]
#: The ops that they have, by their names.
_OPS = {"sum": "sum", "mean": "avg", "product": "product", "max": "max", "min": "min"}
Adapter = Callable[[Case, int], CompetitorCall | None]


def _nn_functional(case: Case, rank: int) -> CompetitorCall | None:
    """torch.distributed.nn.functional."""
    nn: Any = import_module("torch.distributed.nn.functional")
    a, n = case.arguments, case.size
    if _is_ours_alone(case):
        return None
    dim, op = a.get("dim", 0), getattr(dist.ReduceOp, _OPS[a.get("op", "sum")].upper())
    src, dst = a.get("src", 0), a.get("dst", 0)

    def joined(xs: list[Tensor]) -> Tensor:
        return torch.stack(list(xs), dim) if a.get("stack") or xs[0].dim() == 0 else torch.cat(list(xs), dim)

    def gather(x: Tensor) -> Tensor:
        y = joined(nn.gather(x, dst))
        return y if rank == dst else y.narrow(dim, 0, 0)

    def reduce(x: Tensor) -> Tensor:
        y = nn.reduce(x, dst, op)
        return y if rank == dst else torch.where(torch.tensor(True), 0.0, y)  # undefined there

    def reduce_scatter(x: Tensor) -> Any:
        blocks = [b.contiguous() for b in x.chunk(n, dim)]
        return nn.reduce_scatter(torch.empty_like(blocks[rank]), blocks, op)

    def all_to_all(x: Tensor) -> Any:
        d, c = a.get("split_dim", 0), a.get("concat_dim", 0)
        if d == c == 0:
            sizes = [case.per_rank.get(key, [None] * n)[rank] for key in ("concat_sizes", "split_sizes")]
            y = x.new_empty(sum(sizes[0]) if sizes[0] else x.shape[0], *x.shape[1:])
            return nn.all_to_all_single(y, x, *sizes)
        blocks = [b.contiguous() for b in x.chunk(n, d)]
        return torch.cat(nn.all_to_all([torch.empty_like(b) for b in blocks], blocks), c)

    calls: dict[str, CompetitorCall] = {
        "all_reduce": lambda x: nn.all_reduce(x, op),
        "all_gather": lambda x: joined(nn.all_gather(x)),
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "broadcast": lambda x: nn.broadcast(x, src),
        "reduce": reduce,
        "gather": gather,
        "scatter": lambda x: nn.scatter([b.contiguous() for b in x.chunk(n, dim)], src),
    }
    return calls.get(case.name)


def _functional_collectives(case: Case, rank: int) -> CompetitorCall | None:
    """torch.distributed._functional_collectives."""
    ft: Any = import_module("torch.distributed._functional_collectives")
    a, n, world = case.arguments, case.size, dist.group.WORLD
    if _is_ours_alone(case) or a.get("stack") or (() in case.shapes and case.name != "all_reduce"):
        return None
    dim, op = a.get("dim", 0), _OPS[a.get("op", "sum")]
    # Renamed in 2.13; the old names warn since.
    renamed = hasattr(ft, "all_gather_single")
    all_gather = ft.all_gather_single if renamed else ft.all_gather_tensor
    reduce_scatter = ft.reduce_scatter_single if renamed else ft.reduce_scatter_tensor

    def plain(y: Tensor) -> Tensor:
        return y.wait() if isinstance(y, ft.AsyncCollectiveTensor) else y

    def all_to_all(x: Tensor) -> Any:
        sizes = [case.per_rank.get(key, [None] * n)[rank] for key in ("concat_sizes", "split_sizes")]
        return plain(ft.all_to_all_single(x, *sizes, world))

    def permute(x: Tensor) -> Tensor:
        targets = [dst for _, dst in sorted(_pairs(case))]
        return plain(ft.permute_tensor(x.flatten(), targets, world)).view(x.shape)

    calls: dict[str, CompetitorCall] = {
        "all_reduce": lambda x: plain(ft.all_reduce(x, op, world)),
        "all_gather": lambda x: plain(all_gather(x, dim % x.dim(), world)),
        "reduce_scatter": lambda x: plain(reduce_scatter(x, op, dim % x.dim(), world)),
        "all_to_all": all_to_all,
        "broadcast": lambda x: plain(ft.broadcast(x, a.get("src", 0), world)),
        "permute": permute,
        "shift": permute,
    }
    if case.name == "all_to_all" and (a.get("split_dim", 0), a.get("concat_dim", 0)) != (0, 0):
        return None
    if case.name in ("permute", "shift") and len(_pairs(case)) < n:
        return None
    return calls.get(case.name)


def _is_ours_alone(case: Case) -> bool:
    """What neither system has.

    The replicated world, uneven blocks outside of all_to_all, sizes to be asked for, and most ways to reduce.
    """
    a = case.arguments
    if a.get("op", "sum") not in _OPS or a.get("async_op"):
        return True
    uneven = "sizes" in a or "auto" in case.per_rank.get("concat_sizes", [])
    two_dims = case.name == "all_to_all" and bool(case.per_rank) and "split_dim" in a
    return a.get("grad_placement") == "replicate" or uneven or two_dims


def _pairs(case: Case) -> list[tuple[int, int]]:
    if case.name == "permute":
        return list(case.arguments["pairs"])
    offset, wrap = case.arguments.get("offset", 1), case.arguments.get("wrap", True)
    return [(r, (r + offset) % case.size) for r in range(case.size) if wrap or 0 <= r + offset < case.size]


#: Name → adapter; the library itself first.
SYSTEMS: dict[str, Adapter] = {
    "diffcoll": lambda case, rank: lambda x: case.call(x, rank),
    "torch.distributed.nn.functional": _nn_functional,
    "torch.distributed._functional_collectives": _functional_collectives,
}
