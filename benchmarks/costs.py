"""What each collective costs: rounds, messages and bytes, forward and backward, as functions of N.

`ROWS` says which stages a call consists of, `WAYS` what a stage costs, for each way to carry it out. The tables of
notes/running/costs.md are written from both. tests/benchmarks/test_costs.py compares them with counted messages.

    N    number of ranks
    B    bytes of x; of the largest one if the ranks' x differ in size
    b    bytes of the largest block of x: B/N if all blocks are equal

The formulas of ring and tree are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, in the model of Hockney, 1994: a message of n bytes takes α + n·β.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import ceil, log2
from typing import Literal, NamedTuple

#: A collective or part of one, and the size of what a rank passes to each other rank in it: B, b.
Stage = tuple[str, str]
#: How a stage is carried out: by a message to each other rank, or by ranks that pass on what they have received.
Way = Literal["messages", "ring", "tree"]
#: Term → coefficient.
Sum = Mapping[str, int]

#: Functions of N, B and b. The empty term is the number 1.
TERMS: dict[str, Callable[[int, float, float], float]] = {
    "": lambda n, x, block: 1,
    "(N − 1)": lambda n, x, block: n - 1,
    "⌈log₂ N⌉": lambda n, x, block: ceil(log2(n)),
    "(⌈log₂ N⌉ + N − 1)": lambda n, x, block: ceil(log2(n)) + n - 1,
    "b": lambda n, x, block: block,
    "B": lambda n, x, block: x,
    "(N − 1)·B": lambda n, x, block: (n - 1) * x,
    "(N − 1)·b": lambda n, x, block: (n - 1) * block,
    "⌈log₂ N⌉·B": lambda n, x, block: ceil(log2(n)) * x,
    "⌈log₂ N⌉·N·B/2": lambda n, x, block: ceil(log2(n)) * n * x / 2,
    "⌈log₂ N⌉·N·b/2": lambda n, x, block: ceil(log2(n)) * n * block / 2,
}


class Cost(NamedTuple):
    """The cost of one direction of a call, or of one of its stages."""

    #: Messages that are sent one after the other: each round starts when the one before it has arrived.
    rounds: Sum
    #: Messages that the busiest rank of each round sends, or receives if those are more; summed over the rounds.
    messages: Sum
    #: Bytes, likewise.
    nbytes: Sum
    #: Bytes of local memory that the busiest rank reads and writes to copy and to add up, in the library's messages. A
    #: copy of n bytes is 2n, a sum of two tensors 3n. Without what `op` itself reads and writes.
    local: Sum


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


_PARTS = "product, max, min, logsumexp"
_WHOLE = "the same on gloo and MPI, where N·B is at most 128 KB"
_EXCLUSIVE: tuple[Stage, ...] = (("zeros", "B"), ("permute", "B"), ("scan", "B"))
_SUMS = "sum, mean"

ROWS: tuple[Row, ...] = (
    Row("all_reduce", _SUMS, (("all_reduce", "B"),), (("all_reduce", "B"),), (("copy", "B"),)),
    Row(
        "all_reduce",
        _PARTS,
        (("all_to_all", "b"), ("all_gather", "b")),
        (("reduce_scatter", "b"), ("all_to_all", "b")),
        (("copy", "b"), ("all_to_all", "b")),
        "1",
    ),
    Row(
        "all_reduce",
        _WHOLE,
        (("all_gather", "B"), ("copy", "B")),
        (("all_reduce", "B"), ("copy", "B")),
        (("copy", "B"),),
        "N",
    ),
    Row("all_gather", "", (("all_gather", "B"),), (("reduce_scatter", "B"),), (("copy", "B"),)),
    Row("reduce_scatter", _SUMS, (("reduce_scatter", "b"),), (("all_gather", "b"),)),
    Row("reduce_scatter", _PARTS, (("all_to_all", "b"),), (("all_to_all", "b"),), None, "1"),
    Row("all_to_all", "", (("all_to_all", "b"),), (("all_to_all", "b"),)),
    Row("broadcast", "", (("broadcast", "B"),), (("reduce", "B"),), (("copy", "B"),)),
    Row("reduce", _SUMS, (("reduce", "B"),), (("broadcast", "B"),)),
    Row(
        "reduce",
        _PARTS,
        (("all_to_all", "b"), ("gather", "b")),
        (("scatter", "b"), ("all_to_all", "b")),
        None,
        "1",
    ),
    Row("reduce", _WHOLE, (("all_gather", "B"), ("copy", "B")), (("broadcast", "B"), ("copy", "B")), None, "N"),
    Row("gather", "", (("gather", "B"),), (("scatter", "B"),)),
    Row("scatter", "", (("scatter", "b"),), (("gather", "b"),)),
    Row("permute", "", (("permute", "B"),), (("permute", "B"),)),
    Row("shift", "", (("permute", "B"),), (("permute", "B"),)),
    Row("scan", "", (("scan", "B"),), (("scan", "B"),)),
    Row("scan", "exclusive=True", _EXCLUSIVE, _EXCLUSIVE),
    Row("sum_gradients", "", (("copy", "B"),), (("all_reduce", "B"),)),
    Row("split", "", (("copy", "b"),), (("all_gather", "b"),)),
)

# Rounds, messages, bytes. S is the size in the stage.
_DIRECT = ("1", "(N − 1)", "(N − 1)·S")
_RING = ("(N − 1)", "(N − 1)", "(N − 1)·S")
_HALVING = ("⌈log₂ N⌉", "⌈log₂ N⌉", "(N − 1)·S")
_BINOMIAL = ("⌈log₂ N⌉", "⌈log₂ N⌉", "⌈log₂ N⌉·S")

#: A stage that a way does not list is carried out by messages.
WAYS: dict[Way, dict[str, tuple[str, str, str]]] = {
    "messages": {
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), _DIRECT),
        **dict.fromkeys(("broadcast", "reduce"), _DIRECT),
        "all_reduce": ("2", "2·(N − 1)", "2·(N − 1)·b"),
        "permute": ("1", "1", "S"),
        "scan": _BINOMIAL,
    },
    "ring": {  # all_to_all: pairwise exchange; broadcast: scatter by a tree, then all_gather; reduce: the reverse
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), _RING),
        **dict.fromkeys(("broadcast", "reduce"), ("(⌈log₂ N⌉ + N − 1)", "(⌈log₂ N⌉ + N − 1)", "2·(N − 1)·b")),
        "all_reduce": ("2·(N − 1)", "2·(N − 1)", "2·(N − 1)·b"),
    },
    "tree": {  # recursive halving and doubling; all_to_all: Bruck's; with a root: binomial
        **dict.fromkeys(("all_gather", "reduce_scatter", "gather", "scatter"), _HALVING),
        **dict.fromkeys(("broadcast", "reduce"), _BINOMIAL),
        "all_to_all": ("⌈log₂ N⌉", "⌈log₂ N⌉", "⌈log₂ N⌉·N·S/2"),
        "all_reduce": ("2·⌈log₂ N⌉", "2·⌈log₂ N⌉", "2·(N − 1)·b"),
    },
}

#: Bytes that the library reads and writes locally; a stage that WAYS does not list is local.
LOCAL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("all_gather", "all_to_all", "gather", "scatter", "broadcast", "copy"), ("2·S",)),
    "reduce_scatter": ("3·(N − 1)·S",),
    "all_reduce": ("2·B", "2·b", "3·(N − 1)·b"),
    "reduce": ("2·S", "3·(N − 1)·S"),
    "permute": (),
    "scan": ("2·S", "3·⌈log₂ N⌉·S"),
    "zeros": ("S",),
}

#: The backend's own collectives that the library calls, and the way that is assumed for them. The others: messages.
#: gloo's ring and tree are in its source. MPI chooses by N and size; "tree" is what it may choose.
ENGINES: dict[str, dict[str, Way]] = {
    "torch": {"all_reduce": "ring", "broadcast": "tree"},
    "mpi": dict.fromkeys(("all_reduce", "all_gather", "broadcast", "reduce"), "tree"),
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


def total(stages: Sequence[Stage], ways: Way | Mapping[str, Way] = "messages") -> Cost:
    """Return the cost of stages that are carried out one after the other.

    Args:
        stages: of one direction of a call.
        ways: one for all stages; or stage → way, where the others are carried out by messages.
    """
    sums: list[Counter[str]] = [Counter(), Counter(), Counter(), Counter()]
    for name, size in stages:
        way = ways if isinstance(ways, str) else ways.get(name, "messages")
        formulas = WAYS[way].get(name) or WAYS["messages"].get(name, ("", "", ""))
        for terms, parts in zip(sums, (*((formula,) for formula in formulas), LOCAL[name]), strict=True):
            for part in filter(None, parts):
                coefficient, term = _parsed(part.replace("S", size))
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
