"""One torch profiler at a time while simulated ranks run: a second one ends the process by a segmentation fault.

While a simulation runs, two private names of torch.autograd.profiler are replaced, which every profiler calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.autograd import profiler

from diffcoll.engines.guards import THREAD
from diffcoll.engines.replacing import Replacing, replace

#: The rank that has entered a profiler.
_owner: object = None


def _install(undo: ExitStack) -> None:
    undo.callback(_forget_owner)
    for name, check in _REPLACED.items():
        replace(undo, profiler, name, _with_rank(check, getattr(profiler, name)))


def _with_rank(check: Callable[[Any], None], real: Callable[..., Any]) -> Callable[..., Any]:
    def either(*args: Any, **more: Any) -> Any:
        check(THREAD.rank)
        return real(*args, **more)

    return either


def _prepare(rank: Any) -> None:
    global _owner
    if rank is None or _owner is rank:
        return
    if _owner is not None or profiler._is_profiler_enabled:
        other = f"simulated rank {_owner.number}" if _owner is not None else "the caller of simulate"  # type: ignore[attr-defined]
        raise RuntimeError(
            f"torch.profiler: entered on simulated rank {rank.number} while {other} is in a profiler; a process has "
            "one, so profile one rank, or the call of simulate, or use spawn"
        )
    _owner = rank


def _disable(rank: Any) -> None:
    if _owner is rank:
        _forget_owner()


def _forget_owner() -> None:
    global _owner
    _owner = None


_REPLACED = {"_prepare_profiler": _prepare, "_disable_profiler": _disable}
#: Lets a rank enter a profiler only if neither another rank nor the caller is in one.
one_profiler = Replacing(_install)
