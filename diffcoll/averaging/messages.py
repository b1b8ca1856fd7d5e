"""Messages of an averager: those of its construction, the communicator of its own, and the note of a block."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from diffcoll.collectives.broadcast import broadcast
from diffcoll.core.control import Control
from diffcoll.core.errors import CollectiveFailedError
from diffcoll.core.torch_private.tracing import is_profiling
from diffcoll.engines.engine import Engine
from diffcoll.engines.turn import Turn
from diffcoll.engines.types import Group

#: Name in errors, profiles and check mode.
NAME = "GradientAverager"
#: Why a rank may not have joined a reduction.
ABSENT = (
    "died, hangs, waits in a collective of the model that a failed rank has left, or has not entered this block; "
    "enter it equally often on all ranks, see in_step() for unequal numbers of batches"
)
#: Approximate size of one message of `broadcast_from_first`.
_BYTES = 64 << 20


@contextlib.contextmanager
def communicating(engine: Engine, at: str, nbytes: int, what: str) -> Iterator[None]:
    """Take the engine's turn for the message `at`, label the profile, and add to an error of the backend.

    An error names the message and its contents `what`.
    """
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(Turn(engine, f"{NAME}, {at}"))
            if is_profiling():
                label = f"diffcoll.{NAME} {at} ({what}): {engine.description}, {nbytes} B"
                stack.enter_context(torch.profiler.record_function(label))
            yield
    except CollectiveFailedError as failed:
        error = failed.__cause__ or failed  # the backend's
        said = " ".join(str(error).split())
        text = f"{NAME}, {at} ({what}): failed on rank {engine.rank} of {engine.description}: {said}; a rank {ABSENT}"
        raise CollectiveFailedError(text) from error


# ── the note ─────────────────────────────────────────────────────────────────────────────────────────────

#: What a rank tells the others of itself; both may hold.
FAILED, HAS_COUNT = 1, 2
#: States of a parameter on a rank: no gradient, one in its bucket, one that came after its bucket was sent.
UNUSED, USED, LATE = range(3)


class Note(NamedTuple):
    """What a block tells all ranks beside the gradients."""

    #: For each parameter the largest of the ranks' states.
    states: list[int]
    #: Sum of the counts that the hosts have given.
    total: float
    #: For each rank its FAILED and HAS_COUNT.
    flags: list[int]

    def where(self, flag: int) -> list[int]:
        """Return the ranks for which this holds."""
        return [rank for rank, flags in enumerate(self.flags) if flags & flag]


def note_to_send(states: Sequence[int], count: float, flags: int, engine: Engine, device: torch.device) -> Tensor:
    """Return the numbers whose sum over ranks `read_note` reads, exactly.

    A state is sent as 0, 1 or N + 1, so that the sum over N ranks tells the largest.
    """
    sent = 0, 1, engine.size + 1
    of_ranks = [flags if rank == engine.rank else 0 for rank in range(engine.size)]
    return torch.tensor([*[sent[state] for state in states], count, *of_ranks], dtype=torch.float64, device=device)


def read_note(note: Tensor, n_parameters: int, engine: Engine) -> Note:
    """Return what the sum of all ranks' notes says."""
    numbers: list[float] = note.tolist()
    sums, total, flags = numbers[:n_parameters], numbers[n_parameters], numbers[n_parameters + 1 :]
    states = [LATE if s > engine.size else USED if s else UNUSED for s in sums]
    return Note(states, total, [int(each) for each in flags])


# ── before training ──────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def broadcast_from_first(tensors: Sequence[Tensor], group: Group) -> None:
    """Copy rank 0's values to all ranks, in place."""
    ends = accumulate(t.nbytes for t in tensors)
    for _, pairs in groupby(zip(ends, tensors, strict=True), key=lambda pair: pair[0] // _BYTES):
        chunk = [t.detach() for _, t in pairs]
        for mine, first in zip(chunk, broadcast(chunk, 0, group=group), strict=True):
            _write(mine, first)


def _write(x: Tensor, value: Tensor) -> None:
    """Write a value of the same shape into x; an expanded dimension once, since PyTorch refuses to write it whole."""
    if 0 in x.stride():
        at = tuple(slice(None) if stride else slice(1) for stride in x.stride())
        x, value = x[at], value[at]
    x.copy_(value)


def twin(engine: Engine, owner: object) -> Engine:
    """Return a duplicate of the user's group for an averager, whose messages cannot match others; all ranks call it.

    Closes the duplicates of averagers that were freed without `close()` on all ranks: the garbage collector frees them
    at different times on different ranks, and closing may be a collective call.
    """
    if engine.size == 1:
        return engine
    if engine.twins:
        freed = Control(engine, NAME).numbers([of() is None for of, _ in engine.twins])
        are_freed = [*zip(engine.twins, map(all, zip(*freed, strict=True)), strict=True)]
        engine.twins = [pair for pair, is_freed in are_freed if not is_freed]
        for (_, made), is_freed in are_freed:
            if is_freed:
                made.close()
    engine.twins.append((weakref.ref(owner), engine.twin()))
    return engine.twins[-1][1]
