"""The reductions that `op` may name, and the function of each on a stack of tensors.

A reduction is a function over dim 0 of a stack (N, …). The sum and the mean need no stack, they are linear. For every
other op `core/reducing.py` stacks the ranks' tensors. All functions except the product are PyTorch's, and so are their
gradients, so ties, NaN and −inf are treated as in PyTorch.

note      notes/collectives/reductions.md       truth  diffcoll.truth.all_reduce
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import Tensor

from diffcoll.core.dtypes import wider
from diffcoll.core.errors import message
from diffcoll.core.over_ranks import LARGEST, LOGSUMEXP, SMALLEST, over_ranks
from diffcoll.core.product import product
from diffcoll.engines.types import ReduceOp

#: The names of reductions, in the spellings of PyTorch and NumPy.
Name: TypeAlias = Literal[
    "sum", "mean", "avg", "average", "product", "prod", "logsumexp",
    "max", "maximum", "amax", "min", "minimum", "amin",
]  # fmt: skip
#: What `op` may be: a name, a `torch.distributed.ReduceOp`, or a function that reduces dim 0 of a stack.
Op: TypeAlias = Name | ReduceOp | Callable[[Tensor], Tensor]
Ties = Literal["even", "first"]
Over = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reduction:
    """One reduction."""

    name: str
    #: The function over dim 0 of a stack; None: the sum or the mean, which are linear and need no stack.
    over: Over | None
    #: What x must be: "numbers" (not bool), "fractions" (floating-point or complex), "ordered" (not complex).
    needs: Literal["numbers", "fractions", "ordered", "anything"]
    #: Whether half precisions are reduced in the wider type.
    widened: bool = False
    #: Whether it is a user's function.
    users: bool = False
    #: Whether it needs the stack of whole tensors instead of a stack of parts of them.
    whole: bool = False

    def of(self, stack: Tensor) -> Tensor:
        """Reduce dim 0.

        Not `__call__`: until torch 2.12, Dynamo cannot call an object that is created in the traced code.
        """
        assert self.over is not None
        if not self.widened:
            return self.over(stack)
        return self.over(stack.to(wider(stack.dtype))).to(stack.dtype)


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────


def _first_max(s: Tensor) -> Tensor:
    return s.max(0).values  # its index, and so its gradient, is that of the first of equal elements


def _first_min(s: Tensor) -> Tensor:
    return s.min(0).values


def _table(largest: Over, smallest: Over) -> dict[str, Reduction]:
    reductions = (
        Reduction("sum", None, "numbers"),
        Reduction("mean", None, "fractions"),
        Reduction("product", product, "numbers", widened=True),
        Reduction("max", largest, "ordered"),
        Reduction("min", smallest, "ordered"),
        Reduction("logsumexp", partial(over_ranks, rule=LOGSUMEXP), "fractions", widened=True),
    )
    return {reduction.name: reduction for reduction in reductions}


#: ties → name → reduction.
REDUCTIONS: dict[Ties, dict[str, Reduction]] = {
    "even": _table(partial(over_ranks, rule=LARGEST), partial(over_ranks, rule=SMALLEST)),
    "first": _table(_first_max, _first_min),
}

#: Accepted spelling → name.
SPELLINGS = {name: name for name in REDUCTIONS["even"]} | {
    "avg": "mean",
    "average": "mean",
    "prod": "product",
    "maximum": "max",
    "amax": "max",
    "minimum": "min",
    "amin": "min",
}


def spelled(op: Any) -> tuple[str, Any] | None:
    """Return the name that a string or a `torch.distributed.ReduceOp` stands for, and its factor; None: op is neither.

    A ReduceOp is recognised by its attributes, because torch.distributed may not be available.
    """
    if type(op) is str and op in SPELLINGS:
        return SPELLINGS[op], None
    kind = getattr(op, "op", None) if type(op).__name__ == "ReduceOp" else op
    name: Any = getattr(kind, "name", None) if type(kind).__name__ == "RedOpType" else op
    if not isinstance(name, str):
        return None
    if name == "PREMUL_SUM":
        return "sum", op.__getstate__()[1]  # it has an attribute only since torch 2.13
    return SPELLINGS.get(name.lower(), name.lower()), None


# ── users' functions ─────────────────────────────────────────────────────────────────────────────────────


class elementwise:
    """A function as `op` that reduces each position independently; the ranks then share the work and the memory.

    A plain function as `op` is called on every rank with the whole stack, N times the size of x. Many reductions do
    not need it: each element of their result depends only on the elements at the same position of the ranks' tensors
    (a median, a trimmed mean, a norm over ranks, a weighting by rank). Pass these as `op=dc.elementwise(f)`: each rank
    then reduces a part, and memory and bytes are those of `"max"`.
    If the result at one position depends on any other position (a norm of the whole tensor, a softmax or a sort along a
    dimension of x, weights per row), pass f itself.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> median = dc.elementwise(lambda s: s.median(0).values)
    >>> xs = [torch.tensor([1.0, 9.0]), torch.tensor([2.0, 8.0]), torch.tensor([3.0, 1.0])]
    >>> simulate(lambda x: dc.all_reduce(x, median), xs)[0]
    tensor([2., 8.])

    Args:
        f: gets a stack of some positions of all ranks' x, dim 0 of which is the rank: (N, k) with any k from 1, or
            (N, …) with the shape of x or of a block of it; returns it with dim 0 reduced. It must be the same function
            on all ranks. That f is elementwise is verified in check mode only: it compares the result of f for the
            whole stack with its results for parts, and raises the same ValueError on all ranks if they differ.

    Raises:
        TypeError: f is not callable.

    Source: notes/collectives/reductions.md.
    """

    def __init__(self, f: Over) -> None:
        if not callable(f):
            remedy = f"pass op={f!r} itself" if isinstance(f, str) else ""
            raise TypeError(message("elementwise", "f", repr(f), "a function that reduces dim 0 of a stack", remedy))
        self.f: Over = f.f if isinstance(f, elementwise) else f

    def __call__(self, stack: Tensor) -> Tensor:
        """Reduce dim 0."""
        return self.f(stack)

    def __eq__(self, other: object) -> bool:
        """Whether both wrap the same function."""
        return isinstance(other, elementwise) and self.f == other.f

    def __hash__(self) -> int:
        """Return a hash that is consistent with `==`."""
        return hash((elementwise, self.f))

    def __repr__(self) -> str:
        """Show the name of the function."""
        return f"elementwise({getattr(self.f, '__name__', repr(self.f))})"


def users(f: Over) -> Reduction:
    """Return the reduction that a user's function is."""
    return Reduction("the function", f, "anything", users=True, whole=not isinstance(f, elementwise))
