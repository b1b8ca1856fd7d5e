"""Reduces the gradients of an averager's parameters over the ranks, bucket by bucket.

| state | what it holds | ends with |
|---|---|---|
| idle | `Reducer.now` is None; `Accumulation` has the gradients that are not reduced yet | `begin` |
| collecting | `Collecting`: the pass, and the gradients and buckets that it has completed | `send_rest` |
| sent | a wait for each bucket | `receive`, which writes the results to `.grad` |

A bucket is reduced in place as soon as its last gradient has been accumulated and all earlier buckets have been sent.
Unused parameters contribute zeros. The last bucket ends with one flag per parameter (used on this rank or not) and
`EXTRA` numbers. An error on one rank is told to the others by NaN there, see `abandon`.
"""

from __future__ import annotations

import contextlib
import math
from operator import attrgetter
from typing import Any

import torch

from diffcoll.averaging.accumulation import (
    Accumulation,
    Collecting,
    is_used,
    refuse_changes,
    refuse_unused,
    refuse_views_of_ddp,
)
from diffcoll.averaging.buckets import Bucket, cut
from diffcoll.averaging.comm_hook import CommHook
from diffcoll.averaging.gradient import Parameter, is_own
from diffcoll.averaging.messages import refuse_ended
from diffcoll.averaging.module_buffers import ModuleBuffers
from diffcoll.averaging.policy import NAME, Policy, Settings
from diffcoll.averaging.sending import EXTRA, Sender
from diffcoll.averaging.watch import ModuleTree
from diffcoll.core import check_mode
from diffcoll.core.control import Control
from diffcoll.core.errors import CollectiveFailedError, CollectiveMismatchError
from diffcoll.core.torch_private.tensors import version
from diffcoll.engines.devices import can_pin
from diffcoll.engines.engine import Engine

#: What buckets depend on, but for the order in which gradients are expected.
_KIND = attrgetter("shape", "dtype", "requires_grad")


class Reducer:
    """The buckets of one averager, sent through an engine of its own."""

    def __init__(
        self,
        parameters: list[Parameter],
        engine: Engine,
        settings: Settings,
        tree: ModuleTree,
        buffers: ModuleBuffers | None,
        comm_hook: CommHook | None,
    ) -> None:
        self.parameters, self.engine, self.tree, self.buffers = parameters, engine, tree, buffers
        self.policy = Policy(settings.reduction, comm_hook is not None, engine.size)
        self.accumulation = Accumulation(parameters, self.policy)
        #: Parameters that are not frozen, in the order in which gradients are expected, and those last agreed on.
        self.trainable: list[Parameter] = []
        self._agreed: list[Parameter] | None = None
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[Parameter, Bucket] = {}
        #: The reduction that has begun; None: idle.
        self.now: Collecting | None = None
        #: Number of reductions.
        self.count = 0
        #: Whether another rank has called `skip_step` in the last reduction, and this one has not yet.
        self.is_skipped = False
        self._settings, self._comm_hook = settings, comm_hook
        self._sender = Sender(engine, in_order=settings.deterministic, has_hook=comm_hook is not None)
        #: The order in which gradients are expected, and whether the ranks have agreed on it.
        self._order, self._is_ordered = list(reversed(range(len(parameters)))), False
        #: All parameters, and their `_KIND` when the buckets were made.
        self._tensors, self._kinds = [p.tensor for p in parameters], list[Any]()

    # ── idle → collecting ────────────────────────────────────────────────────────────────────────────────

    def begin(self, *tasks: int) -> Collecting:
        """Prepare the buckets for the gradients of a backward pass."""
        try:
            return self._begin({*tasks})
        except BaseException:
            self.undo()
            raise

    def _begin(self, tasks: set[int]) -> Collecting:
        is_checked = check_mode.is_on() if self.now is None else self.now.is_checked
        self.now = None
        refuse_ended(self.engine)
        self.now = now = Collecting(tasks, is_checked)
        if self.is_skipped:
            raise RuntimeError(
                f"{NAME}: another rank has called skip_step() in the last step, and this one has not, and has no "
                "gradients of it; call skip_step(failed) on all ranks after backward, and step if it returns False"
            )
        kinds, trainable = [*map(_KIND, self._tensors)], self.trainable
        if kinds != self._kinds:
            for p in self.parameters:
                p.refuse_changed_kind(NAME)
            trainable = [p for i in self._order if (p := self.parameters[i]).tensor.requires_grad]
        if trainable != self.trainable or not self.buckets:
            self._cut(trainable)
        else:
            for bucket in self.buckets:
                bucket.reallocate_if_held()
        self._kinds = kinds
        now.compares = self.engine.size > 1 and (is_checked or self._agreed is not self.trainable)
        now.pending = {bucket: len(bucket.parameters) for bucket in self.buckets}
        return now

    def _cut(self, trainable: list[Parameter]) -> None:
        if self._agreed is not None and {*trainable} == {*self._agreed}:
            self._agreed = trainable
        self.trainable, self.buckets, self._bucket_of = trainable, [], {}
        for p in self.parameters:  # free old buckets before new ones are allocated, unless they hold gradients
            p.drop_reduced()
            p.place = None  # type: ignore[assignment]  # frozen ones have none
            p.waits_for_end = False
        nbytes, dtype, tail = self._settings.bucket_mb * 2**20, self._settings.comm_dtype, len(trainable) + EXTRA
        self.buckets = cut(trainable, nbytes, dtype, self.engine, tail, tail_alone=self._comm_hook is not None)
        self._sender.buckets = self.buckets
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        for bucket in self.buckets:
            if self._settings.deterministic:
                bucket.overlaps = False  # a sum in the order of ranks takes two rounds, and the first one blocks
            is_late = bucket.stream is None and (bucket is self.buckets[-1] or not bucket.overlaps)
            for p in bucket.parameters:
                p.waits_for_end = is_late and p.place.is_small

    # ── collecting → sent ────────────────────────────────────────────────────────────────────────────────

    def collect(self, p: Parameter, now: Collecting) -> None:
        """Take a gradient that autograd has accumulated; a bucket that is complete with it is sent."""
        place = p.place
        if p in now.collected:  # as by a nested pass
            if place.is_filled:
                raise RuntimeError(
                    f"{NAME}: {p.name}: a second gradient in one backward, after the first was put into its bucket; "
                    "checkpoints with use_reentrant=True share the parameter: use use_reentrant=False, or no_sync() "
                    "and synchronize()"
                )
            return
        now.collected[p] = None
        if p.pre_hook is None:
            p.value_version = version(p.tensor)
        bucket = self._bucket_of[p]
        if bucket.stream is not None:
            bucket.enter_stream()
        now.pending[bucket] -= 1
        if now.is_nested:
            return
        if not place.is_small and ((grad := p.tensor.grad) is None or is_own(grad)):
            # While it is in the cache; its own memory is free for the next gradient.
            self.accumulation.check(p, in_backward=True)
            place.put(self.policy.scale)
        if now.pending[bucket] == 0:
            self._send_ready(now)

    def _send_ready(self, now: Collecting) -> None:
        """Send complete buckets, in order; not the last one, which reports errors of the whole pass."""
        if now.compares or self._comm_hook is not None:
            return
        for bucket in self.buckets[len(now.waits) : -1]:
            if now.pending[bucket] or not bucket.overlaps or not bucket.is_whole():
                return
            self._send(bucket, now)

    @torch.no_grad()
    def _send(self, bucket: Bucket, now: Collecting) -> None:
        """Start the in-place reduction of the next bucket."""
        bucket.join_streams()
        scale = self.policy.scale
        if self.accumulation.is_new(bucket.parameters):
            bucket.put_small(scale)
        missing = [p for p in bucket.parameters if not p.place.is_filled]
        for p in missing:
            self.accumulation.check(p, in_backward=bool(now.tasks))
        for p in missing:
            p.place.put(scale)
        if bucket is self.buckets[-1]:
            self._put_flags(bucket, now)
        self._sender.start(bucket, now)

    def _put_flags(self, bucket: Bucket, now: Collecting) -> None:
        if self._settings.unused == "allow":
            now.used = [p.place.is_used or p.earlier is not None for p in self.trainable]
        # On a GPU from pinned memory: else the copy would block the host until all earlier kernels are done.
        pinned = not bucket.tail.is_cpu and can_pin(bucket.tail.device.type)
        flags = [*now.used, 0.0, 0.0, self.policy.join.took_part]
        tail = torch.tensor(flags, dtype=bucket.tail.dtype, device="cpu", pin_memory=pinned)
        bucket.tail.copy_(tail, non_blocking=pinned)
        if isinstance(self.policy.total, torch.Tensor):
            bucket.tail[-2] = self.policy.total  # may be on another device
        else:
            bucket.tail[-2].fill_(self.policy.total)  # a copy would block the host

    def send_rest(self) -> Collecting:
        """Send all buckets that have not been sent; an error found here makes all ranks raise."""
        now = self.now
        assert now is not None
        try:
            if self.policy.is_weighted and not now.tasks:  # `synchronize`: no backward has done it
                self.accumulation.drop_weights_of_zeroed()
            self._exchange_buffers(now)
            if self._settings.unused == "error":
                now.used = [is_used(p) for p in self.trainable]
            refuse_views_of_ddp(self.trainable if now.compares else ())
            self._compare_names(now)
            if self.engine.size > 1:
                self.tree.check()
                refuse_changes(self.trainable, now)
            if self.buffers is not None:
                self.buffers.check()
            for bucket in self.buckets[len(now.waits) :]:
                self._send(bucket, now)
        except BaseException as error:
            self.undo()  # buckets that were sent may be sums over some ranks
            try:
                if not isinstance(error, (CollectiveFailedError, CollectiveMismatchError)):
                    self.abandon()
            finally:
                self._end()
            raise
        return now

    def _compare_names(self, now: Collecting) -> None:
        """Raise on all ranks if other parameters are frozen on some; their buckets would differ."""
        if now.compares:
            now.compares, names = False, [p.name for p in self.trainable]
            self._compare(names, f"{len(names)} parameters that are not frozen: {', '.join(names)}")
            self._agreed = self.trainable

    def _compare(self, facts: object, text: str) -> None:
        check_mode.compare(self.engine, (NAME, facts), f"{NAME}, {text}", name=f"{NAME}, which parameters are frozen")

    # ── sent → idle ──────────────────────────────────────────────────────────────────────────────────────

    def receive(self, now: Collecting) -> None:
        """Wait for all buckets, and write the results to `.grad`."""
        try:
            self._receive(now)
        except BaseException:  # the buckets may be sums over some ranks only, or as a hook left them
            self.undo()
            raise
        finally:
            self._end()
        if not self.is_skipped and self._settings.unused == "error" and not all(now.used):
            refuse_unused(self.trainable, self.buckets[-1].tail.real.tolist())

    def _receive(self, now: Collecting) -> None:
        self._sender.wait(now)
        self.is_skipped = self._must_skip()
        if self.buffers is not None:
            self.buffers.write_late()
        if self.is_skipped:
            self.accumulation.drop()
            return
        if self._comm_hook is not None:
            self._comm_hook.reduce(self.buckets[:-1])
        self._finish(now)
        self._agree_on_order(now)

    def _must_skip(self) -> bool:
        """Whether a rank skips this step; raises if one has left backward by an error.

        Where there are streams, only if the host waits for the other ranks anyway: for a hook, or to agree on an order.
        """
        if self.buckets[-1].stream is not None and self._comm_hook is None and self._is_ordered:
            return False
        if math.isnan(self._sender.mark):
            raise RuntimeError(
                f"{NAME}: a rank has left this backward by an error, and its gradients are missing; "
                "look at the other ranks"
            )
        return self.was_skipped()

    def was_skipped(self) -> bool:
        """Whether a rank has skipped the last reduction."""
        return self._sender.mark == math.inf

    @torch.no_grad()
    def _finish(self, now: Collecting) -> None:
        tail = self.buckets[-1].tail.real
        divisor = self.policy.divisor(tail[-2], tail[-1])
        if divisor is not None:
            for bucket in self.buckets:
                bucket.divide(divisor)
        used = None if all(now.used) else tail.tolist()
        for i, p in enumerate(self.trainable):
            place, grad = p.place, p.tensor.grad
            if grad is not None and place.is_used and p.earlier is None and place.holds(grad):
                p.reduced = grad
            elif used is None or used[i]:
                p.reduced = place.take(p.earlier)

    def _agree_on_order(self, now: Collecting) -> None:
        """After the first reduction, order the buckets as gradients were accumulated on rank 0."""
        if not self._is_ordered:
            order = dict.fromkeys([*(p.index for p in now.collected), *self._order])
            self._kinds = []
            self._order, self._is_ordered = Control(self.engine, NAME).numbers_of_first([*order]), True

    def _end(self) -> None:
        self.now = None
        self.tree.is_checked = False
        self.count += 1
        self.accumulation.start_over()

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────

    def undo(self) -> None:
        """Make each `.grad` what it was before this reduction; buckets may still be under way, in their own memory."""
        self.accumulation.undo()

    def abandon(self) -> None:
        """Send NaN in all unsent buckets, for which the other ranks wait; it tells them of the error."""
        now = self._prepared()  # if this raises, the ranks wait until the next call here
        try:
            self._exchange_buffers(now)
            with contextlib.suppress(CollectiveMismatchError):  # the other ranks raise it, too
                if now.compares and now.is_checked:
                    self._compare("left", "which has left this backward by an error")
                self._compare_names(now)
                for bucket in self.buckets[len(now.waits) :]:
                    if any(p.place.holds(p.tensor.grad) for p in bucket.parameters):  # not undone, and not sent
                        bucket.allocate()
                self._sender.send_mark(math.nan, now)
        finally:
            self.now = None
            self.policy.join.on_reduction()  # as on the other ranks; what was accumulated before has been dropped

    def skip(self, failed: bool = True) -> None:
        """Send infinity in the place of the flags if failed; it tells the other ranks to drop their gradients."""
        try:
            now = self._prepared()
            self._exchange_buffers(now)
            if failed:
                self.accumulation.drop()
            else:  # gradients stay in the memory of the last reduction
                for bucket in self.buckets:
                    bucket.allocate()
            self._compare_names(now)
            self._sender.send_mark(math.inf if failed else 0.0, now)
            self.is_skipped = self.was_skipped()
            if self.buffers is not None and self.is_skipped:
                self.buffers.write_late()
        finally:
            if failed:
                self._end()
            self.now = None

    def _prepared(self) -> Collecting:
        """Return the reduction that has begun, or one that begins, for messages that no backward sends."""
        now = self.now if self.now is not None and self.now.pending else self.begin()
        now.ends_with = -1
        return now

    def _exchange_buffers(self, now: Collecting) -> None:
        if self.buffers is not None and not now.is_exchanged:
            self.buffers.end_round(self.policy.join.source)
            now.is_exchanged = True
