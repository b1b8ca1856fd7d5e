"""`Pending`: a collective in flight."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from diffcoll.core.errors import user_line
from diffcoll.core.torch_private.autograd import is_recomputing
from diffcoll.core.torch_private.trees import tree_leaves

T = TypeVar("T")


class Flight(Protocol):
    """What a Pending waits for."""

    def done(self) -> bool:
        """Whether a wait would return at once; does not block, and raises no error of the collective."""

    def abandon(self) -> None:
        """Give up the result, without a wait and without a warning."""


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

    If `wait()` is never called, a RuntimeWarning names the line of the call. Where its result is meant (`pending + 1`,
    `pending.sum()`, `torch.sin(pending)`, `if pending:`) it raises a TypeError or AttributeError that says `.wait()`.
    """

    def __init__(self, name: str, wait: Callable[[], T], flights: Sequence[Flight] = ()) -> None:
        self._name = name
        self._flights = flights
        self._where = "a compiled line" if torch.compiler.is_compiling() else user_line()
        self._wait: Callable[[], T] | None = wait
        # A checkpoint that recomputes stops at its last saved tensor, which may be before wait().
        self._must_wait = torch.compiler.is_compiling() or not is_recomputing()

    def wait(self) -> T:
        """Wait for the collective and return its result. A second call returns the same object.

        Raises:
            Exception: the error of the collective.
        """
        self._must_wait = False
        if self._wait is not None:
            self._result = self._wait()
            self._wait, self._flights = None, ()
        return self._result

    def done(self) -> bool:
        """Poll: return whether `wait()` would return at once, or raise at once. Does not block.

        On gloo, whose messages cannot be polled, the first call starts a thread that waits for them. On simulated
        ranks, of which one runs at a time, the call lets the others run first. False while another thread uses the
        group.
        """
        return all(flight.done() for flight in self._flights)

    def abandon(self) -> None:
        """Give up the result without a wait; the next collective in the group waits for the messages.

        Within `joint_backward` its backward takes part, as that of a result that the loss does not use. `wait()` must
        not be called afterwards.
        """
        self._must_wait = False
        for flight in self._flights:
            flight.abandon()
        self._wait, self._flights = self._was_abandoned, ()

    def _was_abandoned(self) -> T:
        raise RuntimeError(f"{self._name} started at {self._where}: wait() was called after abandon()")

    # ── used as the tensor that it is not ────────────────────────────────────────────────────────────────────

    if not TYPE_CHECKING:  # so that type checkers refuse it too

        def __getattr__(self, name: str) -> Any:
            """Name `wait()` for what only the result has."""
            if name.startswith("_") or not hasattr(torch.Tensor, name):
                raise AttributeError(f"'Pending' object has no attribute {name!r}")
            raise AttributeError(self._no_tensor(f".{name}"))

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Refuse to be an argument of PyTorch's functions."""
            me = next(x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Pending))
            raise TypeError(me._no_tensor(getattr(func, "__name__", repr(func))))

        def __eq__(self, other: object) -> bool:
            """Be equal to itself alone, and comparable with no tensor."""
            if isinstance(other, torch.Tensor):
                raise TypeError(self._no_tensor("=="))
            return self is other

        __hash__ = object.__hash__

    def _no_tensor(self, use: str) -> str:
        call = f"{self._name}(async_op=True) at {self._where}"
        return f"{use}: got the Pending of {call}, expected its result; call .wait()"

    def __repr__(self) -> str:
        """Return the collective, its line, and whether it was waited for."""
        return f"<{self._name} started at {self._where}, {'not ' if self._wait else ''}waited for>"

    def __del__(self) -> None:
        """Warn if `wait()` was never called."""
        if getattr(self, "_must_wait", False):
            warnings.warn(
                f"{self._name}(async_op=True) at {self._where} was never waited for; call wait() on its result",
                RuntimeWarning,
                stacklevel=2,
            )


def _refuse(operator: str) -> Callable[..., Any]:
    def refuse(self: Pending[Any], *_: object) -> Any:
        raise TypeError(self._no_tensor(operator))

    return refuse


#: Operators of tensors, and of numbers.
_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
    *("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "getitem", "setitem", "iter", "len", "contains"),
    *("bool", "float", "int", "complex", "index", "array", "reversed"),
)
for _name in _OPERATORS:
    for _method in (f"__{_name}__", f"__r{_name}__"):
        if hasattr(torch.Tensor, _method):
            setattr(Pending, _method, _refuse(_name))
