"""The linear maps as torch.library ops, for torch.compile.

Eager code runs autograd Functions, which Dynamo does not trace if they have a `jvp`. Compiled code runs ops, which have
none. Both use the same `Linear` objects: the arguments of an op are the fields of one, and the op's kernel, fake kernel
and backward call its methods. No rule is stated here.
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
from diffcoll.core.linear import MAPS, PER_RANK, Linear, common_shape
from diffcoll.core.moves import move
from diffcoll.core.over_ranks import value_in_pieces
from diffcoll.core.product import PRODUCT

__all__ = ["apply", "product", "traced"]

if not COMPILES:
    raise NotImplementedError(
        f"collectives in torch.compile, torch.export, make_fx and the like need torch 2.12 or later, and this is torch "
        f"{torch.__version__}; call the function uncompiled"
    )

_SCHEMA = {"int": "SymInt", "bool": "bool", "tuple[int, ...]": "SymInt[]", "tuple[tuple[int, int], ...]": "int[]"}
_SCHEMA["torch.dtype | None"] = "ScalarType?"
_ops: dict[type[Linear], Any] = {}
_names: dict[type[Linear], tuple[str, ...]] = {}


def apply(f: Linear, x: Tensor) -> Tensor:
    """Return f(x) as one op in the graph, with the op of the adjoint as its derivative."""
    kind = type(f)
    y: Tensor = _ops[kind](x, key_in_graphs(f.engine), *[_flat(getattr(f, name)) for name in _names[kind]])
    return y


class _Caller(threading.local):
    #: Whether the op is called by an autograd Function of the library, which computes the derivatives.
    is_function: bool = False


_caller = _Caller()


def traced(f: Linear, x: Tensor) -> Tensor:
    """Return f(x) as one op, for tracers of eager code below autograd: make_fx, AOTAutograd, FakeTensorMode."""
    if is_jit_tracing():
        raise RuntimeError(
            f"{f.name}: torch.jit.trace cannot record a collective; use torch.export or torch.compile, which can"
        )
    if is_joint() and backward_at_work() < 0:
        raise RuntimeError(_IN_JOINT.format(f.name))
    before, _caller.is_function = _caller.is_function, True
    try:
        return apply(f, x)
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


def _compare(f: Linear, x: Tensor) -> None:
    """In check mode, compare the map with those of the other ranks; the call that it belongs to is not known here."""
    given = {name: getattr(f, name) for name in _names[type(f)] if name not in PER_RANK}
    words = ", ".join(f"{name}={value!r}" for name, value in given.items())
    text = f"compiled {type(f).__name__}({x.dtype} {tuple(x.shape)}, {words}) at {user_line()}"
    checks.compare(f.engine, ("compiled", type(f).__name__, x.dtype, common_shape(f, x), given), text)


def _flat(value: Any) -> Any:
    """Return a field of a map as an argument of the op: pairs are flattened."""
    if isinstance(value, tuple):
        return [v for pair in value for v in pair] if value and isinstance(value[0], tuple) else list(value)
    return value


def _register(kind: type[Linear]) -> None:
    arguments = [(f.name, str(f.type)) for f in fields(kind) if f.name != "engine"]
    _names[kind] = tuple(name for name, _ in arguments)
    schema = ", ".join(["Tensor x", "str group", *(f"{_SCHEMA[t]} {name}" for name, t in arguments)])

    def build(group: str, *values: Any) -> Linear:
        row = zip(arguments, values, strict=True)
        return kind(engine_named(group), *(_unflat(t, value) for (_, t), value in row))

    def kernel(x: Tensor, group: str, *values: Any) -> Tensor:
        f = build(group, *values)
        if not _caller.is_function:
            _check_context(f.name)
        return move(x, f, compare=lambda: _compare(f, x)).contiguous()  # as the result of `fake` is

    def fake(x: Tensor, group: str, *values: Any) -> Tensor:
        traceback.get_current_meta().pop("recompute", None)  # see `_keep_in_checkpoints`
        # Not x.new_empty: if x is a constant in the graph, the compiler would treat the result as one too.
        return torch.empty(build(group, *values).shape(x.shape), dtype=x.dtype, device=x.device)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.f = build(*inputs[1:])

    def backward(ctx: Any, gy: Tensor) -> tuple[Any, ...]:
        return apply(ctx.f.adjoint, gy), None, *[None] * len(arguments)

    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, group: str, *values: Any) -> tuple[Tensor, int]:
        return batch_last(apply(build(group, *values), x.movedim(in_dims[0], -1)))

    op = torch.library.custom_op(
        f"diffcoll::{kind.__name__}",
        kernel,
        mutates_args=(),
        schema=f"({schema}) -> Tensor",
        # The tag of ops whose result does not depend on their arguments alone. The compiler does not fold it if the
        # arguments are constants, recompute it in backward to save memory, or merge it with an equal one.
        tags=[torch.Tag.nondeterministic_seeded],
    )
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup_context)
    op.register_vmap(vmap)
    _ops[kind] = getattr(torch.ops.diffcoll, kind.__name__).default
    _keep_in_order(op, _ops[kind])
    _keep_in_checkpoints(_ops[kind])


def _unflat(kind: str, value: Any) -> Any:
    """Return the field of a map for an argument of the op, the inverse of `_flat`."""
    if kind == "tuple[int, ...]":
        return tuple(value)
    if kind == "tuple[tuple[int, int], ...]":
        return tuple(zip(value[::2], value[1::2], strict=True))
    return value


# ── the product, a rule that is not linear ───────────────────────────────────────────────────────────────


def product(s: Tensor) -> Tensor:
    """Return the product over dim 0 as one op."""
    y: Tensor = torch.ops.diffcoll.product(s)
    return y


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, gy: Tensor) -> Tensor:
    (s,) = ctx.saved_tensors
    return PRODUCT.gradient(s, gy, gy)  # it does not use y


def _product_of_batch(info: Any, in_dims: tuple[int], s: Tensor) -> tuple[Tensor, int]:
    return batch_last(product(s.movedim(in_dims[0], -1)))


_product = torch.library.custom_op(
    "diffcoll::product", lambda s: value_in_pieces(s, PRODUCT), mutates_args=(), schema="(Tensor s) -> Tensor"
)
_product.register_fake(lambda s: s.new_empty(s.shape[1:]))
_product.register_autograd(_product_backward, setup_context=_save)
_product.register_vmap(_product_of_batch)


# ── restrictions on the compiler ─────────────────────────────────────────────────────────────────────────


def _keep_in_checkpoints(op: Any) -> None:
    """Make a compiled checkpoint save the result of a collective instead of recomputing it.

    An op with an effect cannot be moved from the forward graph to the backward graph (torch 2.13: an assertion in its
    partitioner). Checkpoints tag all nodes twice: by the metadata that `torch.fx.traceback` gives to new nodes, from
    which `fake` removes the tag, and once more afterwards, except for the ops listed here.
    """
    checkpoint.SAC_IGNORED_OPS.add(op)


def _keep_in_order(definition: Any, op: Any) -> None:
    """Keep the compiler from dropping a collective whose result this rank ignores, and from reordering collectives.

    No data dependency forbids either, and every rank compiles its own graph. There is no public API for this:
    AOTAutograd supports effects, and Inductor turns them into dependencies. Until torch 2.14 Inductor stores these in
    `additional_star_deps` by the names of buffers, but its scheduler looks them up by the names of operations, so a
    later pass reorders the collectives to save memory. The lowering here therefore adds the dependencies again. Torch
    2.15 stores them correctly and lacks that attribute; the lowering adds nothing there.
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
