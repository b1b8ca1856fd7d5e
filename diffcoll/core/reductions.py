"""The reductions that `op` names, see `diffcoll.core.reduce_calls`.

note      notes/collectives/reductions.md       truth  diffcoll.truth.all_reduce
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold
from operator import mul
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from diffcoll.core.blocks import concatenated
from diffcoll.core.dtypes import wider
from diffcoll.engines.types import ReduceOp

#: The names of reductions.
Name: TypeAlias = Literal["sum", "mean", "avg", "product", "prod", "max", "min", "logsumexp"]
#: What `op` may be: a name, or a `torch.distributed.ReduceOp`.
Op: TypeAlias = Name | ReduceOp
#: How many numbers of all ranks a CPU compares at a time.
PIECE = 1 << 18


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
