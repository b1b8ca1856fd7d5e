"""Messages of an averager: small numbers, what the ranks must agree on before training, and a group of its own.

note  notes/training/gradient-averager.md
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from diffcoll.averaging.policy import NAME
from diffcoll.collectives.broadcast import broadcast
from diffcoll.core.control import Control
from diffcoll.core.errors import CollectiveFailedError
from diffcoll.core.torch_private.tracing import is_profiling
from diffcoll.engines.engine import Engine
from diffcoll.engines.turn import Turn
from diffcoll.engines.types import Group

#: Why a rank may not have joined a reduction, and the remedy.
ABSENT = (
    "died, hangs, has not called backward, or its loss uses none of the parameters; call backward equally often on all "
    "ranks, see join() for unequal numbers of batches"
)
#: Approximate size of one message of `broadcast_from_first`.
_BYTES = 64 << 20


@contextlib.contextmanager
def communicating(engine: Engine, at: str, nbytes: int, what: str, remedy: str) -> Iterator[None]:
    """Take the engine's turn for the message `at`, label the profile, and add to an error of the backend.

    An error names the message, its contents `what`, and by `remedy` what other ranks may have done.
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
        text = f"{NAME}, {at} ({what}): failed on rank {engine.rank} of {engine.description}: {said}; a rank {remedy}"
        raise CollectiveFailedError(text) from error


def refuse_ended(engine: Engine) -> None:
    """Raise if the averager's group was destroyed."""
    if engine.ended:
        raise RuntimeError(
            f"{NAME}: its group was destroyed; call detach(), or make a {NAME} on another group, which replaces "
            "this one"
        )


def write(x: Tensor, value: Tensor) -> None:
    """Write a value of the same shape into x; an expanded dimension once, since PyTorch refuses to write it whole."""
    if 0 in x.stride():
        at = tuple(slice(None) if stride else slice(1) for stride in x.stride())
        x, value = x[at], value[at]
    x.copy_(value)


def numbers_of_ranks(number: int, engine: Engine) -> list[int]:
    """Return the number of each rank."""
    return [first for (first,) in Control(engine, NAME).numbers([int(number)])]


# ── before training, in the user's group ─────────────────────────────────────────────────────────────────


@torch.no_grad()
def broadcast_from_first(tensors: Sequence[Tensor], group: Group) -> None:
    """Copy rank 0's values to all ranks, in place."""
    ends = accumulate(t.nbytes for t in tensors)
    for _, pairs in groupby(zip(ends, tensors, strict=True), key=lambda pair: pair[0] // _BYTES):
        chunk = [t.detach() for _, t in pairs]
        for mine, first in zip(chunk, broadcast(chunk, 0, group=group), strict=True):
            write(mine, first)


def twin(engine: Engine, owner: object) -> Engine:
    """Return a duplicate of the user's group for an averager, whose messages cannot match others; all ranks call it.

    Closes the duplicates of averagers that were freed without `detach()` on all ranks: the garbage collector frees
    them at different times on different ranks, and closing may be a collective call.
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
