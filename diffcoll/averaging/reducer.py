"""Reduces the gradients of an averager's parameters over the ranks, bucket by bucket.

A bucket is reduced in place as soon as its last gradient has been accumulated, in the same order on every rank. At the
end of the backward pass the rest is sent, and the results become the gradients. Unused parameters contribute zeros. The
last bucket ends with one flag per parameter (used on this rank or not) and `EXTRA` numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Literal

import torch

from diffcoll.averaging.buckets import Bucket, Parameter, cut
from diffcoll.averaging.parameters import SPARSE, find_ddp
from diffcoll.averaging.state import NAME, Backward, Join, Weights
from diffcoll.averaging.tree import ModuleTree
from diffcoll.core import checks
from diffcoll.core._torch import is_profiling, versions
from diffcoll.core.errors import CollectiveFailedError, CollectiveMismatchError
from diffcoll.engines.engine import Engine, Exclusive, done

__all__ = ["Reducer", "Reduction", "ending"]

Reduction = Literal["mean", "sum", "weighted"]

#: Numbers behind the flags: NaN from a rank that failed, the weight, whether the rank has taken part.
EXTRA = 3
_DDP = (
    "DistributedDataParallel averages this parameter, too; take one of the two away: call detach(), or use the module "
    "without DistributedDataParallel"
)
_numbers = itertools.count()

#: The reducers whose gradients a backward pass has accumulated, by autograd's number of the pass.
ending: dict[int, list[Reducer]] = {}


class Reducer:
    """The buckets of one averager, sent through an engine that nothing else uses."""

    def __init__(
        self,
        parameters: list[Parameter],
        engine: Engine,
        reduction: Reduction,
        nbytes: float,
        comm_dtype: torch.dtype | None,
        tree: ModuleTree | None,
    ) -> None:
        self.parameters, self.engine, self.reduction = parameters, engine, reduction
        self.number = next(_numbers)
        #: Those that are not frozen, in the order of the buckets.
        self.live: list[Parameter] = []
        self.buckets: list[Bucket] = []
        #: Indices of parameters in the order in which gradients were accumulated, until the ranks have agreed on one.
        self.arrived: list[int] | None = []
        self.backward, self.weights, self.join = Backward(), Weights(), Join()
        #: How often gradients were reduced.
        self.count = 0
        self._nbytes, self._dtype, self._tree = nbytes, comm_dtype, tree
        self._order = list(reversed(range(len(parameters))))  # in which gradients are expected

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Prepare the buckets for the gradients of a backward pass."""
        now = self.backward
        if self.engine.ended:
            now.tasks.clear()
            raise RuntimeError(
                f"{NAME}: its group was destroyed; call detach(), or make a {NAME} on another group, which takes over"
            )
        now.number += 1
        now.next_bucket = 0
        now.compares = checks.is_on() and self.engine.size > 1
        now.is_end_awaited = now.is_nested = False
        if self.arrived:
            self.arrived = []  # of a backward pass that an error ended
        for p in self.parameters:
            if p.tensor.shape != p.shape or p.tensor.dtype != p.dtype:
                p.refuse_kind(NAME)
        live = [p for i in self._order if (p := self.parameters[i]).tensor.requires_grad]
        if live != self.live or not self.buckets:
            self._cut(live)
        else:
            for bucket in self.buckets:
                bucket.let_go()
        for bucket in self.buckets:
            bucket.pending = len(bucket.parameters)
        for p in live:
            p.is_put = False
        now.value_versions = versions([p.tensor for p in live])

    def _cut(self, live: list[Parameter]) -> None:
        self.live, self.buckets = live, []
        for p in self.parameters:  # old buckets are freed before new ones are allocated, unless they hold gradients
            p.__dict__.pop("bucket", None)
            p.__dict__.pop("place", None)
            p.forget_views()
        self.buckets = cut(live, self._nbytes, self._dtype, self.engine, len(live) + EXTRA)

    # ── gradients into buckets ───────────────────────────────────────────────────────────────────────────

    def put(self, p: Parameter) -> None:
        """Copy one gradient to its place in the bucket."""
        self._check(p)
        p.put(self._scale())

    def put_aside(self, p: Parameter) -> None:
        """Set a gradient aside that was reduced before, so that it is not reduced again.

        A mean needs none of that: the mean of what is the same on all ranks is the same.
        """
        if not p.recall():
            raise RuntimeError(
                f"{NAME}: {p.name}: its gradient was changed while backward calls added to one that had been reduced; "
                "call zero_grad() before the first of them, or synchronize() before the change"
            )
        if p.reduced is not None and p.reduced is p.tensor.grad and self.reduction != "mean":
            p.put_aside()

    def _check(self, p: Parameter) -> None:
        self.put_aside(p)
        grad = p.tensor.grad
        if grad is None:
            return
        if grad.layout != torch.strided:
            raise TypeError(f"{NAME}: {p.name}: {SPARSE}")
        if grad.requires_grad:
            raise RuntimeError(
                f"{NAME}: {p.name}: its gradient is part of a graph (create_graph=True), which ends in a bucket; "
                "take torch.autograd.grad(…, create_graph=True) and dc.average_gradients, which is differentiable"
            )

    def _scale(self) -> float:
        """Return the factor of this rank's gradients. A mean is divided first: in half precision a sum may overflow."""
        if not self.join.took_part:
            return 0.0
        return 1 / self.engine.size if self.reduction == "mean" and not self.join.is_active else 1.0

    # ── send ─────────────────────────────────────────────────────────────────────────────────────────────

    def send_ready(self) -> None:
        """Send the buckets whose gradients are complete; the last one waits for the end, it tells of errors."""
        if self.backward.compares:
            return
        while self.backward.next_bucket < len(self.buckets) - 1 and self.buckets[self.backward.next_bucket].ready:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Start to reduce the next bucket, in place."""
        bucket = self.buckets[self.backward.next_bucket]
        self.backward.next_bucket += 1
        if bucket.stream is not None:
            bucket.join_streams()
        unput = [p for p in bucket.parameters if not p.is_put]
        for p in unput:
            self._check(p)
        bucket.put_small(self._scale())
        for p in unput:
            if not p.is_put:
                p.put(self._scale())
        if bucket is self.buckets[-1]:
            self._put_flags(bucket)
        self._start(bucket)

    def _put_flags(self, bucket: Bucket) -> None:
        used = [p.is_used or p.kept is not None for p in self.live]
        pinned = bucket.tail.is_cuda  # else the copy would make the host wait for all kernels before it
        flags = [*used, 0.0, 0.0, self.join.took_part]
        tail = torch.tensor(flags, dtype=bucket.tail.dtype, device="cpu", pin_memory=pinned)
        bucket.tail.copy_(tail, non_blocking=pinned)
        bucket.tail[-2] = self.weights.total  # which may be a tensor elsewhere

    def _start(self, bucket: Bucket) -> None:
        engine = self.engine
        if engine.size == 1:
            return
        engine.operation, engine.later = NAME, bucket.overlaps
        with self._explaining(bucket):
            bucket.wait = engine.all_reduce(bucket.row, bucket.row)

    def send_rest(self) -> None:
        """Send all buckets that have not been sent; an error here becomes one on all ranks."""
        try:
            if self.backward.compares:
                names = [p.name for p in self.live]
                self._compare(names, f"{len(names)} parameters that are not frozen: {', '.join(names)}")
            if self._tree is not None and self.engine.size > 1:
                self._tree.check()
            self._check_changes()
            while self.backward.next_bucket < len(self.buckets):
                self._send()
        except (CollectiveMismatchError, CollectiveFailedError):
            self._end()
            raise
        except BaseException:
            try:
                self.abandon(compared=True)
            finally:
                self._end()
            raise

    def _compare(self, facts: object, text: str) -> None:
        checks.compare(self.engine, (NAME, facts), f"{NAME}, {text}")

    def _check_changes(self) -> None:
        """Raise if a gradient or its parameter was modified in this pass after the gradient was accumulated."""
        if self.engine.size == 1:
            return
        values = versions([p.tensor for p in self.live])
        for p, before, now in zip(self.live, self.backward.value_versions, values, strict=True):
            if p.turn != self.backward.number:
                continue
            if p.tensor.grad is None:
                why = "its gradient was taken away"
            elif p.is_put and p.has_changed():
                why = "its gradient was changed"
            elif now != (before if p.node is None else p.value_version):
                why = "its value was changed"
            else:
                continue
            if find_ddp(q.tensor for q in self.live):
                raise RuntimeError(f"{NAME}: {p.name}: {_DDP}")
            raise RuntimeError(
                f"{NAME}: {p.name}: {why} in backward, before it was averaged, as an optimizer that steps within "
                "backward does: its step would be another one on every rank; step after backward, or change "
                "gradients in hooks of the tensor, p.register_hook(…)"
            )

    def check_unchanged(self) -> None:
        """Raise if DistributedDataParallel has averaged again what was reduced; its end of backward comes later."""
        changed = next((p for p in self.live if p.reduced is not None and p.has_changed()), None)
        if changed and find_ddp(q.tensor for q in self.live):
            raise RuntimeError(f"{NAME}: {changed.name}: {_DDP}")

    # ── receive ──────────────────────────────────────────────────────────────────────────────────────────

    def receive(self) -> None:
        """Wait for all buckets, and make their contents the gradients."""
        try:
            for bucket in self.buckets:
                with self._explaining(bucket):
                    bucket.wait()
                bucket.wait = done
            self._finish()
            self._agree_on_order()
        finally:
            self._end()

    @torch.no_grad()
    def _finish(self) -> None:
        tail = self.buckets[-1].tail.real
        if tail.is_cpu and tail[-3].isnan():
            raise RuntimeError(
                f"{NAME}: a rank has left this backward by an error, and its gradients are not there; "
                "look at the other ranks"
            )
        if self.reduction == "weighted" or (self.reduction == "mean" and self.join.is_active):
            divisor = tail[-2] if self.reduction == "weighted" else tail[-1]
            divisor = torch.where(divisor == 0, 1.0, divisor)
            for bucket in self.buckets:
                bucket.divide(divisor)
        used = None if all(p.is_used for p in self.live) else tail.tolist()
        for i, p in enumerate(self.live):
            if p.is_used and p.shares and p.kept is None:
                p.reduced = p.grad_view  # it is the gradient already
            elif used is None or used[i]:
                grad = p.take()
                if p.kept is not None:
                    grad.add_(p.kept)
                p.reduced = grad
                p.record_gradient()

    def _agree_on_order(self) -> None:
        """After the first reduction, cut the buckets in the order in which gradients were accumulated on rank 0."""
        if self.arrived is None:
            return
        arrived = self.arrived + [i for i in self._order if i not in set(self.arrived)]
        self.arrived = None
        order = torch.tensor(arrived, device=self.engine.control_device)
        if self.engine.size > 1:
            self.engine.operation, self.engine.later = NAME, False
            with Exclusive(self.engine, NAME):
                self.engine.broadcast(order, 0)()
        self._order = order.tolist()

    def _end(self) -> None:
        self.backward.tasks.clear()
        self.backward.is_end_awaited = self.backward.is_nested = False
        if self._tree is not None:
            self._tree.has_looked = False
        self.count += 1
        if self.join.is_leaving:
            self.join.leave()
        for p in self.parameters:
            p.kept = p.added = None

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────

    def abandon(self, compared: bool = False) -> None:
        """Tell the other ranks that this one has left the backward pass by an error: they wait for its buckets."""
        for task in [task for task, reducers in ending.items() if self in reducers]:
            del ending[task]
        self.backward.tasks.clear()
        if self.backward.compares and not compared:  # the other ranks wait for the comparison
            with contextlib.suppress(CollectiveMismatchError):
                self._compare("left", "which has left this backward by an error")
            return
        while self.backward.next_bucket < len(self.buckets):
            bucket = self.buckets[self.backward.next_bucket]
            self.backward.next_bucket += 1
            bucket.row.fill_(math.nan)
            self._start(bucket)
        for bucket in self.buckets:
            with self._explaining(bucket):
                bucket.wait()
            bucket.wait = done

    @contextlib.contextmanager
    def _explaining(self, bucket: Bucket) -> Iterator[None]:
        """Work in the group, named in profiles; an error of the backend says in which bucket, and who is absent."""
        engine = self.engine
        at = f"bucket {self.buckets.index(bucket)} of {len(self.buckets)}"
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(Exclusive(engine, f"{NAME}, {at}"))
                if is_profiling():
                    label = f"diffcoll.{NAME} {at}: {engine.description}, {bucket.row.nbytes} B"
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
            text = f"{NAME}, {at} ({bucket}): failed on rank {engine.rank} of {engine.description}: {said}; {remedy}"
            raise CollectiveFailedError(text) from error
