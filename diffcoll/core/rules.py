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
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from diffcoll.core.errors import Origin
from diffcoll.core.joint import of_thread, read_in_checkpoint, record
from diffcoll.core.maps import Linear
from diffcoll.core.moves import InFlight, move
from diffcoll.core.torch_private.autograd import backward_at_work, save_in_checkpoint
from diffcoll.core.torch_private.tracing import untraced
from diffcoll.core.torch_private.transforms import apply_rule, batch_last, is_batched_by_autograd


def apply(f: Linear, x: Tensor) -> Tensor:
    """Return f(x), differentiable to any order and in both modes; in a graph that is compiled, as one op."""
    return _compiled().apply(f, x) if f.engine.compiling else _run(_Apply, x, f, None)


def start(f: Linear, x: Tensor) -> Callable[[], Tensor]:
    """Start f on x; the returned function, to be called once, waits for f(x), differentiable as `apply` is."""
    if f.engine.compiling:
        wait: Callable[[], Tensor] = _compiled().start(f, x)
        return wait
    flight = Flight(None)
    return _Awaited(_run(_Start, x, f, flight), f, flight)


def _run(rule: Any, x: Tensor, *more: Any) -> Tensor:
    """Return rule.apply(x, *more), which a region of joint_backward records."""
    return apply_rule(rule, x, *more) if of_thread.chain is None else record(rule, x, *more)


def _compiled() -> Any:
    """Import the ops, which takes time."""
    from diffcoll.core import compiled

    return compiled


def _of_backward(ctx: Any, gy: Tensor) -> Origin:
    """Return what names a backward; raise if it cannot be run, or ranks may run it in different orders.

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
    if is_batched_by_autograd(gy) and ctx.f.engine.size > 1:
        raise RuntimeError(
            f"{origin.name}: {origin.backward}, called at {origin.line}: got gradients batched by is_grads_batched, "
            "expected one; call torch.autograd.grad for each, or torch.func.vmap of torch.func.vjp"
        )
    if torch.is_grad_enabled() and ctx.thread != get_ident() and ctx.f.engine.size > 1:
        return origin.recorded_elsewhere()
    return origin


def _dense(gy: Tensor) -> Tensor:
    """Return a gradient that engines can send: that of an embedding may be sparse, on some ranks only."""
    return gy if gy.layout is torch.strided else gy.to_dense()


class _Apply(Function):
    """y = F x;  gx = F* gy;  ty = F tx.  `origin` is the forward call whose backward this is, if it is one."""

    @staticmethod
    def forward(x: Tensor, f: Linear, origin: Origin | None) -> Tensor:
        return move(x, f, origin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, Origin | None], output: Tensor) -> None:
        save_in_checkpoint(ctx)
        _, ctx.f, origin = inputs
        ctx.origin = origin.of_next_order() if origin else Origin(ctx.f.name, 2, None, ctx.f.engine.calls)
        ctx.thread = get_ident()

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        read_in_checkpoint(ctx)
        return _run(_Apply, _dense(gy), ctx.f.adjoint, _of_backward(ctx, gy)), None, None

    @staticmethod
    def jvp(ctx: Any, tx: Tensor, *_: None) -> Tensor:
        return _run(_Apply, tx, ctx.f, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], x: Tensor, f: Linear, origin: Origin | None
    ) -> tuple[Tensor, int]:
        return batch_last(_run(_Apply, x.movedim(in_dims[0], -1), f, origin))


# ── started and awaited separately ───────────────────────────────────────────────────────────────────────


class Flight:
    """One application of a map that is started and awaited separately.

    In the graph it is two nodes, connected by an empty tensor. Its derivatives are again a start and a wait. The
    tangent is started by `_Start` and awaited by `_Wait`; the adjoint is started by the backward of `_Wait` and awaited
    by that of `_Start`.
    """

    __slots__ = ("adjoints", "number", "origin", "tangents", "wait")

    def __init__(self, origin: Origin | None) -> None:
        #: The forward call whose backward this is, if it is one.
        self.origin = origin
        #: Of this call, if it is a forward call.
        self.number = 0
        self.wait: Callable[[], Tensor] | None = None
        #: Tangents in flight, in the order of the levels of forward mode.
        self.tangents: deque[Flight] = deque()
        #: The adjoint in flight, by the number of the backward pass: a hook may run a nested one through this graph.
        self.adjoints: dict[int, Flight] = {}


class _Awaited:
    """The wait of a flight, to be called once; not traced, since what eager code has started cannot be in a graph."""

    def __init__(self, empty: Tensor, f: Linear, flight: Flight) -> None:
        self._of = empty, f, flight

    @partial(
        untraced,
        reason="eager code started the collective; call wait() before the compiled function, or compile without "
        "fullgraph",
    )
    def __call__(self) -> Tensor:
        return _run(_Wait, *self._of)


class _Start(Function):
    """From x to an empty tensor."""

    @staticmethod
    def forward(x: Tensor, f: Linear, flight: Flight) -> Tensor:
        flight.wait = InFlight(x, f, flight.origin)
        flight.number = f.engine.calls
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, Flight], output: Tensor) -> None:
        _, ctx.f, ctx.flight = inputs
        ctx.origin = ctx.flight.origin or Origin(ctx.f.name, 2, None, ctx.flight.number)

    @staticmethod
    def backward(ctx: Any, gempty: Tensor) -> tuple[Tensor, None, None]:
        adjoint = ctx.flight.adjoints.pop(backward_at_work(), None)
        if adjoint is None:  # without a wait, this node is reached only through the chain of joint_backward
            raise RuntimeError(
                f"{ctx.origin.name}(async_op=True) at {ctx.origin.line}: backward: got a collective in flight, "
                "expected one whose wait() was called within the region, on all ranks"
            )
        return _run(_Wait, gempty, ctx.f.adjoint, adjoint), None, None

    @staticmethod
    def jvp(ctx: Any, tx: Tensor, *_: None) -> Tensor:
        ctx.flight.tangents.append(Flight(None))
        return _run(_Start, tx, ctx.f, ctx.flight.tangents[-1])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], x: Tensor, f: Linear, flight: Flight) -> tuple[Tensor, int]:
        empty = _run(_Start, x.movedim(in_dims[0], -1), f, flight)
        return empty.unsqueeze(1).expand(0, info.batch_size), 1


class _Wait(Function):
    """From the empty tensor to y."""

    @staticmethod
    def forward(empty: Tensor, f: Linear, flight: Flight) -> Tensor:
        assert flight.wait is not None
        y, flight.wait = flight.wait(), None  # what it refers to is freed: no collector sees a cycle through C++
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, Flight], output: Tensor) -> None:
        save_in_checkpoint(ctx)
        _, ctx.f, ctx.flight = inputs
        origin = ctx.flight.origin
        ctx.origin = origin.of_next_order() if origin else Origin(ctx.f.name, 2, None, ctx.flight.number)
        ctx.thread = get_ident()

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        read_in_checkpoint(ctx)
        ctx.flight.adjoints[backward_at_work()] = adjoint = Flight(_of_backward(ctx, gy))
        return _run(_Start, _dense(gy), ctx.f.adjoint, adjoint), None, None

    @staticmethod
    def jvp(ctx: Any, tempty: Tensor, *_: None) -> Tensor:
        return _run(_Wait, tempty, ctx.f, ctx.flight.tangents.popleft())

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], empty: Tensor, f: Linear, flight: Flight
    ) -> tuple[Tensor, int]:
        return batch_last(_run(_Wait, empty.sum(in_dims[0]), f, flight))
