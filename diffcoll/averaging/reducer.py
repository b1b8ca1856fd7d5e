"""What a block does: it moves gradients into buckets while backward runs, and reduces all in `.grad` at its end.

A block sends the same messages on every rank, whatever happens in it: the early buckets in order; then the note, which
tells all ranks who has which gradients and who has failed; then the last buckets; then, if the note says so, gradients
that came after their bucket was sent. Hooks are only an optimization: they move large gradients while they are in the
cache and send early buckets; what they have not moved is moved at the end.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from diffcoll.averaging import unreduced
from diffcoll.averaging.buckets import Bucket, Parameter, cut, divide, sent_dtype
from diffcoll.averaging.messages import (
    FAILED,
    HAS_COUNT,
    LATE,
    NAME,
    UNUSED,
    USED,
    Note,
    communicating,
    note_to_send,
    read_note,
)
from diffcoll.averaging.parameters import Named
from diffcoll.core.control import Control
from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.core.torch_private.tensors import version
from diffcoll.core.torch_private.tracing import untraced
from diffcoll.engines.devices import is_capturing
from diffcoll.engines.engine import Engine, Wait, done
from diffcoll.engines.turn import Turn

#: Seconds after which a rank that has failed prints its error, if the others have not reached the end of their block.
PATIENCE = 10.0


class Reducer:
    """The blocks of one averager, whose messages are sent through an engine of its own."""

    def __init__(
        self, named: Named, engine: Engine, is_mean: bool, nbytes: float, comm_dtype: torch.dtype | None
    ) -> None:
        self.engine = engine
        self.parameters = [Parameter(i, *pair) for i, pair in enumerate(named)]
        self.ids = {id(p.tensor) for p in self.parameters}
        self.is_open = False
        #: Whether backward has added to gradients outside of a block since the last one.
        self.is_unreduced = False
        self._is_mean, self._nbytes, self._comm_dtype = is_mean, nbytes, comm_dtype
        with Turn(engine, NAME):
            self._host = engine.control()  # carries the note over the CPU where that is possible
        #: The order in which gradients are expected of the parameters that have a place, and that of the next block.
        self._order: list[int] = []
        self._next_order: list[int] | None = None
        #: The order on this rank, while it is recorded.
        self._recorded: dict[int, None] | None = {}
        self._early: list[Bucket] = []
        self._last: list[Bucket] = []
        self._placed: list[Tensor] = []
        self._placeless: list[Parameter] = []
        #: The smallest parameter of the last buckets, whose gradient stays in `.grad` until the end of a block.
        self.witness: Parameter | None = None
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles)
        self._guards: list[Any] = []
        self._start_over()
        # At first reverse order, and what requires a gradient on rank 0.
        is_laid_out = Control(engine, NAME).numbers_of_first([int(p.tensor.requires_grad) for p in self.parameters])
        self._lay_out([i for i in reversed(range(len(named))) if is_laid_out[i]])

    def _start_over(self) -> None:
        """Forget the block that has ended."""
        self.is_open = False
        _remove(self._guards)
        #: One for each bucket that was sent.
        self._waits: list[Wait] = []
        #: Indices of parameters whose gradient came after their bucket was sent, or that have no place.
        self._late: set[int] = set()
        #: The witness's gradient after the last accumulation, and its version.
        self._seen: tuple[Tensor, int] | None = None
        self._was_changed = False
        self._scale, self._count, self._has_count, self._versions = 1.0, 0.0, False, 0

    # ── the layout ───────────────────────────────────────────────────────────────────────────────────────

    def _lay_out(self, order: list[int]) -> None:
        """Cut buckets, and register the hooks that they need."""
        _remove(self._handles)
        self._early, self._last, self._order, self._next_order = [], [], order, None
        for p in self.parameters:  # free the old buckets before new ones are allocated
            p.leave_bucket()
        self._early, self._last = cut([self.parameters[i] for i in order], self._nbytes, self._comm_dtype, self.engine)
        self._placed = [p.tensor for p in self.parameters if p.bucket is not None]
        self._placeless = [p for p in self.parameters if p.bucket is None]
        if not self._early:
            self._recorded = None  # the order makes no difference
        candidates = [p for bucket in self._last for p in bucket.parameters if p.tensor.requires_grad]
        self.witness = min(candidates, key=lambda p: p.tensor.nbytes, default=None)
        for p in self.parameters:
            is_needed = self._recorded is not None or p is self.witness or not p.is_small or p.bucket in self._early
            if p.bucket is not None and p.tensor.requires_grad and is_needed:
                register: Any = p.tensor.register_post_accumulate_grad_hook
                self._handles.append(register(_hook(weakref.ref(self), p.index)))

    @property
    def _buckets(self) -> list[Bucket]:
        """All buckets, in the order in which they are sent."""
        return [*self._early, *self._last]

    def close(self) -> None:
        """Remove the hooks, and free the communicator; all ranks call it."""
        _remove(self._handles)
        if self.engine.size > 1:
            self.engine.close()

    # ── the block ────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, count: float | Tensor | None) -> None:
        """Enter a block."""
        if self.is_open:
            raise RuntimeError(f"{NAME}.reduce: entered within a block of the same {NAME}; use one block a step")
        if self.engine.ended:
            raise RuntimeError(f"{NAME}.reduce: its group was destroyed; make a new {NAME}, or call close()")
        if isinstance(count, Tensor) and count.is_cpu:
            count = float(count)
        if is_capturing() and not isinstance(count, Tensor) and count is not None:
            raise RuntimeError(
                f"{NAME}.reduce: count: got a number of the host while a CUDA graph is captured, which every replay "
                "would repeat; pass a 0-d tensor on the device"
            )
        if self._next_order is not None:
            self._lay_out(self._next_order)
        for p in self._placeless:
            p.begin()
        for bucket in self._buckets:
            bucket.begin()
        self._has_count = count is not None
        self._scale = 1 / self.engine.size if self._is_mean and not self._has_count else 1.0
        tail = self._last[-1].tail
        if isinstance(count, Tensor):
            tail.copy_(count)
        else:
            self._count = float(count or 0)
            tail.zero_()
        self._versions = self._sum_of_versions()
        if self._refuses_reduced:
            for p in self.parameters:
                if p.tensor.requires_grad and p.is_reduced():
                    register: Any = p.tensor.register_hook
                    self._guards.append(register(_guard(p)))
        self.is_open = True

    def after_accumulate(self, p: Parameter) -> None:
        """Move a gradient that autograd has accumulated to its bucket, which is sent if it is complete."""
        grad = p.tensor.grad
        if not self.is_open:
            self._after_plain_accumulate(p, grad)
            return
        bucket = p.bucket
        if bucket is None or grad is None:
            return
        if self._recorded is not None:
            self._recorded.setdefault(p.index)
        if p is self.witness:
            before, self._seen = self._seen, (grad, version(grad))
            self._was_changed |= before is not None and (before[0] is not grad or before[1] + 1 != version(grad))
        bucket.enter_stream()
        if p.has_arrived:
            return  # a further gradient stays in `.grad` until the bucket is sent, or the block ends
        p.has_arrived = True
        bucket.pending -= 1
        if not p.is_small and p is not self.witness:
            with torch.no_grad():
                p.pack(self._scale)  # while it is in the cache; its own memory is free for the next gradient
        for ready in self._early[len(self._waits) :]:
            if ready.pending:
                break
            ready.pack(self._scale)
            self._send(ready)

    def _after_plain_accumulate(self, p: Parameter, grad: Tensor | None) -> None:
        if grad is not None and grad is p.assigned and version(grad) == p.reduced_version + 1:
            p.reduced_version += 1  # not zeroed before: what was reduced is still in it
        if p is self.witness and not unreduced.is_in_block(p.tensor):
            self.is_unreduced = True

    def _send(self, bucket: Bucket) -> None:
        """Start the in-place reduction of the next bucket."""
        if self.engine.size > 1:
            with self._communicating(bucket):
                self._waits.append(self.engine.all_reduce(bucket.row, bucket.row, bucket.overlaps))
        else:
            self._waits.append(done)

    @torch.no_grad()
    def end(self, error: BaseException | None) -> None:
        """Leave a block, by this error on this rank: reduce what is in `.grad`.

        Raises:
            RuntimeError: gradients would be wrong, here or on another rank; `.grad` is None on all ranks.
        """
        failure = error or self._pack_all()
        try:
            with _printing(failure):
                note = self._communicate(failure is not None)
            if failure is not None:
                raise failure
            self._refuse(note)
            self._write(note)
            self._follow(note)
        except BaseException as raised:
            for p in self.parameters:
                p.drop()
            if error is None or not isinstance(raised, Exception):
                raise
        finally:
            self._start_over()
            unreduced.after_block(self)

    def _pack_all(self) -> BaseException | None:
        """Move all gradients to their buckets; return the error of this rank, of which the others will be told."""
        try:
            self._refuse_changes()
            for bucket in self._buckets[len(self._waits) :]:
                bucket.pack(self._scale)
            for p in self.parameters:
                grad = p.tensor.grad
                if grad is not None and p.tensor.requires_grad:
                    p.refuse(grad)
                    self._late.add(p.index)
        except BaseException as error:
            return error
        return None

    def _communicate(self, has_failed: bool) -> Note:
        """Send what this block has not sent yet, and wait for all of it."""
        for bucket in self._early[len(self._waits) :]:
            self._send(bucket)
        late = self._late
        states = [LATE if p.index in late else USED if p.is_packed else UNUSED for p in self.parameters]
        flags = FAILED * has_failed + HAS_COUNT * self._has_count
        numbers = note_to_send(states, self._count, flags, self.engine, self._host.control_device)
        wait: Wait = done
        if self.engine.size > 1:
            with self._communicating_note(numbers):
                wait = self._host.all_reduce(numbers, numbers, self._host.overlaps(numbers))
        for bucket in self._last:
            self._send(bucket)
        with self._communicating_note(numbers):
            wait()
        for bucket, of_bucket in zip(self._buckets, self._waits, strict=True):
            with self._communicating(bucket):
                of_bucket()
        return read_note(numbers, len(states), self.engine)

    def _write(self, note: Note) -> None:
        """Make the reduced gradients `.grad`; None for a parameter that no rank has used."""
        rows = self._reduce_late([p for p, state in zip(self.parameters, note.states, strict=True) if state == LATE])
        if self._has_count:
            count = self._last[-1].tail.real + note.total
            divisor = torch.where(count == 0, torch.inf, count)
            for row in (*(bucket.body for bucket in self._buckets), *(row for row, _ in rows)):
                divide(row, divisor)
        for row, of_row in rows:
            sizes = [p.as_sent(row.dtype).numel() for p in of_row]
            for p, part in zip(of_row, row.split_with_sizes(sizes), strict=True):
                p.add_late(part)
        for p, state in zip(self.parameters, note.states, strict=True):
            if state >= USED:
                p.assign()

    def _reduce_late(self, late: list[Parameter]) -> list[tuple[Tensor, list[Parameter]]]:
        """Reduce the gradients that are late on some ranks, in one message for each dtype and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
        for p in late:
            kinds.setdefault((sent_dtype(p.dtype, self._comm_dtype), p.device), []).append(p)
        rows: list[tuple[Tensor, list[Parameter]]] = []
        for (dtype, _), of_kind in kinds.items():
            row = torch.cat([p.take_late(dtype, self._scale) for p in of_kind])
            rows.append((row, of_kind))
            if self.engine.size > 1:
                what = (
                    f"{of_kind[0].name} …, {len(of_kind)} parameters, whose gradients came after their bucket was sent"
                )
                with communicating(self.engine, "late gradients", row.nbytes, what):
                    self.engine.all_reduce(row, row)()
        return rows

    def _follow(self, note: Note) -> None:
        """Decide the layout of the next block, on all ranks alike: rank 0's order in the first one, and what is new."""
        if self._recorded is not None:
            mine = dict.fromkeys([*self._recorded, *self._order])
            self._next_order = Control(self.engine, NAME).numbers_of_first([*mine])
            self._recorded = None
        new = [p.index for p in self._placeless if note.states[p.index] == LATE]
        if new:
            self._next_order = [*(self._next_order or self._order), *reversed(new)]

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────

    def _refuse(self, note: Note) -> None:
        """Raise what all ranks know of each other."""
        failed, counted = note.where(FAILED), note.where(HAS_COUNT)
        if failed:
            raise RuntimeError(
                f"{NAME}.reduce: the block was left by an error on rank {_listed(failed)}, and `.grad` is None on all "
                "ranks; that rank has the cause; to go on, call zero_grad() and take the next step"
            )
        if 0 < len(counted) < self.engine.size:
            raise CollectiveMismatchError(
                f"{NAME}.reduce: count: got None on some ranks, and a count on rank {_listed(counted)}; pass one on "
                "all ranks, 0 where there is nothing"
            )

    def _refuse_changes(self) -> None:
        """Raise if something else has modified gradients or parameters within the block."""
        if self._versions != self._sum_of_versions():
            raise RuntimeError(
                f"{NAME}.reduce: a parameter was modified within the block, as by an optimizer's step, whose gradients "
                "are not reduced yet; step after the block"
            )
        seen, witness = self._seen, self.witness
        if seen is not None and witness is not None:
            is_same = witness.tensor.grad is seen[0] and version(seen[0]) == seen[1]
            if self._was_changed or not is_same:
                raise RuntimeError(
                    f"{NAME}.reduce: {witness.name}: its gradient was modified within the block after backward, as by "
                    "clipping, zero_grad() or DistributedDataParallel; do it after the block, or zero_grad() before it"
                )
        if self._refuses_reduced:
            for p in self.parameters:
                if p.is_reduced() and p.tensor.requires_grad:
                    p.refuse_reduced()

    @property
    def _refuses_reduced(self) -> bool:
        """Whether the reduction changes what is equal on all ranks; a mean does not."""
        return not self._is_mean or self._has_count

    def _sum_of_versions(self) -> int:
        return sum(map(version, self._placed))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    def _communicating(self, bucket: Bucket) -> contextlib.AbstractContextManager[None]:
        buckets = self._buckets
        at = f"bucket {buckets.index(bucket)} of {len(buckets)}"
        return communicating(self.engine, at, bucket.row.nbytes, str(bucket))

    def _communicating_note(self, numbers: Tensor) -> contextlib.AbstractContextManager[None]:
        what = f"who has which of {len(self.parameters)} gradients"
        return communicating(self._host, "the note", numbers.nbytes, what)


def _hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    """Return the hook of a parameter; a reference to either would be a cycle that the garbage collector cannot see."""

    def after_accumulate(_: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.after_accumulate(alive.parameters[index])

    return untraced(after_accumulate)


def _guard(p: Parameter) -> Callable[[Tensor], None]:
    """Return a hook that raises before a gradient is added to a reduced one, which would be reduced again."""

    def before_accumulate(_: Tensor) -> None:
        if p.is_reduced():
            p.refuse_reduced()

    return untraced(before_accumulate)


@contextlib.contextmanager
def _printing(failure: BaseException | None) -> Iterator[None]:
    """Print a rank's error if the others do not come: it is raised after them, and they may wait for this rank."""
    if failure is None:
        yield
        return
    text = f"{NAME}: this rank has failed, and waits for the others to reach the end of the block:\n"
    text += "".join(traceback.format_exception(failure))
    timer = threading.Timer(PATIENCE, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _remove(handles: list[Any]) -> None:
    """Remove hooks."""
    while handles:
        handles.pop().remove()


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
