"""Run a map on plain tensors, below autograd: named in profiles and in errors, compared in check mode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffcoll.core import check_mode
from diffcoll.core.errors import Origin
from diffcoll.core.maps import Linear
from diffcoll.core.torch_private.tensors import is_zero_without_memory
from diffcoll.core.torch_private.tracing import is_observed, is_profiling, is_tracing, is_watched, unobserved
from diffcoll.core.torch_private.transforms import is_transformed
from diffcoll.engines.devices import current_stream
from diffcoll.engines.turn import BackendError, Turn

T = TypeVar("T")


def move(x: Tensor, f: Linear, origin: Origin | None = None) -> Tensor:
    """Return f(x) of a plain tensor; `origin`: the forward call whose backward this is, if it is one."""
    # Runs several times per training step with cold caches: every Python statement counts (notes/running/engines.md).
    y: Tensor = _named(lambda: _run(x, f, origin), f, origin, x) if is_watched() else _run(x, f, origin)
    return y


def _run(x: Tensor, f: Linear, origin: Origin | None, later: bool = False) -> Any:
    """Return f(x), or with `later` the function that waits for it; check mode compares the ranks' calls before.

    The engine gets x with lazy conjugates and negations resolved, and zeros without memory materialised.
    """
    engine = f.engine
    if origin is None:
        engine.calls += 1
    if x.is_conj() or x.is_neg() or is_transformed(x):  # both calls unwrap what an ended transform has left
        x = x.resolve_conj().resolve_neg()
    elif is_zero_without_memory(x):
        x = x.clone()
    if engine.size == 1 and f.identity_alone:
        y = x.clone(memory_format=torch.contiguous_format)
        return (lambda: y) if later else y
    if compared := check_mode.ever_on and check_mode.is_on():
        check_mode.compare_moves(f, x, origin, later=later)
    with Turn(engine, f.name, origin, compared, f.detail):
        wait = _begin(f, x, later)
        return wait if later else wait()


class Flight:
    """One application of a map that is started and awaited separately.

    It may be dropped without a wait: after an error between start and wait, or by a checkpoint that stops recomputing
    early. Its messages are still in flight and need their memory, so the next call in the group waits for it.

    Args:
        origin: the forward call whose backward this is, if it is one.
    """

    __slots__ = ("_f", "_wait", "adjoints", "number", "origin", "tangents")

    def __init__(self, origin: Origin | None) -> None:
        self.origin = origin
        #: Of this call, if it is a forward call.
        self.number = 0
        #: Tangents in flight, in the order of the levels of forward mode.
        self.tangents: deque[Flight] = deque()
        #: The adjoint in flight, by the number of the backward pass: a hook may run a nested one through this graph.
        self.adjoints: dict[int, Flight] = {}
        self._wait: Callable[[], Tensor] | None = None

    def start(self, x: Tensor, f: Linear) -> None:
        """Start f on a plain tensor."""
        self._f = f
        wait = _named(lambda: _run(x, f, self.origin, later=True), f, self.origin, x)
        self._wait = wait if x.is_cpu else _wait_across_streams(wait, x.device)
        self.number = f.engine.calls

    def wait(self) -> Tensor:
        """Wait for f(x), once; what the wait refers to is freed: no collector sees a cycle through C++."""
        f, wait, self._wait = self._f, self._wait, None
        if wait is None:
            raise RuntimeError(f"{f.name}: an earlier wait() of this call failed; see its error")

        def awaited() -> Tensor:
            with Turn(f.engine, f.name, self.origin, check_mode.is_on()):
                return wait()

        return _named(awaited, f, self.origin, None)

    def __del__(self) -> None:
        if self._wait is not None:
            self._f.engine.abandoned.append(self._wait)


def _named(step: Callable[[], T], f: Linear, origin: Origin | None, x: Tensor | None) -> T:
    """Return step(), which sends x or waits for it: named in profiles, and hidden from modes."""
    if is_observed():
        if is_tracing():
            raise RuntimeError(f"{f.name}: this tracer does not record a collective; torch.compile and torch.export do")
        with unobserved():
            return _named(step, f, origin, x)
    if not is_profiling():
        return step()
    call = f.name if origin is None else f"{origin.name} backward"
    nbytes = "" if x is None else f", {f.bytes(x)} B"
    with torch.profiler.record_function(f"diffcoll.{call}: {f.engine.description}{nbytes}"):
        return step()


def _begin(f: Linear, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
    """Start f on x, after what was abandoned in the group.

    With `later`, x may be modified before the wait: a gradient may share memory with p.grad, which hooks modify. So a
    copy of x is sent, unless the map reads x at once.
    """
    engine = f.engine
    while engine.abandoned:
        try:
            engine.abandoned.popleft()()
        except BackendError:
            pass  # not this call's error: nobody reads the result, and a group that has failed fails again
    if not x.is_cpu:
        engine.connect(x.device)
    if not later or f.reads_at_once:
        return f.start(x, later)
    memory = engine.scratch.take(x.numel(), like=x)
    wait = f.start(memory.view(x.shape).copy_(x), later)

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
