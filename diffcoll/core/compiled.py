"""The linear maps as torch.library ops, for torch.compile.

Eager code runs autograd Functions, which Dynamo does not trace if they have a `jvp`. Compiled code runs ops, which have
none. Both use the same maps: an op gets a map as a text, which has its class, its group by name, and its fields, and as
a list the sizes, which may be symbolic. Graph caches outlive processes, so the group is resolved at every call. No rule
is stated here.

    diffcoll::apply(x, map, sizes) → y
    diffcoll::start(x, ticket_shape, map, sizes) → ticket       with async_op
    diffcoll::wait(ticket, shape, dtype, device, map, sizes) → y

The gradient of a ticket is the ticket of the adjoint, so a compiled backward starts the adjoints in the same order as
an eager one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import traceback

from diffcoll.core.groups import engine_named, key_in_graphs
from diffcoll.core.joint import is_joint
from diffcoll.core.maps import MAPS, Linear, named
from diffcoll.core.moves import InFlight, move
from diffcoll.core.torch_private.autograd import backward_at_work
from diffcoll.core.torch_private.compiler import keep_in_checkpoints, keep_in_order
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.core.torch_private.transforms import batch_last, is_differentiating

if not COMPILES:
    raise NotImplementedError(
        f"collectives in torch.compile and torch.export need torch 2.12 or later, and this is torch "
        f"{torch.__version__}; call the function uncompiled"
    )

# ── a map as a text and a list of sizes ──────────────────────────────────────────────────────────────────

#: The fields of each map that are lists of sizes, and the others.
_SIZES = {name: [f.name for f in fields(kind) if f.name.endswith("sizes")] for name, kind in MAPS.items()}
_OTHERS = {
    name: [f.name for f in fields(kind) if f.name != "engine" and f.name not in _SIZES[name]]
    for name, kind in MAPS.items()
}


def _written(f: Linear) -> tuple[str, list[int]]:
    """Return a map as a text and a list of sizes."""
    kind = type(f).__name__
    lists = [getattr(f, name) for name in _SIZES[kind]]
    others = ", ".join(_literal(getattr(f, name)) for name in _OTHERS[kind])
    lengths = ", ".join(str(len(sizes)) for sizes in lists)
    text = f"{kind}|{f.name}|{f.detail}|[{others}]|[{lengths}]|{key_in_graphs(f.engine)}"
    return text, [size for sizes in lists for size in sizes]


def _literal(value: Any) -> str:
    return f"'{value}'" if isinstance(value, torch.dtype) else f"{value}"


def _read(text: str, sizes: Sequence[int]) -> Linear:
    """Return the map that was written."""
    kind, name, detail, others, lengths, key = text.split("|", 5)
    values: dict[str, Any] = {}
    for field, value in zip(_OTHERS[kind], ast.literal_eval(others), strict=True):
        values[field] = getattr(torch, value.removeprefix("torch.")) if isinstance(value, str) else value
    start = 0
    for field, length in zip(_SIZES[kind], ast.literal_eval(lengths), strict=True):
        values[field] = tuple(sizes[start : start + length])
        start += length
    f: Linear = MAPS[kind](engine_named(key), **values)
    return named(f, name, detail)


# ── what the rules call ──────────────────────────────────────────────────────────────────────────────────


def apply(f: Linear, x: Tensor) -> Tensor:
    """Return f(x) as one op in the graph, with the op of the adjoint as its derivative."""
    y: Tensor = torch.ops.diffcoll.apply.default(x, *_written(f))
    return y


def start(f: Linear, x: Tensor) -> Callable[[], Tensor]:
    """Start f on x as one op in the graph; the returned function waits for f(x), as another."""
    return _wait_for(f, _start(f, x, [1]), f.shape(x.shape), x)


def _start(f: Linear, x: Tensor, shape: Sequence[int]) -> Tensor:
    ticket: Tensor = torch.ops.diffcoll.start.default(x, shape, *_written(f))
    return ticket


def _wait_for(f: Linear, ticket: Tensor, shape: Sequence[int], like: Tensor) -> Callable[[], Tensor]:
    """Return the function that waits for f(x), of this shape and with dtype and device of `like`.

    It refers to values that Dynamo can return from a graph, so a Pending that was made in a graph may leave it.
    """
    op, dtype, device = torch.ops.diffcoll.wait.default, like.dtype, like.device
    text, sizes = _written(f)
    return lambda: op(ticket, shape, dtype, device, text, sizes)


def _checked(text: str, sizes: Sequence[int]) -> Linear:
    """Return the map; raise within joint_backward or forward mode, which Dynamo's guards do not check.

    A backward within a region of joint_backward is allowed: its forward was called outside.
    """
    f = _read(text, sizes)
    if is_joint() and backward_at_work() < 0:
        raise RuntimeError(
            f"{f.name}: a compiled graph within joint_backward: the chain of the region is not in the graph; call the "
            "function uncompiled there, or compile the parts without collectives"
        )
    if is_differentiating():
        raise RuntimeError(
            f"{f.name}: a compiled graph was called within torch.func.jvp, forward_ad and the like: PyTorch "
            "has no forward-mode rules for ops and would drop tangents; call the function uncompiled there"
        )
    return f


# ── the ops ──────────────────────────────────────────────────────────────────────────────────────────────

#: What was started by an op and not waited for; its ticket keeps it alive. If an error or the end of a checkpoint's
#: recomputation prevents the wait, the ticket is freed, and the next call in the group waits.
_flights: WeakValueDictionary[int, InFlight] = WeakValueDictionary()
_numbers = count(1)


class _Apply:
    """y of x; the gradient is that of the adjoint."""

    schema = "(Tensor x, str map, SymInt[] sizes) -> Tensor"

    @staticmethod
    def kernel(x: Tensor, text: str, sizes: Sequence[int]) -> Tensor:
        return move(x, _checked(text, sizes))

    @staticmethod
    def fake(x: Tensor, text: str, sizes: Sequence[int]) -> Tensor:
        # Not x.new_empty: if x is a constant in the graph, the compiler would treat the result as one too.
        return torch.empty(_read(text, sizes).shape(x.shape), dtype=x.dtype, device=x.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, Sequence[int]], output: Tensor) -> None:
        ctx.f = _read(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Any, ...]:
        return apply(ctx.f.adjoint, gy), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, text: str, sizes: Sequence[int]) -> tuple[Tensor, int]:
        return batch_last(apply(_read(text, sizes), x.movedim(in_dims[0], -1)))


class _Start:
    """A ticket of x, filled with the number of what was started; its gradient is the ticket of the adjoint."""

    schema = "(Tensor x, SymInt[] shape, str map, SymInt[] sizes) -> Tensor"

    @staticmethod
    def kernel(x: Tensor, shape: Sequence[int], text: str, sizes: Sequence[int]) -> Tensor:
        flight, number = InFlight(x, _checked(text, sizes), None), next(_numbers)
        _flights[number] = flight
        ticket = torch.full(shape, float(number), dtype=torch.float64, device="cpu")
        ticket.flight = flight  # type: ignore[attr-defined]
        return ticket

    @staticmethod
    def fake(x: Tensor, shape: Sequence[int], text: str, sizes: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, text, sizes = inputs
        ctx.f, ctx.shape, ctx.like = _read(text, sizes), x.shape, x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gticket: Tensor) -> tuple[Any, ...]:
        return _wait_for(ctx.f.adjoint, gticket, ctx.shape, ctx.like)(), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, shape: Sequence[int], text: str, sizes: Sequence[int]
    ) -> tuple[Tensor, int]:
        return _start(_read(text, sizes), x.movedim(in_dims[0], -1), [info.batch_size, *shape]), 0


class _Wait:
    """y of a ticket; the backward starts the adjoint."""

    schema = "(Tensor ticket, SymInt[] shape, ScalarType dtype, Device device, str map, SymInt[] sizes) -> Tensor"

    @staticmethod
    def kernel(ticket: Tensor, shape: Any, dtype: Any, device: Any, text: str, sizes: Sequence[int]) -> Tensor:
        flight = _flights.pop(int(ticket.view(-1)[0]), None)
        if flight is None:
            name = _checked(text, sizes).name
            raise RuntimeError(f"{name}(async_op=True) in a graph: waited for twice, or backward without wait()")
        return flight()

    @staticmethod
    def fake(ticket: Tensor, shape: Any, dtype: Any, device: Any, text: str, sizes: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ticket, _, _, _, text, sizes = inputs
        ctx.f, ctx.shape = _read(text, sizes), ticket.shape

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Any, ...]:
        return _start(ctx.f.adjoint, gy, ctx.shape), None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, ticket: Tensor, shape: Any, dtype: Any, device: Any, text: str, sizes: Sequence[int]
    ) -> tuple[Tensor, int]:
        like = torch.empty(0, dtype=dtype, device=device)
        return batch_last(_wait_for(_read(text, sizes), ticket, [*shape, info.batch_size], like)())


def _define(name: str, op: Any) -> None:
    def fake(*inputs: Any) -> Tensor:
        traceback.get_current_meta().pop("recompute", None)  # see `keep_in_checkpoints`
        y: Tensor = op.fake(*inputs)
        return y

    definition = torch.library.custom_op(
        f"diffcoll::{name}",
        op.kernel,
        mutates_args=(),
        schema=op.schema,
        # The tag of ops whose result does not depend on their arguments alone. The compiler does not fold it if the
        # arguments are constants, recompute it in backward to save memory, or merge it with an equal one.
        tags=[torch.Tag.nondeterministic_seeded],
    )
    definition.register_fake(fake)
    definition.register_autograd(op.backward, setup_context=op.setup_context)
    definition.register_vmap(op.vmap)
    overload = getattr(torch.ops.diffcoll, name).default
    keep_in_order(definition, overload)
    keep_in_checkpoints(overload)


_define("apply", _Apply)
_define("start", _Start)
_define("wait", _Wait)
