"""Which pairs of a row and a column are positives, and which are excluded.

note  notes/training/contrastive.md
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from diffcoll.core.torch_private.transforms import is_vmapped


class Marks(NamedTuple):
    """Identifies the sample of each row or column."""

    #: Number of the row among all ranks' rows.
    number: Tensor
    #: Without labels, the number of its positive.
    partner: Tensor
    label: Tensor | None = None
    id: Tensor | None = None
    #: Of rows, (b, 1); of columns, (number, 1) or (number, b). w_ij of row_soft is that of row i plus that of column j.
    weight: Tensor | None = None

    @staticmethod
    def of_samples(
        sizes: list[int], views: int, each: int, labels: Tensor | None, ids: Tensor | None, device: torch.device
    ) -> Marks:
        """Return those of all ranks' rows; each of them has a label if it has several positives.

        A label of −1 becomes one that no other row has.
        """
        index = torch.arange(sum(sizes), device=device)
        if labels is not None:
            labels = labels.long()  # −1 as a uint8 is 255
            labels = torch.where(labels == -1, index + torch.iinfo(torch.long).min, labels)
        elif each > 1:
            labels = index
        if views == 1 or labels is not None:
            return Marks(index, index, labels, ids)
        partners = []
        for r, size in enumerate(sizes):
            first, half = sum(sizes[:r]), size // views
            part = index[first : first + size]
            partners.append(torch.where(part < first + half, part + (size - half), part - half))
        return Marks(index, torch.cat(partners), labels, ids)

    def part(self, first: int, count: int) -> Marks:
        """Return those of `count` rows."""
        return Marks(*(None if x is None else x[first : first + count] for x in self))  # type: ignore[arg-type]

    def repeated(self, times: int) -> Marks:
        """Return those of as many columns for each of these rows, which have labels."""
        label, sample = (
            None if x is None else x.unsqueeze(1).expand(-1, times).flatten() for x in (self.label, self.id)
        )
        assert label is not None
        number = torch.arange(label.shape[0], device=label.device)
        return Marks(number, number, label, sample)

    def of_no_columns(self) -> Marks:
        """Return those of these rows among such columns."""
        return Marks(self.number, torch.full_like(self.number, -1), weight=self.weight)

    def excluded(self) -> Tensor | int:
        """Return how many samples each one is not compared with: those of its id that are not its positives."""
        if self.id is None:
            return 0
        return counts(self.id) - (1 if self.label is None else counts(self.id, self.label))

    def weighted(self, weight: Tensor) -> Marks:
        """Return these with weights, one for each or a row of them."""
        return self._replace(weight=weight if weight.ndim == 2 else weight.unsqueeze(1))


def equal(a: Tensor, b: Tensor) -> Tensor:
    """Return for each pair of values whether they are equal."""
    return a.unsqueeze(1) == b.unsqueeze(0)


def same_id(rows: Marks, cols: Marks) -> Tensor | None:
    """Return for each pair whether its ids are equal; None: there are none."""
    return None if rows.id is None or cols.id is None else equal(rows.id, cols.id)


def soft_weights(rows: Marks, cols: Marks, excluded: Tensor | None) -> Tensor:
    """Return w_ij, 0 for excluded pairs."""
    assert rows.weight is not None and cols.weight is not None
    weights = rows.weight + cols.weight.T
    return weights if excluded is None else weights.masked_fill(excluded, 0)


def masks(rows: Marks, cols: Marks, within: bool) -> tuple[Tensor, Tensor | None]:
    """Return which pairs are positive and which are excluded; None: none. `within`: a row with itself is."""
    if rows.label is not None and cols.label is not None:
        positive = equal(rows.label, cols.label)
    else:
        positive = equal(rows.partner, cols.number)
    itself = equal(rows.number, cols.number) if within else None
    if itself is not None:
        positive = positive & ~itself
    of_same_id = same_id(rows, cols)
    if of_same_id is None:
        return positive, itself
    return positive, of_same_id & ~positive  # the pair of a row with itself is one of them


def counts(*marks: Tensor) -> Tensor:
    """Return the number of rows that have all the marks of each row."""
    if not torch.compiler.is_compiling() and any(map(is_vmapped, marks)):  # vmap refuses unique
        return torch.stack([equal(x, x) for x in marks]).all(0).sum(1)
    if len(marks) == 1:
        _, inverse, found = torch.unique(marks[0], return_inverse=True, return_counts=True)
    else:
        both = torch.stack([x.long() for x in marks], 1)
        _, inverse, found = torch.unique(both, dim=0, return_inverse=True, return_counts=True)
    of_each: Tensor = found[inverse]
    return of_each
