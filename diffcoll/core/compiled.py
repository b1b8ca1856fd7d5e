"""The linear maps as torch.library ops, for torch.compile.

Eager code runs autograd Functions, which Dynamo does not trace if they have a `jvp`. Compiled code runs ops, which have
none. Both use the same `Linear` objects: the arguments of an op are the fields of one, and the op's kernel, fake kernel
and backward call its methods. No rule is stated here.

A map has three ops. The first returns y. With `async_op` there are two nodes, as in eager code (`derivatives.py`): the
second op starts the map and returns a ticket, the third takes the ticket and waits for y. The gradient of the ticket is
the ticket of the adjoint. So a compiled backward starts the adjoints in the same order as an eager one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import count
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import traceback

from diffcoll.core import checks
from diffcoll.core.agreement import Agreement
from diffcoll.core.errors import user_line
from diffcoll.core.groups import engine_named, key_in_graphs
from diffcoll.core.joint import is_joint
from diffcoll.core.linear import MAPS, PER_RANK, Linear, common_shape
from diffcoll.core.moves import InFlight, move, named
from diffcoll.core.torch_private.autograd import backward_at_work
from diffcoll.core.torch_private.compiler import keep_in_checkpoints, keep_in_order
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.core.torch_private.tracing import is_jit_tracing
from diffcoll.core.torch_private.transforms import batch_last, is_differentiating
from diffcoll.engines.engine import Engine

if not COMPILES:
    raise NotImplementedError(
        f"collectives in torch.compile, torch.export, make_fx and the like need torch 2.12 or later, and this is torch "
        f"{torch.__version__}; call the function uncompiled"
    )

T = TypeVar("T")


class _Ops(NamedTuple):
    """The ops of a map: y of x; a ticket of x; y of a ticket."""

    run: Any
    start: Any
    wait: Any


_SCHEMA = {"int": "SymInt", "bool": "bool", "tuple[int, ...]": "SymInt[]", "tuple[tuple[int, int], ...]": "int[]"}
_SCHEMA["torch.dtype | None"] = "ScalarType?"
_ops: dict[type[Linear], _Ops] = {}
_names: dict[type[Linear], tuple[str, ...]] = {}


def apply(f: Linear, x: Tensor) -> Tensor:
    """Return f(x) as one op in the graph, with the op of the adjoint as its derivative."""
    y: Tensor = _ops[type(f)].run(x, *_arguments(f))
    return y


def start(f: Linear, x: Tensor) -> Callable[[], Tensor]:
    """Start f on x as one op in the graph; the returned function waits for f(x), as another."""
    return _wait_for(f, _start(f, x, [1]), f.shape(x.shape), x)


def _start(f: Linear, x: Tensor, shape: Sequence[int]) -> Tensor:
    """Start f on x; return a ticket of this shape."""
    ticket: Tensor = _ops[type(f)].start(x, shape, *_arguments(f))
    return ticket


def _wait_for(f: Linear, ticket: Tensor, shape: Sequence[int], like: Tensor) -> Callable[[], Tensor]:
    """Return the function that waits for f(x), of this shape and with dtype and device of `like`.

    It refers to values that Dynamo can return from a graph, so a Pending that was made in a graph may leave it.
    """
    op, arguments, dtype, device = _ops[type(f)].wait, _arguments(f), like.dtype, like.device
    return lambda: op(ticket, shape, dtype, device, *arguments)


def _arguments(f: Linear) -> list[Any]:
    return [key_in_graphs(f.engine), *[_flat(getattr(f, name)) for name in _names[type(f)]]]


class _Caller(threading.local):
    #: Whether the op is called by an autograd Function of the library, which computes the derivatives.
    is_function: bool = False


_caller = _Caller()


def traced(f: Linear, x: Tensor) -> Tensor:
    """Return f(x) as one op, for tracers of eager code below autograd: make_fx, AOTAutograd, FakeTensorMode."""
    return _by_function(f, lambda: apply(f, x))


def traced_start(f: Linear, x: Tensor) -> Callable[[], Tensor]:
    """Do what `start` does, for the same tracers as `traced`."""
    wait = _by_function(f, lambda: start(f, x))
    return lambda: _by_function(f, wait)


def _by_function(f: Linear, step: Callable[[], T]) -> T:
    if is_jit_tracing():
        raise RuntimeError(
            f"{f.name}: torch.jit.trace cannot record a collective; use torch.export or torch.compile, which can"
        )
    if is_joint() and backward_at_work() < 0:
        raise RuntimeError(_IN_JOINT.format(f.name))
    before, _caller.is_function = _caller.is_function, True
    try:
        return step()
    finally:
        _caller.is_function = before


def _check_context(name: str) -> None:
    """Raise if a compiled graph is called within joint_backward or forward mode, which Dynamo's guards do not check.

    A backward within a region of joint_backward is allowed: its forward was called outside.
    """
    if is_joint() and backward_at_work() < 0:
        raise RuntimeError(_IN_JOINT.format(name))
    if is_differentiating():
        raise RuntimeError(
            f"{name}: a compiled or traced graph was called within torch.func.jvp, forward_ad and the like: PyTorch "
            "has no forward-mode rules for ops and would drop tangents; call the function uncompiled there"
        )


_IN_JOINT = (
    "{}: a compiled or traced graph within joint_backward: the chain of the region is not in the graph; call the "
    "function uncompiled there, or compile the parts without collectives"
)


def _compare(f: Linear, x: Tensor, later: bool = False) -> None:
    """In check mode, compare the map with those of the other ranks; the call that it belongs to is not known here."""
    given = {name: getattr(f, name) for name in _names[type(f)] if name not in PER_RANK}
    words = ", ".join(f"{name}={value!r}" for name, value in given.items()) + ", started" * later
    text = f"compiled {type(f).__name__}({x.dtype} {tuple(x.shape)}, {words}) at {user_line()}"
    checks.compare(f.engine, ("compiled", type(f).__name__, x.dtype, common_shape(f, x), given, later), text)


def _flat(value: Any) -> Any:
    """Return a field of a map as an argument of the op: pairs are flattened."""
    if isinstance(value, tuple):
        return [v for pair in value for v in pair] if value and isinstance(value[0], tuple) else list(value)
    return value


#: What was started by an op and not waited for; its ticket keeps it alive. If an error or the end of a checkpoint's
#: recomputation prevents the wait, the ticket is freed, and the next call in the group waits.
_flights: WeakValueDictionary[int, InFlight] = WeakValueDictionary()
_numbers = count(1)


def _ticket(flight: InFlight, shape: Sequence[int]) -> Tensor:
    """Return a tensor filled with the number of what was started; autograd treats it as a function of x."""
    number = next(_numbers)
    _flights[number] = flight
    ticket = torch.full(shape, float(number), dtype=torch.float64, device="cpu")
    ticket.flight = flight  # type: ignore[attr-defined]
    return ticket


def _flight(f: Linear, ticket: Tensor) -> InFlight:
    flight = _flights.pop(int(ticket.view(-1)[0]), None)
    if flight is None:
        raise RuntimeError(f"{f.name}(async_op=True) in a graph: waited for twice, or backward without wait()")
    return flight


def _register(kind: type[Linear]) -> None:
    arguments = [(f.name, str(f.type)) for f in fields(kind) if f.name != "engine"]
    _names[kind] = tuple(name for name, _ in arguments)
    schema = ", ".join(["str group", *(f"{_SCHEMA[t]} {name}" for name, t in arguments)])
    nothing = [None] * (1 + len(arguments))

    def build(group: str, *values: Any) -> Linear:
        row = zip(arguments, values, strict=True)
        return kind(engine_named(group), *(_unflat(t, value) for (_, t), value in row))

    def checked(*values: Any) -> Linear:
        f = build(*values)
        if not _caller.is_function:
            _check_context(f.name)
        return f

    class Run:
        """y of x; the gradient is that of the adjoint."""

        schema = "Tensor x"

        @staticmethod
        def kernel(x: Tensor, *values: Any) -> Tensor:
            f = checked(*values)
            return move(x, f, compare=lambda: _compare(f, x))

        @staticmethod
        def fake(x: Tensor, *values: Any) -> Tensor:
            # Not x.new_empty: if x is a constant in the graph, the compiler would treat the result as one too.
            return torch.empty(build(*values).shape(x.shape), dtype=x.dtype, device=x.device)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.f = build(*inputs[1:])

        @staticmethod
        def backward(ctx: Any, gy: Tensor) -> tuple[Any, ...]:
            return apply(ctx.f.adjoint, gy), *nothing

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *values: Any) -> tuple[Tensor, int]:
            return batch_last(apply(build(*values), x.movedim(in_dims[0], -1)))

    class Start:
        """A ticket of x; its gradient is the ticket of the adjoint, for which the backward waits."""

        schema = "Tensor x, SymInt[] shape"

        @staticmethod
        def kernel(x: Tensor, shape: Sequence[int], *values: Any) -> Tensor:
            f = checked(*values)
            flight = named(f, None, x, lambda: InFlight(x, f, None, lambda: _compare(f, x, later=True)))
            return _ticket(flight, shape)

        @staticmethod
        def fake(x: Tensor, shape: Sequence[int], *values: Any) -> Tensor:
            return torch.empty(shape, dtype=torch.float64, device="cpu")

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            x, _, *values = inputs
            ctx.f, ctx.shape, ctx.like = build(*values), x.shape, x.new_empty(0)

        @staticmethod
        def backward(ctx: Any, gticket: Tensor) -> tuple[Any, ...]:
            return _wait_for(ctx.f.adjoint, gticket, ctx.shape, ctx.like)(), None, *nothing

        @staticmethod
        def vmap(
            info: Any, in_dims: tuple[Any, ...], x: Tensor, shape: Sequence[int], *values: Any
        ) -> tuple[Tensor, int]:
            return _start(build(*values), x.movedim(in_dims[0], -1), [info.batch_size, *shape]), 0

    class Wait:
        """y of a ticket; the backward starts the adjoint."""

        schema = "Tensor ticket, SymInt[] shape, ScalarType dtype, Device device"

        @staticmethod
        def kernel(ticket: Tensor, shape: Any, dtype: Any, device: Any, *values: Any) -> Tensor:
            f = checked(*values)
            return named(f, None, ticket, _flight(f, ticket))

        @staticmethod
        def fake(ticket: Tensor, shape: Any, dtype: Any, device: Any, *values: Any) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ticket, _, _, _, *values = inputs
            ctx.f, ctx.shape = build(*values), ticket.shape

        @staticmethod
        def backward(ctx: Any, gy: Tensor) -> tuple[Any, ...]:
            return _start(ctx.f.adjoint, gy, ctx.shape), None, None, None, *nothing

        @staticmethod
        def vmap(
            info: Any, in_dims: tuple[Any, ...], ticket: Tensor, shape: Any, dtype: Any, device: Any, *values: Any
        ) -> tuple[Tensor, int]:
            like = torch.empty(0, dtype=dtype, device=device)
            return batch_last(_wait_for(build(*values), ticket, [*shape, info.batch_size], like)())

    ops = {"": Run, "Start": Start, "Wait": Wait}
    _ops[kind] = _Ops(*[_define(prefix + kind.__name__, op, schema) for prefix, op in ops.items()])


def _define(name: str, op: Any, more: str) -> Any:
    """Register an op of a map."""

    def fake(*inputs: Any) -> Tensor:
        traceback.get_current_meta().pop("recompute", None)  # see `keep_in_checkpoints`
        y: Tensor = op.fake(*inputs)
        return y

    definition = torch.library.custom_op(
        f"diffcoll::{name}",
        op.kernel,
        mutates_args=(),
        schema=f"({op.schema}, {more}) -> Tensor",
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
    return overload


def _unflat(kind: str, value: Any) -> Any:
    """Return the field of a map for an argument of the op, the inverse of `_flat`."""
    if kind == "tuple[int, ...]":
        return tuple(value)
    if kind == "tuple[tuple[int, int], ...]":
        return tuple(zip(value[::2], value[1::2], strict=True))
    return value


# ── the header of a scatter ──────────────────────────────────────────────────────────────────────────────


def header(engine: Engine, root: int, structure: int, numbers: list[int]) -> None:
    """Send or receive, when the graph runs, the header that eager code does; raise on all ranks if it is another."""
    torch.ops.diffcoll.header.default(key_in_graphs(engine), root, structure, numbers)


def _exchange_header(group: str, root: int, structure: int, numbers: list[int]) -> None:
    _check_context("scatter")
    Agreement("scatter", None, engine_named(group), False, {"src": root}).header(root, list(numbers), structure)


_header = torch.library.custom_op(
    "diffcoll::header",
    _exchange_header,
    mutates_args=(),
    schema="(str group, int root, int structure, SymInt[] numbers) -> ()",
)
_header.register_fake(lambda *_: None)
keep_in_order(_header, torch.ops.diffcoll.header.default)
keep_in_checkpoints(torch.ops.diffcoll.header.default)


for _kind in MAPS.values():
    _register(_kind)
