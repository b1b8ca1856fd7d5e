"""A queue of the features of earlier steps, the same on all ranks (MoCo, XBM).

note  notes/training/contrastive.md
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffcoll.composed.gather_batch import gather_batch
from diffcoll.core import expect
from diffcoll.core.arguments import Sizes
from diffcoll.core.errors import message
from diffcoll.engines.devices import is_capturing
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import check_marks, check_rows
from diffcoll.nn.in_group import InGroup

_NAME = "FeatureQueue"


class FeatureQueue(InGroup):
    """Contrastive losses with many negatives (MoCo, XBM): keeps the last features of all ranks.

    Each step, use what the queue has in the loss, then append the features of this step.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def step(rows):
    ...     queue = dc.nn.FeatureQueue(4, 1)
    ...     queue.enqueue(rows)  # of rank 0 first, whichever arrives first
    ...     return queue.features().flatten().tolist()
    >>> rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])
    >>> simulate(step, rows.split([3, 2]))
    [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]

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
        self.size, self.dim = expect.integer(_NAME, "size", size, 1), expect.integer(_NAME, "dim", dim, 1)
        self.group = group
        # Row i of all that were ever appended is at i % size: appending writes new rows alone.
        self.register_buffer("rows", torch.zeros(self.size, self.dim, device=device, dtype=dtype))
        kept = torch.zeros(self.size, device=device, dtype=torch.long) if labels else None
        self.register_buffer("labels_of_rows", kept)
        #: How many rows were ever appended; the host knows it without reading from a device.
        self.enqueued = 0

    @torch.no_grad()
    def enqueue(self, features: Tensor, labels: Tensor | None = None, *, sizes: Sizes = "auto") -> None:
        """Append the features of all ranks, in the order of ranks, and drop the oldest rows; all ranks call it.

        Of more than `size` new rows, the last ones stay.

        Args:
            features: this rank's, (b, D); b may differ between ranks, and be 0.
            labels: (b,), integers, of a queue with labels.
            sizes: the ranks' numbers of rows, as of `gather_batch`.

        Raises:
            TypeError, ValueError: an argument is invalid.
            RuntimeError: a CUDA graph captures it, whose replays would write to the same rows again.
            CollectiveMismatchError: on all ranks, with sizes="auto", if they differ in dtypes or in D.
        """
        name = f"{_NAME}.enqueue"
        if is_capturing():
            expected, remedy = "a call outside of it", "a replay would write to the same rows again"
            raise RuntimeError(message(name, "features", "a CUDA graph that is captured", expected, remedy))
        check_rows(name, "features", features)
        if features.shape[1] != self.dim:
            raise ValueError(message(name, "features", f"shape {tuple(features.shape)}", f"(b, {self.dim})"))
        if (labels is None) != (self.labels_of_rows is None):
            got, expected = ("none", "one for each row") if labels is None else ("a tensor", "none")
            raise ValueError(message(name, "labels", got, expected, "FeatureQueue(…, labels=True) keeps labels"))
        sent = [features, *check_marks(name, features, labels=labels).values()]
        new, _, _, total, _ = gather_batch(sent, group=self.group, sizes=sizes)
        first = max(total - self.size, 0)
        at = torch.arange(self.enqueued + first, self.enqueued + total, device=self.rows.device) % self.size
        self.rows[at] = new[0][first:].to(self.rows.dtype)
        if self.labels_of_rows is not None:
            self.labels_of_rows[at] = new[1][first:]
        self.enqueued += total

    def features(self) -> Tensor:
        """Return a copy of the rows, (n, D), the oldest first; n grows up to `size`."""
        return self.rows[self._places()]

    def labels(self) -> Tensor:
        """Return the labels, (n,), of the rows that `features` returns."""
        if self.labels_of_rows is None:
            got, expected = "a queue without labels", "one with labels"
            raise ValueError(message(f"{_NAME}.labels", "queue", got, expected, "pass labels=True to FeatureQueue"))
        return self.labels_of_rows[self._places()]

    def get_extra_state(self) -> Tensor:
        """Return what `state_dict` keeps besides the rows."""
        return torch.tensor(self.enqueued)

    def set_extra_state(self, state: Tensor) -> None:
        """Take what `load_state_dict` has of it."""
        self.enqueued = int(state)

    def extra_repr(self) -> str:
        """Show the arguments."""
        return f"{self.size}, {self.dim}{', labels=True' * (self.labels_of_rows is not None)}"

    def _places(self) -> Tensor:
        """Return the indices of the rows from the oldest to the newest."""
        first = max(self.enqueued - self.size, 0)
        return torch.arange(first, self.enqueued, device=self.rows.device) % self.size
