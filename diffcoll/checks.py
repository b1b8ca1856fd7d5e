"""Check mode: before a collective moves anything, its ranks compare what they are about to do."""

from __future__ import annotations

import os
import threading
from hashlib import blake2b
from types import TracebackType

import torch
from torch import Tensor

from diffcoll.engines import local
from diffcoll.engines.engine import Engine
from diffcoll.errors import CollectiveMismatchError

__all__ = ["check_mode", "compare", "is_on", "same_everywhere"]

_on = os.environ.get("DIFFCOLL_CHECK", "0") not in ("", "0")


class _Rank(threading.local):
    """What a simulated rank has said for itself: it is a thread among others of this process."""

    on: bool | None = None


_rank = _Rank()


class check_mode:
    """Make ranks that disagree an error on all of them; a switch, and a context manager that restores it.

    Before each collective, forward and backward, its ranks compare operation, dtype, shape, arguments and order. Where
    they differ every rank raises the same `CollectiveMismatchError`, which lists each rank's call and its line, and
    nothing has been moved. A tensor that is declared replicated, or whose cotangent is, is compared too. The
    environment variable `DIFFCOLL_CHECK=1` switches it on from the start. Off, it costs nothing.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def f(x):
    ...     with dc.check_mode():
    ...         return dc.all_reduce(x)
    >>> simulate(f, [torch.ones(2), torch.ones(2)], rules=True)
    [tensor([2., 2.]), tensor([2., 2.])]

    Each process says it for itself, in a simulated world each rank, and all ranks of a group must say the same.
    Compiled collectives are not compared.

    Args:
        on: whether to compare from here on.

    Source: notes/failures.md.
    """

    def __init__(self, on: bool = True) -> None:
        self._before = _switch(on)

    def __enter__(self) -> None:
        """Nothing to do: it was switched when this was made."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore what was before."""
        _switch(self._before)


def _switch(on: bool) -> bool:
    global _on
    before = is_on()
    if local.here() is None:
        _on = on
    else:
        _rank.on = on
    return before


def is_on() -> bool:
    """Whether the ranks compare."""
    return _on if _rank.on is None else _rank.on


def compare(engine: Engine, facts: object, text: str) -> None:
    """Raise on all ranks if facts are not the same on all; text is how this rank's call reads."""
    engine.operation, engine.later = "check mode", False
    digest = int.from_bytes(blake2b(repr(facts).encode(), digest_size=7).digest(), "big")
    words = torch.tensor(list(text.encode()), dtype=torch.uint8, device=engine.control_device)
    rows = _gathered(engine, torch.tensor([digest, len(words)], device=engine.control_device), [2] * engine.size)
    if all(row[0] == digest for row in rows):
        return
    said = _gathered(engine, words, [int(row[1]) for row in rows])
    calls = "\n".join(f"  rank {r}: {bytes(text.tolist()).decode()}" for r, text in enumerate(said))
    raise CollectiveMismatchError(f"the ranks of {engine.description} disagree:\n{calls}")


def same_everywhere(engine: Engine, x: Tensor, text: str) -> None:
    """Raise on all ranks if x, which is declared one tensor that all ranks hold, is not, but for rounding."""
    engine.operation, engine.later = "check mode", False
    xs = _gathered(engine, x.detach().resolve_conj().resolve_neg().contiguous().view(-1), [x.numel()] * engine.size)
    exact = not (x.is_floating_point() or x.is_complex())
    tolerance = 0.0 if exact else torch.finfo(x.dtype).eps ** 0.5
    for r, other in enumerate(xs):
        if not torch.allclose(other, xs[0], rtol=tolerance, atol=tolerance, equal_nan=True):
            largest = (other - xs[0]).abs().max().item()
            raise CollectiveMismatchError(
                f"{text}: declared replicated, but it differs by {largest:.3g} between rank 0 and rank {r}; "
                'say cotangent="partial" where each rank has a loss of its own'
            )


def _gathered(engine: Engine, mine: Tensor, lengths: list[int]) -> list[Tensor]:
    blocks = [mine.new_empty(length) for length in lengths]
    engine.all_gather(mine, blocks)()
    return blocks
