"""Averagers communicate in duplicates of the user's group, so their messages cannot match other messages.

A duplicate of an averager that was freed without `detach()` is closed when the next one is made in the same group: the
garbage collector frees averagers at different times on different ranks, and closing may be a collective call.
"""

from __future__ import annotations

import weakref

import torch

from diffcoll.averaging.state import NAME
from diffcoll.engines.engine import Engine, Exclusive


def twin(engine: Engine, owner: object) -> Engine:
    """Return a duplicate of the user's group for an averager; close those that were freed on all ranks.

    All ranks call it.
    """
    if engine.size == 1:
        return engine
    _close_freed(engine)
    made, number = engine.twin(), engine.twins_made
    engine.twins[number] = made
    engine.twins_made += 1
    weakref.finalize(owner, engine.twins_freed.append, number).atexit = False
    return made


def _gather_numbers(numbers: list[int], engine: Engine) -> list[list[int]]:
    """Exchange as many integers on each rank; return one list per rank."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=engine.control_device)
    row = mine.repeat(engine.size)
    if engine.size > 1:
        engine.operation, engine.later = NAME, False
        with Exclusive(engine, NAME):
            engine.all_gather(mine, row, [len(numbers)] * engine.size)()
    rows: list[list[int]] = row.view(engine.size, -1).tolist()
    return rows


def _close_freed(engine: Engine) -> None:
    freed = [*engine.twins_freed]
    most = max(count for (count,) in _gather_numbers([len(freed)], engine))
    if not most:
        return
    rows = _gather_numbers([*freed, *[-1] * (most - len(freed))], engine)
    for number in sorted(set.intersection(*map(set, rows)) - {-1}):
        engine.twins_freed.remove(number)
        engine.twins.pop(number).close()
