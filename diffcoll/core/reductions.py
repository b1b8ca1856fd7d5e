"""The reductions that `op` names.

Sum and mean are linear. The others are composed of linear maps and a local reduction, with PyTorch's own derivative, so
ties, NaN and −inf are treated as in PyTorch:

    all_to_all: rank r receives block r of every rank, stacked                   (N, block r)
    reduction over dim 0 of the stack                                            (block r)
    all_gather, or gather, or nothing                                            y

This sends as many bytes as an all-reduce, and each rank keeps one stack of the size of x. Small tensors are gathered
whole instead, in one round of messages:

    all_gather, replicated                                                       (N, shape of x)
    reduction over dim 0, on every rank                                          y, replicated
    sum_gradients, or keep it on one rank                                        y

Every rank builds the same graph, also for an empty block: if a rank's graph lacked a collective, the other ranks would
wait for it in a higher-order backward.

note      notes/collectives/reductions.md       truth  diffcoll.truth.all_reduce
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold
from operator import mul
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from diffcoll.core import check_mode
from diffcoll.core.blocks import concatenated
from diffcoll.core.dtypes import wider
from diffcoll.core.maps import AllGather, AllReduce, AllToAll, Keep, Linear, Reduce, ReduceScatter, SumGradients, named
from diffcoll.core.rules import apply
from diffcoll.core.torch_private.tensors import divided
from diffcoll.core.torch_private.tracing import is_known
from diffcoll.engines.engine import Engine, even_sizes
from diffcoll.engines.types import ReduceOp

#: The names of reductions.
Name: TypeAlias = Literal["sum", "mean", "avg", "product", "prod", "max", "min", "logsumexp"]
#: What `op` may be: a name, or a `torch.distributed.ReduceOp`.
Op: TypeAlias = Name | ReduceOp
#: How many numbers of all ranks a CPU compares at a time.
PIECE = 1 << 18
_DENSE = torch.contiguous_format
#: A map, the tensor to apply it to, and what is done with its result.
Steps = tuple[Linear, Tensor, Callable[[Tensor], Tensor] | None]


class Reduction(NamedTuple):
    """One reduction."""

    name: str
    #: What x must be: "numbers" (not bool), "fractions" (floating-point or complex), "ordered" (not complex).
    needs: Literal["numbers", "fractions", "ordered"]
    #: The function over dim 0 of a stack; None: the sum or the mean, which are linear.
    over: Callable[[Tensor], Tensor] | None = None

    def of(self, stack: Tensor) -> Tensor:
        """Reduce dim 0; half precisions in the wider dtype, rounded once. May return a view of the stack."""
        assert self.over is not None
        return self.over(stack.to(wider(stack.dtype))).to(stack.dtype)


def _in_pieces(over: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a reduction over dim 0, on a CPU in pieces whose intermediate results, of eight bytes, fit the caches.

    In one piece a maximum of 16 MB on two ranks takes 1.5 times as long.
    """

    def reduced(stack: Tensor) -> Tensor:
        columns = PIECE // len(stack)
        if torch.compiler.is_compiling() or not stack.is_cpu or stack[0].numel() <= columns:
            return over(stack)
        pieces = [over(piece) for piece in torch.split(stack.flatten(1), columns, 1)]
        return concatenated(pieces).view(stack.shape[1:])

    return reduced


REDUCTIONS = {
    reduction.name: reduction
    for reduction in (
        Reduction("sum", "numbers"),
        Reduction("mean", "fractions"),
        # Not torch.prod, which is wrong in nested forward mode where factors are zero.
        Reduction("product", "numbers", lambda stack: fold(mul, stack.unbind(0))),
        Reduction("max", "ordered", _in_pieces(lambda stack: stack.amax(0))),
        Reduction("min", "ordered", _in_pieces(lambda stack: stack.amin(0))),
        Reduction("logsumexp", "fractions", _in_pieces(lambda stack: torch.logsumexp(stack, 0))),
    )
}
#: Accepted spelling → name.
SPELLINGS = {name: name for name in REDUCTIONS} | {"avg": "mean", "prod": "product"}


def spelled(op: Any) -> str | None:
    """Return the name that a string or a `torch.distributed.ReduceOp` stands for; None: op is neither.

    A ReduceOp is recognised by its attributes, because torch.distributed may not be available.
    """
    if isinstance(op, str):
        return SPELLINGS.get(op, op)
    kind = getattr(op, "op", None) if type(op).__name__ == "ReduceOp" else op
    name: Any = getattr(kind, "name", None) if type(kind).__name__ == "RedOpType" else None
    return SPELLINGS.get(name.lower(), name) if isinstance(name, str) else None


def steps(reduction: Reduction, x: Tensor, f: AllReduce | Reduce | ReduceScatter) -> Steps:
    """Return the steps of a reduction; f is the map of the sum, which has the other arguments."""
    if reduction.name == "sum" or f.engine.in_one_graph:
        return f, x, None
    if reduction.over is None:
        return _mean(x, f)
    if isinstance(f, AllReduce):
        return _on_all_ranks(reduction, x, f)
    return _on_rank(reduction, x, f) if isinstance(f, Reduce) else _blocks(reduction, x, f)


def _mean(x: Tensor, f: AllReduce | Reduce | ReduceScatter) -> Steps:
    """Σ_s x_s / N; half precisions are added up in the wider dtype, and rounded once."""
    if f.engine.size == 1:
        return f, x, None
    dtype, wide = x.dtype, wider(x.dtype)
    after = None if wide == dtype else lambda y: y.to(dtype)
    detail = "mean" if wide == dtype else f"mean of {dtype}"  # check mode sees the dtype that is sent
    return named(f, f.name, detail), divided(x.to(wide), f.engine.size), after


def _on_all_ranks(reduction: Reduction, x: Tensor, f: AllReduce) -> Steps:
    """y on every rank."""
    engine, replicated = f.engine, f.replicated
    if _in_one_stack(x, engine):
        if replicated or engine.size == 1:
            return _whole(reduction, x, engine, lambda y: y.clone(memory_format=_DENSE), ", replicated")
        # Its adjoint adds up the gradients of y before the local derivative: after it, the terms may overflow.
        return _whole(reduction, x, engine, lambda y: apply(SumGradients(engine), y))
    sizes = even_sizes(x.numel(), engine.size)
    last = AllGather(engine, 0, sizes, replicated)
    return named(last, "all_reduce", reduction.name), _row_block(reduction, x, engine, sizes), lambda y: y.view(x.shape)


def _on_rank(reduction: Reduction, x: Tensor, f: Reduce) -> Steps:
    """y on rank dst, zeros elsewhere."""
    engine, dst = f.engine, f.dst
    if _in_one_stack(x, engine):
        return _whole(reduction, x, engine, lambda y: apply(Keep(engine, dst), y))
    sizes = even_sizes(x.numel(), engine.size)

    def shaped(y: Tensor) -> Tensor:
        if engine.rank != dst:  # y is empty, and stays in the graph
            y = concatenated([y, y.new_zeros(x.numel())])
        return y.view(x.shape)

    block = _row_block(reduction, x, engine, sizes)
    return named(AllToAll.to_root(engine, dst, 0, sizes), "reduce", reduction.name), block, shaped


def _blocks(reduction: Reduction, x: Tensor, f: ReduceScatter) -> Steps:
    """Block r of y along dim, on rank r."""
    n = f.engine.size
    cut = f.sizes or (x.shape[f.dim] // n,) * n
    first = named(AllToAll(f.engine, f.dim + 1, 0, cut, (1,) * n), "reduce_scatter", reduction.name)
    return first, x.unsqueeze(0), lambda stack: reduction.of(stack).clone(memory_format=_DENSE)


def _in_one_stack(x: Tensor, engine: Engine) -> bool:
    """Whether every rank reduces the stack of all ranks' whole x.

    Sizes without a value yet are not taken to be small: the graph of every rank must be the same.
    """
    return engine.size == 1 or is_known(x.numel() * x.element_size() <= engine.small(x.device.type))


def _whole(
    reduction: Reduction, x: Tensor, engine: Engine, last: Callable[[Tensor], Tensor], detail: str = ""
) -> Steps:
    """Every rank reduces the stack of all ranks' x. So the stack and y are replicated."""
    f = named(AllGather(engine, 0, (), True), "all_reduce", reduction.name + detail)
    return f, x.unsqueeze(0), lambda stack: last(reduction.of(stack))


def _row_block(reduction: Reduction, x: Tensor, engine: Engine, sizes: tuple[int, ...]) -> Tensor:
    """Block r of y as one row, on rank r; check mode compares the shape of x, which a row does not have."""
    detail = f"{reduction.name} of {tuple(x.shape)}" if check_mode.compares(engine) else reduction.name
    f = named(AllToAll(engine, 1, 0, sizes, (1,) * engine.size), "all_reduce", detail)
    return reduction.of(apply(f, x.reshape(1, -1)))
