"""The scheduler of simulated ranks: threads of one process, of which one runs at a time.

A rank runs until it waits for another rank, and then releases the lock of the next rank that can run. So a run is
deterministic, each hand-over wakes one thread only, and a deadlock is detected at once: no rank can run.

A *meeting* is one communication of all ranks of a group. Each rank adds an entry, and the last one combines all entries
into one result for each rank.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from diffcoll.core.errors import UNEVEN, CollectiveMismatchError, not_run
from diffcoll.core.torch_private.autograd import before_node
from diffcoll.engines import guards
from diffcoll.engines.meeting import Entry, LocalGroup, Meeting
from diffcoll.engines.process_state import (
    copies_end_here,
    forget_environment,
    process_state,
    set_process_state,
    states_of_ranks,
)
from diffcoll.engines.rank_threads import ambient, forward_mode, set_forward_mode, shared_forward_mode

#: (name of the collective, each rank's tensor, arguments and facts, see `Engine.run_truth`) → each rank's result.
Truth = Callable[[str, list[Any], list[dict[str, Any]], list[tuple[object, object]]], list[Any]]


class _Stopped(BaseException):
    """Ends a rank of a simulation that was interrupted; not an Exception, so that the user's code does not catch it."""


class _Rank(threading.Thread):
    """One simulated rank: a thread that runs when it has its turn."""

    def __init__(self, world: World, number: int, body: Callable[[], Any]) -> None:
        super().__init__(name=f"rank {number}", daemon=True)
        self.turn = _closed_lock()
        self.world = world
        self.number = number
        self.body = body
        self.engines: dict[LocalGroup, Any] = {}
        self.default_group: object = None
        self.c10d_groups: Any = None  # its groups of torch.distributed, if the simulation has that
        self.check_mode: Any = None  # see `core.check_mode`
        self.waits_for: Meeting | None = None
        self.error: BaseException | None = None  # to be raised where this rank waits
        self.outcome: str = ""  # "returned" or "raised …", once it has ended
        self.result: Any = None
        self.state: Any = None  # the process's state of this rank, while other ranks run
        self.forward_mode = forward_mode()

    def run(self) -> None:
        self.turn.acquire()
        if not self.world.stopped:
            self._run()
        if not self.world.stopped:
            self.world.leave(self)

    def _run(self) -> None:
        guards.THREAD.rank = self
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


class World:
    """N simulated ranks. With `truth` all ranks share one autograd graph; with None the library's rules run."""

    def __init__(self, size: int, seed: int = 0, truth: Truth | None = None) -> None:
        self.size = size
        self.seed = seed
        self.truth = truth
        self.group = LocalGroup(tuple(range(size)))  # all ranks
        self.threads = 1  # for one operation of a rank
        self.launched = False  # whether ranks have the variables of a launcher
        self.stopped = False  # by Ctrl-C
        self.running = False
        self.process = os.getpid()
        self.failures: list[tuple[int, BaseException]] = []
        self._ranks: list[_Rank] = []
        self._ended: set[int] = set()
        self._ready: deque[_Rank] = deque()
        self._over = _closed_lock()
        self._meetings: dict[tuple[LocalGroup, int], Meeting] = {}

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per rank. Returns their results in the order of ranks, or raises the first error."""
        with guards.one_at_a_time():
            return self._run(bodies)

    def _run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        keep, level, threads = process_state(), forward_mode(), torch.get_num_threads()
        # A thread pool for each rank would take as many threads as ranks times cores.
        self.threads = max(1, threads // self.size)
        entered = ambient()
        states = list(states_of_ranks(self.seed, len(bodies), self.launched))
        for number, (body, state) in enumerate(zip(bodies, states, strict=True)):
            context = contextvars.copy_context()
            rank = _Rank(self, number, partial(context.run, _within, entered(), body))
            rank.state = state
            self._ranks.append(rank)
            rank.start()
        self.running = True
        self._ready.extend(self._ranks)
        with shared_forward_mode(), guards.running(), guards.uncaught() as of_threads:
            try:
                self._give_turn()
                self._over.acquire()
            except BaseException:
                self._stop()
                raise
            finally:
                self.running = False
                self._meetings.clear()  # those called off refer to tensors, whose graph refers to the world
                set_process_state(keep)
                for state in states:
                    forget_environment(state)
                set_forward_mode(level)
                torch.set_num_threads(threads)  # is a default of the process, too
        ranks, self._ranks = self._ranks, []  # results may refer to the world, which must not refer to them
        for rank in ranks:
            rank.join()
        if of_threads:
            raise of_threads[0]
        if self.failures:
            number, error = self.failures[0]
            if hasattr(error, "add_note"):  # Python 3.11 and later
                others = [f"; rank {r.number} {r.outcome}" for r in ranks if r.number != number]
                error.add_note(f"raised on simulated rank {number} of {self.size}{''.join(others[:8])}")
            raise error
        results = [rank.result for rank in ranks]
        for y in _pytree.tree_leaves(results):
            if isinstance(y, Tensor):
                before_node(y, partial(guards.backward_starts, self))
        return results

    def _stop(self) -> None:
        """End the ranks that wait; the one that runs ends at its next collective."""
        self.stopped = True
        for rank in self._ranks:
            if rank.turn.locked():
                rank.turn.release()
            rank.result = None  # its graph may refer to the world

    # ── meetings ─────────────────────────────────────────────────────────────────────────────────────────

    def meet(
        self,
        group: LocalGroup,
        number: int,
        entry: Entry,
        combine: Callable[[list[Any]], Sequence[Any]],
    ) -> Callable[[], Any]:
        """Add this rank's entry to the group's meeting of this number. Returns a function that waits for its result."""
        me = guards.current(self)
        ranks = group.ranks
        meeting = self._meetings.get((group, number))
        if meeting is None:
            meeting = self._meetings[group, number] = Meeting(ranks, is_work=not entry.step)
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
        elif entry.step != first.step:
            differ = f"rank {first_rank} needs {first.step}, rank {me.number} {entry.step}"
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
        me = guards.current(self)
        meeting = Meeting((me.number,), {me.number: Entry(what, "", None, None)}, is_work=True)

        def finish() -> None:
            meeting.results = {me.number: None}
            self._wake(meeting)

        return finish, partial(self._wait, me, meeting)

    def _wait(self, me: _Rank, meeting: Meeting) -> Any:
        while meeting.results is None:
            # An engine's Wait may be called in any thread, while the rank's own thread does nothing else. A Work of
            # torch.distributed promises no such thing, and two threads of one rank would both go on.
            if guards.THREAD.rank is not me and (meeting.is_work or guards.THREAD.rank is not None or not self.running):
                guards.current(self)
                raise RuntimeError("a simulated rank waits for what another rank has started; wait in that rank")
            if me.error is None:
                me.waits_for = meeting
                self._hand_over(me)
            if me.error is not None:
                error, me.error = me.error, None
                raise error
        return meeting.results[me.number]

    def _hand_over(self, me: _Rank) -> None:
        """Let the next rank that can run do so. Returns when it is this rank's turn again."""
        if not self._ready:
            self._call_off(None, "no rank can go on")
        if self._ready[0] is me:
            self._ready.popleft()
            return
        me.state, me.forward_mode = process_state(), forward_mode()
        self._give_turn()
        me.turn.acquire()
        if self.stopped:
            raise _Stopped
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

    def _doing(self, rank: _Rank, meeting: Meeting | None) -> str:
        if rank.outcome:
            return rank.outcome
        if meeting is not None and rank.number in meeting.entries:
            return str(meeting.entries[rank.number])
        return str(rank.waits_for.entries[rank.number]) if rank.waits_for else "is in no collective"


def _closed_lock() -> threading.Lock:
    """Return a lock that is held."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _within(modes: AbstractContextManager[None], body: Callable[[], Any]) -> Any:
    with modes:
        return body()
