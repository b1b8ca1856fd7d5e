"""All derivatives of a collective, from its map F and the adjoint F*. The rules here serve all collectives.

    backward          gx = F* gy        F* is a collective, so its own backward is F again, to any order
    forward mode      ty = F tx         a linear map is its own derivative
    vmap              F with the batch dimension moved last; collectives never act on it

`apply` waits for the result at once. `start` returns a function that waits. In backward, the adjoint is started by the
node of the wait and awaited by the node of the start, so communication overlaps with computation there too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from diffcoll.core.errors import Origin
from diffcoll.core.joint import is_recorded, of_thread, read_in_checkpoint, recorded, recording
from diffcoll.core.maps import Linear
from diffcoll.core.moves import Flight, move
from diffcoll.core.torch_private.autograd import backward_at_work, save_in_checkpoint
from diffcoll.core.torch_private.tracing import untraced
from diffcoll.core.torch_private.transforms import is_batched_by_autograd, is_in_dual_level, is_within_transform


def apply(f: Linear, x: Tensor) -> Tensor:
    """Return f(x), differentiable to any order and in both modes; in a graph that is compiled, as one op."""
    return _in_graph(f, x) if f.engine.compiling else run(_Apply, x, f, None)


def start(f: Linear, x: Tensor, call: Origin | None) -> Callable[[], Tensor]:
    """Start f on x; the returned function, to be called once, waits for f(x), differentiable as `apply` is."""
    if call is None:
        y = _in_graph(f, x)
        return lambda: y
    flight = Flight(call)
    return partial(_awaited, run(_Start, x, f, flight), f, flight)


def _in_graph(f: Linear, x: Tensor) -> Tensor:
    from diffcoll.core import compiled  # takes time to import

    return compiled.apply(f, x)


@partial(
    untraced,
    reason="eager code started the collective; call wait() before the compiled function, or compile without fullgraph",
)
def _awaited(empty: Tensor, f: Linear, flight: Flight) -> Tensor:
    return run(_Wait, empty, f, flight)


def run(rule: Any, x: Tensor, f: Any, *more: Any) -> Tensor:
    """Return rule.apply(x, f, *more); a region of joint_backward records it on its chain.

    Function.apply binds its arguments to the signature of forward, which takes as long as a small message. Outside
    torch.func its base class does the same without that; where nothing records x, as in a first-order backward, forward
    alone does.
    """
    y: Tensor
    if is_within_transform():
        y = rule.apply(x, f, *more)
    elif of_thread.chain is not None and (chain := recording()) is not None and is_recorded(x, f.name):
        y = recorded(chain, rule, x, f, *more)
    elif x.requires_grad or is_in_dual_level():
        y = super(Function, rule).apply(x, f, *more)
    else:
        y = rule.forward(x, f, *more)
    return y


def _received(ctx: Any, gy: Tensor) -> tuple[Tensor, Origin]:
    """Return the gradient that a node has received, and what names its backward.

    Autograd runs nodes in the order of their numbers, which count the nodes of the thread that makes them. A backward
    with create_graph in autograd's own thread (that of an accelerator) makes nodes that are numbered by it, and ranks
    may have made unequal numbers of others there before.

    Raises:
        RuntimeError: this backward cannot be run, or ranks may run it in different orders.
    """
    origin: Origin = ctx.origin
    if ctx.saves:
        read_in_checkpoint(ctx)
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
        origin = origin.derived(origin.order, elsewhere=True)
    # The gradient of an embedding may be sparse, on some ranks only; engines do not send such.
    return gy if gy.layout is torch.strided else gy.to_dense(), origin


class _Apply(Function):
    """y = F x;  gx = F* gy;  ty = F tx.  `origin` is the forward call whose backward this is, if it is one."""

    forward = staticmethod(move)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, Origin | None], output: Tensor) -> None:
        save_in_checkpoint(ctx)
        _, f, origin = inputs
        ctx.f, ctx.thread = f, get_ident()
        ctx.origin = origin.derived(origin.order + 1) if origin else Origin(f.name, 2, None, f.engine.calls)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        gy, origin = _received(ctx, gy)
        return run(_Apply, gy, ctx.f.adjoint, origin), None, None

    @staticmethod
    def jvp(ctx: Any, tx: Tensor, *_: None) -> Tensor:
        return run(_Apply, tx, ctx.f, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], x: Tensor, f: Linear, origin: Origin | None
    ) -> tuple[Tensor, int]:
        y = run(_Apply, x.movedim(in_dims[0], -1), f, origin)
        return y, y.dim() - 1


# ── started and awaited separately ───────────────────────────────────────────────────────────────────────
#
# In the graph a flight is two nodes, connected by an empty tensor. Its derivatives are again a start and a wait. The
# tangent is started by `_Start` and awaited by `_Wait`; the adjoint is started by the backward of `_Wait` and awaited
# by that of `_Start`.


class _Start(Function):
    """From x to an empty tensor."""

    @staticmethod
    def forward(x: Tensor, f: Linear, flight: Flight) -> Tensor:
        flight.start(x, f)
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, Flight], output: Tensor) -> None:
        x, ctx.f, ctx.flight = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, gempty: Tensor) -> tuple[Tensor, None, None]:
        adjoint = ctx.flight.adjoints.pop(backward_at_work(), None)
        if adjoint is None:  # reached through the chain of joint_backward alone: no loss uses y, which nobody awaited
            gy = gempty.new_zeros(ctx.f.shape(ctx.shape))
            return run(_Apply, gy, ctx.f.adjoint, ctx.flight.backward), None, None
        return run(_Wait, gempty, ctx.f.adjoint, adjoint), None, None

    @staticmethod
    def jvp(ctx: Any, tx: Tensor, *_: None) -> Tensor:
        ctx.flight.tangents.append(Flight(ctx.flight.backward.derived(0)))
        return run(_Start, tx, ctx.f, ctx.flight.tangents[-1])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], x: Tensor, f: Linear, flight: Flight) -> tuple[Tensor, int]:
        empty = run(_Start, x.movedim(in_dims[0], -1), f, flight)
        return empty.unsqueeze(1).expand(0, info.batch_size), 1


class _Wait(Function):
    """From the empty tensor to y."""

    @staticmethod
    def forward(empty: Tensor, f: Linear, flight: Flight) -> Tensor:
        return flight.wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear, Flight], output: Tensor) -> None:
        save_in_checkpoint(ctx)
        _, ctx.f, ctx.flight = inputs
        ctx.thread, ctx.origin = get_ident(), ctx.flight.backward

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        gy, origin = _received(ctx, gy)
        ctx.flight.adjoints[backward_at_work()] = adjoint = Flight(origin)
        return run(_Start, gy, ctx.f.adjoint, adjoint), None, None

    @staticmethod
    def jvp(ctx: Any, tempty: Tensor, *_: None) -> Tensor:
        return run(_Wait, tempty, ctx.f, ctx.flight.tangents.popleft())

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], empty: Tensor, f: Linear, flight: Flight
    ) -> tuple[Tensor, int]:
        y = run(_Wait, empty.sum(in_dims[0]), f, flight)
        return y, y.dim() - 1
