"""Averages over ranks as functions, and what ranks do before they train one model together.

note  notes/averaging.md
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from diffcoll.averaging.buckets import is_channels_last
from diffcoll.collectives.all_gather import all_gather
from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.collectives.broadcast import broadcast
from diffcoll.core._torch import tree_flatten
from diffcoll.core.arguments import Group, Tree
from diffcoll.core.checks import digest, refuse
from diffcoll.core.errors import message
from diffcoll.core.groups import resolve
from diffcoll.engines.engine import WIDER

__all__ = [
    "agree_on_parameters",
    "average_gradients",
    "broadcast_from_first",
    "checked_weight",
    "global_mean",
    "weighted",
]

#: A model is broadcast in messages of about this size.
_BYTES = 64 << 20


def average_gradients(
    tree: Tree, op: Literal["mean", "sum"] = "mean", weight: float | Tensor | None = None, group: Group = None
) -> Tree:
    """Gradients, averaged over the ranks: a function of them, differentiable to any order.

    For gradients that are themselves part of a loss, as in MAML or a gradient penalty. Those of one dtype travel in one
    message.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def f(x, w):
    ...     p = torch.tensor(1.0, requires_grad=True)
    ...     (g,) = torch.autograd.grad(x * p**2, [p], create_graph=True)
    ...     return dc.average_gradients([g], weight=w)[0]
    >>> simulate(f, [torch.tensor(3.0), torch.tensor(5.0)], [1, 3])  # (1 · 6 + 3 · 10) / 4
    [tensor(9., grad_fn=<DivBackward0>), tensor(9., grad_fn=<DivBackward0>)]

    Args:
        tree: a tensor, or nested tuples, lists and dicts of tensors; any floating-point or complex dtype; the same
            structure and shapes on all ranks.
        op: `"mean"` or `"sum"`.
        weight: what this rank's gradients count, a number or a 0-d tensor from zero up: the mean is
            Σ_r w_r g_r / Σ_r w_r then, the sum Σ_r w_r g_r. A rank of weight zero counts as zero, also with NaN. Where
            all weights are zero, so is the mean.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        The same structure; the same numbers on every rank.

    Raises:
        TypeError, ValueError: an argument is wrong on its own.

    Source: notes/averaging.md.
    """
    if op not in ("mean", "sum"):
        raise ValueError(message("average_gradients", "op", repr(op), '"mean" or "sum"'))
    if weight is None:
        reduced: Tree = all_reduce(tree, op, group)
        return reduced
    leaves, rebuild = tree_flatten(tree)
    tensors = [g for g in leaves if isinstance(g, Tensor)]
    rides = [g for g in tensors if g.dtype in (torch.float32, torch.float64)]
    like = max(rides, key=lambda g: g.dtype.itemsize, default=None)  # with those, in one message
    near = tensors[0] if like is None and tensors else like
    dtype = torch.float64 if like is None else like.dtype
    w = _number(checked_weight("average_gradients", weight), dtype, None if near is None else near.device)
    terms = [weighted(g, w) if isinstance(g, Tensor) else g for g in leaves]  # others: all_reduce names them
    summed: list[Tensor] = all_reduce([*terms, w], "sum", group)
    if op == "mean":
        total = torch.where(summed[-1] == 0, 1.0, summed[-1])
        summed = [_divided(g, total) for g in summed]
    averaged: Tree = rebuild(summed[:-1])
    return averaged


def global_mean(value: float | Tensor, weight: float | Tensor | None = None, group: Group = None) -> Tensor:
    """Mean of a number over the ranks, for logging: Σ_r w_r v_r / Σ_r w_r, without a gradient.

    >>> import diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda loss, tokens: dc.global_mean(loss, tokens).item(), [2.0, 5.0], [100, 50])
    [3.0, 3.0]

    Args:
        value: a number or a tensor, the same shape on all ranks; integers and half precision are averaged in float32.
        weight: what this rank's value counts; None: the same on all ranks. The value of a rank of weight zero does not
            count at all, also if it is NaN; where all are zero, the mean is NaN.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        A tensor of the value's shape, in float64 for a number, the same on every rank.

    Raises:
        TypeError, ValueError: an argument is wrong on its own.

    Source: notes/averaging.md.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(message("global_mean", "value", type(value).__name__, "a number or a tensor"))
    # A number is put where the group's own messages are: not every backend moves CPU memory.
    device = resolve(group, "global_mean").control_device
    v = value.detach() if isinstance(value, Tensor) else _number(value, torch.float64, device)
    v = v if v.dtype in (torch.float64, torch.complex64, torch.complex128) else v.float()
    w = checked_weight("global_mean", 1.0 if weight is None else weight)
    w = _number(w, torch.float64, v.device)
    with torch.no_grad():
        total = all_reduce(torch.stack([weighted(v, w), w.to(v).expand(v.shape)]), "sum", group)
        return total[0] / total[1]


def _number(value: float | Tensor, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return a 0-d tensor; of a Python number without a copy, for which the host would wait for all kernels."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype)
    return torch.full((), value, dtype=dtype, device=device)


def _divided(x: Tensor, total: Tensor) -> Tensor:
    wide = x.to(WIDER.get(x.dtype, x.dtype))
    return (wide / total.to(wide)).to(x.dtype)


def weighted(x: Tensor, w: Tensor) -> Tensor:
    """Return w · x, and zero where w is; half precision need not know the weight."""
    wide = x.to(WIDER.get(x.dtype, x.dtype))
    return torch.where(w.to(x.device) == 0, torch.zeros_like(x), (wide * w.to(wide)).to(x.dtype))


def checked_weight(name: str, weight: float | Tensor) -> float | Tensor:
    """Return a weight: a number from zero up, or a 0-d tensor, which is not looked at."""
    expected = "a number or a 0-d tensor"
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(message(name, "weight", f"a tensor of {tuple(weight.shape)}", expected))
        return weight.detach().reshape(())
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise TypeError(message(name, "weight", type(weight).__name__, expected))
    if not 0 <= weight < math.inf:
        raise ValueError(message(name, "weight", repr(weight), "a finite number from zero up"))
    return weight


# ── before training ──────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def agree_on_parameters(
    name: str, named: Sequence[tuple[str, Tensor]], group: Group, states: Sequence[str] = ()
) -> None:
    """Raise on all ranks if their parameters differ, or what is said of each; naming the first one that does."""
    engine = resolve(group, name)
    facts = [f"{n} {tuple(p.shape)} {p.dtype}{' channels_last' * is_channels_last(p)}" for n, p in named]
    facts = [fact + state for fact, state in zip(facts, states or [""] * len(facts), strict=True)]
    digests = torch.tensor([digest(fact) for fact in facts], device=engine.control_device)
    lengths = all_gather(torch.tensor(len(facts), device=engine.control_device), group=group).tolist()
    of_ranks = all_gather(digests, group=group, sizes=lengths).split_with_sizes(lengths)
    rows = [row.tolist() for row in of_ranks]
    first = next((i for i in range(max(lengths)) if len({tuple(row[i : i + 1]) for row in rows}) > 1), None)
    if first is not None:
        fact = facts[first] if first < len(facts) else "nothing"
        refuse(engine, fact, f"{name}: the ranks' parameters differ; the first that does is number {first}:")


@torch.no_grad()
def broadcast_from_first(tensors: Sequence[Tensor], group: Group) -> None:
    """Give all ranks the values of rank 0, in place."""
    chunk: list[Any] = []
    nbytes = 0
    for i, t in enumerate(tensors):
        chunk.append(t.detach())
        nbytes += t.nbytes
        if nbytes >= _BYTES or i == len(tensors) - 1:
            for mine, first in zip(chunk, broadcast(chunk, 0, group), strict=True):
                mine.copy_(first)
            chunk, nbytes = [], 0
