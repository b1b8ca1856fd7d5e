"""Messages of an averager: its name in errors of the backend and in profiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from diffcoll.averaging.state import NAME
from diffcoll.core.errors import CollectiveFailedError, CollectiveMismatchError
from diffcoll.core.torch_private.tracing import is_profiling
from diffcoll.engines.engine import Engine, Exclusive

#: Why a rank may not have joined a reduction, and the remedy.
ABSENT = (
    "died, hangs, has not called backward, or its loss uses none of the parameters; call backward equally often on all "
    "ranks, see join() for unequal numbers of batches"
)


@contextlib.contextmanager
def communicating(engine: Engine, at: str, nbytes: int, what: str, remedy: str) -> Iterator[None]:
    """Take the engine's turn, label the profile, and add the message and the absent ranks to an error of the backend.

    Args:
        engine: which sends the message.
        at: which message it is, for errors and profiles.
        nbytes: its size.
        what: its contents, for errors.
        remedy: what an absent rank may have done, and what to do, for errors.
    """
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(Exclusive(engine, f"{NAME}, {at}"))
            if is_profiling():
                label = f"diffcoll.{NAME} {at}: {engine.description}, {nbytes} B"
                stack.enter_context(torch.profiler.record_function(label))
            yield
    except CollectiveMismatchError:
        raise
    except RuntimeError as failed:
        error = failed.__cause__ or failed  # the backend's
        absent = engine.absent()
        who = f"rank {', '.join(map(str, absent))} did not join: it" if absent else "a rank"
        said = " ".join(str(error).split())
        text = f"{NAME}, {at} ({what}): failed on rank {engine.rank} of {engine.description}: {said}; {who} {remedy}"
        raise CollectiveFailedError(text) from error


def refuse_ended(engine: Engine) -> None:
    """Raise if the averager's group was destroyed."""
    if engine.ended:
        raise RuntimeError(
            f"{NAME}: its group was destroyed; call detach(), or make a {NAME} on another group, which replaces "
            "this one"
        )


def numbers_of_ranks(number: int, engine: Engine) -> list[int]:
    """Return the number of each rank."""
    numbers = [0] * engine.size
    numbers[engine.rank] = int(number)
    total = torch.tensor(numbers, device=engine.control_device)
    if engine.size > 1:
        engine.operation, engine.later = NAME, False
        with Exclusive(engine, NAME):
            engine.all_reduce(total, total)()
    return total.tolist()
