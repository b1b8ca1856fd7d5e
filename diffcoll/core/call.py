"""How one call of a collective is executed.

group                 async_op
simulated, no rules   both        `diffcoll.truth`, in one autograd graph of all ranks
within torch.compile  False       one op in the graph
within torch.compile  True        two ops, start and wait
any other             False       `rules.apply`
any other             True        `rules.start`, and a `Pending`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from torch import Tensor

from diffcoll.core.arguments import Call
from diffcoll.core.maps import PER_RANK, Linear
from diffcoll.core.pending import Pending
from diffcoll.core.rules import apply, start
from diffcoll.core.torch_private.transforms import batch_sizes


class Bound(NamedTuple):
    """y = after(f(x)).

    steps: for a reduction that is not linear, executes all of it but the last map, which it returns; f is the map of
    the sum, which tells what ranks must agree on.
    """

    f: Linear
    x: Tensor
    after: Callable[[Tensor], Tensor] | None = None
    steps: Callable[[], tuple[Linear, Tensor, Callable[[Tensor], Tensor] | None]] | None = None


def perform(call: Call, bound: Bound) -> Any:
    """Return the result of a call whose arguments are read."""
    if call.engine.in_one_graph:
        return _in_truth(call, bound)
    f, x, after, steps = bound
    if steps is not None:
        f, x, after = steps()
    if call.async_op:
        wait = start(f, x)
        return Pending(call.name, wait if after is None else lambda: after(wait()))
    y = apply(f, x)
    return y if after is None else after(y)


def _in_truth(call: Call, bound: Bound) -> Any:
    """Execute a call by `diffcoll.truth`, with its arguments in one spelling."""
    arguments, f = dict(call.arguments), bound.f
    if "op" in arguments:
        arguments["op"] = call.op(call.x).name
    if "grad_placement" in arguments:
        arguments["grad_placement"] = "replicate" if call.replicated() else "partial"
    for name in ("dim", "split_dim", "concat_dim"):
        if arguments.get(name, 0) < 0:
            arguments[name] %= max(1, call.x.dim() + arguments.get("stack", False))
    values = [getattr(f, field.name) for field in fields(f) if field.name not in PER_RANK]
    meaning = call.name, f.detail, arguments.get("op"), *values
    kind = bound.x.dtype, f.common_shape(bound.x.shape), batch_sizes(bound.x)
    y: Tensor = call.engine.run_truth(call.name, call.x, arguments, (meaning, kind))
    return Pending(call.name, lambda: y) if call.async_op else y
