"""GradientAverager: gradients of a model that every rank holds, averaged over the ranks while backward runs.

`hooks.py` follows the backward pass, `reducer.py` reduces the buckets, `buckets.py` lays gradients side by side in
memory. The buckets are sent in a twin of the group, so they never meet other messages.

note  notes/averaging.md, notes/when-gradients-synchronize.md
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diffcoll.averaging import registry
from diffcoll.averaging.buckets import Parameter
from diffcoll.averaging.functions import agree_on_parameters, broadcast_from_first, checked_weight
from diffcoll.averaging.hooks import Hooks
from diffcoll.averaging.parameters import differentiable, named_parameters
from diffcoll.averaging.reducer import Reducer, Reduction
from diffcoll.averaging.state import NAME
from diffcoll.averaging.tree import ModuleTree
from diffcoll.core._torch import untraced
from diffcoll.core.errors import message
from diffcoll.core.groups import resolve
from diffcoll.engines import local
from diffcoll.engines.engine import Engine, Exclusive

__all__ = ["GradientAverager"]

Batch = TypeVar("Batch")


class GradientAverager:
    """Make every rank's gradients those of one loss: the mean, the sum or the weighted mean of all ranks' losses.

    It attaches to the parameters and wraps nothing. From then on `backward()` returns with the averaged gradients in
    `.grad`, bitwise the same on all ranks.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def gradient(x):
    ...     model = torch.nn.Linear(1, 1, bias=False)
    ...     dc.GradientAverager(model)
    ...     model(x).sum().backward()
    ...     return model.weight.grad
    >>> simulate(gradient, [torch.tensor([[2.0]]), torch.tensor([[4.0]])], rules=True)
    [tensor([[3.]]), tensor([[3.]])]

    A parameter that this rank's loss does not use counts as zero; one that no rank has used keeps `grad is None`. So
    ranks may use different ones. At least one must be used on every rank that calls backward, and every rank must call
    it. Parameters may be frozen and unfrozen at any time, on all ranks alike; what is frozen is not sent. Gradients
    that are there before backward are added to. A gradient that somebody keeps is never written after `zero_grad()`.

    Each parameter has one averager: a new one on the same module or the same parameters takes over.

    Args:
        module_or_params: an `nn.Module`, parameters, or pairs (name, parameter); the same on all ranks in number,
            order, names, shapes and dtypes. Any floating-point or complex dtype, also several, also on several devices;
            frozen integers are broadcast only. A module is watched for parameters that it gets later, an error.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        reduction: `"mean"`: Σ_r g_r / N. `"sum"`: Σ_r g_r. `"weighted"`: Σ_r w_r g_r / Σ_r w_r, see `set_weight`.
        bucket_mb: megabytes of gradients in one message, at the most, if no single one is larger.
        comm_dtype: the dtype in which gradients travel and are added; None: their own.
        broadcast_parameters: give all ranks rank 0's parameters first.
        broadcast_buffers: give all ranks rank 0's buffers first, once; for that a module is needed.
        hooks: False: nothing happens in backward; `synchronize` reduces what is in `.grad`.

    Raises:
        TypeError, ValueError: an argument is wrong on its own; a module has sparse gradients; DistributedDataParallel,
            FSDP or an averager of other parameters too reduces some of these already.
        CollectiveMismatchError: the ranks' parameters differ; on all ranks, naming the first.
        CollectiveFailedError: from backward: a rank died or did not come; says in which bucket, and who.
        RuntimeError: from backward: gradients would not be right, and why, e.g. an optimizer stepped within backward.

    Source: notes/averaging.md.
    """

    def __init__(
        self,
        module_or_params: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        group: Any = None,
        *,
        reduction: Reduction = "mean",
        bucket_mb: float = 25.0,
        comm_dtype: torch.dtype | None = None,
        broadcast_parameters: bool = True,
        broadcast_buffers: bool = False,
        hooks: bool = True,
    ) -> None:
        _check_arguments(reduction, bucket_mb, comm_dtype)
        module = module_or_params if isinstance(module_or_params, nn.Module) else None
        if broadcast_buffers and module is None:
            raise TypeError(message(NAME, "broadcast_buffers", "True", "a module, which has buffers"))
        named = named_parameters(NAME, module_or_params)
        engine = _engine(group)
        registry.refuse_shared(named)
        claims = registry.claims_on(named)
        agree_on_parameters(NAME, named, group, [registry.status(p, claims, module, named) for _, p in named])
        registry.take_over(claims, module, named)
        if broadcast_parameters:
            broadcast_from_first([p for _, p in named], group)
        if module is not None and broadcast_buffers:
            broadcast_from_first(list(module.buffers()), group)
        engine = engine.twin() if engine.size > 1 else engine
        registry.refuse_shared(named)  # again: the other ranks may have come here meanwhile
        self._rank = local.here()  # a simulated rank is a thread
        self._tree = None if module is None else ModuleTree(module, named)
        parameters = [Parameter(i, *pair) for i, pair in enumerate(differentiable(named))]
        self._reducer = Reducer(parameters, engine, reduction, bucket_mb * 2**20, comm_dtype, self._tree)
        self._hooks = Hooks(self._reducer)
        owner = None if module is None else weakref.ref(module)
        self._leave_registry = registry.enter(registry.Claim(named, owner, self._rank, self.detach))
        self._is_attached = True
        if self._tree is not None:
            self._tree.attach(registry.averaged, self._hooks.after_new_parameter)
        if hooks:
            self._hooks.attach()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only; the next backward outside sends them too."""
        self._check_attached("no_sync")
        self._hooks.paused += 1
        try:
            yield
        finally:
            self._hooks.paused -= 1

    @untraced
    def set_weight(self, weight: float | Tensor) -> None:
        """Say what this rank's next batch counts, once for each batch and before its backward, e.g. its tokens.

        Micro-batches under `no_sync` count what each of them says: k of them on N ranks are one batch. A weight of zero
        is legal, also where an empty batch makes the loss NaN; where all are zero, gradients are zero.

        Args:
            weight: a number from zero up, or a 0-d tensor, which is not looked at.

        Raises:
            ValueError, TypeError: it is no such number, or the reduction is not `"weighted"`.
        """
        reducer, name = self._reducer, f"{NAME}.set_weight"
        if reducer.reduction != "weighted":
            raise ValueError(message(name, "weight", repr(weight), "none", 'say reduction="weighted"'))
        weight = checked_weight(name, weight)
        self._check_attached("set_weight")
        weights = reducer.weights
        zeroed = all(p.tensor.grad is None for p in reducer.parameters)  # the user dropped what was accumulated
        if weights.set_at != reducer.count or zeroed:
            weights.total, weights.set_at = 0.0, reducer.count
        weights.current = 0.0 if reducer.join.ran_out else weight
        weights.total = weights.total + weights.current

    @untraced
    def synchronize(self) -> None:
        """Reduce what is in `.grad` now; all ranks call it.

        After backward under `no_sync`, or with `hooks=False`. What has been reduced before and not been added to since
        stays as it is.
        """
        self._check_attached("synchronize")
        if self._reducer.backward.tasks:
            self._reducer.abandon()
        self._reducer.begin()
        self._reducer.send_rest()
        self._reducer.receive()

    def join(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Go through batches of which ranks have unequal numbers; all ranks loop over it.

        A rank that has run out repeats its last batch with weight zero until all have: it makes the same steps, and so
        keeps the same parameters, optimizer and schedule, but its gradients and weights do not count. The mean is over
        the ranks that still have batches. Costs one small message a batch.

        Args:
            batches: this rank's, at least one.

        Raises:
            ValueError: a rank has no batch; on all ranks.
        """
        self._check_attached("join")
        reducer, here = self._reducer, self._reducer.join
        iterator, nothing = iter(batches), object()
        mine: Any = next(iterator, nothing)
        last, yielded_at = mine, -1
        here.is_active, here.is_leaving = True, False
        try:
            while have := _sum_over_ranks(int(mine is not nothing), reducer.engine):
                if yielded_at < 0:
                    _refuse_without_batch(reducer.engine.size - have, reducer.engine.size)
                if mine is nothing and not here.ran_out:
                    here.ran_out = True
                    self._hooks.hook_before()
                last = last if here.ran_out else mine
                here.took_part = not here.ran_out or (here.took_part and reducer.count == yielded_at)
                yielded_at = reducer.count
                yield last
                if not here.ran_out:
                    mine = next(iterator, nothing)
        finally:
            here.ran_out = False
            here.is_leaving = True  # what was accumulated in the loop and is not reduced yet counts as it did there
            if reducer.count != yielded_at:
                here.leave()

    @untraced
    def detach(self) -> None:
        """Leave the parameters as they were; gradients stay. All ranks call it.

        Others that still wait in a backward which this rank has left by an error get an error.
        """
        if not self._is_attached:
            return
        self._is_attached = False
        self._leave_registry()
        if self._tree is not None:
            self._tree.detach()
        self._hooks.detach()
        engine = self._reducer.engine
        if self._reducer.backward.tasks and not engine.ended and self._rank is local.here():
            with contextlib.suppress(RuntimeError):  # the group has failed: nobody waits
                self._reducer.abandon()
        if engine.size > 1:
            engine.close()

    def _check_attached(self, what: str) -> None:
        if not self._is_attached:
            raise RuntimeError(
                f"{NAME}.{what}: this averager was detached, or a newer one has taken over; use that one"
            )


def _check_arguments(reduction: object, bucket_mb: object, comm_dtype: object) -> None:
    if reduction not in ("mean", "sum", "weighted"):
        raise ValueError(message(NAME, "reduction", repr(reduction), '"mean", "sum" or "weighted"'))
    if not isinstance(bucket_mb, (int, float)) or not bucket_mb > 0:
        raise ValueError(message(NAME, "bucket_mb", repr(bucket_mb), "a number of megabytes above zero"))
    if comm_dtype is not None and not (isinstance(comm_dtype, torch.dtype) and comm_dtype.is_floating_point):
        raise TypeError(message(NAME, "comm_dtype", repr(comm_dtype), "a floating-point torch.dtype or None"))


def _engine(group: Any) -> Engine:
    engine = resolve(group, NAME)
    if engine.joint:
        remedy = "simulate(…, rules=True), with backward inside"
        raise RuntimeError(message(NAME, "group", "a joint world", "ranks that call backward themselves", remedy))
    return engine


def _sum_over_ranks(number: int, engine: Engine) -> int:
    total = torch.tensor([number], device=engine.control_device)
    if engine.size > 1:
        engine.operation, engine.later = NAME, False
        with Exclusive(engine, NAME):
            engine.all_reduce(total, total)()
    return int(total)


def _refuse_without_batch(without: int, size: int) -> None:
    if without:
        got, remedy = f"{without} of {size} ranks with none", "give each rank one that it can repeat"
        raise ValueError(message(f"{NAME}.join", "batches", got, "at least one on every rank", remedy))
