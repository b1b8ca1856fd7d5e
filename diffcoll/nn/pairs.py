"""What contrastive losses have in common: sums over the logits of this rank's rows and all ranks' columns.

    row_lse_i, row_sum_i          sums over all B columns of this rank's b rows, see `diffcoll.nn.logits`
    col_lse_j = log Σ_i exp s_ij  over all ranks' rows, for this rank's columns

A rank computes b × B logits, in chunks if asked for. Its part of the column sums is combined with those of the other
ranks by a reduce-scatter of B numbers, so no second matrix is needed.

note  notes/contrastive.md
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from diffcoll.collectives.reduce_scatter import reduce_scatter
from diffcoll.composed.gather_batch import gather_batch
from diffcoll.core._torch import is_vmapped
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.nn.features import Options
from diffcoll.nn.logits import Marks, Rule, blocks, merged
from diffcoll.nn.ring import Ring

__all__ = ["Compared", "Rule", "compare"]


class Compared(NamedTuple):
    """The sums of this rank's rows over all columns, and of this rank's columns over all rows."""

    row_lse: Tensor
    row_sum: Tensor
    col_lse: Tensor
    #: Number of positives of each row; None: there are no labels.
    row_count: Tensor | None
    #: Number of all ranks' rows.
    total: int

    def positives(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the mean logit of each row's positives; without labels, row i's positive is row i of this rank's k."""
        return (q * k).sum(1) if self.row_count is None else self.row_sum / self.row_count


def compare(
    q: Tensor,
    k: Tensor,
    options: Options,
    rule: Rule,
    *,
    bias: Tensor | None = None,
    views: int = 1,
    labels: Tensor | None = None,
    ids: Tensor | None = None,
) -> Compared:
    """Return the sums of this rank's rows q over all ranks' k, and of its k over all ranks' q.

    Args:
        q: (n, D), in the dtype of the logits, with the scale.
        k: (n, D), as it is sent.
        options: of the loss.
        rule: what is summed.
        bias: of the logits, for the sigmoid.
        views: the rows are this many views of the samples, one view after the other.
        labels: (n,); pairs of equal labels are positives. None: pairs of the same sample are.
        ids: (n,); pairs of equal ids that are not positives are excluded.
    """
    whole = {"k": k} if options.exchange == "gather" else {"rows": k.new_zeros(len(k), dtype=torch.bool)}
    tree = whole | {name: x for name, x in (("labels", labels), ("ids", ids)) if x is not None}
    try:
        everyone, sizes, offset, total = gather_batch(tree, options.group)
    except CollectiveMismatchError as error:
        facts = "labels or ids (given on all ranks, of one dtype), exchange, or dtype or size of the features"
        raise CollectiveMismatchError(f"{options.name}: the ranks differ in {facts}; {error}") from None
    if not torch.compiler.is_compiling() and total == 0:  # a size from another rank has no value while compiling
        remedy = "one rank at least must have rows"
        raise ValueError(message(options.name, "features", "an empty batch on every rank", "a row", remedy))
    cols = _marks(sizes, views, everyone.get("labels"), everyone.get("ids"), k.device)
    rows = cols.part(offset, len(q))
    if options.exchange == "ring":
        sums = Ring(rule, rows, cols, sizes, options.chunk_size, options.group).sums(q, k, bias)
    else:
        sums = merged(list(blocks(q, everyone["k"], bias, rule, rows, cols, options.chunk_size)))
    none = q.new_empty(0)
    col_lse = sums.col_lse
    if col_lse is not None:
        col_lse = reduce_scatter(col_lse, "logsumexp", 0, options.group, sizes=sizes)
    count = None if cols.label is None else _counts(cols.label)[offset : offset + len(q)] - int(rule.within)
    return Compared(
        none if sums.row_lse is None else sums.row_lse,
        none if sums.row_sum is None else sums.row_sum,
        none if col_lse is None else col_lse,
        count,
        total,
    )


def _marks(sizes: list[int], views: int, labels: Tensor | None, ids: Tensor | None, device: torch.device) -> Marks:
    """Return the marks of all ranks' rows."""
    index = torch.arange(sum(sizes), device=device)
    starts = [sum(sizes[:r]) for r in range(len(sizes))]
    samples = [index[start : start + size // views].repeat(views) for start, size in zip(starts, sizes, strict=True)]
    return Marks(index, torch.cat(samples) if views > 1 else index, labels, ids)


def _counts(labels: Tensor) -> Tensor:
    """Return the number of rows with the label of each row."""
    if not torch.compiler.is_compiling() and is_vmapped(labels):  # vmap refuses unique
        return (labels.unsqueeze(1) == labels).sum(1)
    inverse, counts = torch.unique(labels, return_inverse=True, return_counts=True)[1:]
    found: Tensor = counts[inverse]
    return found
