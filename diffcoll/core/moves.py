"""Run a map on plain tensors, below autograd: one thread at a time, named in profiles and in errors."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TypeVar

import torch
from torch import Tensor

from diffcoll.core import checks
from diffcoll.core.errors import CollectiveMismatchError, Origin, user_line
from diffcoll.core.linear import Linear, common_shape
from diffcoll.core.torch_private.tensors import is_zero_without_memory
from diffcoll.core.torch_private.tracing import is_observed, is_profiling, unobserved
from diffcoll.core.torch_private.transforms import is_transformed
from diffcoll.engines.devices import current_stream
from diffcoll.engines.turn import Turn

T = TypeVar("T")


def move(x: Tensor, f: Linear, origin: Origin | None = None, compare: Callable[[], None] | None = None) -> Tensor:
    """Return f(x) of a plain tensor.

    Args:
        x: with memory, and not traced.
        f: the map.
        origin: the forward call whose backward this is; None: this is a forward call.
        compare: called in check mode instead of the comparison of f and origin.
    """
    # Runs several times per training step with cold caches: every Python statement counts (notes/running/engines.md).
    if is_profiling() or is_observed() or checks.is_on():
        return named(f, origin, x, lambda: _compared(x, f, origin, compare))
    with Turn(f.engine, f.name, origin):
        return _begin(f, x)()


def _compared(x: Tensor, f: Linear, origin: Origin | None, compare: Callable[[], None] | None) -> Tensor:
    _compare(f, origin, x, compare)
    with Turn(f.engine, f.name, origin):
        return _begin(f, x)()


class InFlight:
    """A map that was started on a plain tensor; calling it, once, waits for the result.

    It may be dropped without a wait: after an error between start and wait, or by a checkpoint that stops recomputing
    early. Its messages are still in flight and need their memory, so the next call in the group waits for it.
    """

    __slots__ = ("__weakref__", "_engine", "_f", "_origin", "_polls", "_wait")

    def __init__(self, x: Tensor, f: Linear, origin: Origin | None, compare: Callable[[], None] | None = None) -> None:
        self._wait: Callable[[], Tensor] | None = None
        self._f, self._origin, self._engine = f, origin, f.engine
        self._polls: list[Callable[[], bool]] = []
        _compare(f, origin, x, compare)
        with f.engine.turn(f.name, origin, later=True, polls=self._polls):
            wait = _begin(f, x, later=True)
            self._wait = wait if x.is_cpu else _wait_across_streams(wait, x.device)
        if self._engine.size > 1:
            self._engine.unwaited[id(self)] = get_ident()

    def __call__(self) -> Tensor:
        """Wait for f(x)."""
        with self._engine.turn(self._f.name, self._origin, waits=True):
            if self._wait is None:
                raise RuntimeError("an earlier wait() of this call failed; see its error")
            return self._take_wait()()

    def done(self) -> bool:
        """Whether a wait would return at once, or raise; False if another thread uses the group."""
        engine = self._engine
        if self._wait is None or engine.size == 1:
            return True
        if not engine.lock.acquire(False):
            return False
        try:
            return all(poll() for poll in self._polls)
        except RuntimeError:  # of the backend; the wait raises it
            return True
        finally:
            engine.lock.release()

    def __del__(self) -> None:
        if self._wait is not None:
            self._engine.abandoned.append(self._take_wait())

    def _take_wait(self) -> Callable[[], Tensor]:
        wait, self._wait = self._wait, None
        self._engine.unwaited.pop(id(self), None)
        assert wait is not None
        return wait


def named(f: Linear, origin: Origin | None, x: Tensor, step: Callable[[], T]) -> T:
    """Return step(), which sends x or waits for it; name it in profiles, and hide it from modes."""
    if is_observed():
        with unobserved():
            return named(f, origin, x, step)
    if not is_profiling():
        return step()
    call = f.name if origin is None else f"{origin.name} backward"
    with torch.profiler.record_function(f"diffcoll.{call}: {f.engine.description}, {f.bytes(x)} B"):
        return step()


def _begin(f: Linear, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
    """Start f on x, with lazy conjugates and negations resolved and zeros without memory materialised, for the engine.

    With `later`, x may be modified before the wait: a gradient may share memory with p.grad, which hooks modify. So a
    copy of x is sent, unless the map reads x at once.
    """
    engine = f.engine
    while engine.abandoned:
        try:
            engine.abandoned.popleft()()
        except CollectiveMismatchError:
            raise
        except RuntimeError:
            pass  # not this call's error: nobody reads the result, and a group that has failed fails again
    if not x.is_cpu:
        engine.connect(x.device)
    if x.is_conj() or x.is_neg() or is_transformed(x):  # both calls unwrap what an ended transform has left
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


def _wait_across_streams(wait: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Return the wait for a map started on the current stream such that it may be called on another stream.

    Memory allocated at the start belongs to the stream of the start. The wait releases it, and it may then be reused on
    that stream while the stream of the wait, and the backend that it waits for, still read it.
    """
    start = current_stream(device)
    if start is None:
        return wait

    def finish() -> Tensor:
        y = wait()
        here = current_stream(device)
        if here is not None and here != start:
            start.wait_stream(here)
            y.record_stream(here)
        return y

    return finish


def _compare(f: Linear, origin: Origin | None, x: Tensor, compare: Callable[[], None] | None = None) -> None:
    """In check mode, compare the ranks' backward calls; forward calls were compared with their arguments."""
    engine = f.engine
    if not checks.is_on() or engine.size == 1:
        return
    gradient = f"gradient {x.dtype} {tuple(x.shape)}"
    what = f"{f.name} at {user_line()}" if origin is None else f"{origin.backward} of {origin.name} at {origin.line}"
    if compare is not None:
        compare()
    elif origin is not None:
        facts = origin.backward, origin.name, f.name, x.dtype, common_shape(f, x)
        checks.compare(engine, facts, f"{what}: {gradient}")
    if f.shared[0]:
        checks.same_everywhere(engine, x, what)
