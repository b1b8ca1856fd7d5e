"""What each collective costs: rounds, messages and bytes, forward and backward, as functions of N.

`ROWS` says which stages a call consists of, `MESSAGES` what a stage costs. The table of notes/running/costs.md is
written from both. tests/benchmarks/test_costs.py compares them with counted messages.

    N    number of ranks
    B    bytes of x; of the largest one if the ranks' x differ in size
    b    bytes of the largest block of x: B/N if all blocks are equal
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import ceil, log2
from typing import Literal, NamedTuple

#: A collective or part of one, and the size of what a rank passes to each other rank in it: B, b.
Stage = tuple[str, str]
#: Term → coefficient.
Sum = Mapping[str, int]

#: Functions of N, B and b. The empty term is the number 1.
TERMS: dict[str, Callable[[int, float, float], float]] = {
    "": lambda n, x, block: 1,
    "(N − 1)": lambda n, x, block: n - 1,
    "⌈log₂ N⌉": lambda n, x, block: ceil(log2(n)),
    "b": lambda n, x, block: block,
    "B": lambda n, x, block: x,
    "(N − 1)·B": lambda n, x, block: (n - 1) * x,
    "(N − 1)·b": lambda n, x, block: (n - 1) * block,
    "⌈log₂ N⌉·B": lambda n, x, block: ceil(log2(n)) * x,
}


class Cost(NamedTuple):
    """The cost of one direction of a call, or of one of its stages."""

    #: Messages that are sent one after the other: each round starts when the one before it has arrived.
    rounds: Sum
    #: Messages that the busiest rank of each round sends, or receives if those are more; summed over the rounds.
    messages: Sum
    #: Bytes, likewise.
    nbytes: Sum


class Row(NamedTuple):
    """The stages of a call."""

    collective: str
    #: What the row holds for: ops or arguments; empty: any.
    which: str
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    #: The backward with `grad_placement="replicate"`; None: the collective has no such argument.
    replicated: tuple[Stage, ...] | None = None
    #: Bytes of the stack that a rank reduces with `op`, in units of B: "1", "N", or "0" if there is no stack.
    stack: Literal["0", "1", "N"] = "0"


_PARTS = "other ops"
_WHOLE = "other ops, small x"
_EXCLUSIVE: tuple[Stage, ...] = (("permute", "B"), ("scan", "B"))
_SUMS = "sum, mean"

ROWS: tuple[Row, ...] = (
    Row("all_reduce", _SUMS, (("all_reduce", "B"),), (("all_reduce", "B"),), ()),
    Row(
        "all_reduce",
        _PARTS,
        (("all_to_all", "b"), ("all_gather", "b")),
        (("reduce_scatter", "b"), ("all_to_all", "b")),
        (("all_to_all", "b"),),
        "1",
    ),
    Row(
        "all_reduce",
        _WHOLE,
        (("all_gather", "B"),),
        (("all_reduce", "B"),),
        (),
        "N",
    ),
    Row("all_gather", "", (("all_gather", "B"),), (("reduce_scatter", "B"),), ()),
    Row("reduce_scatter", _SUMS, (("reduce_scatter", "b"),), (("all_gather", "b"),)),
    Row("reduce_scatter", _PARTS, (("all_to_all", "b"),), (("all_to_all", "b"),), None, "1"),
    Row("all_to_all", "", (("all_to_all", "b"),), (("all_to_all", "b"),)),
    Row("broadcast", "", (("broadcast", "B"),), (("reduce", "B"),), ()),
    Row("reduce", _SUMS, (("reduce", "B"),), (("broadcast", "B"),)),
    Row(
        "reduce",
        _PARTS,
        (("all_to_all", "b"), ("gather", "b")),
        (("scatter", "b"), ("all_to_all", "b")),
        None,
        "1",
    ),
    Row("reduce", _WHOLE, (("all_gather", "B"),), (("broadcast", "B"),), None, "N"),
    Row("gather", "", (("gather", "B"),), (("scatter", "B"),)),
    Row("scatter", "", (("scatter", "b"),), (("gather", "b"),)),
    Row("permute", "", (("permute", "B"),), (("permute", "B"),)),
    Row("shift", "", (("permute", "B"),), (("permute", "B"),)),
    Row("scan", "", (("scan", "B"),), (("scan", "B"),)),
    Row("scan", "exclusive=True", _EXCLUSIVE, _EXCLUSIVE),
    Row("sum_gradients", "", (), (("all_reduce", "B"),)),
    Row("split", "", (), (("all_gather", "b"),)),
)

_DIRECT = ("1", "(N − 1)", "(N − 1)·S")
#: Rounds, messages and bytes of a stage of size S; one that is not listed is local.
MESSAGES: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), _DIRECT),
    **dict.fromkeys(("broadcast", "reduce"), _DIRECT),
    "all_reduce": ("2", "2·(N − 1)", "2·(N − 1)·b"),
    "permute": ("1", "1", "S"),
    "scan": ("⌈log₂ N⌉", "⌈log₂ N⌉", "⌈log₂ N⌉·S"),
}


def row(collective: str, op: str = "sum", *, whole: bool = False, exclusive: bool = False) -> Row:
    """Return the row of a call.

    Args:
        collective: its name.
        op: of a reduction.
        whole: whether every rank reduces the stack of all ranks' whole x, because x is small.
        exclusive: of a scan.
    """
    rows = [row for row in ROWS if row.collective == collective]
    at = int(exclusive) if collective == "scan" else 0 if op in ("sum", "mean") else 1
    return rows[at + (whole and len(rows) > 2)]


def total(stages: Sequence[Stage]) -> Cost:
    """Return the cost of stages that are carried out one after the other."""
    sums: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for name, size in stages:
        for terms, formula in zip(sums, MESSAGES.get(name, ()), strict=False):
            coefficient, term = _parsed(formula.replace("S", size))
            terms[term] += coefficient
    return Cost(*sums)


def _parsed(formula: str) -> tuple[int, str]:
    head, _, tail = formula.partition("·")
    return (int(head), tail) if head.isdigit() else (1, formula)


def value(terms: Sum, n: int, x: float, block: float | None = None) -> float:
    """Return the value for N = n, B = x and b = block; None: equal blocks."""
    return sum(k * TERMS[term](n, x, x / n if block is None else block) for term, k in terms.items())


def text(terms: Sum) -> str:
    """Return the formula as text."""
    parts = [str(k) if not term else term if k == 1 else f"{k}·{term}" for term, k in terms.items()]
    alone = re.fullmatch(r"\(([^()]*)\)", " + ".join(parts))
    return alone[1] if alone else " + ".join(parts) or "0"
