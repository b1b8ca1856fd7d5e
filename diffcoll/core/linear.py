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
from threading import get_ident
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from diffcoll.core import checks, joint
from diffcoll.core._torch import (
    apply_rule,
    backward_at_work,
    batch_last,
    is_batched_by_autograd,
    is_plain,
    is_profiling,
    is_traced,
    is_zero_without_memory,
    over_batch,
)
from diffcoll.core.errors import CollectiveFailedError, CollectiveMismatchError, Origin, failure, user_line
from diffcoll.core.joint import record
from diffcoll.engines.engine import Engine, Exclusive, Wait, done

__all__ = ["MAPS", "UNEVEN", "Linear", "alone", "apply", "at_once", "begin", "moved", "start", "then"]

T = TypeVar("T")
#: Maps whose x may have another size on every rank.
UNEVEN = ("all_gather", "all_to_all", "gather", "scatter")

#: The linear maps of `diffcoll.collectives` by the name of the class, for modules that those import.
MAPS: dict[str, Any] = {}


@dataclass(frozen=True)
class Linear(ABC):
    """A linear map from all ranks' x to all ranks' y, as seen by the rank of `engine`.

    Dimensions are counted from the front. Dimensions of x behind those that the map names are carried along,
    so the same object serves under vmap.
    """

    #: Name of the collective, as in `diffcoll.truth` and `notes/`.
    name: ClassVar[str]
    #: Whether x has been read when `start` returns, so that it may change before the wait.
    reads_at_once: ClassVar[bool] = False

    engine: Engine

    def __init_subclass__(cls) -> None:
        """Enter a map of the library in MAPS."""
        if cls.__module__.startswith("diffcoll.collectives."):
            MAPS[cls.__name__] = cls

    @abstractmethod
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Start on a plain tensor x; the returned function waits for y, in fresh memory.

        Where the class says so, y is a view of x. Unless it `reads_at_once`, x must not change until then.
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
    """Start f on x, as engines need it: they move memory, which knows no lazy conjugate and no ended transform.

    Later, x may have changed: a gradient may be the memory of p.grad, which hooks modify. So what is under way is the
    library's own.
    """
    engine = f.engine
    while engine.abandoned:
        engine.abandoned.popleft()()
    engine.operation, engine.later = f.name, later
    if not x.is_cpu:
        engine.connect(x.device)
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    elif is_zero_without_memory(x):
        x = x.clone()
    if not later or f.reads_at_once:
        return f.start(x)
    memory = engine.scratch.take(x.numel(), like=x)
    wait = f.start(memory.view(x.shape).copy_(x))

    def finish() -> Tensor:
        y = wait()
        engine.scratch.give(memory)
        return y

    return finish


def run(x: Tensor, f: Linear, origin: Origin | None) -> Tensor:
    """Return f(x) of a plain tensor; origin is the forward call whose backward this is, if it is one.

    Here every message passes. Cold, as between two steps of training, each line costs several times what it does in a
    loop, and each call more.
    """
    if not is_plain(x):
        if is_batched_by_autograd(x):
            return over_batch(lambda x: record(_Apply, x, f, origin), x)
        if is_traced(x):
            return _traced(f, x)
    engine = f.engine
    if is_profiling() or checks.is_on() or engine.unwaited or not engine.lock.acquire(False):
        return moved(f, origin, x, lambda: _checked(f, origin, x, lambda: alone(f, x, origin)))
    engine.doing = f.name, origin, get_ident()
    try:
        return begin(f, x)()
    except RuntimeError as error:
        raise _failed(f, origin, error)  # noqa: B904
    finally:
        engine.doing = None
        engine.lock.release()


def alone(f: Linear, x: Tensor, origin: Origin | None = None) -> Tensor:
    """Return f(x), as the only one of this process's threads that works in the group."""
    with Exclusive(f.engine, f.name, origin):
        return begin(f, x)()


def apply(f: Linear, x: Tensor) -> Tensor:
    """Return f(x), differentiable to any order and in both modes."""
    if f.engine.compiling:
        from diffcoll.core import compiled  # it makes an op of every map, which takes time

        return compiled.apply(f, x)
    return (record if joint.here.chain else apply_rule)(_Apply, x, f, None)


def _traced(f: Linear, x: Tensor) -> Tensor:
    """Return f(x) of an x that is traced, where autograd has been seen to: one op in the graph."""
    from diffcoll.core import compiled  # it makes an op of every map, which takes time

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


def _checked(f: Linear, origin: Origin | None, x: Tensor, move: Callable[[], T]) -> T:
    """Return move(), which moves x, in check mode after a comparison; forward calls have been compared before."""
    engine = f.engine
    if checks.is_on() and engine.size > 1:
        gradient = f"gradient {x.dtype} {tuple(x.shape)}"
        what = (
            f"{f.name} at {user_line()}" if origin is None else f"{origin.backward} of {origin.name} at {origin.line}"
        )
        if origin is not None:
            same = list(x.shape) if f.name not in UNEVEN else x.dim()
            checks.compare(engine, (origin.backward, origin.name, f.name, x.dtype, same), f"{what}: {gradient}")
        if f.shared[0]:
            checks.same_everywhere(engine, x, what)
    return move()


def _agree_on_tangent(f: Linear, tx: Tensor) -> None:
    """In check mode, compare that all ranks have come to move a tangent: one whose x has none would not."""
    if checks.is_on() and f.engine.size > 1:
        checks.compare(f.engine, ("tangent", f.name), f"tangent of {f.name} at {user_line()}: {tx.dtype}")


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
        ctx.origin = origin.of_next_order() if origin else Origin(ctx.f.name, inside=2)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        return (record if joint.here.chain else apply_rule)(_Apply, gy, ctx.f.adjoint, ctx.origin), None, None

    @staticmethod
    def jvp(ctx: Any, tx: Tensor, *_: None) -> Tensor:
        _agree_on_tangent(ctx.f, tx)
        return record(_Apply, tx, ctx.f, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], x: Tensor, f: Linear, origin: Origin | None
    ) -> tuple[Tensor, int]:
        return batch_last(record(_Apply, x.movedim(in_dims[0], -1), f, origin))


# ── with time between the start and the wait ─────────────────────────────────────────────────────────────


class _Flight:
    """What of a map is under way: called once, waits for y.

    If it is dropped before, by an error between start and wait or by a checkpoint that has seen enough, its messages
    are under way all the same, and memory must be there for them: the next call in the group waits for it.
    """

    __slots__ = ("_engine", "_f", "_origin", "_wait")

    def __init__(self, f: Linear, x: Tensor, origin: Origin | None) -> None:
        self._wait: Callable[[], Tensor] | None = None
        self._f, self._origin, self._engine = f, origin, f.engine
        with Exclusive(f.engine, f.name, origin):
            wait = begin(f, x, later=True)
            self._wait = _from_this_stream(wait, x.device) if x.is_cuda else wait
        if self._engine.size > 1:
            self._engine.unwaited[id(self)] = get_ident()

    def __call__(self) -> Tensor:
        with Exclusive(self._engine, self._f.name, self._origin, waits=True):
            if self._wait is None:
                raise RuntimeError("an earlier wait() for it has failed, see the error there")
            self._engine.operation = self._f.name
            wait = self._end()
            return wait()

    def __del__(self) -> None:
        if self._wait is not None:
            self._engine.abandoned.append(self._end())

    def _end(self) -> Callable[[], Tensor]:
        wait, self._wait = self._wait, None
        self._engine.unwaited.pop(id(self), None)
        assert wait is not None
        return wait


def _from_this_stream(wait: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Return the wait for what was started on the current stream; it may be called on another one.

    Memory that was allocated at the start belongs to the stream of the start, and is reused there once it is released,
    which the wait does. The stream of the wait, and the backend that it waits for, may still read it then.
    """
    start = torch.cuda.current_stream(device)

    def finish() -> Tensor:
        y = wait()
        here = torch.cuda.current_stream(device)
        if here != start:
            start.wait_stream(here)
            y.record_stream(here)
        return y

    return finish


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
    #: The adjoint on its way, by the number of the backward: within one, a hook may run another through the same graph.
    adjoints: dict[int, _Transit] = field(default_factory=dict)


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
        if not is_plain(x) and (is_batched_by_autograd(x) or is_traced(x)):
            y = run(x, f, transit.origin)
            transit.wait = lambda: y
            return x.new_empty(0)
        origin = transit.origin
        transit.wait = moved(f, origin, x, lambda: _checked(f, origin, x, lambda: _Flight(f, x, origin)))
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, _Transit], output: Tensor) -> None:
        _, ctx.f, ctx.transit = inputs
        ctx.origin = ctx.transit.origin or Origin(ctx.f.name)

    @staticmethod
    def backward(ctx: Any, gempty: Tensor) -> tuple[Tensor, None, None]:
        adjoint = ctx.transit.adjoints.pop(backward_at_work(), None)
        if adjoint is None:  # only a chain of joint backward leads here
            name, line = ctx.origin.name, ctx.origin.line
            raise RuntimeError(f"{name}(async_op=True) at {line}: backward: never waited for; call wait() before")
        return record(_Wait, gempty, ctx.f.adjoint, adjoint), None, None

    @staticmethod
    def jvp(ctx: Any, tx: Tensor, *_: None) -> Tensor:
        _agree_on_tangent(ctx.f, tx)
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
        assert transit.wait is not None
        y = moved(f, transit.origin, empty, transit.wait)
        transit.wait = None
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, _Transit], output: Tensor) -> None:
        _, ctx.f, ctx.transit = inputs
        origin = ctx.transit.origin
        ctx.origin = origin.of_next_order() if origin else Origin(ctx.f.name)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        ctx.transit.adjoints[backward_at_work()] = adjoint = _Transit(ctx.origin)
        return record(_Start, gy, ctx.f.adjoint, adjoint), None, None

    @staticmethod
    def jvp(ctx: Any, tempty: Tensor, *_: None) -> Tensor:
        return record(_Wait, tempty, ctx.f, ctx.transit.tangents.popleft())

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], empty: Tensor, f: Linear, transit: _Transit
    ) -> tuple[Tensor, int]:
        return batch_last(record(_Wait, empty.sum(in_dims[0]), f, transit))
