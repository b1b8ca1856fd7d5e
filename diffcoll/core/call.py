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
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from diffcoll.core import checks
from diffcoll.core.agreement import kind
from diffcoll.core.arguments import ADDED, CHECK_X_THEMSELVES, Arguments
from diffcoll.core.derivatives import Started, apply, start
from diffcoll.core.dtypes import wider
from diffcoll.core.groups import resolve
from diffcoll.core.linear import Linear
from diffcoll.core.pending import Pending
from diffcoll.core.reducing import Reducing, Steps
from diffcoll.core.reductions import Reduction
from diffcoll.core.torch_private.tensors import divide_, times
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
    call = Call(name, x, engine, async_op, arguments, key)
    call.check()
    return understand(call, x)


def _eager(f: Linear, x: Tensor, after: Callable[[Tensor], Tensor] | None, name: str, async_op: bool) -> Any:
    if async_op:
        wait = start(f, x)
        flights = (wait,) if isinstance(wait, Started) else ()
        return Pending(name, wait if after is None else lambda: after(wait()), flights)
    y = apply(f, x)
    return y if after is None else after(y)


@dataclass(frozen=True, eq=False)
class Call(Arguments):
    """One call. A collective reads its arguments and submits a map, which is compared and executed here."""

    #: The key of this call's plan in `engine.plans`; None: no plan is kept.
    key: tuple[Any, ...] | None = None

    def of(self, x: Any, **arguments: Any) -> Call:
        """Return the same call for a leaf of a tree, for several leaves concatenated, or with other arguments."""
        return Call(self.name, x, self.engine, self.async_op, {**self.arguments, **arguments})

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
            return self._in_truth(self.x, f, block)
        return self._by_rules(Plan(f, before, after, self._given), x, block)

    def reduce(self, f: Linear, x: Tensor, steps: Callable[[Reducing], Steps]) -> Any:
        """Return the reduction of x that `op` names: f(x) for the sum, the result of `steps` if it is not linear."""
        reduction, factor = self.op(x)
        if factor is not None:
            x = times(x, factor)
        if checks.is_on():
            self.agree(f, x, reduction)
        if self.engine.in_one_graph:
            return self._in_truth(x, f, x, reduction)
        if reduction.over is not None:
            last, block, after = steps(Reducing(self.name, reduction, self.engine, x, checked=self.compares()))
            return _eager(last, block, after, self.name, self.async_op)
        plan = Plan(f, None, None, self._given) if reduction.name == "sum" else self._mean(f, x)
        return self._by_rules(plan, x, x if plan.before is None else plan.before(x))

    def _mean(self, f: Linear, x: Tensor) -> Plan:
        """Return the sum f divided by N. In half precision the sum may overflow where the mean does not."""
        n, dtype, wide = self.engine.size, x.dtype, wider(x.dtype)
        before = None if wide == dtype else lambda x: x.to(wide)
        if (mean := f.averaging) is not None:
            return Plan(mean, before, None if wide == dtype else lambda y: y.to(dtype), self._given)
        return Plan(f, before, lambda y: divide_(y, n).to(dtype), self._given)

    @property
    def _given(self) -> tuple[Any, ...]:
        return self.async_op, *self.arguments.values()

    def _by_rules(self, plan: Plan, x: Tensor, block: Tensor) -> Any:
        """Apply the map; keep the plan for the next call if nothing in it is of other ranks or may change."""
        y = _eager(plan.f, block, plan.after, self.name, self.async_op)
        if self.key is None or self.name in CHECK_X_THEMSELVES or x.dtype not in ADDED:
            return y
        if _ATOMS.issuperset(map(type, plan.arguments)) and "auto" not in plan.arguments:
            plans = self.engine.plans
            if len(plans) >= _PLANS:
                plans.clear()
            plans[self.key] = plan
        return y

    def _in_truth(self, x: Any, f: Linear, block: Tensor, reduction: Reduction | None = None) -> Any:
        y: Tensor = self.engine.run_truth(
            self.name, x, self.settled(f, block, reduction), (self.meaning(f, reduction), kind(f, block))
        )
        return Pending(self.name, lambda: y) if self.async_op else y
