"""`Pending`: a collective in flight."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from diffcoll.core.errors import Origin
from diffcoll.core.torch_private.autograd import AutogradMode, is_recomputing

T = TypeVar("T")


class Pending(Generic[T]):
    """Overlap computation with communication: the result of a collective with `async_op=True`, returned by `wait()`.

    Start early, compute something independent, then wait. Backward mirrors forward: the adjoint starts at the node of
    `wait()` and is waited for at the node of the call, so computation between the two overlaps in backward too.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def f(x):
    ...     pending = dc.all_reduce(x, async_op=True)
    ...     square = x * x  # meanwhile
    ...     return pending.wait() + square
    >>> simulate(f, [torch.tensor(1.0), torch.tensor(2.0)])
    [tensor(4.), tensor(7.)]

    If `wait()` is never called, a RuntimeWarning names the line of the call. Used as the tensor that it is not, as in
    `pending + 1` or `torch.sin(pending)`, it raises a TypeError that says `.wait()`.
    """

    def __init__(self, name: str, wait: Callable[[], T], call: Origin | None) -> None:
        self._name, self._call = name, call
        self._wait: Callable[[], T] | None = wait
        # In a graph, which has no `call`, there is nothing to wait for. A checkpoint that recomputes may stop before.
        self._must_wait = call is not None and not is_recomputing()
        self._started = None if call is None else AutogradMode()

    def wait(self) -> T:
        """Wait for the collective and return its result. A second call returns the same object.

        The result is differentiable as if the call had returned it: the grad mode is that of the call, and a checkpoint
        entered since does not compute it again.

        Raises:
            Exception: the error of the collective.
        """
        self._must_wait = False
        if self._wait is not None:
            started = None if torch.compiler.is_compiling() else self._started
            with contextlib.nullcontext() if started is None else started.restored():
                self._result = self._wait()
            self._wait = None
        return self._result

    def _drop(self) -> None:
        """Give up the result, for a caller that ends early: the next call in the group waits for the messages."""
        self._must_wait = False

    if not TYPE_CHECKING:  # so that type checkers refuse it too

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Refuse to be an argument of PyTorch's functions."""
            raise TypeError(f"{getattr(func, '__name__', func)}: got a Pending, expected its result; call .wait()")

    @property
    def _line(self) -> str:
        return "a compiled line" if self._call is None else self._call.line

    def __repr__(self) -> str:
        """Return the collective, its line, and whether it was waited for."""
        return f"<{self._name} started at {self._line}, {'not ' if self._wait else ''}waited for>"

    def __del__(self) -> None:
        """Warn if `wait()` was never called."""
        if getattr(self, "_must_wait", False):
            warnings.warn(
                f"{self._name}(async_op=True) at {self._line} was never waited for; call wait() on its result",
                RuntimeWarning,
                stacklevel=2,
            )


def _refuse(self: Pending[Any], *_: object) -> Any:
    raise TypeError(f"got {self!r} as a tensor or a number, expected its result; call .wait()")


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow", "neg", "getitem", "iter", "len", "bool", "float"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        if hasattr(torch.Tensor, _method):
            setattr(Pending, _method, _refuse)
