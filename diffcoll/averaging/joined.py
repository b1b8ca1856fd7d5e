"""The loop over unequal numbers of batches, and the iterator that `join` returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Generator, Iterable, Iterator, MutableMapping, MutableSequence
from typing import Any, Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from diffcoll.averaging.hooks import Hooks
from diffcoll.averaging.messages import numbers_of_ranks
from diffcoll.averaging.policy import NAME
from diffcoll.averaging.reducer import Reducer
from diffcoll.core.errors import message

Batch = TypeVar("Batch")
#: What a rank tells the others before each iteration.
_RAN_OUT, _HAS_BATCH, _HAS_NOTHING = range(3)
_REPLACED = f"{NAME}.join: another join() has begun since, expected one loop at a time; end this loop before the next"


def joined(
    batches: Iterable[Batch], spare: Batch | None, hooks: Hooks, reducer: Reducer
) -> Generator[Batch, None, None]:
    """Yield this rank's batches, then its last one again until every rank has run out."""
    state, engine, buffers = reducer.policy.join, reducer.engine, reducer.buffers
    iterator, nothing = iter(batches), object()
    mine: Any = next(iterator, nothing)
    last, yielded_at = nothing if spare is None else spare, -1
    loop = state.enter()
    try:
        while True:
            status = _HAS_BATCH if mine is not nothing else _HAS_NOTHING if last is nothing else _RAN_OUT
            hooks.end_failed_backward()
            of_ranks = numbers_of_ranks(status, engine)
            if _HAS_BATCH not in of_ranks:
                break
            _refuse_nothing(of_ranks)
            if mine is not nothing:
                last, state.took_part = copied_containers(mine), True  # the loop may modify its own
            elif not state.ran_out:
                state.run_out(reducer.accumulation.has_gradients())
                hooks.hook_before(reducer.parameters)
            state.source = of_ranks.index(_HAS_BATCH)
            yielded_at = reducer.count
            yield copied_containers(last) if state.ran_out else mine
            if state.loop is not loop:
                raise RuntimeError(_REPLACED)
            if not state.ran_out:
                mine = next(iterator, nothing)
        if buffers is not None:
            exchanged = numbers_of_ranks(buffers.is_exchanged, engine)
            state.source = 0
            buffers.synchronize(resets_source=len(set(exchanged)) == 1)
    finally:
        if state.loop is loop:
            state.ran_out = False
            state.is_leaving = True  # keep the loop's weighting until gradients accumulated in it are reduced
            if reducer.count != yielded_at:
                state.leave()


def _refuse_nothing(of_ranks: list[int]) -> None:
    """Raise, on all ranks, if some have nothing to repeat."""
    without = [str(rank) for rank, status in enumerate(of_ranks) if status == _HAS_NOTHING]
    if without:
        got = f"None on rank {', '.join(without)}, which has no batch at all, while others have one"
        expected = "a batch that such a rank repeats with weight zero"
        remedy = "pass join(batches, spare=batch) there, a batch of any values in the form of the others'"
        raise ValueError(message(f"{NAME}.join", "spare", got, expected, remedy))


def copied_containers(batch: Any) -> Any:
    """Return the batch with copies of the containers in it, also nested ones, and the same tensors."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, tuple):
        items = [copied_containers(item) for item in batch]
        if all(new is old for new, old in zip(items, batch, strict=True)):
            return batch
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    new: Any = batch
    if isinstance(batch, (MutableMapping, MutableSequence)):
        new = copy.copy(batch)
        for key in list(batch) if isinstance(batch, MutableMapping) else range(len(batch)):
            item = copied_containers(batch[key])
            if item is not batch[key]:
                new[key] = item
    elif isinstance(batch, set):
        new = batch.copy()
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        new = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(new, field.name, copied_containers(getattr(batch, field.name)))
    return new


class Joined(Iterator[Batch], Generic[Batch]):
    """The batches of a loop, which ends with the `for` over it, also if somebody keeps this object, as tqdm does.

    A `for` loop that is left early frees the iterator it has asked for, which closes the generator.
    """

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        self._batches = batches
        self._was_left = False

    @override
    def __iter__(self) -> Joined[Batch]:
        """Return an iterator that closes this one when it is freed before the end."""
        return Joined(self._of_loop())

    @override
    def __next__(self) -> Batch:
        """Return the next batch; without a `for` loop only `close` ends the loop early."""
        self._refuse_left()
        return next(self._batches)

    def close(self) -> None:
        """End the loop on this rank; all ranks call it."""
        self._batches.close()

    def _of_loop(self) -> Generator[Batch, None, None]:
        self._refuse_left()
        try:
            yield from self._batches
        except GeneratorExit:
            self._was_left = True
            raise

    def _refuse_left(self) -> None:
        if self._was_left:
            raise RuntimeError(
                f"{NAME}.join: a second loop over an iterator whose first one was left early, by break or an error, "
                "expected one loop; call join() again, with the batches that are left"
            )
