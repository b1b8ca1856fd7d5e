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
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from diffcoll.averaging.buckets import Bucket, Parameter, cut, late_buckets
from diffcoll.averaging.messages import LATE, NAME, UNUSED, USED, Message, Note, note_to_send, read_note
from diffcoll.averaging.parameters import Named
from diffcoll.averaging.unreduced import Watch
from diffcoll.core.control import Control
from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.core.torch_private.tensors import version
from diffcoll.core.torch_private.tracing import untraced
from diffcoll.engines.devices import is_capturing
from diffcoll.engines.engine import Engine
from diffcoll.engines.turn import Turn

#: Seconds after which a rank that has failed prints its error, if the others have not reached the end of their block.
PATIENCE = 10.0


class Reducer:
    """The buckets and hooks of one averager, whose messages are sent through an engine of its own."""

    def __init__(
        self, named: Named, engine: Engine, is_mean: bool, nbytes: float, comm_dtype: torch.dtype | None
    ) -> None:
        self.engine, self.is_mean, self._nbytes = engine, is_mean, nbytes
        self.parameters = [Parameter(i, *pair, comm_dtype) for i, pair in enumerate(named)]
        self.watch = Watch(p.tensor for p in self.parameters)
        with Turn(engine, NAME):
            self.host = engine.control()  # carries the note over the CPU where that is possible
        #: The open block.
        self.block: Block | None = None
        #: The order in which gradients come on this rank, while it is recorded.
        self.recorded: dict[int, None] | None = {}
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles)
        # At first reverse order, and what requires a gradient on rank 0.
        has_place = Control(engine, NAME).numbers_of_first([int(p.tensor.requires_grad) for p in self.parameters])
        self._order = [i for i in reversed(range(len(named))) if has_place[i]]
        self._lay_out()

    def _lay_out(self) -> None:
        """Cut buckets, and register the hooks that they need."""
        _remove(self._handles)
        self._is_outdated = False
        self.early: list[Bucket] = []
        self.last: list[Bucket] = []
        for p in self.parameters:  # free the old buckets before new ones are allocated
            p.bucket = None
        self.early, self.last = cut([self.parameters[i] for i in self._order], self._nbytes, self.engine)
        if not self.early:
            self.recorded = None  # the order makes no difference
        # The smallest parameter of the last buckets: its gradient stays in `.grad` until the end of a block.
        candidates = [p.tensor for bucket in self.last for p in bucket.parameters if p.tensor.requires_grad]
        self.watch.witness = min(candidates, key=lambda tensor: tensor.nbytes, default=None)
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.bucket = bucket
                is_witness = p.tensor is self.watch.witness
                is_needed = self.recorded is not None or bucket in self.early or is_witness or not p.is_small
                if is_needed and p.tensor.requires_grad:
                    register: Any = p.tensor.register_post_accumulate_grad_hook
                    self._handles.append(register(_hook(weakref.ref(self), p.index)))

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order in which they are sent."""
        return [*self.early, *self.last]

    def begin(self) -> None:
        """Prepare the buckets for a block."""
        if self._is_outdated:
            self._lay_out()
        for bucket in self.buckets:
            bucket.begin()

    def follow(self, note: Note) -> None:
        """Decide the order of the next block, on all ranks alike: rank 0's in the first one, and what is new."""
        if self.recorded is not None:
            mine = dict.fromkeys([*self.recorded, *self._order])
            self._order = Control(self.engine, NAME).numbers_of_first([*mine])
            self.recorded, self._is_outdated = None, True
        new = [p.index for p in reversed(self.parameters) if p.bucket is None and note.states[p.index] == LATE]
        if new:
            self._order, self._is_outdated = [*self._order, *new], True

    def after_accumulate(self, p: Parameter) -> None:
        """Record a gradient that autograd has accumulated outside of a block."""
        grad = p.tensor.grad
        if grad is not None and grad is p.assigned and version(grad) == p.version + 1:
            p.version += 1  # not zeroed before: what was reduced is still in it
        if p.tensor is self.watch.witness:
            self.watch.is_local = True

    def close(self) -> None:
        """Remove the hooks, and free the communicator; all ranks call it."""
        self.watch.close()
        _remove(self._handles)
        if self.engine.size > 1:
            self.engine.close()


class Block:
    """The context manager of `GradientAverager.reduce`."""

    def __init__(self, reducer: Reducer, count: float | Tensor | None) -> None:
        self._reducer, self._count = reducer, count
        self._scale = 1 / reducer.engine.size if reducer.is_mean and count is None else 1.0

    @untraced
    def __enter__(self) -> None:
        """Prepare the buckets."""
        reducer, count = self._reducer, self._count
        if reducer.block is not None:
            raise RuntimeError(f"{NAME}.reduce: entered within a block of the same {NAME}; use one block a step")
        if isinstance(count, Tensor) and count.is_cpu:
            self._count = count = float(count)
        if count is not None and not isinstance(count, Tensor) and is_capturing():
            raise RuntimeError(
                f"{NAME}.reduce: count: got a number of the host while a CUDA graph is captured, which every replay "
                "would repeat; pass a 0-d tensor on the device"
            )
        #: One for each bucket that was sent.
        self._sent: list[Message] = []
        #: The witness's gradient, and the version that autograd has given it.
        self._seen: Tensor | None = None
        self._version = 0
        #: Parameters whose gradients the last block has reduced, and hooks that raise before they are added to.
        self._reduced: list[Parameter] = []
        self._guards: list[Any] = []
        reducer.begin()
        tail = reducer.last[-1].tail
        if isinstance(count, Tensor):
            tail.copy_(count)
        else:
            tail.zero_()
        if not reducer.is_mean or count is not None:  # a mean of what is equal on all ranks changes nothing
            self._reduced = [p for p in reducer.parameters if p.tensor.requires_grad and p.is_reduced()]
        for p in self._reduced:
            register: Any = p.tensor.register_hook
            self._guards.append(register(untraced(lambda _, p=p: p.refuse_reduced())))
        reducer.block, reducer.watch.is_open = self, True

    def after_accumulate(self, p: Parameter) -> None:
        """Move a gradient that autograd has accumulated to its bucket, which is sent if it is complete."""
        reducer, bucket, grad = self._reducer, p.bucket, p.tensor.grad
        if grad is None or bucket is None:
            return  # a hook of the user's has taken it
        if reducer.recorded is not None:
            reducer.recorded.setdefault(p.index)
        is_witness = p.tensor is reducer.watch.witness
        if is_witness and self._seen is None:
            self._seen, self._version = grad, version(grad)
        elif is_witness:
            self._version += 1
        bucket.enter_stream()
        if p not in bucket.pending:
            return  # a further gradient stays in `.grad` until the bucket is sent, or the block ends
        bucket.pending.remove(p)
        if not p.is_small and not is_witness:
            bucket.pack(p, self._scale)  # while it is in the cache; its own memory is free for the next gradient
        for ready in reducer.early[len(self._sent) :]:
            if ready.pending:
                break
            ready.complete(self._scale)
            self._send(ready)

    @untraced
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Reduce what is in `.grad`, or tell the other ranks of the error."""
        reducer = self._reducer
        try:
            with torch.no_grad():
                self._end(error)
        except BaseException as raised:
            for p in reducer.parameters:
                p.drop()
            if error is None or not isinstance(raised, Exception):
                raise
        finally:
            _remove(self._guards)
            reducer.block = None
            reducer.watch.after_block()

    def _end(self, failure: BaseException | None) -> None:
        states = [UNUSED] * len(self._reducer.parameters)
        if failure is None:
            try:
                states = self._pack()
            except BaseException as error:  # of which the other ranks are told first
                failure = error
        with contextlib.ExitStack() as stack:
            if failure is not None:
                text = "".join(traceback.format_exception(failure))
                timer = threading.Timer(PATIENCE, sys.stderr.write, [text])
                timer.daemon = True
                timer.start()
                stack.callback(timer.cancel)
            note = self._communicate(states, failure is not None)
        if failure is not None:
            raise failure
        self._refuse(note)
        self._reducer.follow(note)
        self._assign(note)

    def _pack(self) -> list[int]:
        """Move all gradients to their buckets; return the state of each parameter."""
        reducer, witness, seen = self._reducer, self._reducer.watch.witness, self._seen
        if seen is not None and witness is not None and (witness.grad is not seen or version(seen) != self._version):
            raise RuntimeError(
                f"{NAME}.reduce: a gradient was modified within the block after backward, as by clipping, zero_grad() "
                "or DistributedDataParallel; do it after the block, or zero_grad() before it"
            )
        for p in self._reduced:
            p.refuse_reduced()
        for bucket in reducer.buckets[len(self._sent) :]:
            bucket.complete(self._scale)
        states = [USED if p.bucket is not None and p in p.bucket.packed else UNUSED for p in reducer.parameters]
        for p in reducer.parameters:
            if p.tensor.grad is not None and p.tensor.requires_grad:
                p.check(p.tensor.grad)
                states[p.index] = LATE
        return states

    def _communicate(self, states: list[int], has_failed: bool) -> Note:
        """Send what this block has not sent yet, and wait for all of it."""
        reducer, host = self._reducer, self._reducer.host
        for bucket in reducer.early[len(self._sent) :]:
            self._send(bucket)
        count = 0.0 if isinstance(self._count, Tensor) else self._count or 0.0
        numbers = note_to_send(states, count, self._count is not None, has_failed, host)
        note = Message(host, numbers, "the note", f"who has which of {len(states)} gradients")
        for bucket in reducer.last:
            self._send(bucket)
        for message in (note, *self._sent):
            message.wait()
        return read_note(numbers, host)

    def _send(self, bucket: Bucket) -> None:
        """Start the reduction of the next bucket."""
        at = f"bucket {len(self._sent)} of {len(self._reducer.buckets)}"
        self._sent.append(Message(self._reducer.engine, bucket.row, at, bucket))

    def _refuse(self, note: Note) -> None:
        """Raise what all ranks know of each other."""
        if note.failed:
            raise RuntimeError(
                f"{NAME}.reduce: the block was left by an error on rank {', '.join(map(str, note.failed))}, which has "
                "the cause, and `.grad` is None on all ranks; to go on, call zero_grad() and take the next step"
            )
        n = self._reducer.engine.size
        if 0 < note.n_counting < n:
            raise CollectiveMismatchError(
                f"{NAME}.reduce: count: got one on {note.n_counting} of {n} ranks; pass one on all, 0 where there is "
                "nothing"
            )

    def _assign(self, note: Note) -> None:
        """Make the reduced gradients `.grad`; None for a parameter that no rank has used."""
        reducer = self._reducer
        late = late_buckets([p for p in reducer.parameters if note.states[p.index] == LATE])
        for bucket in late:
            bucket.complete(self._scale)
            Message(reducer.engine, bucket.row, "late gradients", bucket).wait()
        if self._count is not None:
            count = reducer.last[-1].tail.real + note.total
            divisor = torch.where(count == 0, torch.inf, count)
            for bucket in (*reducer.buckets, *late):
                bucket.divide(divisor)
        for bucket in late:
            for p, memory in bucket.memory.items():
                if p.bucket is None:
                    p.bucket = bucket
                else:
                    p.bucket.memory[p] += memory
        for p in reducer.parameters:
            if note.states[p.index] != UNUSED and p.bucket is not None:
                p.assign(p.bucket.memory[p])


def _hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    """Return the hook of a parameter; a reference to either would be a cycle that the garbage collector cannot see."""

    def after_accumulate(_: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            (alive.block or alive).after_accumulate(alive.parameters[index])

    return untraced(after_accumulate)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
