"""Restrictions on PyTorch's compiler: it neither drops collectives, nor reorders, nor repeats them."""

from __future__ import annotations

from typing import Any

from diffcoll.core.torch_private.names import require

require("torch.compile")

# ruff: noqa: E402
from torch._higher_order_ops.effects import _EffectType
from torch._inductor import lowering, virtualized
from torch.utils import checkpoint


def keep_in_checkpoints(op: Any) -> None:
    """Make a compiled checkpoint save the result of a collective instead of recomputing it.

    An op with an effect cannot be moved from the forward graph to the backward graph (torch 2.13: an assertion in its
    partitioner). Checkpoints tag all nodes twice: by the metadata that `torch.fx.traceback` gives to new nodes, from
    which `fake` removes the tag, and once more afterwards, except for the ops listed here.
    """
    checkpoint.SAC_IGNORED_OPS.add(op)


def keep_in_order(definition: Any, op: Any) -> None:
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
