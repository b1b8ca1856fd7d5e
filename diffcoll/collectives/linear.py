"""The base of all collectives: a linear map between the ranks, and its adjoint, which is another.

A collective states two things, what it does to plain tensors (`start`) and its `adjoint`. From that pair come,
once and for all of them: the backward (apply the adjoint), every higher derivative (the adjoint's adjoint is
the map again), the forward-mode rule (a linear map is its own derivative: apply it to the tangent) and the
vmap rule (a batch dimension put last is one that no collective looks at).

`apply` waits for the result at once; `start` leaves time between the start and the wait, forward and backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from diffcoll import checks, joint
from diffcoll._torch import apply_rule, is_profiling, is_traced, is_zero_without_memory
from diffcoll.engines.engine import Engine, Wait, done
from diffcoll.errors import CollectiveFailedError, CollectiveMismatchError, Origin, failure, message, user_line
from diffcoll.joint import record

__all__ = ["Linear", "alone", "apply", "at_once", "begin", "moved", "start", "then"]

T = TypeVar("T")
#: Maps whose x may have another size on every rank.
_UNEVEN = ("all_gather", "all_to_all", "gather", "scatter")


@dataclass(frozen=True)
class Linear(ABC):
    """A linear map from all ranks' x to all ranks' y, as seen by the rank of `engine`.

    Dimensions are counted from the front. Dimensions of x behind those that the map names are carried along,
    so the same object serves under vmap.
    """

    #: Name of the collective, as in `diffcoll.truth` and `notes/`.
    name: ClassVar[str]

    engine: Engine

    @abstractmethod
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Start on a plain tensor x; the returned function waits for y, in fresh memory.

        Where the class says so, y is a view of x. Until then x must not change.
        """

    def shape(self, x: Sequence[int]) -> list[int]:
        """Return the shape of y when x has this one."""
        return list(x)

    @property
    @abstractmethod
    def adjoint(self) -> Linear:
        """F* with Σ_r ⟨(F x)_r, y_r⟩ = Σ_r ⟨x_r, (F* y)_r⟩ for all x and y.

        Where a space is replicated, all ranks hold one shared tensor and it counts once in its sum.
        """

    @property
    def shared(self) -> tuple[bool, bool]:
        """Whether x, and whether y, is one tensor that all ranks hold (the replicated world)."""
        return False, False


def then(wait: Wait, y: Tensor | Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the function that waits and returns y."""
    if wait is done:
        return (lambda: y) if isinstance(y, Tensor) else y

    def finish() -> Tensor:
        wait()
        return y if isinstance(y, Tensor) else y()

    return finish


def begin(f: Linear, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
    """Start f on x, as engines need it: they move memory, which knows no lazy conjugate and no ended transform."""
    engine = f.engine
    engine.operation, engine.later = f.name, later
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    elif is_zero_without_memory(x):
        x = x.clone()
    return f.start(x)


def run(x: Tensor, f: Linear, origin: Origin | None) -> Tensor:
    """Return f(x) of a plain tensor; origin is the forward call whose backward this is, if it is one.

    Here every message passes. Cold, as between two steps of training, each line costs several times what it does in a
    loop, and each call more.
    """
    if is_traced(x):
        return _traced(f, x)
    if is_profiling() or checks.is_on():
        return moved(f, origin, x, lambda: _checked(f, origin, x, alone))
    engine = f.engine
    if not engine.turn.acquire(False):
        return alone(f, x)
    try:
        return begin(f, x)()
    except RuntimeError as error:
        raise _failed(f, origin, error)  # noqa: B904
    finally:
        engine.turn.release()


def alone(f: Linear, x: Tensor) -> Tensor:
    """Return f(x), as the only one of this process's threads that works in the group."""
    engine = f.engine
    if engine.size == 1:
        return begin(f, x)()
    if not engine.turn.acquire(False):
        remedy = "give each thread a group of its own, or let one thread make all calls"
        got = f"{engine.description}, in which another thread is in {engine.operation}"
        raise ValueError(message(f.name, "group", got, "one that is used by one thread at a time", remedy))
    try:
        return begin(f, x)()
    finally:
        engine.turn.release()


def apply(f: Linear, x: Tensor) -> Tensor:
    """Return f(x), differentiable to any order and in both modes."""
    if f.engine.compiling:
        from diffcoll import compiled  # it is made of the maps

        return compiled.apply(f, x)
    return (record if joint.here.chain else apply_rule)(_Apply, x, f, None)


def _traced(f: Linear, x: Tensor) -> Tensor:
    """Return f(x) of an x that is traced, where autograd has been seen to: one op in the graph."""
    from diffcoll import compiled  # it is made of the maps

    return compiled.traced(f, x)


def at_once(f: Linear, x: Any) -> Tensor:
    """Return apply(f, x) where nothing is being compiled, and there is no region of joint backward."""
    return apply_rule(_Apply, x, f, None)


def moved(f: Linear, origin: Origin | None, x: Tensor, move: Callable[[], T]) -> T:
    """Return move(), which moves x or waits for what was moved: named in profiles, and in the errors of the backend."""
    try:
        if not is_profiling():
            return move()
        call = f.name if origin is None else f"{origin.name} backward"
        with torch.profiler.record_function(f"diffcoll.{call}: {f.engine.description}, {x.nbytes} B"):
            return move()
    except RuntimeError as error:
        raise _failed(f, origin, error)  # noqa: B904


def _checked(f: Linear, origin: Origin | None, x: Tensor, move: Callable[[Linear, Tensor], T]) -> T:
    """Return move(f, x), in check mode after the ranks have compared it; forward calls have been compared before."""
    engine = f.engine
    if checks.is_on() and engine.size > 1:
        gradient = f"gradient {x.dtype} {tuple(x.shape)}"
        what = f"{f.name} at {user_line()}" if origin is None else f"backward of {origin.name} at {origin.line}"
        if origin is not None:
            same = list(x.shape) if f.name not in _UNEVEN else x.dim()
            checks.compare(engine, ("backward", origin.name, f.name, x.dtype, same), f"{what}: {gradient}")
        if f.shared[0]:
            checks.same_everywhere(engine, x, what)
    return move(f, x)


def _failed(f: Linear, origin: Origin | None, error: RuntimeError) -> RuntimeError:
    """Return what to raise for an error of the backend; others are what they are."""
    if isinstance(error, (CollectiveFailedError, CollectiveMismatchError, torch.OutOfMemoryError)):
        return error
    found = failure(f.name, f.engine.description, f.engine.rank, origin, error)
    found.__cause__ = error
    return found


class _Apply(Function):
    """y = F x;  gx = F* gy;  ty = F tx.  `origin` is the forward call whose backward this is, if it is one."""

    awaits = False
    forward = staticmethod(run)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, Origin | None], output: Tensor) -> None:
        _, ctx.f, origin = inputs
        ctx.origin = origin or Origin(ctx.f.name, inside=2)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        return (record if joint.here.chain else apply_rule)(_Apply, gy, ctx.f.adjoint, ctx.origin), None, None

    @staticmethod
    def jvp(ctx: Any, tx: Tensor, *_: None) -> Tensor:
        return record(_Apply, tx, ctx.f, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], x: Tensor, f: Linear, origin: Origin | None
    ) -> tuple[Tensor, int]:
        return record(_Apply, x.movedim(in_dims[0], -1), f, origin), -1


# ── with time between the start and the wait ─────────────────────────────────────────────────────────────


@dataclass
class _Transit:
    """One application of a map that was started and is to be waited for.

    In the graph it is two nodes, joined by an empty tensor. Whatever is derived from it is again a start and a wait:
    the tangent starts where x started; the adjoint starts where the forward waited and is awaited where it started.
    """

    #: The forward call whose backward this is, if it is one.
    origin: Origin | None = None
    wait: Callable[[], Tensor] | None = None
    #: Tangents on their way, in the order of the levels of forward mode.
    tangents: deque[_Transit] = field(default_factory=deque)
    #: The adjoint on its way, during a backward.
    adjoint: _Transit | None = None


def start(f: Linear, x: Tensor) -> Callable[[], Tensor]:
    """Start f on x; the returned function, to be called once, waits for f(x), differentiable as `apply` is."""
    if torch.compiler.is_compiling():  # in a graph it is up to the compiler when to start
        y = apply(f, x)
        return lambda: y
    transit = _Transit()
    empty = record(_Start, x, f, transit)
    return lambda: record(_Wait, empty, f, transit)


class _Start(Function):
    """From x to nothing yet."""

    awaits = False

    @staticmethod
    def forward(x: Tensor, f: Linear, transit: _Transit) -> Tensor:
        if is_traced(x):
            y = _traced(f, x)
            transit.wait = lambda: y
            return x.new_empty(0)
        transit.wait = moved(f, transit.origin, x, lambda: _checked(f, transit.origin, x, partial(begin, later=True)))
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, _Transit], output: Tensor) -> None:
        _, ctx.f, ctx.transit = inputs

    @staticmethod
    def backward(ctx: Any, gempty: Tensor) -> tuple[Tensor, None, None]:
        gx = record(_Wait, gempty, ctx.f.adjoint, ctx.transit.adjoint)
        ctx.transit.adjoint = None
        return gx, None, None

    @staticmethod
    def jvp(ctx: Any, tx: Tensor, *_: None) -> Tensor:
        ctx.transit.tangents.append(_Transit())
        return record(_Start, tx, ctx.f, ctx.transit.tangents[-1])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], x: Tensor, f: Linear, transit: _Transit) -> tuple[Tensor, int]:
        empty = record(_Start, x.movedim(in_dims[0], -1), f, transit)
        return empty.unsqueeze(1).expand(0, info.batch_size), 1


class _Wait(Function):
    """From nothing to y."""

    awaits = True  # what was started, the tangent too

    @staticmethod
    def forward(empty: Tensor, f: Linear, transit: _Transit) -> Tensor:
        wait, transit.wait = transit.wait, None  # it holds y, whose node holds the transit
        assert wait is not None
        return moved(f, transit.origin, empty, wait)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, _Transit], output: Tensor) -> None:
        _, ctx.f, ctx.transit = inputs
        ctx.origin = ctx.transit.origin or Origin(ctx.f.name)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        ctx.transit.adjoint = _Transit(ctx.origin)
        gempty = record(_Start, gy, ctx.f.adjoint, ctx.transit.adjoint)
        return gempty, None, None

    @staticmethod
    def jvp(ctx: Any, tempty: Tensor, *_: None) -> Tensor:
        return record(_Wait, tempty, ctx.f, ctx.transit.tangents.popleft())

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], empty: Tensor, f: Linear, transit: _Transit
    ) -> tuple[Tensor, int]:
        y = record(_Wait, empty.sum(in_dims[0]), f, transit)
        return y, -1
