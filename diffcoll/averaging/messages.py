"""Messages of an averager: those of its construction, the communicator of its own, and those of a block."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from diffcoll.collectives.broadcast import broadcast
from diffcoll.core.control import Control
from diffcoll.core.errors import CollectiveFailedError
from diffcoll.core.torch_private.tracing import is_profiling
from diffcoll.engines.engine import Engine, done
from diffcoll.engines.turn import BackendError, Turn
from diffcoll.engines.types import Group

#: Name in errors, profiles and check mode.
NAME = "GradientAverager"
#: Approximate size of one message of `broadcast_from_first`.
_BYTES = 64 << 20
#: Of each group the averagers that have duplicates, and these, in an order that is equal on all ranks.
_twins: weakref.WeakKeyDictionary[Engine, list[tuple[weakref.ref[Any], Engine]]] = weakref.WeakKeyDictionary()


class Message:
    """A reduction of a row in place, in progress; profiles and errors name it, `at`, and its contents, `what`."""

    def __init__(self, engine: Engine, row: Tensor, at: str, what: object) -> None:
        self._engine, self._nbytes, self._at, self._what = engine, row.nbytes, at, what
        with self._named():
            self._wait = engine.all_reduce(row, row, engine.overlaps(row)) if engine.size > 1 else done

    def wait(self) -> None:
        """Wait for the sum of all ranks' rows."""
        with self._named():
            self._wait()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        engine, name = self._engine, f"{NAME}, {self._at}"
        profiled: Any = contextlib.nullcontext()
        if is_profiling():
            label = f"diffcoll.{NAME} {self._at} ({self._what}): {engine.description}, {self._nbytes} B"
            profiled = torch.profiler.record_function(label)
        with Turn(engine, name), profiled:
            try:
                yield
            except BackendError as error:
                raise CollectiveFailedError(
                    f"{name} ({self._what}): failed on rank {engine.rank} of {engine.description}: "
                    f"{' '.join(str(error).split())}; a rank died, hangs, waits in a collective of the model that a "
                    "failed rank has left, or has not entered this block; enter it equally often on all ranks, see "
                    "in_step() for unequal numbers of batches"
                ) from error.__cause__ or error


# ── the note ─────────────────────────────────────────────────────────────────────────────────────────────

#: States of a parameter on a rank: no gradient, one in its bucket, one that came after its bucket was sent.
UNUSED, USED, LATE = range(3)


class Note:
    """What a block tells all ranks beside the gradients: a row of float64, whose sum over ranks is exact.

    A state is sent as 0, 1 or N + 1, so that the sum over N ranks tells the largest.
    """

    def __init__(self, engine: Engine, states: Sequence[int], count: float | Tensor | None, has_failed: bool) -> None:
        self._size, sent = engine.size, (0, 1, engine.size + 1)
        is_on_device = isinstance(count, Tensor)
        counts = 0.0 if count is None or is_on_device else count, count is not None, is_on_device
        failed = [has_failed and rank == engine.rank for rank in range(engine.size)]
        numbers = [*[sent[state] for state in states], *counts, *failed]
        self._row = torch.tensor(numbers, dtype=torch.float64, device=engine.control_device)
        self._message = Message(engine, self._row, "the note", f"who has which of {len(states)} gradients")

    def wait(self) -> None:
        """Wait for the sum of all ranks' notes, and read it."""
        self._message.wait()
        numbers, n = self._row.tolist(), self._size
        *sums, self.total, self.n_counting, self.n_on_device = numbers[:-n]
        #: For each parameter the largest of the ranks' states.
        self.states = [LATE if s > n else USED if s else UNUSED for s in sums]
        self.failed = [rank for rank, has_failed in enumerate(numbers[-n:]) if has_failed]


# ── before training ──────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def broadcast_from_first(tensors: Sequence[Tensor], group: Group) -> None:
    """Copy rank 0's values to all ranks, in place."""
    ends = accumulate(t.nbytes for t in tensors)
    for _, pairs in groupby(zip(ends, tensors, strict=True), key=lambda pair: pair[0] // _BYTES):
        chunk = [t.detach() for _, t in pairs]
        for mine, first in zip(chunk, broadcast(chunk, 0, group=group), strict=True):
            mine.copy_(first)


def twin(engine: Engine, owner: object) -> Engine:
    """Return a duplicate of the user's group for an averager, whose messages cannot match others; all ranks call it.

    Closes the duplicates of averagers that were freed without `close()` on all ranks: the garbage collector frees them
    at different times on different ranks, and closing may be a collective call.
    """
    if engine.size == 1:
        return engine
    twins = _twins.setdefault(engine, [])
    if twins:
        freed = Control(engine, NAME).numbers([of() is None for of, _ in twins])
        for pair, flags in zip([*twins], zip(*freed, strict=True), strict=True):
            if all(flags):
                twins.remove(pair)
                pair[1].close()
    twins.append((weakref.ref(owner), engine.twin()))
    return twins[-1][1]
