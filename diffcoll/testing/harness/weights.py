"""How much each micro-batch counts in the gradient, on the ranks and on one process, found by fitting.

The gradient of one process on a micro-batch alone is a column. Where a step accumulates, the ranks' gradient is a sum
of columns with weights, and so is the gradient of one process on the whole batch. Least squares find the weights. Those
that follow from numbers of rows, labels, ranks and micro-batches have a name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from diffcoll.testing.harness.matching import TRAINED, Matching, Run
from diffcoll.testing.harness.precision import as_real

#: The largest residual of a fit, relative to what is fitted, and the least singular value of columns of length 1.
_RESIDUAL, _SINGULAR = 1e-5, 1e-3
#: How close weights are to those that have a name.
_CLOSE = 1e-4


class Weights(NamedTuple):
    """What a name stands for: the weight of each micro-batch."""

    name: str
    each: tuple[Fraction, ...]

    def __str__(self) -> str:
        common = math.lcm(*(w.denominator for w in self.each))
        words = [f"{w * common}/{common}" if common > 1 else str(w) for w in self.each]
        return f"{words[0]} each ({self.name})" if len(set(words)) == 1 else f"{', '.join(words)} ({self.name})"


def weights_in_words(matching: Matching, run: Run) -> Iterator[str]:
    """Yield the weights of micro-batches, or of the ranks' parts, if they have a name on both sides."""
    setting = run.setting
    assert setting is not None
    batch, spans = setting.batch, setting.spans
    ranks = [batch.micro_batches(run.ranks, setting.index, r) for r in range(run.ranks.size)]
    if not run.ranks.rows:  # ranks along other axes have the same ones
        ranks = list({str([i.tolist() for part in parts for i in part.values()]): parts for parts in ranks}.values())
    found = next((each for group in TRAINED if (each := [q for q in run.quantities if q.group == group])), [])
    columns: list[list[Tensor] | None] = []
    every = [part for parts in ranks for part in parts]
    for part in every:
        columns.append(None)  # as of one without rows or labels
        if not any(index.numel() for index in part.values()):
            continue
        alone = matching.on_one(batch.part(part))
        moved = [a.to(b) - b for a, b in zip(alone.state, alone.before, strict=True)]
        column = [torch.zeros_like(q.wanted).flatten() for q in found]
        for x, q in zip(column, found, strict=True):
            index = part[spans[q.leaf].name].flatten() if q.of_input else slice(None)
            x[index] = (alone.gradients if q.group == "gradient" else moved)[q.leaf].flatten().to(x)
        if all(x.isfinite().all() for x in column) and any(x.any() for x in column):
            columns[-1] = column
    if sum(column is not None for column in columns) < 2:
        return
    counts = batch.counts(every)
    got = _fitted([[(c.got, c.index) for c in q.compared] for q in found], columns, _named(ranks, counts))
    of_one = [[(q.wanted.flatten(), torch.arange(q.wanted.numel()))] for q in found]
    wanted = _fitted(of_one, columns, _named([every], counts))
    what = "micro-batches" if run.ranks.micro else "ranks"
    if got is not None and wanted is not None and got.each != wanted.each:
        yield f"the gradient weighs the {what} {got}; one process weighs them {wanted}"
    elif got is not None and wanted is not None and run.ranks.micro:
        yield f"the weights of the micro-batches are right: {got}"


def _named(ranks: Sequence[Sequence[object]], counts: Mapping[str, Sequence[int]]) -> Iterator[Weights]:
    """Yield the weights that have a name."""
    at = [(r, k) for r, parts in enumerate(ranks) for k in range(len(parts))]
    n, most = len(ranks), max(map(len, ranks))
    each = {
        "equally": [Fraction(1, len(at)) for _ in at],
        "equally on each rank": [Fraction(1, n * len(ranks[r])) for r, _ in at],
        "a sum": [Fraction(1) for _ in at],
        "a mean over ranks, a sum over micro-batches": [Fraction(1, n) for _ in at],
        "a sum over ranks, a mean over micro-batches": [Fraction(1, len(ranks[r])) for r, _ in at],
    }
    for words, count in counts.items():
        of_rank = [sum(c for c, (s, _) in zip(count, at, strict=True) if s == r) or 1 for r, _ in at]
        of_step = [sum(c for c, (_, j) in zip(count, at, strict=True) if j == k) or 1 for _, k in at]
        each[f"by their {words}"] = [Fraction(c, sum(count) or 1) for c in count]
        each[f"by their {words}, on each rank"] = [Fraction(c, n * k) for c, k in zip(count, of_rank, strict=True)]
        each[f"by their {words}, in each step"] = [Fraction(c, most * k) for c, k in zip(count, of_step, strict=True)]
        for other, of_other in counts.items():
            if sum(of_other) not in (0, sum(count)):
                each[f"by their {words} over the total of {other}"] = [Fraction(c, sum(of_other)) for c in count]
    for words, factor in {"": Fraction(1), ", times N": Fraction(n), ", divided by N": Fraction(1, n)}.items():
        for name, weights in each.items():
            yield Weights(name + words, tuple(factor * w for w in weights))


def _fitted(
    targets: Sequence[Sequence[tuple[Tensor, Tensor]]],
    columns: Sequence[Sequence[Tensor] | None],
    names: Iterable[Weights],
) -> Weights | None:
    """Return the first weights with a name whose sum of columns is the target; None: there are none, or several fit."""
    known = [k for k, column in enumerate(columns) if column is not None]
    got = torch.cat([as_real(x) for of_quantity in targets for x, _ in of_quantity])
    each = [
        torch.cat([as_real(x[i]) for x, of_quantity in zip(column, targets, strict=True) for _, i in of_quantity])
        for column in columns
        if column is not None
    ]
    matrix = torch.stack(each, 1)
    lengths = matrix.norm(dim=0)
    if len(got) < len(known) or not lengths.all() or torch.linalg.svdvals(matrix / lengths)[-1] < _SINGULAR:
        return None
    solved = torch.linalg.lstsq(matrix / lengths, got.unsqueeze(1)).solution.squeeze(1)
    if not (matrix / lengths @ solved - got).norm() <= _RESIDUAL * got.norm():
        return None
    weights = (solved / lengths).tolist()

    def fits(named: Weights) -> bool:
        wanted = [float(named.each[k]) for k in known]
        return all(abs(a - b) <= _CLOSE * max(wanted) for a, b in zip(weights, wanted, strict=True))

    return next(filter(fits, names), None)
