"""All derivatives of a collective, from its map F and the adjoint F*. The rules here serve all collectives.

    backward          gx = F* gy        F* is a collective, so its own backward is F again, to any order
    forward mode      ty = F tx         a linear map is its own derivative
    vmap              F with the batch dimension moved last; collectives never act on it

`apply` waits for the result at once. `start` returns a function that waits. In backward, the adjoint is started by the
node of the wait and awaited by the node of the start, so communication overlaps with computation there too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from diffcoll.core import checks, joint
from diffcoll.core.errors import Origin, user_line
from diffcoll.core.joint import record
from diffcoll.core.linear import Linear
from diffcoll.core.moves import InFlight, move, named
from diffcoll.core.torch_private.autograd import backward_at_work
from diffcoll.core.torch_private.tracing import is_traced, untraced
from diffcoll.core.torch_private.transforms import batch_last, is_batched_by_autograd, is_plain, over_batch


def apply(f: Linear, x: Tensor) -> Tensor:
    """Return f(x), differentiable to any order and in both modes; in a graph that is compiled, as one op."""
    return _compiled().apply(f, x) if f.engine.compiling else record(_Apply, x, f, None)


def start(f: Linear, x: Tensor) -> Callable[[], Tensor]:
    """Start f on x; the returned function, to be called once, waits for f(x), differentiable as `apply` is."""
    return _compiled().start(f, x) if f.engine.compiling else Started(f, x)


def _compiled() -> Any:
    """Import the ops; an op is registered for every map, which takes time."""
    from diffcoll.core import compiled

    return compiled


_EAGER = "eager code started the collective; call wait() before the compiled function, or compile without fullgraph"


class Started:
    """A map that was started on x; calling it, once, waits for f(x)."""

    def __init__(self, f: Linear, x: Tensor) -> None:
        self._f, self._request = f, _Request()
        self._chain, self._backward = joint.of_thread.chain and joint.recording(), joint.of_thread.backward
        self._like = x.shape, x.dtype, x.device
        self._empty = record(_Start, x, f, self._request)

    @partial(untraced, reason=_EAGER)
    def __call__(self) -> Tensor:
        """Wait for f(x)."""
        with joint.recording_again(self._chain, self._backward):
            return record(_Wait, self._empty, self._f, self._request)

    def done(self) -> bool:
        """Whether a wait would return at once; see `Pending.done`."""
        wait = self._request.wait
        return not isinstance(wait, InFlight) or wait.done()

    def abandon(self) -> None:
        """Give up the result; see `Pending.abandon`."""
        with joint.recording_again(self._chain, self._backward):
            if self._chain is not None and self._chain is joint.recording():
                shape, dtype, device = self._like
                y = torch.zeros(self._f.shape(shape), dtype=dtype, device=device)
                self._request.wait = lambda: y
                record(_Wait, self._empty, self._f, self._request)
        del self._request, self._empty


def _forward(x: Tensor, f: Linear, origin: Origin | None) -> Tensor:
    """Return f(x) below autograd; origin is the forward call whose backward this is, if it is one."""
    if not is_plain(x):
        if is_batched_by_autograd(x):
            return over_batch(lambda x: record(_Apply, x, f, origin), x)
        if is_traced(x):
            y: Tensor = _compiled().traced(f, x)
            return y
    return move(x, f, origin)


def _dense(gy: Tensor) -> Tensor:
    """Return a gradient that engines can send: that of an embedding may be sparse, on some ranks only."""
    return gy if gy.layout is torch.strided else gy.to_dense()


def _agree_on_tangent(f: Linear, tx: Tensor) -> None:
    """In check mode, compare that all ranks send a tangent: a rank whose x has none would not."""
    if checks.is_on() and f.engine.size > 1:
        checks.compare(f.engine, ("tangent", f.name), f"tangent of {f.name} at {user_line()}: {tx.dtype}")


def _of_backward(ctx: Any) -> Origin:
    """Return what names a backward; raise if ranks may run this second backward in different orders.

    Autograd runs nodes in the order of their numbers, which count the nodes of the thread that makes them. A backward
    with create_graph in autograd's own thread (that of an accelerator) makes nodes that are numbered by it, and ranks
    may have made unequal numbers of others there before.
    """
    origin: Origin = ctx.origin
    if origin.elsewhere:
        raise RuntimeError(
            f"{origin.name}: {origin.backward}, called at {origin.line}: got a graph that autograd has made in a "
            "thread of its own, where ranks may number their nodes differently, and so run collectives in different "
            "orders; call the first backward within torch.autograd.set_multithreading_enabled(False)"
        )
    if torch.is_grad_enabled() and ctx.thread != get_ident() and ctx.f.engine.size > 1:
        return origin.recorded_elsewhere()
    return origin


class _Apply(Function):
    """y = F x;  gx = F* gy;  ty = F tx.  `origin` is the forward call whose backward this is, if it is one."""

    awaits = False
    forward = staticmethod(_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, Origin | None], output: Tensor) -> None:
        _, ctx.f, origin = inputs
        ctx.origin = origin.of_next_order() if origin else Origin(ctx.f.name, inside=2)
        ctx.thread = get_ident()

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        return record(_Apply, _dense(gy), ctx.f.adjoint, _of_backward(ctx)), None, None

    @staticmethod
    def jvp(ctx: Any, tx: Tensor, *_: None) -> Tensor:
        _agree_on_tangent(ctx.f, tx)
        return record(_Apply, tx, ctx.f, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], x: Tensor, f: Linear, origin: Origin | None
    ) -> tuple[Tensor, int]:
        return batch_last(record(_Apply, x.movedim(in_dims[0], -1), f, origin))


# ── started and awaited separately ───────────────────────────────────────────────────────────────────────


@dataclass(eq=False, repr=False)
class _Request:
    """One application of a map that is started and awaited separately.

    In the graph it is two nodes, connected by an empty tensor. Its derivatives are again a start and a wait. The
    tangent is started by `_Start` and awaited by `_Wait`; the adjoint is started by the backward of `_Wait` and awaited
    by that of `_Start`.
    """

    #: The forward call whose backward this is, if it is one.
    origin: Origin | None = None
    wait: Callable[[], Tensor] | None = None
    #: Tangents in flight, in the order of the levels of forward mode.
    tangents: deque[_Request] = field(default_factory=deque)
    #: The adjoint in flight, by the number of the backward pass: a hook may run a nested one through the same graph.
    adjoints: dict[int, _Request] = field(default_factory=dict)


class _Start(Function):
    """From x to an empty tensor."""

    awaits = False

    @staticmethod
    def forward(x: Tensor, f: Linear, request: _Request) -> Tensor:
        origin = request.origin
        if not is_plain(x) and is_batched_by_autograd(x):
            y = _forward(x, f, origin)
            request.wait = lambda: y
        elif not is_plain(x) and is_traced(x):
            request.wait = _compiled().traced_start(f, x)
        else:
            request.wait = named(f, origin, x, lambda: InFlight(x, f, origin))
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, _Request], output: Tensor) -> None:
        _, ctx.f, ctx.request = inputs
        ctx.origin = ctx.request.origin or Origin(ctx.f.name)

    @staticmethod
    def backward(ctx: Any, gempty: Tensor) -> tuple[Tensor, None, None]:
        adjoint = ctx.request.adjoints.pop(backward_at_work(), None)
        if adjoint is None:  # without a wait, this node is reached only through the chain of joint_backward
            name, line = ctx.origin.name, ctx.origin.line
            what = "got a collective in flight, expected one that was waited for before joint(loss)"
            remedy = "call wait() or abandon() first, on all ranks"
            if name == "shift":
                remedy += "; if it sends the next block of a ring that was left early, close() the ring's iterator"
            raise RuntimeError(f"{name}(async_op=True) at {line}: backward: {what}; {remedy}")
        return record(_Wait, gempty, ctx.f.adjoint, adjoint), None, None

    @staticmethod
    def jvp(ctx: Any, tx: Tensor, *_: None) -> Tensor:
        _agree_on_tangent(ctx.f, tx)
        ctx.request.tangents.append(_Request())
        return record(_Start, tx, ctx.f, ctx.request.tangents[-1])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], x: Tensor, f: Linear, request: _Request) -> tuple[Tensor, int]:
        empty = record(_Start, x.movedim(in_dims[0], -1), f, request)
        return empty.unsqueeze(1).expand(0, info.batch_size), 1


class _Wait(Function):
    """From the empty tensor to y."""

    awaits = True  # a map that was started, and its tangent

    @staticmethod
    def forward(empty: Tensor, f: Linear, request: _Request) -> Tensor:
        wait = request.wait
        assert wait is not None
        # `named` hides what it calls from modes, and so from tracers.
        y = named(f, request.origin, empty, wait) if isinstance(wait, InFlight) else wait()
        request.wait = None
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, _Request], output: Tensor) -> None:
        _, ctx.f, ctx.request = inputs
        origin = ctx.request.origin
        ctx.origin = origin.of_next_order() if origin else Origin(ctx.f.name)
        ctx.thread = get_ident()

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        ctx.request.adjoints[backward_at_work()] = adjoint = _Request(_of_backward(ctx))
        return record(_Start, _dense(gy), ctx.f.adjoint, adjoint), None, None

    @staticmethod
    def jvp(ctx: Any, tempty: Tensor, *_: None) -> Tensor:
        return record(_Wait, tempty, ctx.f, ctx.request.tangents.popleft())

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], empty: Tensor, f: Linear, request: _Request
    ) -> tuple[Tensor, int]:
        return batch_last(record(_Wait, empty.sum(in_dims[0]), f, request))
