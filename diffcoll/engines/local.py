"""Simulated ranks: threads of one process, of which one runs at a time.

A rank runs until it waits for another rank, and then releases the lock of the next rank that can run. So a run is
deterministic, each hand-over wakes one thread only, and a deadlock is detected at once: no rank can run.

A *meeting* is one communication of all ranks of a group. Each rank adds an entry, and the last one combines all entries
into one result for each rank. With the library's rules a meeting is one primitive of the engine, combined by
`diffcoll.engines.delivery`. In a joint graph it is a whole collective, combined by a function that `diffcoll.testing`
passes in.
"""

from __future__ import annotations

import contextvars
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core.errors import CollectiveMismatchError, Origin, not_run, within_backward
from diffcoll.core.torch_private.autograd import after_backward, backward_at_work, before_node
from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.core.torch_private.trees import tree_flatten
from diffcoll.engines import delivery
from diffcoll.engines.engine import Blocks, Engine, Wait
from diffcoll.engines.one_profiler import one_profiler
from diffcoll.engines.process_state import copies_end_here, process_state, set_process_state, states_of_ranks
from diffcoll.engines.rank_threads import (
    ambient,
    forward_mode,
    set_forward_mode,
    shared_forward_mode,
    wrapped_backward_code,
)

#: (name of the collective, each rank's tensor, arguments and facts, see `Engine.run_truth`) → each rank's result.
Truth = Callable[[str, list[Any], list[dict[str, Any]], list[tuple[object, object]]], list[Any]]


#: A graph is compiled or traced for one rank, but simulated ranks share one cache of graphs, or one autograd graph.
NO_GRAPHS = (
    "torch.compile, export, make_fx and linearize do not work within a simulated world: its ranks share compiled and "
    "traced graphs; call the function without them, or compile on real processes (testing.spawn)"
)


@dataclass(frozen=True)
class LocalGroup:
    """Some ranks of a simulated world, in order. Users pass it as `group=`."""

    ranks: tuple[int, ...]
    #: Tells groups of the same ranks apart.
    number: tuple[int, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the hash once: it is used in every call, and takes time proportional to the number of ranks."""
        object.__setattr__(self, "_hash", hash((self.ranks, self.number)))

    def __hash__(self) -> int:
        """Return the hash."""
        return self._hash


@dataclass
class _Entry:
    what: str  # the collective
    step: str  # the primitive of the engine, if one of those
    payload: Any
    line: Origin  # where the call was made
    origin: Origin | None  # the forward call, if this is its backward
    within: str  # words, if this is a forward call that a backward makes

    def __str__(self) -> str:
        if self.origin is None:
            return f"waits in {self.what} at {self.line.line}{self.within}"
        return f"waits in {self.origin.backward} of {self.origin.name} called at {self.origin.line}"


@dataclass
class _Meeting:
    ranks: tuple[int, ...]
    entries: dict[int, _Entry] = field(default_factory=dict)
    results: dict[int, Any] | None = None
    off: str = ""  # why it was called off; ranks that join later raise the same error
    is_work: bool = False  # whether its Wait is that of a Work of torch.distributed


class _Rank(threading.Thread):
    """One simulated rank."""

    def __init__(self, world: World, number: int, body: Callable[[], Any]) -> None:
        super().__init__(name=f"rank {number}", daemon=True)
        self.world = world
        self.number = number
        self.body = body
        self.turn = _closed_lock()
        self.engines: dict[LocalGroup, LocalEngine] = {}
        self.default_group: object = None
        self.has_group: Callable[[], bool] | None = None  # whether torch's default group is set up, if that matters
        self.waits_for: _Meeting | None = None
        self.error: BaseException | None = None  # to be raised where this rank waits
        self.outcome: str = ""  # "returned" or "raised …", once it has ended
        self.result: Any = None
        self.state: Any = None  # the process's state of this rank, while other ranks run
        self.forward_mode = forward_mode()

    def run(self) -> None:
        self.turn.acquire()
        _rank.here = self
        set_process_state(self.state)
        set_forward_mode(self.forward_mode)
        torch.set_num_threads(self.world.threads)
        try:
            with copies_end_here():
                self.result = self.body()
            self.outcome = "returned"
        except BaseException as error:
            self.outcome = f"raised {type(error).__name__}"
            self.world.failures.append((self.number, error))
        self.world.leave(self)


class World:
    """N simulated ranks. With `truth` all ranks share one autograd graph; with None the library's rules run."""

    def __init__(self, size: int, seed: int = 0, truth: Truth | None = None) -> None:
        self.size = size
        self.seed = seed
        self.truth = truth
        self.group = LocalGroup(tuple(range(size)))  # all ranks
        self.threads = 1  # for one operation of a rank
        self.running = False
        self.process = os.getpid()
        self.failures: list[tuple[int, BaseException]] = []
        self._ranks: list[_Rank] = []
        self._ended: set[int] = set()
        self._ready: deque[_Rank] = deque()
        self._over = _closed_lock()
        self._meetings: dict[tuple[LocalGroup, int], _Meeting] = {}

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per rank. Returns their results in the order of ranks, or raises the first error."""
        global _running
        keep, level, threads = process_state(), forward_mode(), torch.get_num_threads()
        # A thread pool for each rank would take as many threads as ranks times cores.
        self.threads = max(1, threads // self.size)
        entered = ambient()
        for number, (body, state) in enumerate(zip(bodies, states_of_ranks(self.seed, len(bodies)), strict=True)):
            context = contextvars.copy_context()
            rank = _Rank(self, number, partial(context.run, _within, entered(), body))
            rank.state = state
            self._ranks.append(rank)
            rank.start()
        self.running = True
        _running += 1
        self._ready.extend(self._ranks)
        with shared_forward_mode(), wrapped_backward_code(_wrapper), one_profiler(here):
            try:
                self._ready.popleft().turn.release()
                self._over.acquire()
            finally:
                self.running = False
                _running -= 1
                self._meetings.clear()  # those called off refer to tensors, whose graph refers to the world
                set_process_state(keep)
                set_forward_mode(level)
                torch.set_num_threads(threads)  # is a default of the process, too
        ranks, self._ranks = self._ranks, []  # results may refer to the world, which must not refer to them
        for rank in ranks:
            rank.join()
        if self.failures:
            number, error = self.failures[0]
            if hasattr(error, "add_note"):  # Python 3.11 and later
                others = [f"; rank {r.number} {r.outcome}" for r in ranks if r.number != number]
                error.add_note(f"raised on simulated rank {number} of {self.size}{''.join(others[:8])}")
            raise error
        results = [rank.result for rank in ranks]
        for y in tree_flatten(results)[0]:
            if isinstance(y, Tensor):
                before_node(y, partial(backward_starts, self))
        return results

    # ── meetings ─────────────────────────────────────────────────────────────────────────────────────────

    def meet(
        self,
        group: LocalGroup,
        number: int,
        what: str,
        step: str,
        payload: Any,
        combine: Callable[[list[Any]], Sequence[Any]],
        origin: Origin | None = None,
        polls: list[Callable[[], bool]] | None = None,
    ) -> Callable[[], Any]:
        """Add this rank's entry to the group's meeting of this number. Returns a function that waits for its result."""
        me = self._current()
        ranks = group.ranks
        meeting = self._meetings.get((group, number))
        if meeting is None:
            meeting = self._meetings[group, number] = _Meeting(ranks, is_work=not step)
        entry = _Entry(what, step, payload, Origin(what), origin, within_backward())
        meeting.entries[me.number] = entry
        first_rank, first = next(iter(meeting.entries.items()))
        gone = self._ended and [r for r in ranks if r not in meeting.entries and r in self._ended]
        if len(meeting.entries) == len(ranks):
            del self._meetings[group, number]
        if meeting.off:
            me.error = CollectiveMismatchError(meeting.off)
        elif what != first.what:
            self._call_off(meeting, "the ranks are in different collectives")
        elif step != first.step:
            differ = f"rank {first_rank} needs {first.step}, rank {me.number} {step}"
            self._call_off(meeting, f"{what} was called with different arguments: {differ}")
        elif gone:
            self._call_off(meeting, f"rank {gone[0]} has ended")
        elif len(meeting.entries) == len(ranks):
            try:
                results = combine([meeting.entries[r].payload for r in ranks])
            except CollectiveMismatchError as error:
                self._call_off(meeting, str(error))
            except Exception as error:
                self._call_off(meeting, f"their arguments do not fit together: {error}")
            else:
                meeting.results = dict(zip(ranks, results, strict=True))
                self._wake(meeting)

        if polls is not None:
            polls.append(partial(self.poll, me, meeting))
        return partial(self._wait, me, meeting)

    def poll(self, me: _Rank, meeting: _Meeting) -> bool:
        """Whether the wait for a meeting would return or raise at once; if not, let the other ranks run first."""
        if meeting.results is None and not meeting.off and me.error is None and self.running:
            if _rank.here is me and self._ready:
                self._ready.append(me)
                self._hand_over(me)
        return meeting.results is not None or bool(meeting.off) or not self.running

    def suspend(self, what: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """For a message between two ranks. Returns what the other rank calls, and what waits until it has."""
        me = self._current()
        meeting = _Meeting(
            (me.number,), {me.number: _Entry(what, "", None, Origin(""), None, within_backward())}, is_work=True
        )

        def finish() -> None:
            meeting.results = {me.number: None}
            self._wake(meeting)

        return finish, partial(self._wait, me, meeting)

    def _wait(self, me: _Rank, meeting: _Meeting) -> Any:
        while meeting.results is None:
            # An engine's Wait may be called in any thread, while the rank's own thread does nothing else. A Work of
            # torch.distributed promises no such thing, and two threads of one rank would both go on.
            if _rank.here is not me and (meeting.is_work or _rank.here is not None or not self.running):
                self._current()
                raise RuntimeError("a simulated rank waits for what another rank has started; wait in that rank")
            if me.error is None:
                me.waits_for = meeting
                self._hand_over(me)
            if me.error is not None:
                error, me.error = me.error, None
                raise error
        return meeting.results[me.number]

    def _current(self) -> _Rank:
        me = _rank.here
        if not self.running:
            raise RuntimeError(
                "a collective of a simulated world was used after the world had ended; "
                "under simulate(rules=True) call backward inside the function, and wait there for what it has started"
            )
        if me is None or me.world is not self:
            raise RuntimeError(
                "a collective of a simulated world was called from a thread that is not one of its ranks "
                "(the backward of CUDA tensors runs on such a thread); simulate on CPU tensors"
            )
        if os.getpid() != self.process:
            raise RuntimeError(
                "a collective of a simulated world was called in a child process of a rank, such as a worker of a "
                "DataLoader, which cannot reach the other ranks; call it in the rank itself"
            )
        rank: _Rank = me
        return rank

    def _hand_over(self, me: _Rank) -> None:
        """Let the next rank that can run do so. Returns when it is this rank's turn again."""
        if not self._ready:
            self._call_off(None, "no rank can go on")
        following = self._ready.popleft()
        if following is me:
            return
        me.state, me.forward_mode = process_state(), forward_mode()
        following.turn.release()
        me.turn.acquire()
        set_process_state(me.state)
        set_forward_mode(me.forward_mode)

    def leave(self, me: _Rank) -> None:
        """End a rank: call off the meetings that it will not join, and let the next rank run."""
        self._ended.add(me.number)
        for meeting in list(self._meetings.values()):
            if me.number in meeting.ranks and me.number not in meeting.entries and not meeting.off:
                self._call_off(meeting, f"rank {me.number} has ended")
        if not self._ready and any(r.waits_for for r in self._ranks):
            self._call_off(None, "no rank can go on")
        (self._ready.popleft().turn if self._ready else self._over).release()

    def _wake(self, meeting: _Meeting) -> None:
        for number in meeting.ranks:
            rank = self._ranks[number]
            if rank.waits_for is meeting:
                rank.waits_for = None
                self._ready.append(rank)

    def _call_off(self, meeting: _Meeting | None, why: str) -> None:
        """Raise the same error on all ranks of this meeting; None: on all ranks that wait."""
        text = f"simulated ranks cannot go on: {why}\n" + "\n".join(
            f"  rank {r.number} {self._doing(r, meeting)}" for r in self._ranks
        )
        met = [meeting] if meeting else list(self._meetings.values())
        of = [e.origin for m in met for e in m.entries.values() if e.origin or e.within]
        if of:
            text += f"\na rank that is elsewhere {not_run(next(filter(None, of), None))}"
        for m in met:
            m.off = m.off or text
        for rank in self._ranks:
            waits = rank.waits_for is not None and (meeting is None or rank.waits_for is meeting)
            if waits or (meeting is not None and rank.number in meeting.entries):
                rank.error = CollectiveMismatchError(text)
            if waits:
                rank.waits_for = None
                self._ready.append(rank)

    def _doing(self, rank: _Rank, meeting: _Meeting | None) -> str:
        if rank.outcome:
            return rank.outcome
        if meeting is not None and rank.number in meeting.entries:
            return str(meeting.entries[rank.number])
        return str(rank.waits_for.entries[rank.number]) if rank.waits_for else "is in no collective"


class LocalEngine(Engine):
    """A group of simulated ranks."""

    def __init__(self, world: World, group: LocalGroup, rank: int) -> None:
        super().__init__(rank=group.ranks.index(rank), size=len(group.ranks))
        self.world = world
        self.group = group
        self.description = f"a simulated group of {self.size} ranks"
        self.in_one_graph = world.truth is not None
        self._meetings = 0  # how many this rank has joined
        self._made: dict[tuple[int, ...], int] = {}  # how many twins and sub-groups, by their ranks

    @property
    @override
    def global_ranks(self) -> tuple[int, ...]:
        return self.group.ranks

    @override
    def twin(self) -> LocalEngine:
        return LocalEngine(self.world, self._another(self.group.ranks), self.group.ranks[self.rank])

    @override
    def subgroup(self, ranks: Sequence[int]) -> LocalGroup:
        return self._another(tuple(self.group.ranks[r] for r in ranks))

    def _another(self, ranks: tuple[int, ...]) -> LocalGroup:
        """Return a group with its own messages: the ranks that call this for the same ranks equally often share one."""
        self._made[ranks] = count = self._made.get(ranks, 0) + 1
        return LocalGroup(ranks, (*self.group.number, count))

    @override
    def exchange(self, sends: Blocks, recvs: Blocks) -> Wait:
        return self._deliver(delivery.exchange, sends, recvs)

    @override
    def all_gather(self, x: Tensor | None, row: Tensor, counts: list[int]) -> Wait:
        return self._deliver(delivery.all_gather, x, row, counts)

    @override
    def reduce_scatter_in_order(self, row: Tensor, counts: list[int], out: Tensor) -> Wait:
        return self._deliver(delivery.reduce_scatter, row, counts, out)

    @override
    def all_reduce_in_order(self, x: Tensor, y: Tensor) -> Wait:
        if self.later and x is not y:  # x may be modified before the other ranks arrive
            x = y.copy_(x)
        return self._deliver(delivery.all_reduce, x, y)

    @override
    def broadcast(self, y: Tensor, src: int) -> Wait:
        return self._deliver(delivery.broadcast, y, src)

    @override
    def reduce(self, y: Tensor, dst: int) -> Wait:
        return self._deliver(delivery.reduce, y, dst)

    def _deliver(self, step: Callable[..., None], *arguments: Any) -> Wait:
        """Return the wait for a primitive, which the last rank to call it carries out for all."""

        def combine(ranks: list[Any]) -> list[None]:
            with torch.inference_mode():  # outputs of a rank in inference mode can be written in that mode only
                step(*ranks)
            return [None] * len(ranks)

        return self._meet(self.operation, step.__name__, arguments, combine)

    @override
    def run_truth(self, name: str, x: Any, arguments: dict[str, Any], facts: tuple[object, object]) -> Any:
        truth = self.world.truth
        assert truth is not None
        if isinstance(x, torch.Tensor) and is_traced(x):
            raise RuntimeError(f"{name}: {NO_GRAPHS}")

        def combine(payloads: list[Any]) -> list[Any]:
            return truth(name, *map(list, zip(*payloads, strict=True)))

        return self._meet(name, "", (x, arguments, facts), combine)()

    def _meet(self, what: str, step: str, payload: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Wait:
        self._meetings += 1
        origin = self.doing[1] if self.doing else None
        return self.world.meet(self.group, self._meetings, what, step, payload, combine, origin, self.polls)


# ── which rank this thread is ────────────────────────────────────────────────────────────────────────────


class _Here(threading.local):
    here: _Rank | None = None
    #: The world whose ranks registered the backward code that this thread executes.
    backward_of: World | None = None


_rank = _Here()


def here() -> _Rank | None:
    """Return the simulated rank that this thread is; None if it is not one."""
    return _rank.here


# ── the backward of a world ──────────────────────────────────────────────────────────────────────────────
#
# When `simulate` has returned, its ranks have ended. A backward of their graph may still call a collective: when a
# checkpoint is recomputed, in the backward of a Function, or in a hook. There `group=None` would mean a group of the
# caller's, such as a single rank. So functions that a rank registers with autograd store its world, and so does each
# backward pass, by its id, when it reaches a result of the world.

_running = 0  # how many worlds are running, nested
_backwards: dict[int, weakref.ref[World]] = {}


def backward_starts(world: World) -> None:
    """Record, until it ends, that the current backward pass belongs to this world."""
    task = backward_at_work()
    if task not in _backwards:
        _backwards[task] = weakref.ref(world, lambda _: _forget(task))  # a backward that fails calls no callback
        after_backward(lambda: _forget(task))


def _forget(task: int) -> None:
    _backwards.pop(task, None)


@contextmanager
def _in_backward_of(world: World) -> Iterator[None]:
    before, _rank.backward_of = _rank.backward_of, world
    try:
        with wrapped_backward_code(_wrapper):  # for higher-order derivatives and recomputed checkpoints
            yield
    finally:
        _rank.backward_of = before


def _wrapper() -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return a decorator that binds backward code to this thread's world; None outside of worlds."""
    world = _rank.backward_of if _rank.here is None else _rank.backward_of or _rank.here.world
    if world is None:
        return None

    def decorate(code: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **more: Any) -> Any:
            with _in_backward_of(world):
                return code(*args, **more)

        return within

    return decorate


def involved() -> bool:
    """Whether `group=None` may mean a simulated world in this thread."""
    return _rank.here is not None or _running > 0 or _rank.backward_of is not None or bool(_backwards)


def refuse_in_backward(operation: str) -> None:
    """Raise if this thread runs a backward of ranks that cannot take part, or is no rank while a world runs."""
    me, world = _rank.here, _rank.backward_of
    if me is None and world is None and _running:
        raise RuntimeError(
            f"{operation}: called while a simulated world runs, from a thread that is not one of its ranks; call "
            "collectives in the rank's own thread"
        )
    if world is None and (task := backward_at_work()) != -1:
        noted = _backwards.get(task)
        world = noted() if noted else me.world if me else None
    if world is None or (world.truth is None and me is not None and me.world is world):
        return
    if world.truth is None:
        raise RuntimeError(
            f"{operation}: called in a backward of simulated ranks that have ended; under simulate(rules=True) call "
            "backward inside the function"
        )
    raise RuntimeError(
        f"{operation}: called in the backward of a joint graph (by a checkpoint that is recomputed, the backward of an "
        "autograd.Function, or a hook), where the ranks cannot meet; use simulate(rules=True) and call backward inside "
        "the function"
    )


def engine_of(group: object) -> LocalEngine | None:
    """Return this thread's engine for a `LocalGroup`; for None, that of its whole world. None if it is no rank."""
    me = _rank.here
    if me is None:
        if isinstance(group, LocalGroup):
            raise ValueError("got a group of a simulated world, outside of that world; use it inside simulate()")
        return None
    if group is None and me.has_group is not None and not me.has_group():
        raise RuntimeError(
            "got no group on a simulated rank that has called destroy_process_group(); call init_process_group() again"
        )
    ranks = me.world.group.ranks if group is None else getattr(group, "ranks", None)
    if not isinstance(ranks, tuple):
        return None
    handle = me.world.group if group is None else group if isinstance(group, LocalGroup) else LocalGroup(ranks)
    if handle in me.engines:
        return me.engines[handle]
    if me.number not in ranks:
        raise ValueError("got a group that this rank is not in; call it on the group's ranks only")
    engine = me.engines[handle] = LocalEngine(me.world, handle, me.number)
    return engine


def _closed_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _within(modes: AbstractContextManager[None], body: Callable[[], Any]) -> Any:
    with modes:
        return body()
