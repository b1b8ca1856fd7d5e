"""Gradients of a model that every rank holds, averaged over the ranks while backward runs.

A parameter's hook says that its gradient is there. Gradients travel in buckets, in the order in which they come; a
bucket whose last gradient is there is reduced at once, in place, in the same order on every rank. A callback at the end
of backward sends what is left, waits, and divides. What a rank did not use is zero in its bucket, and at the end of the
last bucket stands who has used what. The buckets travel in a twin of the group, so they never meet others' messages.

note  notes/averaging.md, notes/when-gradients-synchronize.md
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from diffcoll.averaging.buckets import Bucket, Parameter, cut
from diffcoll.averaging.functions import agree_on_parameters, broadcast_from_first, checked_weight, weighted
from diffcoll.averaging.parameters import SPARSE, Watch, differentiable, find_ddp, is_sharded, named_parameters
from diffcoll.core import checks
from diffcoll.core._torch import (
    after_backward,
    backward_at_work,
    has_earlier_hooks,
    is_backward_nested,
    is_profiling,
    nodes_after_nested_backward,
    untraced,
    version,
    versions,
)
from diffcoll.core.errors import CollectiveFailedError, CollectiveMismatchError, message
from diffcoll.core.groups import resolve
from diffcoll.engines import local
from diffcoll.engines.engine import Turn, done

__all__ = ["GradientAverager"]

Batch = TypeVar("Batch")
Reduction = Literal["mean", "sum", "weighted"]

_NAME = "GradientAverager"
#: Numbers behind the gradients: for each parameter, whether it was used; NaN from a rank that failed; two weights.
EXTRA = 3
_numbers = itertools.count()


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
        if reduction not in ("mean", "sum", "weighted"):
            raise ValueError(message(_NAME, "reduction", repr(reduction), '"mean", "sum" or "weighted"'))
        if not isinstance(bucket_mb, (int, float)) or not bucket_mb > 0:
            raise ValueError(message(_NAME, "bucket_mb", repr(bucket_mb), "a number of megabytes above zero"))
        if comm_dtype is not None and not (isinstance(comm_dtype, torch.dtype) and comm_dtype.is_floating_point):
            raise TypeError(message(_NAME, "comm_dtype", repr(comm_dtype), "a floating-point torch.dtype or None"))
        module = module_or_params if isinstance(module_or_params, nn.Module) else None
        if broadcast_buffers and module is None:
            raise TypeError(message(_NAME, "broadcast_buffers", "True", "a module, which has buffers"))
        named = named_parameters(_NAME, module_or_params)
        engine = resolve(group, _NAME)
        if engine.joint:
            remedy = "simulate(…, rules=True), with backward inside"
            raise RuntimeError(message(_NAME, "group", "a joint world", "ranks that call backward themselves", remedy))
        _refuse_shared(named)
        others = _averagers_of(named)
        states = [_state(p, others, module, named) for _, p in named]
        agree_on_parameters(_NAME, named, group, states)
        _take_over(others, module, named)
        if broadcast_parameters:
            broadcast_from_first([p for _, p in named], group)
        if module is not None and broadcast_buffers:
            broadcast_from_first(list(module.buffers()), group)
        self.number = next(_numbers)
        self._engine = engine.twin() if engine.size > 1 else engine
        # Autograd has a thread for each GPU: gradients of several may arrive at the same time.
        self._lock = threading.RLock()
        self._reduction, self._bytes, self._dtype, self._hooks = reduction, bucket_mb * 2**20, comm_dtype, hooks
        self._rank = local.here()  # a simulated rank is a thread
        self._named = named
        self._parameters = [Parameter(i, *pair) for i, pair in enumerate(differentiable(named))]
        self._live: list[Parameter] = []  # those that are not frozen, in the order of the buckets
        self._buckets: list[Bucket] = []
        self._order = list(reversed(range(len(self._parameters))))  # in which gradients are expected
        self._seen: list[int] | None = []  # in which they came, until the ranks have agreed on that
        self._paused = 0
        # A backward that runs: its number and those within it, what to send next, whether its end is awaited.
        self._turn = 0
        self._values: list[int] = []  # how often each live parameter had been changed when it began
        self._tasks: set[int] = set()
        self._next = 0
        self._awaited = self._nested = self._compares = False
        # Weights, since the last time that gradients were reduced.
        self._weight: float | Tensor = 0.0
        self._total: float | Tensor = 0.0
        self._reductions = 0
        self._weighed_at = -1  # how many reductions there had been when a weight was last said
        # Whether this rank has no more batches, while others go on; whether this step has seen one that counts.
        self._ran_out = self._joining = self._leaving = False
        self._took_part = True
        _refuse_shared(named)  # again: the others have come here meanwhile
        self._owner = weakref.finalize(module or named[0][1], _alive.pop, id(self), None)
        self._owner.atexit = False
        _alive[id(self)] = self
        self._is_attached = True
        self._module = None if module is None else weakref.ref(module)
        self._watches: dict[int, Any] = {}  # handles of hooks that look for replaced parameters, by what they are on
        self._watch: weakref.ref[Watch] | None = None
        self._has_looked = False  # in this step, and nothing was replaced
        if module is not None:
            watch = Watch(module, self._before_forward)
            self._watch = weakref.ref(watch)
            self._watches[id(module)] = module.register_forward_pre_hook(watch)
        if hooks:
            self._attach_all()

    # ── what the user calls ──────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only; the next backward outside sends them too."""
        self._check_attached("no_sync")
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

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
        name = f"{_NAME}.set_weight"
        if self._reduction != "weighted":
            raise ValueError(message(name, "weight", repr(weight), "none", 'say reduction="weighted"'))
        weight = checked_weight(name, weight)
        self._check_attached("set_weight")
        gone = all(p.tensor.grad is None for p in self._parameters)  # the user has zeroed what was accumulated
        if self._weighed_at != self._reductions or gone:
            self._total, self._weighed_at = 0.0, self._reductions
        self._weight = 0.0 if self._ran_out else weight
        self._total = self._total + self._weight

    @untraced
    def synchronize(self) -> None:
        """Reduce what is in `.grad` now; all ranks call it.

        After backward under `no_sync`, or with `hooks=False`. What has been reduced before and not been added to since
        stays as it is.
        """
        self._check_attached("synchronize")
        if self._tasks:
            self._give_up()
        self._begin()
        self._send_rest()
        self._receive()

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
        iterator, nothing = iter(batches), object()
        mine: Any = next(iterator, nothing)
        last, yielded_at = mine, -1
        self._joining, self._leaving = True, False
        try:
            while have := self._count(mine is not nothing):
                if yielded_at < 0 and have < self._engine.size:
                    got = f"{self._engine.size - have} of {self._engine.size} ranks with none"
                    remedy = "give each rank one that it can repeat"
                    raise ValueError(message(f"{_NAME}.join", "batches", got, "at least one on every rank", remedy))
                if mine is nothing and not self._ran_out:
                    self._ran_out = True
                    self._attach_before()
                last = last if self._ran_out else mine
                self._took_part = not self._ran_out or (self._took_part and self._reductions == yielded_at)
                yielded_at = self._reductions
                yield last
                if not self._ran_out:
                    mine = next(iterator, nothing)
        finally:
            self._ran_out = False
            self._leaving = True
            if self._reductions != yielded_at:
                self._leave_join()

    def _leave_join(self) -> None:
        """All ranks count again; not before what was accumulated in the loop has been reduced."""
        self._joining = self._leaving = False
        self._took_part = True

    @untraced
    def detach(self) -> None:
        """Leave the parameters as they were; gradients stay. All ranks call it.

        Others that still wait in a backward which this rank has left by an error get an error.
        """
        if not self._is_attached:
            return
        self._is_attached = False
        self._owner()
        for handle in self._watches.values():
            handle.remove()
        for p in self._parameters:
            for hook in p.hooks:
                hook.remove()
            p.hooks, p.node = [], None
        if self._tasks and not self._engine.ended and self._rank is local.here():
            with contextlib.suppress(RuntimeError):  # the group has failed: nobody waits
                self._give_up()
        if self._engine.size > 1:
            self._engine.close()

    def _check_attached(self, what: str) -> None:
        if not self._is_attached:
            raise RuntimeError(
                f"{_NAME}.{what}: this averager was detached, or a newer one has taken over; use that one"
            )

    # ── hooks ────────────────────────────────────────────────────────────────────────────────────────────

    def _attach_all(self) -> None:
        """Register hooks on all parameters; on frozen ones too, so that they are averaged as soon as they are not."""
        for p in self._parameters:
            if p.tensor.is_inference():
                continue  # never has a gradient
            with _requiring_grad(p.tensor):
                hook = _weakly(self._has_come, p)
                p.hooks.append(p.tensor.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            if self._reduction != "mean" or has_earlier_hooks(p.tensor):
                self._attach_before(p)

    def _attach_before(self, *some: Parameter) -> None:
        """Hook in where gradients are accumulated: a hook of the tensor would also see torch.autograd.grad."""
        for p in some or self._parameters:
            if p.hooks and p.node is None:
                with _requiring_grad(p.tensor):
                    p.node = get_gradient_edge(p.tensor).node
                p.hooks.append(p.node.register_prehook(_weakly(self._comes, p)))

    def _comes(self, p: Parameter, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """A gradient is about to be added to what is there: weigh it, and put aside what has been reduced."""
        p.value_version = version(p.tensor)
        weight: float | Tensor = 1.0
        if self._reduction == "weighted":
            if self._weighed_at != self._reductions:
                remedy = (
                    "call set_weight(w) before the backward of each batch, and take all losses of one in one backward"
                )
                raise RuntimeError(message(_NAME, "weight", "none for this batch", "one", remedy))
            weight = self._weight
        self._put_aside(p)
        p.reduced = None
        if self._ran_out:
            weight = 0.0
        (g,) = grads
        if g is None or (isinstance(weight, float) and weight == 1.0):
            return None
        if isinstance(weight, Tensor):
            return (weighted(g, weight),)
        return (g * weight if weight else torch.zeros_like(g),)

    def _put_aside(self, p: Parameter) -> None:
        """See to it that what has been reduced is not reduced again; a mean of what is the same on all ranks is it."""
        if not p.recall():
            raise RuntimeError(
                f"{_NAME}: {p.name}: its gradient was changed while backward calls added to one that had been reduced; "
                "call zero_grad() before the first of them, or synchronize() before the change"
            )
        if p.reduced is not None and p.reduced is p.tensor.grad and self._reduction != "mean":
            p.put_aside()

    def _has_come(self, p: Parameter, tensor: Tensor) -> None:
        """A gradient is there."""
        if p.kept is not None:
            p.note()
        if self._paused:
            return
        task = backward_at_work()
        if task not in self._tasks:
            self._enter(task)
        if p.is_put:
            raise RuntimeError(
                f"{_NAME}: {p.name}: a second gradient in one backward, after the first was taken; checkpoints with "
                "use_reentrant=True share it: use use_reentrant=False, or no_sync() and synchronize()"
            )
        if p.turn == self._turn:
            return  # by way of an inner backward
        p.turn = self._turn
        if self._seen is not None:
            self._seen.append(p.index)
        bucket = p.bucket
        if bucket.stream is not None:
            bucket.enter_stream()
        bucket.pending -= 1
        if self._nested:
            return
        if not p.is_small:  # while it is in the cache, and before the next one needs memory
            self._check(p)
            p.put(self._scale())
        if bucket.pending == 0 and not self._compares:
            # The last one waits for the end of backward: it says whether this rank has failed.
            while self._next < len(self._buckets) - 1 and self._buckets[self._next].ready:
                self._send()

    def _enter(self, task: int) -> None:
        """The first gradient of a backward, or of one within it."""
        nested = is_backward_nested()
        if self._tasks and not nested and task > max(self._tasks):  # not the outer one of those, which is older
            self._give_up()
        if not self._tasks:
            self._tasks.add(task)
            self._begin()
        self._tasks.add(task)
        self._nested = self._nested or nested
        self._await(nested)

    def _await(self, nested: bool) -> None:
        """Be called at the end of the outermost backward."""
        if self._awaited:
            return
        if nested:
            after_backward(self._leave_nested)
            return
        self._awaited = True
        task = backward_at_work()
        if task not in _ending:
            after_backward(partial(_end, task))
        _ending.setdefault(task, []).append(self)

    @untraced
    def _leave_nested(self) -> None:
        """The end of an inner backward: the outer one goes on, and its end is to be awaited there."""
        if self._awaited:
            return
        following = nodes_after_nested_backward()
        if not following:
            raise RuntimeError(
                f"{_NAME}: a backward within another, and no way to know when the outer one ends; use "
                "use_reentrant=False, or no_sync() and synchronize()"
            )
        handles: list[Any] = []

        def on_goes_the_outer(_: object) -> None:
            for handle in handles:
                handle.remove()
            handles.clear()
            self._await(is_backward_nested())

        handles += [node.register_prehook(untraced(on_goes_the_outer)) for node in following]

    # ── buckets ──────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        if self._engine.ended:
            self._tasks.clear()
            raise RuntimeError(
                f"{_NAME}: its group was destroyed; call detach(), or make a {_NAME} on another group, which takes over"
            )
        self._turn += 1
        self._next = 0
        self._compares = checks.is_on() and self._engine.size > 1
        self._awaited = self._nested = False
        if self._seen:
            self._seen = []  # of a backward that was left by an error
        for p in self._parameters:
            if p.tensor.shape != p.shape or p.tensor.dtype != p.dtype:
                p.refuse_kind(_NAME)
        live = [p for i in self._order if (p := self._parameters[i]).tensor.requires_grad]
        if live != self._live or not self._buckets:
            self._live, self._buckets = live, []
            for p in self._parameters:  # old buckets go before new ones are made, unless gradients still lie there
                p.__dict__.pop("bucket", None)
                p.__dict__.pop("place", None)
                p.forget_views()
            self._buckets = cut(live, self._bytes, self._dtype, self._engine, len(live) + EXTRA)
        else:
            for bucket in self._buckets:
                bucket.let_go()
        for bucket in self._buckets:
            bucket.pending = len(bucket.parameters)
        for p in live:
            p.is_put = False
        self._values = versions([p.tensor for p in live])

    @torch.no_grad()
    def _send(self) -> None:
        """Start to reduce the next bucket, in place."""
        bucket = self._buckets[self._next]
        self._next += 1
        if bucket.stream is not None:
            bucket.join_streams()
        unput = [p for p in bucket.parameters if not p.is_put]
        for p in unput:
            self._check(p)
        bucket.put_small(self._scale())
        for p in unput:
            if not p.is_put:
                p.put(self._scale())
        if bucket is self._buckets[-1]:
            used = [p.is_used or p.kept is not None for p in self._live]
            pinned = bucket.tail.is_cuda  # else the copy would make the host wait for all kernels before it
            flags = [*used, 0.0, 0.0, self._took_part]
            tail = torch.tensor(flags, dtype=bucket.tail.dtype, device="cpu", pin_memory=pinned)
            bucket.tail.copy_(tail, non_blocking=pinned)
            bucket.tail[-2] = self._total  # which may be a tensor elsewhere
        self._start(bucket)

    def _check(self, p: Parameter) -> None:
        """Look at a gradient before it is put in its place."""
        self._put_aside(p)
        grad = p.tensor.grad
        if grad is None:
            return
        if grad.layout != torch.strided:
            raise TypeError(f"{_NAME}: {p.name}: {SPARSE}")
        if grad.requires_grad:
            raise RuntimeError(
                f"{_NAME}: {p.name}: its gradient is part of a graph (create_graph=True), which ends in a bucket; "
                "take torch.autograd.grad(…, create_graph=True) and dc.average_gradients, which is differentiable"
            )

    def _scale(self) -> float:
        if not self._took_part:
            return 0.0
        return 1 / self._engine.size if self._reduction == "mean" and not self._joining else 1.0

    def _start(self, bucket: Bucket) -> None:
        engine = self._engine
        if engine.size == 1:
            return
        engine.operation, engine.later = _NAME, bucket.overlaps
        with self._explaining(bucket):
            bucket.wait = engine.all_reduce(bucket.row, bucket.row)

    def _send_rest(self) -> None:
        """Send what has not been sent; an error here is one on all ranks."""
        try:
            if self._compares:
                names = [p.name for p in self._live]
                self._compare(names, f"{len(names)} parameters that are not frozen: {', '.join(names)}")
            self._check_tree()
            self._check_changes()
            while self._next < len(self._buckets):
                self._send()
        except (CollectiveMismatchError, CollectiveFailedError):
            self._over()
            raise
        except BaseException:
            try:
                self._give_up(compared=True)
            finally:
                self._over()
            raise

    def _compare(self, facts: object, text: str) -> None:
        checks.compare(self._engine, (_NAME, facts), f"{_NAME}, {text}")

    def _check_tree(self) -> None:
        """Raise if the module has parameters that nobody averages."""
        if self._has_looked or self._engine.size == 1:
            return
        for name, _ in self._foreign():
            raise RuntimeError(
                f"{_NAME}: {name}: the module has this parameter only since {_NAME} was attached, and nobody averages "
                "its gradient; load_state_dict(assign=True), parametrizations and m.weight = … make new parameters; "
                f"make the {_NAME} anew, which takes over, or give it parameters instead of the module"
            )

    def _foreign(self) -> list[tuple[str, Tensor]]:
        """Return the module's parameters that are not frozen and that nobody averages."""
        watch = None if self._watch is None else self._watch()
        if watch is None or not watch.has_changed():
            self._has_looked = True
            return []
        module = watch.module()
        averaged = {id(t) for averager in list(_alive.values()) for _, t in averager._named}
        foreign = [] if module is None else [pair for pair in module.named_parameters() if id(pair[1]) not in averaged]
        sharded = is_sharded(module, [t for _, t in (*self._named, *foreign)])
        if sharded:
            raise RuntimeError(f"{_NAME}: FSDP shards {sharded} and reduces its gradient; call detach()")
        if not foreign:  # parameters have other names, as in pruning
            watch.record()
        return [(name, t) for name, t in foreign if t.requires_grad]

    def _before_forward(self) -> None:
        """Watch new parameters: where all were replaced, no hook of the old ones runs in backward."""
        self._has_looked = False
        for _, t in self._foreign():
            if id(t) not in self._watches and isinstance(t, nn.Parameter) and t.is_leaf:
                hook = _on_gradient_of_a_new_parameter(self)
                self._watches[id(t)] = t.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _after_new_parameter(self) -> None:
        """A parameter that nobody averages has a gradient: see to it that the end of backward raises."""
        if not self._paused and not self._tasks:
            self._enter(backward_at_work())

    def _check_changes(self) -> None:
        """Raise if a gradient or its parameter was changed in this backward after the gradient was there."""
        if self._engine.size == 1:
            return
        values = versions([p.tensor for p in self._live])
        for p, before, now in zip(self._live, self._values, values, strict=True):
            if p.turn != self._turn:
                continue
            if p.tensor.grad is None:
                why = "its gradient was taken away"
            elif p.is_put and p.has_changed():
                why = "its gradient was changed"
            elif now != (before if p.node is None else p.value_version):
                why = "its value was changed"
            else:
                continue
            if find_ddp(q.tensor for q in self._live):
                raise RuntimeError(f"{_NAME}: {p.name}: {_DDP}")
            raise RuntimeError(
                f"{_NAME}: {p.name}: {why} in backward, before it was averaged, as an optimizer that steps within "
                "backward does: its step would be another one on every rank; step after backward, or change "
                "gradients in hooks of the tensor, p.register_hook(…)"
            )

    def _receive(self) -> None:
        """Wait for all buckets, and make gradients of them."""
        try:
            for bucket in self._buckets:
                with self._explaining(bucket):
                    bucket.wait()
                bucket.wait = done
            self._finish()
            self._agree_on_order()
        finally:
            self._over()

    def _over(self) -> None:
        self._tasks.clear()
        self._awaited = self._nested = self._has_looked = False
        self._reductions += 1
        if self._leaving:
            self._leave_join()
        for p in self._parameters:
            p.kept = p.added = None

    @torch.no_grad()
    def _finish(self) -> None:
        tail = self._buckets[-1].tail.real
        if tail.is_cpu and tail[-3].isnan():
            raise RuntimeError(
                f"{_NAME}: a rank has left this backward by an error, and its gradients are not there; "
                "look at the other ranks"
            )
        if self._reduction == "weighted" or (self._reduction == "mean" and self._joining):
            divisor = tail[-2] if self._reduction == "weighted" else tail[-1]
            divisor = torch.where(divisor == 0, 1.0, divisor)
            for bucket in self._buckets:
                bucket.divide(divisor)
        used = None if all(p.is_used for p in self._live) else tail.tolist()
        for i, p in enumerate(self._live):
            if p.is_used and p.shares and p.kept is None:
                p.reduced = p.grad_view  # it is the gradient already
            elif used is None or used[i]:
                grad = p.take()
                if p.kept is not None:
                    grad.add_(p.kept)
                p.reduced = grad
                p.record_gradient()

    def _agree_on_order(self) -> None:
        """After the first time, cut the buckets anew: in the order in which gradients came on rank 0."""
        if self._seen is None:
            return
        seen = self._seen + [i for i in self._order if i not in set(self._seen)]
        self._seen = None
        order = torch.tensor(seen, device=self._engine.control_device)
        if self._engine.size > 1:
            self._engine.operation, self._engine.later = _NAME, False
            with Turn(self._engine, _NAME):
                self._engine.broadcast(order, 0)()
        self._order = order.tolist()

    def _give_up(self, compared: bool = False) -> None:
        """The backward before was left by an error: the other ranks wait for its buckets, and learn of it."""
        for task in [task for task, averagers in _ending.items() if self in averagers]:
            del _ending[task]
        self._tasks.clear()
        if self._compares and not compared:  # they wait where they compare
            with contextlib.suppress(CollectiveMismatchError):
                self._compare("left", "which has left this backward by an error")
            return
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            self._next += 1
            bucket.row.fill_(math.nan)
            self._start(bucket)
        for bucket in self._buckets:
            with self._explaining(bucket):
                bucket.wait()
            bucket.wait = done

    def _count(self, mine: bool) -> int:
        """On how many ranks it is so."""
        count = torch.tensor([int(mine)], device=self._engine.control_device)
        if self._engine.size > 1:
            self._engine.operation, self._engine.later = _NAME, False
            with Turn(self._engine, _NAME):
                self._engine.all_reduce(count, count)()
        return int(count)

    @contextlib.contextmanager
    def _explaining(self, bucket: Bucket) -> Iterator[None]:
        engine = self._engine
        at = f"bucket {self._buckets.index(bucket)} of {len(self._buckets)}"
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(Turn(engine, f"{_NAME}, {at}"))
                if is_profiling():
                    label = f"diffcoll.{_NAME} {at}: {engine.description}, {bucket.row.nbytes} B"
                    stack.enter_context(torch.profiler.record_function(label))
                yield
        except CollectiveMismatchError:
            raise
        except RuntimeError as error:
            absent = engine.absent()
            who = f"rank {', '.join(map(str, absent))} did not come: it" if absent else "a rank"
            remedy = (
                f"{who} died, hangs, has not called backward, or its loss uses none of the parameters; call backward "
                "equally often on all ranks, see join() for unequal numbers of batches"
            )
            said = " ".join(str(error).split())
            text = f"{_NAME}, {at} ({bucket}): failed on rank {engine.rank} of {engine.description}: {said}; {remedy}"
            raise CollectiveFailedError(text) from error


#: The averagers that a backward has met, by its number.
_ending: dict[int, list[GradientAverager]] = {}


@untraced
def _end(task: int) -> None:
    """End a backward: on all ranks in the order in which averagers were made, whichever each rank has met first."""
    averagers = sorted(_ending.pop(task, []), key=lambda averager: averager.number)
    errors: list[Exception] = []
    sent: list[GradientAverager] = []
    for averager in averagers:
        try:
            averager._send_rest()
            sent.append(averager)
        except Exception as error:  # what the others have sent must be received
            errors.append(error)
    for averager in sent:
        try:
            averager._receive()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    if any(averager._engine.size > 1 for averager in averagers):
        after_backward(partial(_check_unchanged, averagers))


@untraced
def _check_unchanged(averagers: list[GradientAverager]) -> None:
    """Raise if DistributedDataParallel has averaged what was averaged: it does so at the end of backward, too."""
    for averager in averagers:
        changed = next((p for p in averager._live if p.reduced is not None and p.has_changed()), None)
        if changed and find_ddp(p.tensor for p in averager._live):
            raise RuntimeError(f"{_NAME}: {changed.name}: {_DDP}")


_DDP = (
    "DistributedDataParallel averages this parameter, too; take one of the two away: call detach(), or use the module "
    "without DistributedDataParallel"
)


#: An averager lives as long as its module, or its first parameter: what a parameter's hook held would live with it in
#: a circle that passes through the autograd engine, where Python finds no circles.
_alive: dict[int, GradientAverager] = {}


def _averagers_of(named: list[tuple[str, Tensor]]) -> list[GradientAverager]:
    """Return the averagers of any of these parameters."""
    ids = {id(p) for _, p in named}
    return [other for other in list(_alive.values()) if any(id(p) in ids for _, p in other._named)]


def _refuse_shared(named: list[tuple[str, Tensor]]) -> None:
    """Raise if another simulated rank has an averager of the same parameters: ranks are threads, and may share them."""
    me: Any = local.here()
    for other in _averagers_of(named) if me is not None else ():
        if other._rank is not None and other._rank is not me and other._rank.world is me.world:
            remedy = "make the module in the function that each rank runs"
            got = "parameters that another simulated rank holds as well"
            raise ValueError(message(_NAME, "module_or_params", got, "parameters of this rank's own", remedy))


def _is_same(other: GradientAverager, module: nn.Module | None, named: list[tuple[str, Tensor]]) -> bool:
    """Whether an averager has this module, or just these parameters: a new one takes over then."""
    of_module = module is not None and other._module is not None and other._module() is module
    return of_module or {id(p) for _, p in named} == {id(p) for _, p in other._named}


def _state(p: Tensor, others: list[GradientAverager], module: nn.Module | None, named: list[tuple[str, Tensor]]) -> str:
    """Say who averages p already, which must be the same on all ranks."""
    for other in others:
        if any(p is q for _, q in other._named):
            return ", taken over" if _is_same(other, module, named) else ", averaged by another"
    return ""


def _take_over(others: list[GradientAverager], module: nn.Module | None, named: list[tuple[str, Tensor]]) -> None:
    """Detach the averagers whose place a new one takes; an averager of only some of its parameters is an error."""
    ids = {id(p) for _, p in named}
    for other in others:
        if not _is_same(other, module, named):
            first = next(name for name, p in other._named if id(p) in ids)
            got = f"{first}, which another {_NAME} averages, together with others than these"
            remedy = "call detach() on that one first, or make one for all of them"
            raise ValueError(message(_NAME, "module_or_params", got, "parameters of which no other has some", remedy))
    for other in others:
        other.detach()


@contextlib.contextmanager
def _requiring_grad(p: Tensor) -> Iterator[None]:
    """Let p have hooks, also if it is frozen."""
    frozen = not p.requires_grad
    if frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        if frozen:
            p.requires_grad_(False)


def _weakly(method: Callable[..., Any], p: Parameter) -> Callable[..., Any]:
    """Return a hook of p that holds neither the averager nor p."""
    averager, parameter, call = weakref.ref(method.__self__), weakref.ref(p), method.__func__  # type: ignore[attr-defined]

    def hook(given: Any) -> Any:
        alive = averager()
        if alive is None:
            return None
        with alive._lock:
            return call(alive, parameter(), given)

    return untraced(hook)


def _on_gradient_of_a_new_parameter(averager: GradientAverager) -> Callable[[Tensor], None]:
    """Return a hook of a parameter that the module has got after an averager."""
    ref = weakref.ref(averager)

    def hook(p: Tensor) -> None:
        alive = ref()
        if alive is not None and alive._is_attached and any(p is q for _, q in alive._foreign()):
            alive._after_new_parameter()

    return untraced(hook)
