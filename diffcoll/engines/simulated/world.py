"""The scheduler of simulated ranks: threads of one process, of which one runs at a time.

A rank runs until it waits for another rank, and then releases the lock of the next rank that can run. So a run is
deterministic, each hand-over wakes one thread only, and a deadlock is detected at once: no rank can run.

A *meeting* is one communication of all ranks of a group. Each rank adds an entry, and the last one combines all entries
into one result for each rank.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from diffcoll.core.errors import UNEVEN, CollectiveMismatchError, Origin, message, not_run, within_backward
from diffcoll.engines.rank_state import THREAD, NotARankError, RankState, outsiders

#: (name of the collective, each rank's tensor, arguments and facts, see `Engine.run_truth`) → each rank's result.
Truth = Callable[[str, list[Any], list[dict[str, Any]], list[tuple[object, object]]], list[Any]]

#: Held while ranks run: random numbers and the environment are the process's.
_one_world = threading.Lock()
_serials = count()


@dataclass(frozen=True)
class LocalGroup:
    """Some ranks of a simulated world, in order."""

    ranks: tuple[int, ...]
    #: Tells groups of the same ranks apart.
    number: tuple[int, ...] = ()


@dataclass(eq=False, repr=False)
class Entry:
    """What one rank brings to a meeting."""

    what: str  # the collective
    how: object  # what else must be equal on all ranks: the primitive of the engine, or an operation and a root
    payload: Any
    origin: Origin | None  # the forward call, if this is its backward

    def __post_init__(self) -> None:
        self.within = ""  # words, if this is a forward call that a backward makes
        if self.origin is None:
            self.line, self.within = Origin(self.what), within_backward()

    def __str__(self) -> str:
        if self.origin is None:
            return f"waits in {self.what} at {self.line.line}{self.within}"
        return f"waits in {self.origin.backward} of {self.origin.name} called at {self.origin.line}"


@dataclass(eq=False, repr=False)
class Meeting:
    """A communication of the ranks of a group, each of which adds an entry."""

    ranks: tuple[int, ...]
    entries: dict[int, Entry] = field(default_factory=dict)
    results: dict[int, Any] | None = None
    off: str = ""  # why it was called off; ranks that join later raise the same error


class _Stopped(BaseException):
    """Ends a rank of a simulation that was interrupted; not an Exception, so that the user's code does not catch it."""


class Rank(threading.Thread):
    """One simulated rank: a thread that runs when it has its turn."""

    def __init__(self, world: World, number: int, body: Callable[[], Any]) -> None:
        super().__init__(name=f"rank {number}", daemon=True)
        self.turn = _closed_lock()
        self.world = world
        self.number = number
        self.body = body
        self.state = RankState.of_rank(world.seed, number, world.size)
        self.forward_mode = (-1, 0)
        self.engines: dict[LocalGroup, Any] = {}
        self.default_group: object = None
        self.c10d_groups: Any = None  # its groups of torch.distributed
        self.check_mode: Any = None  # see `core.check_mode`
        self.waits_for: Meeting | None = None
        self.error: BaseException | None = None  # to be raised where this rank waits
        self.outcome: str = ""  # "returned" or "raised …", once it has ended
        self.result: Any = None

    def run(self) -> None:
        """Run the body when it is this rank's turn."""
        self.turn.acquire()
        if not self.world.stopped:
            self._run()
        if not self.world.stopped:
            self.world.leave(self)

    def _run(self) -> None:
        THREAD.rank = self
        self.state.set()
        _set_forward_mode(self.forward_mode)
        torch.set_num_threads(self.world.threads)
        try:
            # Else the backward of an accelerator's tensors runs in a thread of autograd's, which is no rank.
            with torch.autograd.set_multithreading_enabled(False):
                self.result = self.body()
            self.outcome = "returned"
        except BaseException as error:
            self.outcome = f"raised {type(error).__name__}"
            self.world.failures.append((self.number, error))


class World:
    """N simulated ranks. With `truth` all ranks share one autograd graph; with None the library's rules run."""

    def __init__(self, size: int, seed: int = 0, truth: Truth | None = None) -> None:
        self.size = size
        self.serial = next(_serials)  # tells worlds apart
        self.seed = seed
        self.truth = truth
        self.group = LocalGroup(tuple(range(size)))  # all ranks
        # Of an operation of a rank; a thread pool for each rank would take as many threads as ranks times cores.
        self.threads = max(1, torch.get_num_threads() // size)
        self.stopped = False  # by Ctrl-C
        self.running = False
        self.failures: list[tuple[int, BaseException]] = []
        self._ranks: list[Rank] = []
        self._ended: set[int] = set()
        self._ready: deque[Rank] = deque()
        self._over = _closed_lock()
        self._meetings: dict[tuple[LocalGroup, int], Meeting] = {}

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per rank. Returns their results in the order of ranks, or raises the first error."""
        keep, threads = RankState.of_process(), torch.get_num_threads()
        # Blocks of several ranks that set these may end in another order than they began.
        dtype, anomaly = torch.get_default_dtype(), (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        outsiders.update(threading.enumerate())
        try:
            self._run(bodies)
        finally:
            keep.set()
            torch.set_num_threads(threads)  # is a default of the process, too
            torch.set_default_dtype(dtype)
            torch.autograd.set_detect_anomaly(*anomaly)
            outsiders.clear()
        ranks, self._ranks = self._ranks, []  # results may refer to the world, which must not refer to them
        for rank in ranks:
            rank.join()
        if self.failures:
            number, error = self.failures[0]
            if hasattr(error, "add_note"):  # Python 3.11 and later
                others = [f"; rank {r.number} {r.outcome}" for r in ranks if r.number != number]
                error.add_note(f"raised on simulated rank {number} of {self.size}{''.join(others[:8])}")
            raise error
        return [rank.result for rank in ranks]

    def _run(self, bodies: Sequence[Callable[[], Any]]) -> None:
        with _shared_forward_mode():
            self._ranks += [Rank(self, number, body) for number, body in enumerate(bodies)]
            self._ready.extend(self._ranks)
            self.running = True
            try:
                for rank in self._ranks:
                    rank.start()
                self._give_turn()
                while not self._over.acquire(timeout=0.2):
                    pass  # a Ctrl-C that another thread of the process has received wakes nobody
            except BaseException:
                self._stop()
                raise
            finally:
                self.running = False
                self._meetings.clear()  # those called off refer to tensors, whose graph refers to the world

    def _stop(self) -> None:
        """End the ranks that wait; the one that runs ends at its next collective."""
        self.stopped = True
        for rank in self._ranks:
            if rank.turn.locked():
                rank.turn.release()
            rank.result = None  # its graph may refer to the world

    # ── meetings ─────────────────────────────────────────────────────────────────────────────────────────

    def meet(
        self, group: LocalGroup, number: int, entry: Entry, combine: Callable[[list[Any]], Sequence[Any]]
    ) -> Callable[[], Any]:
        """Add this rank's entry to the group's meeting of this number. Returns a function that waits for its result."""
        me = self._me()
        ranks = group.ranks
        meeting = self._meetings.get((group, number))
        if meeting is None:
            meeting = self._meetings[group, number] = Meeting(ranks)
        meeting.entries[me.number] = entry
        first_rank, first = next(iter(meeting.entries.items()))
        gone = self._ended and [r for r in ranks if r not in meeting.entries and r in self._ended]
        complete = len(meeting.entries) == len(ranks)
        if complete:
            del self._meetings[group, number]
        if meeting.off:
            me.error = CollectiveMismatchError(meeting.off)
        elif entry.what != first.what:
            self._call_off(meeting, "the ranks are in different collectives")
        elif entry.how != first.how:
            differ = f"rank {first_rank} needs {first.how}, rank {me.number} {entry.how}"
            self._call_off(meeting, f"{entry.what} was called with different arguments: {differ}")
        elif gone:
            self._call_off(meeting, f"rank {gone[0]} has ended")
        elif complete:
            try:
                results = combine([meeting.entries[r].payload for r in ranks])
            except CollectiveMismatchError as error:
                remedy = f"; {UNEVEN}" if entry.what in ("all_gather", "gather") else ""
                self._call_off(meeting, f"{error}{remedy}")
            except Exception as error:
                self._call_off(meeting, f"their arguments do not fit together: {error}")
            else:
                meeting.results = dict(zip(ranks, results, strict=True))
                self._wake(meeting)
        return partial(self._wait, me, meeting)

    def suspend(self, what: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """For a message between two ranks. Returns what the other rank calls, and what waits until it has."""
        me = self._me()
        meeting = Meeting((me.number,), {me.number: Entry(what, None, None, None)})

        def finish() -> None:
            meeting.results = {me.number: None}
            self._wake(meeting)

        return finish, partial(self._wait, me, meeting)

    def _me(self) -> Rank:
        """Return the rank that this thread is; raise if it is none."""
        me: Rank | None = THREAD.rank
        if not self.running:
            raise RuntimeError(
                "a collective of simulated ranks was used after they had ended; call backward inside the function, "
                "and wait there for what it has started"
            )
        if me is None or me.world is not self:
            raise NotARankError(
                "a collective of simulated ranks was called from a thread that is none of them; call it in the rank's "
                "own thread"
            )
        return me

    def _wait(self, me: Rank, meeting: Meeting) -> Any:
        while meeting.results is None:
            if self._me() is not me:
                raise NotARankError("a simulated rank waits for what another rank has started; wait in that rank")
            if me.error is None:
                me.waits_for = meeting
                self._hand_over(me)
            if me.error is not None:
                error, me.error = me.error, None
                raise error
        return meeting.results[me.number]

    def _hand_over(self, me: Rank) -> None:
        """Let the next rank that can run do so. Returns when it is this rank's turn again."""
        if not self._ready:
            self._call_off(None, "no rank can go on")
        if self._ready[0] is me:
            self._ready.popleft()
            return
        me.state, me.forward_mode = RankState.of_process(me.state.stream), forward_mode()
        self._give_turn()
        me.turn.acquire()
        if self.stopped:
            raise _Stopped
        me.state.set()
        _set_forward_mode(me.forward_mode)

    def leave(self, me: Rank) -> None:
        """End a rank: call off the meetings that it will not join, and let the next rank run."""
        self._ended.add(me.number)
        for meeting in list(self._meetings.values()):
            if me.number in meeting.ranks and me.number not in meeting.entries and not meeting.off:
                self._call_off(meeting, f"rank {me.number} has ended")
        if not self._ready and any(r.waits_for for r in self._ranks):
            self._call_off(None, "no rank can go on")
        if self._ready:
            self._give_turn()
        else:
            self._over.release()

    def _give_turn(self) -> None:
        self._ready.popleft().turn.release()

    def _wake(self, meeting: Meeting) -> None:
        for number in meeting.ranks:
            rank = self._ranks[number]
            if rank.waits_for is meeting:
                rank.waits_for = None
                self._ready.append(rank)

    def _call_off(self, meeting: Meeting | None, why: str) -> None:
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

    def _doing(self, rank: Rank, meeting: Meeting | None) -> str:
        if rank.outcome:
            return rank.outcome
        if meeting is not None and rank.number in meeting.entries:
            return str(meeting.entries[rank.number])
        return str(rank.waits_for.entries[rank.number]) if rank.waits_for else "is in no collective"


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait while ranks of another thread run; on a simulated rank an error."""
    if THREAD.rank is not None:
        got = f"simulated rank {THREAD.rank.number}"
        raise RuntimeError(message("simulate", "the caller", got, "a thread that is none"))
    with _one_world:
        yield


def _closed_lock() -> threading.Lock:
    """Return a lock that is held."""
    lock = threading.Lock()
    lock.acquire()
    return lock


# ── forward mode ─────────────────────────────────────────────────────────────────────────────────────────
#
# It has one level, kept in globals of the process, not of the thread. So the globals are saved and restored for each
# rank; the first rank enters the level and the last one exits it.


def forward_mode() -> tuple[int, int]:
    """Return the current level of forward mode and the nesting depth of torch.func.jvp."""
    return forward_ad._current_level, eager_transforms.JVP_NESTING


def _set_forward_mode(state: tuple[int, int]) -> None:
    forward_ad._current_level, eager_transforms.JVP_NESTING = state


@contextlib.contextmanager
def _shared_forward_mode() -> Iterator[None]:
    """Let threads of which one runs at a time be in forward mode at the same time."""
    if forward_mode() != (-1, 0):
        raise RuntimeError("simulate: called within forward mode, expected a call outside of it; enter it in fn")
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    inside = 0

    def enter_dual_level() -> int:
        nonlocal inside
        if inside == 0 or forward_ad._current_level >= 0:
            enter()  # type: ignore[no-untyped-call]  # raises if this thread is in forward mode already
        forward_ad._current_level = 0
        inside += 1
        return 0

    def exit_dual_level(*, level: int | None = None) -> None:
        nonlocal inside
        inside -= 1
        if inside == 0:
            leave(level=level)  # type: ignore[no-untyped-call]
        forward_ad._current_level = -1

    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_dual_level, exit_dual_level
    try:
        yield
    finally:
        forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter, leave
        _set_forward_mode((-1, 0))
