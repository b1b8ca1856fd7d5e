"""How one call of a collective is executed.

The public function reads its arguments and binds a map, which is executed by:

    group                 async_op
    simulated, no rules   both        `diffcoll.truth`, in one autograd graph of all ranks
    within torch.compile  False       one op in the graph
    within torch.compile  True        two ops, start and wait
    any other             False       `derivatives.apply`
    any other             True        `derivatives.start`, and a `Pending`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from diffcoll.core import checks
from diffcoll.core.agreement import kind
from diffcoll.core.arguments import ADDED, CHECK_X_THEMSELVES, Call
from diffcoll.core.bound import Bound, BoundTree
from diffcoll.core.derivatives import Started, apply, start
from diffcoll.core.dtypes import wider
from diffcoll.core.groups import resolve
from diffcoll.core.linear import Linear
from diffcoll.core.pending import Pending
from diffcoll.core.reducing import Reducing
from diffcoll.core.torch_private.tensors import divide_
from diffcoll.engines.types import Group

#: Immutable types. Arguments are compared by identity; a plan keeps its arguments alive, so identities are not reused.
_ATOMS = frozenset((str, int, bool, type(None)))
#: Types of x for which plans are used. Other subclasses of Tensor may override the attributes that a plan depends on.
_TYPES = (Tensor, Parameter)
#: Maximum number of plans of a group.
_PLANS = 512


class Plan(NamedTuple):
    """The map of a call, valid for every x of the same dtype, shape and device: y = after(f(before(x)))."""

    f: Linear
    before: Callable[[Tensor], Tensor] | None
    after: Callable[[Tensor], Tensor] | None
    #: Kept alive, so that no other object gets their identities.
    arguments: tuple[Any, ...]


def perform(
    bind: Callable[[Call, Any], Bound | BoundTree],
    name: str,
    x: Any,
    group: Group,
    async_op: bool = False,
    **arguments: Any,
) -> Any:
    """Return the result of `name(x, group=group, **arguments)`.

    Args:
        bind: reads the arguments of the Call and returns a map of x. The group keeps that map for calls with the same
            arguments and an x of the same dtype, shape and device, unless ranks had to exchange sizes for it.
        name: of the collective.
        x: as the user passed it.
        group: as the user passed it.
        async_op: return a `Pending`.
        arguments: the others by name, as the user passed them.
    """
    engine = resolve(group, name)
    key = None
    if type(x) in _TYPES and not (engine.in_one_graph or engine.compiling or checks.is_on() or x.is_nested):
        key = (name, x.dtype, x.layout, x.shape, x.device, *map(id, (async_op, *arguments.values())))
        plan = engine.plans.get(key)
        if plan is not None:
            return _by_rules(plan, x if plan.before is None else plan.before(x), name, async_op)
    call = Call(name, x, engine, async_op, arguments)
    call.check()
    return _execute(bind(call, x), key)


def _execute(bound: Bound | BoundTree, key: tuple[Any, ...] | None = None) -> Any:
    """Execute a call; `key`: under which `engine.plans` may keep its map."""
    call = bound.call
    if isinstance(bound, BoundTree):
        ys, joined = [_execute(part) for part in bound.parts], bound.joined
        return Pending(call.name, lambda: joined([y.wait() for y in ys]), ys) if call.async_op else joined(ys)
    block = bound.x if bound.before is None else bound.before(bound.x)
    if checks.is_on():
        call.agree(bound.f, block, bound.reduction)
    if call.engine.in_one_graph:
        return _in_truth(bound, block)
    plan = Plan(bound.f, bound.before, None, (call.async_op, *call.arguments.values()))
    if bound.reduction is not None and bound.steps is not None:
        if bound.reduction.over is not None:
            reducing = Reducing(call.name, bound.reduction, call.engine, block, checked=call.compares())
            f, block, after = bound.steps(reducing)
            return _by_rules(Plan(f, None, after, ()), block, call.name, call.async_op)
        if bound.reduction.name == "mean":
            plan = _mean(plan, block.dtype)
            block = block if plan.before is None else plan.before(block)
    y = _by_rules(plan, block, call.name, call.async_op)
    if key is not None and _may_be_kept(plan, call.name, block.dtype):
        plans = call.engine.plans
        if len(plans) >= _PLANS:
            plans.clear()
        plans[key] = plan
    return y


def _by_rules(plan: Plan, x: Tensor, name: str, async_op: bool) -> Any:
    after = plan.after
    if async_op:
        wait = start(plan.f, x)
        flights = (wait,) if isinstance(wait, Started) else ()
        return Pending(name, wait if after is None else lambda: after(wait()), flights)
    y = apply(plan.f, x)
    return y if after is None else after(y)


def _in_truth(bound: Bound, block: Tensor) -> Any:
    call, f, reduction = bound.call, bound.f, bound.reduction
    facts = call.meaning(f, reduction), kind(f, block)
    y: Tensor = call.engine.run_truth(call.name, call.x, call.settled(f, block, reduction), facts)
    return Pending(call.name, lambda: y) if call.async_op else y


def _mean(total: Plan, dtype: torch.dtype) -> Plan:
    """Return the sum divided by N. In half precision the sum may overflow where the mean does not."""
    f, wide, n = total.f, wider(dtype), total.f.engine.size
    before = None if wide == dtype else lambda x: x.to(wide)
    if (mean := f.averaging) is not None:
        return Plan(mean, before, None if wide == dtype else lambda y: y.to(dtype), total.arguments)
    return Plan(f, before, lambda y: divide_(y, n).to(dtype), total.arguments)


def _may_be_kept(plan: Plan, name: str, dtype: torch.dtype) -> bool:
    """Whether nothing in the plan is of other ranks, or may change."""
    if name in CHECK_X_THEMSELVES or dtype not in ADDED:
        return False
    return _ATOMS.issuperset(map(type, plan.arguments)) and "auto" not in plan.arguments
