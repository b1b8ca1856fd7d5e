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
from functools import reduce as fold
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from diffcoll.averaging.buckets import Bucket, Parameter, cut
from diffcoll.averaging.messages import LATE, NAME, UNUSED, Message, Note
from diffcoll.averaging.parameters import Named
from diffcoll.averaging.unreduced import reducers
from diffcoll.core.control import Control
from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.core.torch_private.tensors import version
from diffcoll.core.torch_private.tracing import untraced
from diffcoll.engines.devices import is_capturing
from diffcoll.engines.engine import Engine

#: Seconds after which a rank that has failed prints its error, if the others have not reached the end of their block.
PATIENCE = 10.0


class Reducer:
    """The buckets and hooks of one averager, whose messages are sent through an engine of its own."""

    def __init__(
        self, named: Named, engine: Engine, is_mean: bool, nbytes: float, comm_dtype: torch.dtype | None
    ) -> None:
        self.engine, self.is_mean, self._nbytes = engine, is_mean, nbytes
        self.parameters = [Parameter(i, *pair, comm_dtype) for i, pair in enumerate(named)]
        self._ids = {id(p.tensor) for p in self.parameters}
        #: The open block.
        self.block: Block | None = None
        #: A parameter of the last buckets, the smallest of those that this rank uses.
        self.witness: Parameter | None = None
        #: The count of a rank that has none on a device, in the finest dtype.
        finest = fold(torch.promote_types, (p.dtype.to_real() for p in self.parameters), torch.float32)
        self.zero = torch.zeros((), dtype=finest, device=self.parameters[0].tensor.device)
        self._control = Control(engine, NAME)
        self.host = engine.control()  # carries the note over the CPU where that is possible
        # At first reverse order, and what requires a gradient on rank 0.
        has_place = self._control.numbers([p.tensor.requires_grad for p in self.parameters])[0]
        self._order = [i for i in reversed(range(len(named))) if has_place[i]]
        #: The order in which gradients come on this rank, while it is recorded.
        self.recorded: dict[int, None] | None = {}
        #: Handles of hooks, by the parameter's index.
        self._handles: dict[int, Any] = {}
        weakref.finalize(self, _remove, self._handles)
        self._lay_out()
        reducers.add(self)

    def _lay_out(self) -> None:
        """Cut buckets, and register the hooks that they need."""
        _remove(self._handles)
        self._is_outdated = False
        #: In the order in which they are sent: first those that are sent while backward runs.
        self.buckets: list[Bucket] = []
        self.early: set[Bucket] = set()
        for p in self.parameters:  # free the old buckets before new ones are allocated
            p.bucket = None
        buckets = cut([self.parameters[i] for i in self._order], self._nbytes)
        early = [bucket for bucket in buckets[:-1] if self.engine.overlaps(bucket.row)]
        self.buckets = [*early, *(bucket for bucket in buckets if bucket not in early)]
        self.early = set(early)
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.bucket = bucket
                if self.recorded is not None or bucket in self.early or not p.is_small:
                    self._register_hook(p)
        self.choose_witness()

    def choose_witness(self) -> None:
        """Let the smallest parameter of the last buckets that the block has used be the witness, or the same as before.

        Its gradient stays in `.grad` until a block ends, which tells whether gradients were modified. Its hook, like
        all, tells of backward outside of a block; after the first block small parameters have no other one.
        """
        late = [p for b in self.buckets[len(self.early) :] for p in b.parameters if p.tensor.requires_grad]
        rank = {p: (p.state == UNUSED, p is not self.witness, p.tensor.nbytes) for p in late}
        self.witness = min(late, key=rank.__getitem__, default=None)
        if self.witness is not None:
            self._register_hook(self.witness)

    def _register_hook(self, p: Parameter) -> None:
        if p.tensor.requires_grad and p.index not in self._handles:
            register: Any = p.tensor.register_post_accumulate_grad_hook
            self._handles[p.index] = register(_hook(weakref.ref(self), p.index))

    def begin(self) -> None:
        """Prepare the buckets for a block."""
        if self._is_outdated:
            self._lay_out()
        for p in self.parameters:
            p.state = UNUSED
        for bucket in self.buckets:
            bucket.begin()

    def follow(self) -> None:
        """Decide the order of the next block, on all ranks alike: rank 0's in the first one, and what is new."""
        new = [p.index for p in reversed(self.parameters) if p.bucket is None and p.state == LATE]
        if self.recorded is not None:
            mine = dict.fromkeys([*self.recorded, *self._order])
            self._order = self._control.numbers([*mine])[0]
        if new or self.recorded is not None:
            self._order, self.recorded, self._is_outdated = [*self._order, *new], None, True

    def forbids(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer would use a gradient that is not reduced, as far as hooks tell."""
        hooked = (self.parameters[i] for i in self._handles)
        is_local = any(p.gradient.is_local and p.tensor.grad is not None for p in hooked)
        ids = (id(p) for group in optimizer.param_groups for p in group["params"])
        return (self.block is not None or is_local) and not self._ids.isdisjoint(ids)

    def close(self) -> None:
        """Remove the hooks, and free the communicator; all ranks call it."""
        reducers.discard(self)
        _remove(self._handles)
        if self.engine.size > 1:
            self.engine.close()


class Block:
    """The context manager of `GradientAverager.reduce`."""

    def __init__(self, reducer: Reducer, count: float | Tensor | None) -> None:
        self._reducer, self._given = reducer, count
        is_mean = reducer.is_mean and count is None
        self._scale = 1 / reducer.engine.size if is_mean else 1.0
        #: What must not be reduced twice: a mean of what is equal on all ranks changes nothing.
        self._at_most_once = [] if is_mean else reducer.parameters

    @untraced
    def __enter__(self) -> None:
        """Prepare the buckets."""
        reducer, count = self._reducer, self._given
        if reducer.block is not None:
            raise RuntimeError(f"{NAME}.reduce: entered within a block of the same {NAME}; use one block a step")
        if isinstance(count, Tensor):
            count = float(count) if count.is_cpu else count.to(reducer.zero, copy=True)
        if isinstance(count, (int, float)) and is_capturing():
            raise RuntimeError(
                f"{NAME}.reduce: count: got a number of the host while a CUDA graph is captured, which every replay "
                "would repeat; pass a 0-d tensor on the device"
            )
        #: The number, or a copy of the count on the device.
        self._count = count
        #: One for each bucket that was sent.
        self._sent: list[Message] = []
        #: Gradients that stay in `.grad` until the end, as far as hooks tell, and their versions by autograd.
        self._seen: dict[Parameter, tuple[Tensor, int]] = {}
        #: Autograd has a thread for each device, and each calls hooks.
        self._lock = threading.Lock()
        #: Hooks that raise before a reduced gradient is added to.
        self._guards: dict[int, Any] = {}
        reducer.begin()
        for p in self._at_most_once:
            if p.gradient.is_reduced():
                register: Any = p.tensor.register_hook
                self._guards[p.index] = register(untraced(lambda _, p=p: p.refuse_reduced()))
        reducer.block = self

    def after_accumulate(self, p: Parameter) -> None:
        """Move a gradient that autograd has accumulated to its bucket, which is sent if it is complete."""
        reducer, bucket, grad = self._reducer, p.bucket, p.tensor.grad
        if grad is None:
            raise RuntimeError(
                f"{NAME}.reduce: {p.name}: a hook or the block of another averager has taken its gradient from `.grad` "
                "while backward runs; step after the block, and let one averager have the parameter"
            )
        assert bucket is not None
        with self._lock:
            if reducer.recorded is not None:
                reducer.recorded.setdefault(p.index)
            bucket.enter_stream()
            stays = bucket not in reducer.early and (p.is_small or p is reducer.witness)
            if stays:
                first, at = self._seen.get(p, (grad, version(grad) - 1))
                self._seen[p] = first, at + 1
            if p not in bucket.pending:
                return  # a further gradient stays in `.grad` until the bucket is sent, or the block ends
            bucket.pending.remove(p)
            if not p.is_small and not stays:
                bucket.pack(p, self._scale)  # while it is in the cache; its own memory is free for the next gradient
            for ready in reducer.buckets[len(self._sent) : len(reducer.early)] if not bucket.pending else ():
                if ready.pending:
                    break
                ready.complete(self._scale)
                self._send(ready)

    @untraced
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Reduce what is in `.grad`, or tell the other ranks of the error."""
        try:
            with torch.no_grad():
                self._end(error)
        except BaseException as raised:
            for p in self._reducer.parameters:
                p.gradient.assign(None)
            if error is None or not isinstance(raised, Exception):
                raise
        finally:
            _remove(self._guards)
            self._reducer.block = None

    def _end(self, failure: BaseException | None) -> None:
        reducer = self._reducer
        is_first = reducer.recorded is not None
        if failure is not None and is_first and "inplace operation" in str(failure):
            failure.add_note(f"{NAME}: make it before the forward: it writes rank 0's values into the parameters")
        if failure is None:
            try:
                self._pack()
            except BaseException as error:  # of which the other ranks are told first
                failure = error
        note = self._communicate(failure)
        if failure is not None:
            raise failure
        if note.failed:
            raise RuntimeError(
                f"{NAME}.reduce: the block was left by an error on rank {', '.join(map(str, note.failed))}, which has "
                "the cause, and `.grad` is None on all ranks; to go on, call zero_grad() and take the next step"
            )
        n = reducer.engine.size
        if 0 < note.n_counting < n:
            raise CollectiveMismatchError(
                f"{NAME}.reduce: count: got one on {note.n_counting:.0f} of {n} ranks; pass one on all, 0 where there "
                "is nothing"
            )
        if reducer.witness is None or reducer.witness.state == UNUSED:
            reducer.choose_witness()  # here `state` is this rank's
        for p, state in zip(reducer.parameters, note.states, strict=True):
            p.state = state
        reducer.follow()
        self._assign(note)

    def _pack(self) -> None:
        """Move all gradients to their buckets; what is in `.grad` then comes late."""
        reducer = self._reducer
        for p, (grad, at) in self._seen.items():
            if p.tensor.grad is not grad or version(grad) != at:
                raise RuntimeError(
                    f"{NAME}.reduce: {p.name}: its gradient was modified within the block after backward, as by "
                    "clipping, zero_grad(), a hook or DistributedDataParallel. Clip after the block, zero before it, "
                    "and use DDP or the averager, not both"
                )
        for p in self._at_most_once:
            p.refuse_reduced()
        for bucket in reducer.buckets[len(self._sent) :]:
            bucket.complete(self._scale)
        for p in reducer.parameters:
            if p.tensor.grad is not None and p.tensor.requires_grad:
                p.check(p.tensor.grad)
                p.state = LATE

    def _communicate(self, failure: BaseException | None) -> Note:
        """Send what this block has not sent yet, and wait for all of it."""
        reducer = self._reducer
        with contextlib.ExitStack() as stack:
            if failure is not None:
                text = "".join(traceback.format_exception(failure))
                timer = threading.Timer(PATIENCE, sys.stderr.write, [text])
                timer.start()
                stack.callback(timer.cancel)
            for bucket in reducer.buckets[len(self._sent) : len(reducer.early)]:
                self._send(bucket)
            note = Note(reducer.host, [p.state for p in reducer.parameters], self._count, failure is not None)
            for bucket in reducer.buckets[len(reducer.early) :]:
                self._send(bucket)
            note.wait()
            for message in self._sent:
                message.wait()
        return note

    def _send(self, bucket: Bucket) -> None:
        """Start the reduction of the next bucket."""
        at = f"bucket {len(self._sent)} of {len(self._reducer.buckets)}"
        self._sent.append(Message(self._reducer.engine, bucket.row, at, bucket))

    def _assign(self, note: Note) -> None:
        """Make the reduced gradients `.grad`; None for a parameter that no rank has used."""
        reducer = self._reducer
        late = cut([p for p in reducer.parameters if p.state == LATE], inf)
        for bucket in late:
            bucket.complete(self._scale)
            Message(reducer.engine, bucket.row, "late gradients", bucket).wait()
        buckets = [*reducer.buckets, *late]
        if self._count is not None:
            count = self._count if isinstance(self._count, Tensor) else reducer.zero.clone()
            if note.n_on_device:
                Message(reducer.engine, count, "the count", "of this block").wait()
            count = count + note.total
            divisor = torch.where(count == 0, torch.inf, count)
            for bucket in buckets:
                bucket.divide(divisor)
        for bucket in buckets:
            for p, memory in bucket.memory.items():
                if p.bucket is not bucket and p.bucket is not None:
                    memory += p.bucket.memory[p]
                if p.state != UNUSED:
                    p.assign(memory)


def _hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    """Return the hook of a parameter; a reference to either would be a cycle that the garbage collector cannot see."""

    def after_accumulate(_: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            p = alive.parameters[index]
            p.gradient.after_accumulate() if alive.block is None else alive.block.after_accumulate(p)

    return untraced(after_accumulate)


def _remove(handles: dict[int, Any]) -> None:
    while handles:
        handles.popitem()[1].remove()
