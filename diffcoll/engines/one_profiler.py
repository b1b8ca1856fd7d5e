"""One torch profiler at a time while simulated ranks run: a second one ends the process by a segmentation fault.

While a simulation runs, two private names of torch.autograd.profiler are replaced, which every profiler calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import profiler

from diffcoll.engines.guards import THREAD

_REPLACED = ("_prepare_profiler", "_disable_profiler")
_lock = threading.Lock()
_simulations = 0
_before: dict[str, Callable[..., Any]] = {}
#: The rank that has entered a profiler.
_owner: object = None


@contextmanager
def one_profiler() -> Iterator[None]:
    """Let a rank enter a profiler only if neither another rank nor the caller is in one."""
    global _simulations, _owner
    with _lock:
        if not _simulations:
            _before.update({name: getattr(profiler, name) for name in _REPLACED})
            for name, replaced in zip(_REPLACED, (_prepare, _disable), strict=True):
                setattr(profiler, name, _with_rank(replaced, _before[name]))
        _simulations += 1
    try:
        yield
    finally:
        with _lock:
            _simulations -= 1
            if not _simulations:
                _owner = None
                for name in _REPLACED:
                    setattr(profiler, name, _before.pop(name))


def _with_rank(replaced: Callable[[Any], None], real: Callable[..., Any]) -> Callable[..., Any]:
    def either(*args: Any, **more: Any) -> Any:
        replaced(THREAD.rank)
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
    global _owner
    if _owner is rank:
        _owner = None
