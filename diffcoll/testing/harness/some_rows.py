"""Gradients of which some rows are wrong."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from diffcoll.testing.harness.case import LITTLE, Case, Finding, in_list, short
from diffcoll.testing.harness.causes import Kind
from diffcoll.testing.harness.comparison import busy, is_near, multiple
from diffcoll.testing.harness.report import ratio_in_words


def some_rows(case: Case) -> Iterator[Finding]:
    """Some rows of a gradient are wrong, all by the same factor or not, and those that are large are right."""
    groups: dict[float | None, list[str]] = {}
    of_names: dict[str, str] = {}
    for name in case.left("gradient"):
        wrong = [q for q in case.of(name) if not q.ok]
        if not all(isinstance(q.rows, torch.Tensor) and is_near(q.ratio, 1.0, case.tolerance) for q in wrong):
            continue
        each = [
            (q, row) for q in wrong for row in (q.errors > q.allowed).flatten(1).any(1).nonzero().flatten().tolist()
        ]
        ratios = [multiple(q.got[row], q.wanted[row], 30 * case.tolerance) for q, row in each]
        same = all(is_near(ratio, ratios[0] or 0.0, 30 * case.tolerance) for ratio in ratios)
        ratio = ratios[0] if same else None
        if all(q.error < LITTLE for q in wrong) and (ratio is None or is_near(ratio, 1.0, LITTLE)):
            continue
        groups.setdefault(ratio, []).append(name)
        where = [f"{row}" if q.rank is None else f"{row} on rank {q.rank}" for q, row in each]
        of_names[name] = f"{short(name)}: row{'s' * (len(where) > 1)} {', '.join(where[:5])}{', …' * (len(where) > 5)}"
    for ratio, names in groups.items():
        words = "; ".join(of_names[name] for name in names)
        factor = "" if ratio is None else f", {ratio_in_words(ratio, case.size)} times the right one"
        yield Finding(Kind.SOME_ROWS, names, f"{words}: wrong{factor}; the larger rows are right")


def left_out(case: Case) -> Iterator[Finding]:
    """Rows that count on one process have no effect on the losses of the ranks."""
    names: list[str] = []
    where: list[str] = []
    for name in case.left("gradient") if case.values_differ else []:
        lost = [
            f"row {row} on rank {q.rank}"
            for q in case.of(name)
            if q.rank is not None and not q.mismatched
            for row in (busy(q.wanted) & ~busy(q.got)).nonzero().flatten().tolist()
        ]
        if lost and (found := case.witness.evidence.cause(short(name))) and found[0] == Kind.CONSISTENT:
            names.append(name)
            where = where or [*lost[:5], *["…"] * (len(lost) > 5)]
    if names and case.witness.local_statistics is None:
        seen = f"{in_list(names)}: no effect on the losses of the ranks: {', '.join(where)}"
        yield Finding(Kind.LEFT_OUT, names + case.left("value", "output"), seen)
