"""How one call of a collective is executed.

The public function reads its arguments and submits a map, which is executed by:

    group                 async_op
    simulated, no rules   both        `diffcoll.truth`, in one autograd graph of all ranks
    within torch.compile  False       one op in the graph
    within torch.compile  True        two ops, start and wait
    any other             False       `derivatives.apply`
    any other             True        `derivatives.start`, and a `Pending`
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from diffcoll.core import checks
from diffcoll.core.agreement import kind
from diffcoll.core.arguments import ADDED, Arguments
from diffcoll.core.derivatives import Started, apply, start
from diffcoll.core.groups import resolve
from diffcoll.core.linear import Linear
from diffcoll.core.pending import Pending
from diffcoll.core.reducing import Reducing, Steps
from diffcoll.core.torch_private.tensors import divide_, times
from diffcoll.engines.engine import WIDER, Engine
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
    understand: Callable[[Call, Any], Any], name: str, x: Any, group: Group, async_op: bool = False, **arguments: Any
) -> Any:
    """Return the result of `name(x, group=group, **arguments)`.

    Args:
        understand: reads the arguments of the Call and submits a map. The group keeps that map for calls with the same
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
            return _eager(plan.f, x if plan.before is None else plan.before(x), plan.after, name, async_op)
    made = Call(name, x, engine, async_op, arguments)
    made.key = key
    return understand(made, x)


def _eager(f: Linear, x: Tensor, after: Callable[[Tensor], Tensor] | None, name: str, async_op: bool) -> Any:
    if async_op:
        wait = start(f, x)
        flights = (wait,) if isinstance(wait, Started) else ()
        return Pending(name, wait if after is None else lambda: after(wait()), flights)
    y = apply(f, x)
    return y if after is None else after(y)


class Call(Arguments):
    """One call: reads the arguments, compares them with those of the other ranks, and submits the map."""

    #: The key of this call's plan in `engine.plans`; None: no plan is kept.
    key: tuple[Any, ...] | None = None

    def __init__(self, name: str, x: Any, engine: Engine, async_op: bool, arguments: dict[str, Any]) -> None:
        self.given = async_op, *arguments.values()
        super().__init__(name, x, engine, async_op, arguments)

    def of(self, leaf: Tensor) -> Call:
        """Return the same call for one leaf of a tree, or for several leaves concatenated."""
        call = copy(self)
        call._agreed, call.key = False, None
        call.x, call.arguments = leaf, dict(self.arguments)
        return call

    def submit(
        self,
        f: Linear,
        x: Tensor,
        *,
        before: Callable[[Tensor], Tensor] | None = None,
        after: Callable[[Tensor], Tensor] | None = None,
    ) -> Any:
        """Return after(f(before(x))), or with `async_op` a Pending of it. In check mode the ranks compare it first."""
        block = x if before is None else before(x)
        if checks.is_on():
            self.agree(f, block)
        if self.engine.in_one_graph:
            return self._in_truth(f, block)
        y = _eager(f, block, after, self.name, self.async_op)
        self._keep(Plan(f, before, after, self.given), x)
        return y

    def _keep(self, plan: Plan, x: Tensor) -> None:
        """Keep the plan of this call, which raised no error, for the next one."""
        if self.key is None or self.exchanged or x.dtype not in ADDED or not _ATOMS.issuperset(map(type, self.given)):
            return
        plans = self.engine.plans
        if len(plans) >= _PLANS:
            plans.clear()
        plans[self.key] = plan

    def reduce(self, f: Linear, x: Tensor, steps: Callable[[Reducing], Steps]) -> Any:
        """Return the reduction of x that `op` names: f(x) for the sum, the result of `steps` if it is not linear."""
        self.reduction, factor = self.op(x)
        reduction = self.reduction
        if factor is not None:
            x = times(x, factor)
        if checks.is_on():
            self.agree(f, x)
        if self.engine.in_one_graph:
            self.x = x
            return self._in_truth(f, x)
        if reduction.name == "sum":
            return self.submit(f, x)
        if reduction.over is not None:
            self.key = None
            last, block, after = steps(Reducing(self.name, reduction, self.engine, x, checked=self.compares()))
            return self.submit(last, block, after=after)
        # The mean is the sum divided by N. In half precision the sum may overflow where the mean does not.
        n, dtype, wide = self.engine.size, x.dtype, WIDER.get(x.dtype)
        before = None if wide is None else lambda x: x.to(wide)
        if (mean := f.averaging) is not None:
            return self.submit(mean, x, before=before, after=None if wide is None else lambda y: y.to(dtype))
        return self.submit(f, x, before=before, after=lambda y: divide_(y, n).to(dtype))

    def _in_truth(self, f: Linear, x: Tensor) -> Any:
        y: Tensor = self.engine.run_truth(self.name, self.x, self.arguments, (self.meaning(f), kind(f, x)))
        return Pending(self.name, lambda: y) if self.async_op else y
