"""What `join` returns: an iterator that ends with the loop over it, also if somebody keeps it, as tqdm does.

A `for` loop that is left early frees the iterator it has asked for, which closes the generator.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

from typing_extensions import override

from diffcoll.averaging.state import NAME

Batch = TypeVar("Batch")


class Joined(Iterator[Batch], Generic[Batch]):
    """The batches of a loop. A loop over it has an iterator of its own, and ends when that is freed."""

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
