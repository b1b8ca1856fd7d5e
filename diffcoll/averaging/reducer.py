"""Reduces the gradients of an averager's parameters over the ranks, bucket by bucket.

A bucket is reduced in place as soon as its last gradient has been accumulated and all earlier buckets have been sent.
At the end of the backward pass the rest is sent, and the results become the gradients. Unused parameters contribute
zeros. The last bucket ends with one flag per parameter (used on this rank or not) and `EXTRA` numbers.
"""

from __future__ import annotations

import contextlib
import math

import torch

from diffcoll.averaging.accumulated import is_readable
from diffcoll.averaging.buckets import Bucket, Parameter, cut
from diffcoll.averaging.changes import refuse_changes
from diffcoll.averaging.comm_hook import CommHook
from diffcoll.averaging.communicating import ABSENT, communicating, refuse_ended
from diffcoll.averaging.module_buffers import ModuleBuffers
from diffcoll.averaging.parameters import SPARSE
from diffcoll.averaging.state import NAME, Backward, Join, Settings, Weights
from diffcoll.averaging.tree import ModuleTree
from diffcoll.core import checks
from diffcoll.core.errors import CollectiveFailedError, CollectiveMismatchError
from diffcoll.core.torch_private.tensors import versions
from diffcoll.engines.engine import Engine, Exclusive, done

#: Numbers after the flags: NaN from a rank that failed, infinity from one that skips the step; the weight; whether the
#: rank has taken part.
EXTRA = 3


class Reducer:
    """The buckets of one averager, sent through an engine of its own."""

    def __init__(
        self,
        parameters: list[Parameter],
        engine: Engine,
        arguments: Settings,
        tree: ModuleTree | None,
        buffers: ModuleBuffers | None,
        comm_hook: CommHook | None,
    ) -> None:
        self.parameters, self.engine, self.reduction = parameters, engine, arguments.reduction
        #: Parameters that are not frozen, in the order in which gradients are expected.
        self.trainable: list[Parameter] = []
        self.buckets: list[Bucket] = []
        #: Indices of parameters in order of accumulation, recorded until the ranks have agreed on an order; then None.
        self.accumulation_order: list[int] | None = []
        self.backward, self.weights, self.join = Backward(), Weights(), Join()
        self._witness: Parameter | None = None  # see `is_witness`
        #: Number of reductions.
        self.count = 0
        #: Whether another rank has called `skip_step` in the last reduction, and this one has not yet.
        self.is_skipped = False
        self._arguments, self._tree, self.buffers, self._comm_hook = arguments, tree, buffers, comm_hook
        self._order = list(reversed(range(len(parameters))))  # in which gradients are expected

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Prepare the buckets for the gradients of a backward pass."""
        now = self.backward
        if self.engine.ended:
            now.tasks.clear()
            refuse_ended(self.engine)
        if self.is_skipped:
            raise RuntimeError(
                f"{NAME}: another rank has called skip_step() in the last step, and this one has not, and has no "
                "gradients of it; call skip_step(failed) on all ranks after backward, and step if it returns False"
            )
        now.number += 1
        now.next_bucket = 0
        now.is_checked = checks.is_on() and self.engine.size > 1
        now.ends_with, now.is_nested = -1, False
        if self.buffers is not None:
            self.buffers.open_round()
        if self.accumulation_order:
            self.accumulation_order = []  # left by a backward pass that raised
        for p in self.parameters:
            if p.tensor.shape != p.shape or p.tensor.dtype != p.dtype:
                p.raise_kind_changed(NAME)
        trainable = [p for i in self._order if (p := self.parameters[i]).tensor.requires_grad]
        if trainable != self.trainable or not self.buckets:
            self._cut(trainable)
        else:
            for bucket in self.buckets:
                bucket.reallocate_if_held()
        for bucket in self.buckets:
            bucket.pending = len(bucket.parameters)
        for p in trainable:
            p.is_in_bucket = False
        now.value_versions = versions([p.tensor for p in trainable])
        now.is_open = True

    def _cut(self, trainable: list[Parameter]) -> None:
        self.trainable, self.buckets = trainable, []
        for p in self.parameters:  # free old buckets before new ones are allocated, unless they hold gradients
            p.drop_views()
            p.grad_view = None
            p.__dict__.pop("bucket", None)
            p.__dict__.pop("place", None)
        nbytes, dtype, tail = self._arguments.bucket_mb * 2**20, self._arguments.comm_dtype, len(trainable) + EXTRA
        self.buckets = cut(trainable, nbytes, dtype, self.engine, tail, tail_alone=self._comm_hook is not None)
        if self._arguments.deterministic:
            for bucket in self.buckets:
                bucket.overlaps = False  # a sum in the order of ranks takes two rounds, and the first one blocks

    # ── gradients into buckets ───────────────────────────────────────────────────────────────────────────

    def put(self, p: Parameter) -> None:
        """Copy one gradient to its place in the bucket."""
        self._check(p)
        p.put(self._scale())

    def set_aside(self, p: Parameter) -> None:
        """Set aside a gradient that was reduced before, so that it is not reduced again.

        Not where the reduction keeps what is equal on all ranks.
        """
        if p.earlier is not None and p.is_zeroed():
            p.earlier = None
        if p.earlier is not None and (p.is_modified() or self._may_be_zeroed(p)):
            raise RuntimeError(
                f"{NAME}: {p.name}: its gradient was changed while backward calls were added to a reduced gradient; "
                "call zero_grad() before the first of them, or synchronize() before the change"
            )
        if p.reduced is not None and p.reduced is p.tensor.grad and self.changes_reduced:
            p.set_aside()

    @property
    def changes_reduced(self) -> bool:
        """Whether to reduce a value that is equal on all ranks may change it; a mean does not, a hook may."""
        return self.reduction != "mean" or self._comm_hook is not None

    def refuse_replaced(self, p: Parameter) -> None:
        """Raise, before it is sent or added to, if `.grad` replaces a reduced gradient, and is not zero."""
        grad = p.tensor.grad
        is_other = p.was_replaced or (p.reduced is not None and p.reduced is not grad)
        if grad is None or not is_other or not self.changes_reduced:
            return
        if grad.layout != torch.strided or grad.any():
            raise RuntimeError(
                f"{NAME}: {p.name}: its gradient was replaced after its reduction, and would be reduced twice; modify "
                "it in place, or call zero_grad() before backward"
            )

    def count_weight(self) -> None:
        """Count the weight of a batch, whose first gradient is about to be accumulated."""
        self.drop_weights_of_zeroed()
        self.weights.total, self.weights.is_pending = self.weights.total + self.weights.current, False

    def drop_weights_of_zeroed(self) -> None:
        """Forget the weights of earlier batches if all of their gradients were set to None or to zero."""
        accumulated = [p for p in self.parameters if p.is_accumulated]
        if self._witness is not None and self._witness.is_zeroed():  # perhaps through `.data`, as all others then
            rest = [p.tensor.grad for p in accumulated if p.tensor.grad is not None]
            if any(g.layout != torch.strided or g.any() for g in rest):
                return
        elif not all(p.is_zeroed() or p.accumulated.is_zero_view(p.tensor.grad) for p in accumulated):
            return
        if not accumulated or any(p.is_zeroed() for p in accumulated):
            self.weights.total, self._witness = 0.0, None
        elif any(map(self._may_be_zeroed, accumulated)) and self.weights.total != 0:
            raise RuntimeError(
                f"{NAME}: {accumulated[0].name}, …: all gradients are zero, and views of memory that was modified "
                "after they were accumulated, so whether the weight of their batch counts is not known; call "
                "set_weight(0) for a batch without gradients, or do not write to that memory before the reduction"
            )

    def is_witness(self, p: Parameter) -> bool:
        """Whether the gradient of p tells whether gradients were zeroed through `.data`: the first that is not zero."""
        grad = p.tensor.grad
        if self._witness is None and self.reduction == "weighted" and grad is not None and is_readable(grad):
            self._witness = p if grad.any() else None
        return self._witness is p

    def _may_be_zeroed(self, p: Parameter) -> bool:
        """Whether a gradient that was zero may have been zeroed: it is a view, and its base was modified."""
        of_all = [q.accumulated for q in self.parameters]
        return p.accumulated.is_zero_view(p.tensor.grad) and p.accumulated.is_base_modified(of_all)

    def _check(self, p: Parameter) -> None:
        self.set_aside(p)
        grad = p.tensor.grad
        if grad is None:
            return
        if grad.layout != torch.strided:
            raise TypeError(f"{NAME}: {p.name}: {SPARSE}")
        if self.backward.tasks:  # `synchronize` reduces what is in `.grad`, whoever has assigned it
            self.refuse_replaced(p)
        if self.reduction == "weighted" and p.weighted_at != self.count:
            raise RuntimeError(
                f"{NAME}: {p.name}: its gradient was not multiplied by the weight, since no backward has accumulated "
                "it since the last reduction; call set_weight(w) before backward, and average gradients that you "
                "assign by dc.average_gradients(…, weight=w)"
            )
        if grad.requires_grad:
            raise RuntimeError(
                f"{NAME}: {p.name}: its gradient is part of a graph (create_graph=True), and reduction in a bucket is "
                "not differentiable; use torch.autograd.grad(…, create_graph=True) and dc.average_gradients, which is"
            )

    def _scale(self) -> float:
        """Return the factor of this rank's gradients: 1/N before the sum, which may overflow in half precision."""
        if not self.join.took_part:
            return 0.0
        return 1.0 if self.reduction != "mean" or self._divides_after else 1 / self.engine.size

    @property
    def _divides_after(self) -> bool:
        """Whether the sum over ranks is divided by a number that only the last bucket brings."""
        counts_ranks = self.join.is_active or self._comm_hook is not None
        return self.reduction == "weighted" or (self.reduction == "mean" and counts_ranks)

    # ── send ─────────────────────────────────────────────────────────────────────────────────────────────

    def send_ready(self) -> None:
        """Send complete buckets, in order; not the last one, which reports errors of the whole pass."""
        if self.backward.is_checked or self._comm_hook is not None:
            return
        while self.backward.next_bucket < len(self.buckets) - 1 and self.buckets[self.backward.next_bucket].ready:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Start the in-place reduction of the next bucket."""
        bucket = self.buckets[self.backward.next_bucket]
        if bucket.stream is not None:
            bucket.join_streams()
        missing = [p for p in bucket.parameters if not p.is_in_bucket]
        for p in missing:
            self._check(p)
        bucket.put_small(self._scale())
        for p in missing:
            if not p.is_in_bucket:
                p.put(self._scale())
        if bucket is self.buckets[-1]:
            self._put_flags(bucket)
        self.backward.next_bucket += 1  # not before: if a check has raised, `abandon` sends this bucket
        self._start(bucket)

    def _put_flags(self, bucket: Bucket) -> None:
        if self._arguments.unused == "allow":
            self._used = [p.is_used or p.earlier is not None for p in self.trainable]
        pinned = bucket.tail.is_cuda  # otherwise the copy would block the host until all earlier kernels are done
        flags = [*self._used, 0.0, 0.0, self.join.took_part]
        tail = torch.tensor(flags, dtype=bucket.tail.dtype, device="cpu", pin_memory=pinned)
        bucket.tail.copy_(tail, non_blocking=pinned)
        bucket.tail[-2] = self.weights.total  # may be a tensor on another device

    def _start(self, bucket: Bucket) -> None:
        engine = self.engine
        if engine.size == 1 or (self._comm_hook is not None and bucket is not self.buckets[-1]):
            return
        engine.operation, engine.later = NAME, bucket.overlaps
        with self._communicating(bucket):
            reduce = engine.all_reduce_in_order if self._arguments.deterministic else engine.all_reduce
            bucket.wait = reduce(bucket.row, bucket.row)

    def send_rest(self) -> None:
        """Send all buckets that have not been sent; an error found here makes all ranks raise."""
        try:
            if self.reduction == "weighted" and not self.backward.tasks:  # `synchronize`: no backward has done it
                self.drop_weights_of_zeroed()
            if self.buffers is not None:
                self.buffers.end_round(self.join.source)
            if self._arguments.unused == "error":
                self._used = [p.is_used_since_reduction() for p in self.trainable]
            if self.backward.is_checked:
                self._compare_names()
            if self._tree is not None and self.engine.size > 1:
                self._tree.check()
            if self.buffers is not None:
                self.buffers.check()
            if self.engine.size > 1:
                refuse_changes(self.trainable, self.backward)
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

    def _compare_names(self) -> None:
        names = [p.name for p in self.trainable]
        self._compare(names, f"{len(names)} parameters that are not frozen: {', '.join(names)}")

    def _compare(self, facts: object, text: str) -> None:
        checks.compare(self.engine, (NAME, facts), f"{NAME}, {text}")

    # ── receive ──────────────────────────────────────────────────────────────────────────────────────────

    def receive(self) -> None:
        """Wait for all buckets, and write the results to `.grad`."""
        try:
            for bucket in self.buckets:
                with self._communicating(bucket):
                    bucket.wait()
                bucket.wait = done
            self.is_skipped = self._is_skipped()
            if self.buffers is not None:
                self.buffers.write_late()
            if self.is_skipped:
                self.drop()
                return
            if self._comm_hook is not None:
                self._comm_hook.reduce(self.buckets[:-1])
            self._finish()
            self._agree_on_order()
            self._refuse_unused()
        finally:
            self._end()

    def _is_skipped(self) -> bool:
        """Whether a rank skips this step; raises if one has left backward by an error.

        On a GPU only if the host waits for the other ranks anyway: for a hook, or to agree on an order.
        """
        if self.buckets[-1].tail.is_cuda and self._comm_hook is None and self.accumulation_order is None:
            return False
        if self.has_mark(math.nan):
            raise RuntimeError(
                f"{NAME}: a rank has left this backward by an error, and its gradients are missing; "
                "look at the other ranks"
            )
        return self.has_mark(math.inf)

    def has_mark(self, mark: float) -> bool:
        """Whether a rank has sent NaN, or infinity and no rank NaN, in the place of `EXTRA`'s first number."""
        sent = float(self.buckets[-1].tail.real[-3])
        return sent == mark or (math.isnan(mark) and math.isnan(sent))

    def drop(self) -> None:
        """Drop all gradients, of this step and those that it was added to."""
        for p in self.parameters:
            p.zero()
            p.reduced = p.earlier = None
            p.accumulated.clear()

    def _refuse_unused(self) -> None:
        """Raise, if asked for, the names of the parameters that no rank has used; the same on all ranks."""
        if self._arguments.unused == "allow" or all(self._used):
            return
        flags = self.buckets[-1].tail.real.tolist()
        names = [p.name for p, flag in zip(self.trainable, flags, strict=False) if not flag]
        if names:
            raise RuntimeError(
                f"{NAME}: unused: got {len(names)} of {len(self.trainable)} parameters that no rank's loss has used "
                f'since the last reduction, expected none with unused="error": {", ".join(names)}; use them, freeze '
                "them by requires_grad_(False), or leave them out by ignore=[…]"
            )

    @torch.no_grad()
    def _finish(self) -> None:
        tail = self.buckets[-1].tail.real
        if self._divides_after:
            divisor = tail[-2] if self.reduction == "weighted" else tail[-1]
            divisor = torch.where(divisor == 0, 1.0, divisor)
            for bucket in self.buckets:
                bucket.divide(divisor)
        used = None if all(self._used) else tail.tolist()
        for i, p in enumerate(self.trainable):
            if p.is_used and p.shares and p.earlier is None and p.is_view(p.tensor.grad):
                p.reduced = p.grad_view
            elif used is None or used[i]:
                grad = p.set_gradient()
                if p.earlier is not None:
                    grad.add_(p.earlier)
                p.reduced = grad
                p.record_gradient()

    def _agree_on_order(self) -> None:
        """After the first reduction, order the buckets as gradients were accumulated on rank 0."""
        if self.accumulation_order is None:
            return
        accumulation_order = self.accumulation_order + [i for i in self._order if i not in set(self.accumulation_order)]
        self.accumulation_order = None
        order = torch.tensor(accumulation_order, device=self.engine.control_device)
        if self.engine.size > 1:
            self.engine.operation, self.engine.later = NAME, False
            with Exclusive(self.engine, NAME):
                self.engine.broadcast(order, 0)()
        self._order = order.tolist()

    def _end(self) -> None:
        self.backward.tasks.clear()
        self.backward.is_open = False
        self.backward.ends_with, self.backward.is_nested = -1, False
        if self._tree is not None:
            self._tree.is_checked = False
        self.count += 1
        self.join.on_reduction()
        self._witness = None
        for p in self.parameters:
            p.earlier, p.is_accumulated, p.was_replaced = None, False, False
            p.accumulated.clear()

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────

    def abandon(self, compared: bool = False) -> None:
        """Send NaN in all unsent buckets, for which the other ranks wait; it tells them of the error."""
        try:
            self._leave_pass()
            if self.backward.is_checked and not compared:  # the other ranks wait in the comparison
                with contextlib.suppress(CollectiveMismatchError):
                    self._compare("left", "which has left this backward by an error")
            else:
                self._send_mark(math.nan)
        finally:
            self.backward.is_open = False

    def skip(self, failed: bool = True) -> None:
        """Send infinity in the place of the flags if failed; it tells the other ranks to drop their gradients."""
        try:
            self._leave_pass()
            if not failed:  # gradients stay in the memory of the last reduction
                for bucket in self.buckets:
                    bucket.allocate()
            if self.backward.is_checked:
                self._compare_names()
            self._send_mark(math.inf if failed else 0.0)
            self.is_skipped = self.has_mark(math.inf)
            if self.buffers is not None and self.is_skipped:
                self.buffers.write_late()
        finally:
            if failed:
                self._end()
            self.backward.is_open = False

    def _leave_pass(self) -> None:
        """Prepare for the messages of this reduction, which its backward will not send."""
        if not self.backward.is_open:
            is_checked = self.backward.is_checked if self.backward.tasks else None  # tasks: `begin` has raised
            self.begin()
            if is_checked is not None:
                self.backward.is_checked = is_checked
        self.backward.tasks.clear()
        self.backward.ends_with = -1
        if self.buffers is not None:
            self.buffers.end_round(self.join.source)

    @torch.no_grad()
    def _send_mark(self, mark: float) -> None:
        """Send all unsent buckets without gradients, with a mark in the place of `EXTRA`'s first number; wait."""
        while self.backward.next_bucket < len(self.buckets):
            bucket = self.buckets[self.backward.next_bucket]
            self.backward.next_bucket += 1
            bucket.row.fill_(math.nan)
            if bucket is self.buckets[-1]:
                bucket.tail[-3] = mark
            self._start(bucket)
        for bucket in self.buckets:
            with self._communicating(bucket):
                bucket.wait()
            bucket.wait = done

    def _communicating(self, bucket: Bucket) -> contextlib.AbstractContextManager[None]:
        at = f"bucket {self.buckets.index(bucket)} of {len(self.buckets)}"
        return communicating(self.engine, at, bucket.row.nbytes, str(bucket), ABSENT)
