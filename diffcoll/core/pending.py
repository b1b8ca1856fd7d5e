"""A collective that was started and is to be waited for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from diffcoll.core._torch import is_recomputing
from diffcoll.core.errors import user_line

__all__ = ["Pending"]

T = TypeVar("T")


class Pending(Generic[T]):
    """What a collective returns with `async_op=True`; `wait()` gives the result.

    The derivative mirrors the forward: the adjoint starts where the forward waited, and is awaited where the
    forward started. So whatever is computed between the two overlaps with communication in both directions.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def f(x):
    ...     pending = dc.all_reduce(x, async_op=True)
    ...     square = x * x  # meanwhile
    ...     return pending.wait() + square
    >>> simulate(f, [torch.tensor(1.0), torch.tensor(2.0)])
    [tensor(4.), tensor(7.)]

    A Pending that is never waited for is reported by a RuntimeWarning with the line that started it.
    """

    def __init__(self, name: str, wait: Callable[[], T]) -> None:
        self._name = name
        self._where = "a compiled line" if torch.compiler.is_compiling() else user_line()
        self._wait: Callable[[], T] | None = wait
        self._must_wait = torch.compiler.is_compiling() or not is_recomputing()  # a checkpoint stops when it has enough

    def wait(self) -> T:
        """Return the result, when it is there. A second call returns the same.

        Raises:
            Exception: whatever the collective raised.
        """
        self._must_wait = False
        if self._wait is not None:
            self._result = self._wait()
            self._wait = None
        return self._result

    def __repr__(self) -> str:
        """Say what it is and whether it was waited for."""
        return f"<{self._name} started at {self._where}, {'not ' if self._wait else ''}waited for>"

    def __del__(self) -> None:
        """Report that nobody waited."""
        if getattr(self, "_must_wait", False):
            warnings.warn(
                f"{self._name}(async_op=True) at {self._where} was never waited for; call wait() on what it returns",
                RuntimeWarning,
                stacklevel=2,
            )
