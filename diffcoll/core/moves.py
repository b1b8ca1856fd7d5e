"""Run a map on plain tensors, below autograd: named in profiles and in errors, compared in check mode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from diffcoll.core import check_mode
from diffcoll.core.errors import Origin
from diffcoll.core.maps import Linear
from diffcoll.core.torch_private.tensors import is_zero_without_memory
from diffcoll.core.torch_private.tracing import is_observed, is_profiling, is_tracing, is_watched, unobserved
from diffcoll.core.torch_private.transforms import is_transformed
from diffcoll.engines.devices import current_stream
from diffcoll.engines.engine import Engine
from diffcoll.engines.turn import BackendError, Turn

T = TypeVar("T")


def move(x: Tensor, f: Linear, origin: Origin | None = None) -> Tensor:
    """Return f(x) of a plain tensor; `origin`: the forward call whose backward this is, if it is one."""
    # Runs several times per training step with cold caches: every Python statement counts (notes/running/engines.md).
    return _observed(partial(_move, x, f, origin), f, origin, x) if is_watched() else _move(x, f, origin)


def _move(x: Tensor, f: Linear, origin: Origin | None) -> Tensor:
    x = _counted(x, f, origin)
    if f.engine.size == 1 and f.identity_alone:
        return x.clone(memory_format=torch.contiguous_format)
    with _turn(x, f, origin):
        _settle(x, f.engine)
        return f.start(x)()


class Flight:
    """One application of a map that is started and awaited separately.

    It may be dropped without a wait: after an error between start and wait, or by a checkpoint that stops recomputing
    early. Its messages are still in flight and need their memory, so the next call in the group waits for it.

    Args:
        call: the forward call, or the one whose backward this is.
    """

    __slots__ = ("_f", "_origin", "_wait", "adjoints", "backward", "tangents")

    def __init__(self, call: Origin) -> None:
        self._origin = call if call.order else None
        #: What names the backward of this one.
        self.backward = call.derived(call.order + 1)
        #: Tangents in flight, in the order of the levels of forward mode.
        self.tangents: deque[Flight] = deque()
        #: The adjoint in flight, by the number of the backward pass: a hook may run a nested one through this graph.
        self.adjoints: dict[int, Flight] = {}
        self._wait: Callable[[], Tensor] | None = None

    def start(self, x: Tensor, f: Linear) -> None:
        """Start f on a plain tensor."""
        self._f = f
        _observed(partial(self._start, x), f, self._origin, x)
        if self._origin is None:
            self.backward.number = f.engine.calls

    def _start(self, x: Tensor) -> None:
        f, engine = self._f, self._f.engine
        x = _counted(x, f, self._origin)
        if engine.size == 1 and f.identity_alone:
            y = x.clone(memory_format=torch.contiguous_format)
            self._wait = lambda: y
            return
        stream, memory = None if x.is_cpu else current_stream(x.device), None
        with _turn(x, f, self._origin, later=True):
            _settle(x, engine)
            if not f.reads_at_once:  # x may be modified before the wait: a gradient may share memory with p.grad
                x = memory = engine.scratch.take(x.numel(), like=x).view(x.shape).copy_(x)
            self._wait = partial(_finish, f.start(x, True), memory, stream)

    def wait(self) -> Tensor:
        """Wait for f(x), once; what the wait refers to is freed: no collector sees a cycle through C++."""
        f, wait, self._wait = self._f, self._wait, None
        if wait is None:
            raise RuntimeError(f"{f.name}: an earlier wait() of this call failed; see its error")

        def awaited() -> Tensor:
            with Turn(f.engine, f.name, self._origin, check_mode.is_on()):
                return wait()

        return _observed(awaited, f, self._origin, None)

    def __del__(self) -> None:
        if self._wait is not None:
            self._f.engine.abandoned.append(self._wait)


def _finish(wait: Callable[[], Tensor], memory: Tensor | None, start: torch.Stream | None) -> Tensor:
    """Return y; `memory` is the copy of x that was sent, `start` the stream on which it was, on an accelerator.

    Memory allocated at the start belongs to that stream. It is released here, and may be reused there while the stream
    of the wait, and the backend that it waits for, still read it.
    """
    y = wait()
    here = None if start is None else current_stream(y.device)
    if start is not None and here is not None and here != start:
        start.wait_stream(here)
        y.record_stream(here)
    return y


def _counted(x: Tensor, f: Linear, origin: Origin | None) -> Tensor:
    """Count a forward call; return x without lazy conjugates and negations, and with memory if it is a zero without."""
    if origin is None:
        f.engine.calls += 1
    if x.is_conj() or x.is_neg() or is_transformed(x):  # both calls unwrap what an ended transform has left
        return x.resolve_conj().resolve_neg()
    return x.clone() if is_zero_without_memory(x) else x


def _turn(x: Tensor, f: Linear, origin: Origin | None, later: bool = False) -> Turn:
    """Return the turn in which f is started; check mode compares the ranks' calls before."""
    if compared := check_mode.ever_on and check_mode.is_on():
        check_mode.compare_moves(f, x, origin, later=later)
    return Turn(f.engine, f.name, origin, compared, f.detail)


def _settle(x: Tensor, engine: Engine) -> None:
    """Wait for what was abandoned in the group, and connect x's device."""
    while engine.abandoned:
        try:
            engine.abandoned.popleft()()
        except BackendError:
            pass  # not this call's error: nobody reads the result, and a group that has failed fails again
    if not x.is_cpu:
        engine.connect(x.device)


def _observed(step: Callable[[], T], f: Linear, origin: Origin | None, x: Tensor | None) -> T:
    """Return step(), which sends x or waits for it: named in profiles, and hidden from modes."""
    if is_observed():
        if is_tracing():
            raise RuntimeError(f"{f.name}: this tracer does not record a collective; torch.compile and torch.export do")
        with unobserved():
            return _observed(step, f, origin, x)
    if not is_profiling():
        return step()
    call = f.name if origin is None else f"{origin.name} backward"
    nbytes = "" if x is None else f", {x.numel() * (getattr(f, 'sent', None) or x.dtype).itemsize} B"
    with torch.profiler.record_function(f"diffcoll.{call}: {f.engine.description}{nbytes}"):
        return step()
