"""The linear maps as one torch.library op, for torch.compile: `diffcoll::apply(x, map, sizes) → y`.

Eager code runs autograd Functions, which Dynamo does not trace if they have a `jvp`. Compiled code runs this op, which
has none. Both use the same maps: the op gets a map as a text, which has its class, its group by name, and its fields,
and as a list the sizes, which may be symbolic. Graph caches outlive processes, so the group is resolved at every call.
No rule is stated here. With `async_op` the op waits for its result, too.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback

from diffcoll.core.groups import engine_named, key_in_graphs, refuse_derivatives
from diffcoll.core.maps import MAPS, Linear, part_of
from diffcoll.core.moves import move
from diffcoll.core.torch_private.compiler import keep_in_checkpoints, keep_in_order
from diffcoll.core.torch_private.release import COMPILES

if not COMPILES:
    raise NotImplementedError(
        f"collectives in torch.compile and torch.export need torch 2.12 or later, and this is torch "
        f"{torch.__version__}; call the function uncompiled"
    )

#: The fields of each map; the first is its engine.
_FIELDS = {name: [field.name for field in fields(kind)[1:]] for name, kind in MAPS.items()}


def apply(f: Linear, x: Tensor) -> Tensor:
    """Return f(x) as one op in the graph, with the op of the adjoint as its derivative."""
    y: Tensor = torch.ops.diffcoll.apply.default(x, *_written(f))
    return y


def _written(f: Linear) -> tuple[str, list[int]]:
    """Return a map as a text and a list of sizes; the text has the length of each list of sizes in its place."""
    kind, words, found = type(f).__name__, [], []
    for field in _FIELDS[kind]:
        value = getattr(f, field)
        if field.endswith("sizes"):
            words.append(f"{len(value)}")
            found += value
        else:
            words.append(f"'{value}'" if isinstance(value, torch.dtype) else f"{value}")
    return f"{kind}|{f.name}|{f.detail}|[{', '.join(words)}]|{key_in_graphs(f.engine)}", found


def _read(text: str, sizes: Sequence[int]) -> Linear:
    """Return the map that was written."""
    kind, name, detail, words, key = text.split("|", 4)
    values: dict[str, Any] = {}
    start = 0
    for field, value in zip(_FIELDS[kind], ast.literal_eval(words), strict=True):
        if field.endswith("sizes"):
            values[field] = tuple(sizes[start : start + value])
            start += value
        else:
            values[field] = getattr(torch, value.removeprefix("torch.")) if isinstance(value, str) else value
    f: Linear = MAPS[kind](engine_named(key), **values)
    return part_of(f, name, detail)


@torch.library.custom_op(
    "diffcoll::apply",
    mutates_args=(),
    schema="(Tensor x, str map, SymInt[] sizes) -> Tensor",
    # The tag of ops whose result does not depend on their arguments alone. The compiler does not fold it if the
    # arguments are constants, recompute it in backward to save memory, or merge it with an equal one.
    tags=[torch.Tag.nondeterministic_seeded],
)
def _op(x: Tensor, text: str, sizes: Sequence[int]) -> Tensor:
    f = _read(text, sizes)
    refuse_derivatives(f.name)  # Dynamo's guards do not check them
    return move(x, f)


@_op.register_fake
def _fake(x: Tensor, text: str, sizes: Sequence[int]) -> Tensor:
    traceback.get_current_meta().pop("recompute", None)  # see `keep_in_checkpoints`
    # Not x.new_empty: if x is a constant in the graph, the compiler would treat the result as one too.
    return torch.empty(_read(text, sizes).shape(x.shape), dtype=x.dtype, device=x.device)


@_op.register_vmap
def _vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, text: str, sizes: Sequence[int]) -> tuple[Tensor, int]:
    y = apply(_read(text, sizes), x.movedim(in_dims[0], -1))
    return y, y.dim() - 1


def _setup_context(ctx: Any, inputs: tuple[Tensor, str, Sequence[int]], output: Tensor) -> None:
    ctx.f = _read(*inputs[1:])


def _backward(ctx: Any, gy: Tensor) -> tuple[Any, ...]:
    return apply(ctx.f.adjoint, gy), None, None


_op.register_autograd(_backward, setup_context=_setup_context)
keep_in_order(_op, torch.ops.diffcoll.apply.default)
keep_in_checkpoints(torch.ops.diffcoll.apply.default)
