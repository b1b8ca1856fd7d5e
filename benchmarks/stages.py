"""`benchmarks stages`: where the time of a reduction that is not linear goes.

Each stage of a forward and backward is measured alone, on all ranks at once, beside the whole and beside a sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rich.table import Table
from torch import Tensor

import diffcoll
from diffcoll.core.groups import resolve
from diffcoll.core.linear import MAPS
from diffcoll.core.moves import move
from diffcoll.core.reductions import REDUCTIONS, Name
from diffcoll.engines.engine import even_sizes

OPS: tuple[Name, ...] = ("product", "max", "logsumexp")
SIZES = {"1 MB": 1 << 18, "16 MB": 1 << 22}
Steps = dict[str, Callable[[], object]]


def table(title: str, times: Callable[[Callable[[int], Steps]], dict[str, float]]) -> Table:
    """A row for each stage, a column for each op and size.

    Args:
        title: what is measured, for the caption.
        times: returns the median milliseconds of each step of a rank.
    """
    grid = Table("stage", title=f"all_reduce, {title}: median ms of each stage by itself, with a barrier")
    columns = []
    for size, numel in SIZES.items():
        for op in OPS:
            grid.add_column(f"{op}, {size}")
            columns.append(times(lambda rank: steps(op, numel)))  # noqa: B023
    for name in columns[0]:
        grid.add_row(name, *[f"{column[name]:.2f}" for column in columns])
    return grid


def steps(op: Name, numel: int) -> Steps:
    """Return the stages of `all_reduce(x, op)` of `numel` float32; those that send are run by all ranks together."""
    engine, of = resolve(None, "bench"), REDUCTIONS["even"][op].of
    n, x, gy = engine.size, torch.randn(numel, requires_grad=True), torch.randn(numel)
    sizes, ones = even_sizes(numel, n), (1,) * n
    to_stack, to_all = MAPS["AllToAll"](engine, 1, 0, sizes, ones), MAPS["AllGather"](engine, 0, sizes)
    stack = move(x.detach().view(1, -1), to_stack).requires_grad_()
    block, g = of(stack), gy[: sizes[engine.rank]].clone()

    def whole(op: Name) -> Tensor:
        return torch.autograd.grad(diffcoll.all_reduce(x, op), x, gy)[0]

    return {
        "forward and backward": lambda: whole(op),
        "the same of a sum": lambda: whole("sum"),
        "forward: all_to_all, into the stack": lambda: move(x.detach().view(1, -1), to_stack),
        "forward: op of the stack": lambda: of(stack.detach()),
        "forward: all_gather": lambda: move(block.detach(), to_all),
        "backward: reduce_scatter": lambda: move(gy, to_all.adjoint),
        "backward: gradient of the stack": lambda: torch.autograd.grad(block, stack, g, retain_graph=True),
        "backward: all_to_all, into the gradient": lambda: move(stack.detach(), to_stack.adjoint),
        "nothing but the barrier": lambda: None,
        "a write to new memory of the size of x": lambda: torch.empty(numel).fill_(0),
    }
