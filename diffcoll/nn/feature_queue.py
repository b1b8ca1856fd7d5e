"""A queue of the features of earlier steps, the same on all ranks (MoCo, XBM).

note  notes/training/contrastive.md
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffcoll.composed.gather_batch import gather_batch
from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.core.groups import get_rank, get_world_size, resolve
from diffcoll.engines.types import Group
from diffcoll.nn.convention import same_options
from diffcoll.nn.features import check_features, per_row
from diffcoll.nn.in_group import InGroup

_NAME = "FeatureQueue"


class FeatureQueue(nn.Module):
    """Contrastive losses with many negatives (MoCo, XBM): keeps the last features of all ranks.

    Each step, use what the queue has in the loss, then append the features of this step.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def step(rows):
    ...     queue = dc.nn.FeatureQueue(4, 1)
    ...     queue.enqueue(rows)  # of rank 0 first, whichever arrives first
    ...     return queue.features().flatten().tolist(), queue.features(share=True).flatten().tolist()
    >>> simulate(step, [torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[3.0], [4.0]])], rules=True)
    [([1.0, 2.0, 3.0, 4.0], [1.0, 2.0]), ([1.0, 2.0, 3.0, 4.0], [3.0, 4.0])]

    The queue is bitwise the same on all ranks, and the one that a single process with the whole batch has, also with
    uneven and empty ranks. Its buffers are in `state_dict`; training may go on with another number of ranks. No
    gradient is ever sent: features are detached. What `features` and `labels` have returned is a copy, which later
    calls do not change, so `enqueue` may be called between forward and backward.

    Args:
        size: maximum number of rows.
        dim: D, the length of a row.
        labels: whether each row has a label, an integer, as XBM needs.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
            Copies of the module use the same group. Only a module with None can be pickled.
        device: of the rows.
        dtype: of the rows. Features of another dtype are sent as they are, and converted.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/training/contrastive.md.
    """

    rows: Tensor
    labels_of_rows: Tensor | None
    enqueued: Tensor

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        labels: bool = False,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if group is not None:
            resolve(group, _NAME)
        self.size = expect.integer(_NAME, "size", size, 1)
        self.dim = expect.integer(_NAME, "dim", dim, 1)
        self._in = InGroup(group, _NAME)
        # Row i of all that were ever appended is at i % size: appending writes new rows alone.
        self.register_buffer("rows", torch.zeros(self.size, self.dim, device=device, dtype=dtype))
        kept = torch.zeros(self.size, device=device, dtype=torch.long) if expect.flag(_NAME, "labels", labels) else None
        self.register_buffer("labels_of_rows", kept)
        self.register_buffer("enqueued", torch.zeros((), device=device, dtype=torch.long))

    @property
    def group(self) -> Group:
        """The group as it was passed."""
        return self._in.group

    @torch.no_grad()
    def enqueue(self, features: Tensor, labels: Tensor | None = None) -> None:
        """Append the features of all ranks, in the order of ranks, and drop the oldest rows; all ranks call it.

        Of more than `size` new rows, the last ones stay.

        Args:
            features: this rank's, (b, D); b may differ between ranks, and be 0.
            labels: (b,), integers, of a queue with labels.

        Raises:
            TypeError, ValueError: an argument is invalid.
            CollectiveMismatchError: on all ranks, if they differ in dtypes or in D.
        """
        name = f"{_NAME}.enqueue"
        self._check(name, features, labels)
        sent = [features.detach()] if labels is None else [features.detach(), labels.detach().long()]
        start = int(self.enqueued)
        kept = {"size": self.size, "dtype": self.rows.dtype, "enqueued": start}
        same_options(name, self.group, **kept)
        new, _, _, total, _ = gather_batch(sent, group=self.group)
        first = max(total - self.size, 0)
        at = torch.arange(start + first, start + total, device=self.rows.device) % self.size
        self.rows[at] = new[0][first:].to(self.rows.dtype)
        if self.labels_of_rows is not None:
            self.labels_of_rows[at] = new[1][first:]
        self.enqueued += total

    def features(self, *, share: bool = False) -> Tensor:
        """Return a copy of the rows, (n, D), the oldest first; n grows up to `size`.

        Args:
            share: return this rank's part of them, for losses in which the columns of every rank count for all queries.
                The parts of all ranks, in the order of ranks, are the queue; their lengths differ by at most 1.
        """
        return self.rows[self._places(share)]

    def labels(self, *, share: bool = False) -> Tensor:
        """Return the labels, (n,), of the rows that `features` returns."""
        if self.labels_of_rows is None:
            got, expected = "a queue without labels", "one with labels"
            raise ValueError(message(f"{_NAME}.labels", "queue", got, expected, "pass labels=True to FeatureQueue"))
        return self.labels_of_rows[self._places(share)]

    def extra_repr(self) -> str:
        """Show the arguments, the group only if there is one."""
        group = "" if self.group is None else f", group={self.group!r}"
        return f"{self.size}, {self.dim}{', labels=True' * (self.labels_of_rows is not None)}{group}"

    def _places(self, share: bool) -> Tensor:
        """Return the indices of the rows, or of this rank's share, from the oldest to the newest."""
        end = int(self.enqueued)
        n = min(end, self.size)
        rank, ranks = (get_rank(self.group), get_world_size(self.group)) if share else (0, 1)
        first, last = (end - n + n * r // ranks for r in (rank, rank + 1))
        return torch.arange(first, last, device=self.rows.device) % self.size

    def _check(self, name: str, features: Tensor, labels: Tensor | None) -> None:
        check_features(name, features=features)
        if features.shape[1] != self.dim:
            got, expected = f"shape {tuple(features.shape)}", f"shape (b, {self.dim})"
            raise ValueError(message(name, "features", got, expected, "dim of the queue is the length of a row"))
        if features.device != self.rows.device:
            got, expected = f"a tensor on {features.device}", f"{self.rows.device}, as the queue"
            raise ValueError(message(name, "features", got, expected, "move the queue with queue.to(device)"))
        if (labels is None) != (self.labels_of_rows is None):
            got, expected = ("none", "one for each row") if labels is None else ("a tensor", "none")
            raise ValueError(message(name, "labels", got, expected, "FeatureQueue(…, labels=True) keeps labels"))
        if labels is not None:
            per_row(name, "labels", labels, features)
