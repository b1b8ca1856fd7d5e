"""The linear maps as torch.library ops, for torch.compile.

Eager code runs autograd Functions, which Dynamo does not trace when they have forward-mode rules; compiled code
runs ops, which have none. Both are made of the same `Linear` objects: an op's arguments are the fields of one, and
its kernel, its shape and its backward ask that object. No rule is stated here.
"""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType
from torch._inductor import lowering, virtualized
from torch.fx import traceback
from torch.utils import checkpoint

from diffcoll.core import checks
from diffcoll.core._torch import COMPILES, backward_at_work, batch_last, is_differentiating, is_jit_tracing
from diffcoll.core.errors import user_line
from diffcoll.core.groups import engine_named, key_in_graphs
from diffcoll.core.joint import is_joint
from diffcoll.core.linear import MAPS, PER_RANK, UNEVEN, Linear
from diffcoll.core.moves import move
from diffcoll.core.reductions import Product

__all__ = ["apply", "product", "traced"]

if not COMPILES:
    raise NotImplementedError(
        f"collectives in torch.compile, torch.export, make_fx and the like need torch 2.12 or later, and this is torch "
        f"{torch.__version__}; call the function uncompiled"
    )

_SCHEMA = {"int": "SymInt", "bool": "bool", "tuple[int, ...]": "SymInt[]", "tuple[tuple[int, int], ...]": "int[]"}
_ops: dict[type[Linear], Any] = {}
_names: dict[type[Linear], tuple[str, ...]] = {}


def apply(f: Linear, x: Tensor) -> Tensor:
    """Return f(x) as one op in the graph, with the op of the adjoint as its derivative."""
    kind = type(f)
    y: Tensor = _ops[kind](x, key_in_graphs(f.engine), *[_flat(getattr(f, name)) for name in _names[kind]])
    return y


class _Here(threading.local):
    #: Whether an autograd Function of the library calls an op, and sees to its derivatives.
    derived: bool = False


_here = _Here()


def traced(f: Linear, x: Tensor) -> Tensor:
    """Return f(x) as one op, for those who trace eager code below autograd: make_fx, AOTAutograd, FakeTensorMode."""
    if is_jit_tracing():
        raise RuntimeError(
            f"{f.name}: torch.jit.trace cannot record a collective; use torch.export or torch.compile, which can"
        )
    if is_joint() and backward_at_work() < 0:
        raise RuntimeError(_IN_JOINT.format(f.name))
    before, _here.derived = _here.derived, True
    try:
        return apply(f, x)
    finally:
        _here.derived = before


def _refuse(name: str) -> None:
    """Raise where a graph that was compiled elsewhere must not run: it does not look where it is called.

    A backward within the region is fine: its forward was called outside.
    """
    if is_joint() and backward_at_work() < 0:
        raise RuntimeError(_IN_JOINT.format(name))
    if is_differentiating():
        raise RuntimeError(
            f"{name}: a compiled or traced graph was called within torch.func.jvp, forward_ad and the like: PyTorch "
            "has no such rules for ops, and would drop tangents; call the function uncompiled there"
        )


_IN_JOINT = (
    "{}: a compiled or traced graph within joint_backward: the chain of the region is not in the graph; call the "
    "function uncompiled there, or compile the parts without collectives"
)


def _compare(f: Linear, x: Tensor) -> None:
    """In check mode, compare the map with those of the other ranks: the call that made it is not known here."""
    given = {name: getattr(f, name) for name in _names[type(f)] if name not in PER_RANK}
    same = list(x.shape) if f.name not in UNEVEN else x.dim()
    words = ", ".join(f"{name}={value!r}" for name, value in given.items())
    text = f"compiled {type(f).__name__}({x.dtype} {tuple(x.shape)}, {words}) at {user_line()}"
    checks.compare(f.engine, ("compiled", type(f).__name__, x.dtype, same, given), text)


def _flat(value: Any) -> Any:
    """A field as an argument of the op: pairs in one row."""
    if isinstance(value, tuple):
        return [v for pair in value for v in pair] if value and isinstance(value[0], tuple) else list(value)
    return value


def _register(kind: type[Linear]) -> None:
    arguments = [(f.name, str(f.type)) for f in fields(kind) if f.name != "engine"]
    _names[kind] = tuple(name for name, _ in arguments)
    schema = ", ".join(["Tensor x", "str group", *(f"{_SCHEMA[t]} {name}" for name, t in arguments)])

    def made(group: str, *values: Any) -> Linear:
        row = zip(arguments, values, strict=True)
        return kind(engine_named(group), *(_structured(t, value) for (_, t), value in row))

    def kernel(x: Tensor, group: str, *values: Any) -> Tensor:
        f = made(group, *values)
        if not _here.derived:
            _refuse(f.name)
        return move(x, f, compare=lambda: _compare(f, x)).contiguous()  # as `fake` says

    def fake(x: Tensor, group: str, *values: Any) -> Tensor:
        traceback.get_current_meta().pop("recompute", None)  # see `_keep_in_checkpoints`
        # Not x.new_empty: of an x whose value the compiler knows it would believe to know that too.
        return torch.empty(made(group, *values).shape(x.shape), dtype=x.dtype, device=x.device)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.f = made(*inputs[1:])

    def backward(ctx: Any, gy: Tensor) -> tuple[Any, ...]:
        return apply(ctx.f.adjoint, gy), None, *[None] * len(arguments)

    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, group: str, *values: Any) -> tuple[Tensor, int]:
        return batch_last(apply(made(group, *values), x.movedim(in_dims[0], -1)))

    op = torch.library.custom_op(
        f"diffcoll::{kind.__name__}",
        kernel,
        mutates_args=(),
        schema=f"({schema}) -> Tensor",
        # Not a function of its arguments alone: so it is not run while compiling, where they are constants, not
        # run again in the backward to save memory, and not merged with an equal one.
        tags=[torch.Tag.nondeterministic_seeded],
    )
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup_context)
    op.register_vmap(vmap)
    _ops[kind] = getattr(torch.ops.diffcoll, kind.__name__).default
    _keep_in_order(op, _ops[kind])
    _keep_in_checkpoints(_ops[kind])


def _structured(kind: str, value: Any) -> Any:
    if kind == "tuple[int, ...]":
        return tuple(value)
    if kind == "tuple[tuple[int, int], ...]":
        return tuple(zip(value[::2], value[1::2], strict=True))
    return value


# ── a rule that is not linear and of our own ─────────────────────────────────────────────────────────────


def product(s: Tensor) -> Tensor:
    """Return the product over dim 0 as one op."""
    y: Tensor = torch.ops.diffcoll.product(s)
    return y


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_product = torch.library.custom_op("diffcoll::product", Product.forward, mutates_args=(), schema="(Tensor s) -> Tensor")
_product.register_fake(lambda s: s.new_empty(s.shape[1:]))
_product.register_autograd(Product.backward, setup_context=_keep)
_product.register_vmap(Product.vmap)


# ── what the compiler may not do ─────────────────────────────────────────────────────────────────────────


def _keep_in_checkpoints(op: Any) -> None:
    """Let a compiled checkpoint keep the result of a collective, instead of making it again.

    What has an effect cannot be cut out of the forward graph and run again in the backward (torch 2.13: an assertion in
    its partitioner). Checkpoints tag every node by `torch.fx.traceback`'s metadata for nodes to come, from which `fake`
    takes the tag away, and once more afterwards, but for the ops listed here.
    """
    checkpoint.SAC_IGNORED_OPS.add(op)


def _keep_in_order(definition: Any, op: Any) -> None:
    """Forbid the compiler to drop a collective whose result this rank ignores, and to reorder collectives.

    It would be free to, since no data says so, and every rank compiles a graph of its own. There is no public way:
    AOTAutograd knows effects, and Inductor takes them over as dependencies. Until torch 2.14 it stores these in
    `additional_star_deps` under the names of buffers, where its scheduler looks for those of operations, so that a
    later pass reorders them to save memory. Hence a lowering of our own, which states them again. Torch 2.15 states
    them right, without that attribute: the lowering adds nothing there.
    """
    definition.register_effect(_EffectType.ORDERED)
    fall_back = lowering.fallback_handler(op)  # type: ignore[no-untyped-call]

    def lower(*args: Any, **kwargs: Any) -> Any:
        graph = virtualized.V.graph
        before = len(graph.operations)
        result = fall_back(*args, **kwargs)
        last = graph.effectful_ops.get(_EffectType.ORDERED)
        if last is not None and hasattr(graph, "additional_star_deps"):
            for operation in graph.operations[before:]:
                graph.additional_star_deps[operation.get_operation_name()].add(last.get_name())
        return result

    lowering.register_lowering(op, type_promotion_kind=None)(lower)


for _kind in MAPS.values():
    _register(_kind)
