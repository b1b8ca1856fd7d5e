"""`diffcoll bench stages`: where the time of a reduction that is not linear goes.

Each stage of a forward and backward is measured alone, on all ranks at once, beside the whole and beside the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import diffcoll
from diffcoll.core.groups import resolve
from diffcoll.core.linear import MAPS
from diffcoll.core.moves import move
from diffcoll.core.reductions import REDUCTIONS
from diffcoll.engines.engine import even_sizes

__all__ = ["OPS", "SUM", "stages"]

OPS = ("product", "max", "logsumexp")
SUM = "the same of a sum"


def stages(op: str, numel: int) -> dict[str, Callable[[], object]]:
    """Return the stages of `all_reduce(x, op)` of `numel` float32, forward and backward; the whole and the sum first.

    A stage that sends something is to be run by all ranks together.
    """
    engine = resolve(None, "bench")
    n, x = engine.size, torch.randn(numel, requires_grad=True)
    gy = torch.randn(numel)
    sizes, ones = even_sizes(numel, n), (1,) * n
    to_stack, to_all = MAPS["AllToAll"](engine, 1, 0, sizes, ones), MAPS["AllGather"](engine, 0, sizes)
    stack = move(x.detach().view(1, -1), to_stack).requires_grad_()
    block = REDUCTIONS["even"][op].of(stack)
    g = gy[: sizes[engine.rank]].clone()

    def whole(op: str) -> Tensor:
        return torch.autograd.grad(diffcoll.all_reduce(x, op), x, gy)[0]

    def local_backward() -> object:
        return torch.autograd.grad(block, stack, g, retain_graph=True)

    return {
        f"all_reduce {op}": lambda: whole(op),
        SUM: lambda: whole("sum"),
        "forward: all_to_all, into the stack": lambda: move(x.detach().view(1, -1), to_stack),
        f"forward: local {op} of the stack": lambda: REDUCTIONS["even"][op].of(stack),
        "forward: all_gather": lambda: move(block.detach(), to_all),
        "backward: reduce_scatter": lambda: move(gy, to_all.adjoint),
        "backward: local gradient of the stack": local_backward,
        "backward: all_to_all, into the gradient": lambda: move(stack.detach(), to_stack.adjoint),
        "beside: write to new memory of the size of x": lambda: torch.empty(numel).fill_(0),
    }
