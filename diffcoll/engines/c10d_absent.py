"""Asks the store of torch.distributed which ranks have noticed that a group failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d

from diffcoll.engines.c10d_store import address_of, ask

# How long the ranks of a failed group wait for each other to report. All of them fail at about the same time.
SECONDS = 2.0
# How much longer they wait for the store itself.
STORE_SECONDS = 1.0


def absent(key: str, rank: int, ranks: Sequence[int]) -> list[int]:
    """Report that this rank has noticed a failure of the group `key`; return the ranks that have not, if that is known.

    A process serves the store, usually rank 0's. If that is stopped, or its host is cut off, a call of the store
    returns never, whatever its timeout. So a thread calls it, and this function returns after `SECONDS +
    STORE_SECONDS`.
    """
    try:
        store: Any = distributed_c10d._get_default_store()  # there is no public access to it
    except ValueError:  # the default group was destroyed
        return []
    found: list[int] = []
    has_ended = ask(lambda: _ask(store, key, rank, ranks, found), address_of(store), SECONDS + STORE_SECONDS)
    return found if has_ended else []


def _ask(store: Any, key: str, rank: int, ranks: Sequence[int], found: list[int]) -> None:
    key, end = f"diffcoll/failed/{key}/{{}}", time.monotonic() + SECONDS
    with contextlib.suppress(RuntimeError):  # the process that serves the store has ended
        store.set(key.format(rank), "")
        silent = [r for r in ranks if r != rank]
        while silent and time.monotonic() < end:
            silent = [r for r in silent if not store.check([key.format(r)])]
            time.sleep(0.02)
        found += silent
