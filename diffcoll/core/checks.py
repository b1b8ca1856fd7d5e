"""Check mode: before a collective moves anything, its ranks compare what they are about to do."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from hashlib import blake2b
from itertools import zip_longest
from types import TracebackType

import torch
from torch import Tensor

from diffcoll.core.errors import CollectiveFailedError, CollectiveMismatchError, failure, message, user_line
from diffcoll.engines import local
from diffcoll.engines.engine import Engine, Exclusive

__all__ = ["check_mode", "compare", "digest", "disagree", "is_on", "refuse", "same_everywhere"]


class _State:
    """Whether the ranks compare, and in which groups they have done so in the innermost block, first one first.

    That is an order in which all ranks can meet once more: in it they have met before.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self.used: dict[Engine, None] | None = None


class _Rank(threading.local):
    """What a simulated rank has said for itself: it is a thread among others of this process."""

    state: _State | None = None


_process = _State(os.environ.get("DIFFCOLL_CHECK", "0") not in ("", "0"))
_rank = _Rank()
_ever = _process.on  # whether anyone has switched it on: quick to ask, and mostly the answer


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

    Leaving a block is compared too, in the groups that were used in it: where a rank has skipped the last collectives,
    or has left by an exception, the others raise, and do not wait. The exception itself goes on its way.

    Each process says it for itself, in a simulated world each rank, and all ranks of a group must say the same.
    Compiled and traced collectives are compared by map, arguments, dtype and shape, with each other: one that is
    compiled on some ranks only is an error.

    Args:
        on: whether to compare from here on.

    Source: notes/failures.md.
    """

    def __init__(self, on: bool = True) -> None:
        if not isinstance(on, bool):
            raise TypeError(message("check_mode", "on", type(on).__name__, "True or False"))
        global _ever
        state = _here()
        self._before, state.on = state.on, on
        _ever = _ever or on
        self._outer: dict[Engine, None] | None = None

    def __enter__(self) -> None:
        """Note from here on which groups are used; it was switched when this was made."""
        state = _here()
        self._outer, state.used = state.used, {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Compare that all ranks leave, and restore what was before."""
        state = _here()
        used, on = state.used or {}, state.on
        state.used, state.on = self._outer, self._before
        if self._outer is not None:
            self._outer.update(used)
        if on and not isinstance(error, (CollectiveMismatchError, CollectiveFailedError, KeyboardInterrupt)):
            _leave(used, error)


def _leave(used: dict[Engine, None], error: BaseException | None) -> None:
    """Raise on ranks that leave a block where others do not; those that leave by an error keep it."""
    how = "" if error is None else f" by {type(error).__name__}: {error}"
    for engine in [engine for engine in used if not engine.ended]:
        try:
            compare(engine, ("end", type(error).__name__), f"the end of check mode at {user_line()}{how}")
        except CollectiveMismatchError:
            if error is None:
                raise
        except RuntimeError as reason:
            if error is None:
                raise failure("check_mode", engine.description, engine.rank, None, reason) from reason


def _here() -> _State:
    """What this process, or this simulated rank, has said."""
    if _rank.state is None and local.here() is not None:
        _rank.state = _State(_process.on)
    return _rank.state or _process


def is_on() -> bool:
    """Whether the ranks compare."""
    return _ever and (_rank.state or _process).on


def compare(engine: Engine, facts: object, text: str, leaves: Sequence[str] | None = None) -> None:
    """Raise on all ranks if facts are not the same on all; text is how this rank's call reads.

    Where x is a tree, `leaves` says what each of its leaves is; the error names the first that differs.
    """
    engine.operation, engine.later = "check mode", False
    if (used := _here().used) is not None:
        used[engine] = None
    mine = digest(repr((facts, leaves)))
    rows = _gathered(engine, _numbers(engine, [mine, -1 if leaves is None else len(leaves)]), [2] * engine.size)
    if all(row[0] == mine for row in rows):
        return
    counts = [int(row[1]) for row in rows]
    if leaves is not None and -1 not in counts:
        digests = _gathered(engine, _numbers(engine, [digest(leaf) for leaf in leaves]), counts)
        of_ranks = zip_longest(*(row.tolist() for row in digests))
        first = next((i for i, of_leaf in enumerate(of_ranks) if len(set(of_leaf)) > 1), None)
        if first is not None:
            text += f"\n    the first leaf that differs: {leaves[first] if first < len(leaves) else 'not there'}"
    refuse(engine, text, disagree(engine))


def digest(text: str) -> int:
    """Return a number that tells texts apart."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def disagree(engine: Engine) -> str:
    """Return the beginning of an error."""
    return f"the ranks of {engine.description} disagree:"


def refuse(engine: Engine, text: str, why: str) -> None:
    """Raise on all ranks, which have all seen why; text is what this rank says."""
    engine.operation, engine.later = "check mode", False
    words = torch.tensor(list(text.encode()), dtype=torch.uint8, device=engine.control_device)
    lengths = _gathered(engine, _numbers(engine, [len(words)]), [1] * engine.size)
    said = _gathered(engine, words, [int(length) for length in lengths])
    calls = "\n".join(f"  rank {r}: {bytes(text.tolist()).decode()}" for r, text in enumerate(said))
    raise CollectiveMismatchError(f"{why}\n{calls}")


def _numbers(engine: Engine, numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=engine.control_device)


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
    row = mine.new_empty(sum(lengths))
    with Exclusive(engine, "check mode"):
        engine.all_gather(mine, row, lengths)()
    return list(row.split_with_sizes(lengths))
