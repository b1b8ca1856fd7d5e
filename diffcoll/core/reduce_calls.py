"""Calls with a reduction.

Sum and mean are linear. The others are composed of linear maps and a local reduction, with PyTorch's own derivative, so
ties, NaN and −inf are treated as in PyTorch:

    all_to_all: rank r receives part r of every rank, stacked                    (N, part r)
    reduction over dim 0 of the stack                                            (part r)
    all_gather, or gather, or nothing                                            y

This sends as many bytes as an all-reduce, and each rank keeps one stack of the size of x. Small tensors are gathered
whole instead, in one round of messages:

    all_gather, replicated                                                       (N, shape of x)
    reduction over dim 0, on every rank                                          y, replicated
    sum_gradients, or keep it on one rank                                        y

Every rank builds the same graph, also for an empty block: if a rank's graph lacked a collective, the other ranks would
wait for it in a higher-order backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcoll.core.arguments import Call
from diffcoll.core.blocks import concatenated
from diffcoll.core.dtypes import wider
from diffcoll.core.maps import AllGather, AllReduce, AllToAll, Keep, Reduce, ReduceScatter, SumGradients, part_of
from diffcoll.core.reductions import Reduction
from diffcoll.core.rules import apply
from diffcoll.core.torch_private.tensors import divided
from diffcoll.core.torch_private.tracing import is_known

_DENSE = torch.contiguous_format


def reduced(call: Call, x: Tensor, f: AllReduce | Reduce | ReduceScatter) -> Any:
    """Return the result of a call on x; f is the map of the sum, which has the other arguments."""
    reduction, engine = call.op(x), f.engine
    if reduction.name == "sum" or engine.in_one_graph:
        return call.perform(f, x)
    if reduction.over is None:
        return _mean(call, x, f)
    if isinstance(f, ReduceScatter):
        return _of_blocks(call, reduction, x, f)
    # Sizes without a value yet are not taken to be small: the graph of every rank must be the same.
    if engine.size == 1 or is_known(x.numel() * x.element_size() <= engine.small(x.device.type)):
        return _of_one_stack(call, reduction, x, f)
    return _in_parts(call, reduction, x, f)


def _mean(call: Call, x: Tensor, f: AllReduce | Reduce | ReduceScatter) -> Any:
    """Σ_s x_s / N; half precisions are added up in the wider dtype, and rounded once."""
    dtype, wide = x.dtype, wider(x.dtype)
    detail = "mean" if wide == dtype else f"mean of {dtype}"  # check mode sees the dtype that is sent
    return call.perform(part_of(f, f.name, detail), divided(x.to(wide), f.engine.size), lambda y: y.to(dtype))


def _of_blocks(call: Call, reduction: Reduction, x: Tensor, f: ReduceScatter) -> Any:
    """Block r of y along dim, on rank r."""
    n = f.engine.size
    cut = f.sizes or (x.shape[f.dim] // n,) * n
    blocks = part_of(AllToAll(f.engine, f.dim + 1, 0, cut, (1,) * n), f.name, reduction.name)
    return call.perform(blocks, x.unsqueeze(0), lambda stack: reduction.of(stack).clone(memory_format=_DENSE))


def _of_one_stack(call: Call, reduction: Reduction, x: Tensor, f: AllReduce | Reduce) -> Any:
    """Every rank reduces the stack of all ranks' x, so the stack and y are replicated."""
    engine = f.engine

    def of(stack: Tensor) -> Tensor:
        y = reduction.of(stack)
        if isinstance(f, Reduce):
            return apply(Keep(engine, f.dst), y)
        if f.replicated or engine.size == 1:
            return y.clone(memory_format=_DENSE)
        # Its adjoint adds up the gradients of y before the local derivative: after it, the terms may overflow.
        return apply(SumGradients(engine), y)

    detail = reduction.name + (f", dst={f.dst}" if isinstance(f, Reduce) else ", replicated" * f.replicated)
    return call.perform(part_of(AllGather(engine, 0, (), True), f.name, detail), x.unsqueeze(0), of)


def _in_parts(call: Call, reduction: Reduction, x: Tensor, f: AllReduce | Reduce) -> Any:
    """Every rank reduces a part of y, which the others or the root then receive."""
    engine, n, numel = f.engine, f.engine.size, x.numel()
    part = (numel + n - 1) // n
    sizes = tuple(_least(part, numel - r * part) for r in range(n))
    # Check mode compares the shape of x, which a row does not have; a graph has no text of sizes.
    detail = reduction.name if engine.compiling else f"{reduction.name} of {tuple(x.shape)}"
    stack = apply(part_of(AllToAll(engine, 1, 0, sizes, (1,) * n), f.name, detail), x.reshape(1, -1))
    mine = reduction.of(stack)
    if isinstance(f, AllReduce):  # of equal parts: backends gather those by a collective of their own
        is_even = is_known(numel % n == 0)  # else a slice, whose backward is a copy
        if not is_even:
            mine = torch.nn.functional.pad(mine, (0, part - sizes[engine.rank]))
        gather = part_of(AllGather(engine, 0, (), f.replicated), f.name, reduction.name)
        return call.perform(gather, mine, lambda y: (y if is_even else y[:numel]).view(x.shape))

    def of_root(y: Tensor) -> Tensor:
        if engine.rank != f.dst:  # y is empty, and stays in the graph
            y = concatenated([y, y.new_zeros(numel)])
        return y.view(x.shape)

    return call.perform(part_of(AllToAll.to_root(engine, f.dst, 0, sizes), f.name, reduction.name), mine, of_root)


def _least(a: int, b: int) -> int:
    """Return the smaller of two sizes, or 0; they may be symbols of the compiler."""
    size: int = torch.sym_max(0, torch.sym_min(a, b))  # type: ignore[no-untyped-call]
    return size
