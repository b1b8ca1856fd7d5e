"""The scheduler of simulated ranks: threads of one process, of which one runs at a time.

A rank runs until it waits for another rank, and then gives the turn to the next rank that can run. So a run is
deterministic, each hand-over wakes one thread only, and a deadlock is detected at once: no rank can run.

A *meeting* is one communication of all ranks of a group. Each rank adds an entry, and the last one combines all entries
into one result for each rank.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakSet

import torch

from diffcoll.core.errors import CollectiveMismatchError, message, of_uneven
from diffcoll.engines.devices import synchronize_streams
from diffcoll.engines.rank_state import THREAD, NotARankError, launched_as, outsiders, seed_rank
from diffcoll.engines.simulated.blocks import Misfit
from diffcoll.engines.simulated.functional import forget
from diffcoll.engines.simulated.meetings import Combine, Entry, Meeting
from diffcoll.engines.simulated.report import Report
from diffcoll.engines.simulated.state import State, shared_forward_mode
from diffcoll.engines.simulated.store import SimulatedStore

#: (name of the collective, each rank's tensor and arguments) → each rank's result.
Truth = Callable[[str, list[tuple[Any, dict[str, Any]]]], list[Any]]

#: Held while ranks run: random numbers and the environment are the process's.
_one_world = threading.Lock()
#: Numbers of worlds, far enough apart for the names of groups to be counted from them.
_serials = count(step=10**6)


class _Stopped(BaseException):
    """Ends a rank of a simulation that was interrupted; not an Exception, so that the user's code does not catch it."""


class Rank(threading.Thread):
    """One simulated rank: a thread that runs when it has its turn."""

    def __init__(self, world: World, number: int, body: Callable[[], None]) -> None:
        super().__init__(name=f"rank {number}", daemon=True)
        self.turn = threading.Lock()
        self.turn.acquire()
        self.world = world
        self.number = number
        self.body = body
        self.default_group: object = None
        self.c10d_groups: Any = None  # its groups of torch.distributed
        self.check_mode: Any = None  # see `core.check_mode`
        self.submodules: list[str] = []  # whose forward it runs, from the outermost on
        self.names: dict[int, str] = {}  # of the outermost one's submodules, by id
        self.works: WeakSet[Any] = WeakSet()  # of torch.distributed, see `forget`
        self.joined: dict[Meeting, None] = {}  # those in progress
        self.waits_for: Meeting | None = None
        self.outcome: str = ""  # "returned" or "raised …", once it has ended

    def run(self) -> None:
        """Run the body when it is this rank's turn."""
        self.turn.acquire()
        THREAD.rank, world = self, self.world
        if world.stopped:
            return
        world.before.restore()
        torch.set_num_threads(world.threads)
        self.stream = seed_rank(world.seed, self.number)
        os.environ.update(launched_as(self.number, world.size))
        try:
            # Else the backward of an accelerator's tensors runs in a thread of autograd's, which is no rank.
            with torch.autograd.set_multithreading_enabled(False):
                self.body()
            for meeting in list(self.joined):  # else a program that hangs would return
                world.wait(self, meeting)
            self.outcome = "returned"
        except BaseException as error:
            self.outcome = f"raised {type(error).__name__}"
            world.failures.append((self.number, error))
        finally:  # graphs refer to engines, and these to the rank, which must not refer to tensors
            self.default_group = self.c10d_groups = None
            THREAD.rank = None
            forget(self.works)
            self.joined.clear()
            del self.body
        if not world.stopped:
            world.next()


class World:
    """N simulated ranks. With `truth` all ranks share one autograd graph; with None the library's rules run."""

    def __init__(self, size: int, seed: int = 0, truth: Truth | None = None) -> None:
        self.size = size
        self.serial = next(_serials)
        self.seed = seed
        self.truth: Any = truth
        # Of an operation of a rank; a thread pool for each rank would take as many threads as ranks times cores.
        self.threads = max(1, torch.get_num_threads() // size)
        self.stopped = False  # by Ctrl-C
        self.failures: list[tuple[int, BaseException]] = []
        self._ranks: list[Rank] = []
        self._ready: deque[Rank] = deque()
        self._over = threading.Lock()
        self._over.acquire()
        self._meetings: dict[object, Meeting] = {}
        #: For torch.distributed: the store, and the messages that wait for their counterpart, see `SimulatedGroup`.
        self.store = SimulatedStore(self)
        self.mailboxes: defaultdict[object, list[tuple[int, Meeting]]] = defaultdict(list)

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per rank. Returns their results in the order of ranks, or raises the first error."""
        self.before, threads, environment = State(), torch.get_num_threads(), dict(os.environ)
        results: list[Any] = [None] * self.size

        def keep(number: int) -> None:
            results[number] = bodies[number]()

        ranks = self._ranks = [Rank(self, number, partial(keep, number)) for number in range(self.size)]
        self.report = Report(ranks)
        self._ready.extend(ranks)
        outsiders.update(threading.enumerate())
        try:
            with shared_forward_mode():
                for rank in ranks:
                    rank.start()
                self.next()
                while not self._over.acquire(timeout=0.2):
                    pass  # a Ctrl-C that another thread of the process has received wakes nobody
        except BaseException:  # the ranks that wait end now, and the one that runs at its next collective
            self.stopped = True
            for rank in ranks:
                with contextlib.suppress(RuntimeError):  # it has its turn
                    rank.turn.release()
            raise
        finally:
            self.before.restore()
            for name in {*os.environ} - {*environment}:
                del os.environ[name]
            os.environ.update(environment)
            torch.set_num_threads(threads)  # is a default of the process, too
            outsiders.clear()
        for rank in ranks:
            rank.join()
        self._meetings.clear()  # graphs refer to the world, too
        self.mailboxes.clear()
        if self.failures:
            number, error = self.failures[0]
            error.add_note(f"raised on simulated rank {number} of {self.size}")
            raise error
        return results

    # ── meetings ─────────────────────────────────────────────────────────────────────────────────────────

    def meet(self, me: Rank, ranks: tuple[int, ...], name: object, entry: Entry, combine: Combine) -> Callable[[], Any]:
        """Add this rank's entry to the meeting of this name; returns a function that waits for its result."""
        expect_thread_of(me)
        meeting = self._meetings.get(name) or self._meetings.setdefault(name, Meeting(ranks))
        first_rank, first = next(iter(meeting.entries.items()), (me.number, entry))
        wait = self.join(me, meeting, entry)
        complete = len(meeting.entries) == len(ranks)
        if complete:
            del self._meetings[name]
        if meeting.off:
            pass
        elif entry.what != first.what:
            self.call_off([meeting], "the ranks are in different collectives")
        elif entry.how != first.how:
            hows = f"{self.report.names([first_rank])} has {first.how}, {self.report.names([me.number])} {entry.how}"
            why = f"{entry.what} was called with different arguments: {hows}"
            self.call_off([meeting], why + of_uneven(entry.what))
        elif complete:
            self.complete(meeting, ranks, combine)
        return wait

    def join(self, me: Rank, meeting: Meeting, entry: Entry) -> Callable[[], Any]:
        """Add this rank's entry to a meeting; returns a function that waits for its result."""
        entry.submodule = me.submodules[-1] if me.submodules else ""
        meeting.entries[me.number] = entry
        me.joined[meeting] = None
        return partial(self.wait, me, meeting)

    def complete(self, meeting: Meeting, ranks: Sequence[int], combine: Combine) -> None:
        """Give each of these ranks its result, or call the meeting off if what they bring does not fit together."""
        try:
            synchronize_streams()  # each rank may be on a stream of its own
            results = combine([meeting.entries[r].payload for r in ranks])
            synchronize_streams()
        except Misfit as error:
            receiver, sender = (self.report.names([ranks[r]]) for r in (error.receiver, error.sender))
            why = f"{receiver} expects {error.expects} from {sender}, which sends {error.sends}"
            self.call_off([meeting], why + of_uneven(meeting.entries[ranks[0]].what))
        except Exception as error:
            self.call_off([meeting], f"their arguments do not fit together: {error}")
        else:
            self.report.first_split = self.report.first_split or self.report.split(meeting)
            meeting.entries.clear()  # they may refer to the ranks' graphs
            self.end(meeting, dict(zip(ranks, results, strict=True)))

    def end(self, meeting: Meeting, results: dict[int, Any] | None) -> None:
        """Let the ranks run that wait for this meeting; None: it was called off."""
        meeting.results = results
        for rank in map(self._ranks.__getitem__, meeting.ranks):
            if results is not None:
                rank.joined.pop(meeting, None)
            if rank.waits_for is meeting:
                rank.waits_for = None
                self._ready.append(rank)

    def wait(self, me: Rank, meeting: Meeting) -> Any:
        """Return this rank's result of a meeting; other ranks run until it is there. Raise if it was called off."""
        while meeting.results is None:
            expect_thread_of(me)
            if meeting.off:
                me.joined.pop(meeting, None)
                raise CollectiveMismatchError(meeting.off)
            me.waits_for = meeting
            self._pause(me)
        return meeting.results[me.number]

    def give_way(self) -> None:
        """Let the ranks run that can, before this one goes on."""
        if self._ready and THREAD.rank is not None:
            self._ready.append(THREAD.rank)
            self._pause(THREAD.rank)

    def _pause(self, me: Rank) -> None:
        """Let other ranks run until it is this rank's turn again."""
        state = State()
        self.next()
        me.turn.acquire()
        if self.stopped:
            raise _Stopped
        state.restore(me.stream)

    def next(self) -> None:
        """Let the next rank that can run do so; if all ranks wait, they raise, and if all have ended, the run ends."""
        if not self._ready:
            waited_for = dict.fromkeys(rank.waits_for for rank in self._ranks if rank.waits_for)
            self.call_off([*waited_for], "deadlock: every rank waits or has ended", deadlock=True)
        if self._ready:
            self._ready.popleft().turn.release()
        else:
            self._over.release()

    def call_off(self, meetings: Sequence[Meeting], why: str, deadlock: bool = False) -> None:
        """Raise the same error on all ranks that wait for these meetings, now or later."""
        if not meetings:
            return
        try:
            text = self.report.text(why, meetings, deadlock)
        except Exception as error:  # else the ranks would wait for ever
            text = f"simulated ranks: {why} (no report: {error!r})"
        for meeting in meetings:
            meeting.off = text
            self.end(meeting, None)


def expect_thread_of(me: Rank) -> None:
    """Raise unless this thread is a rank's own: it uses what that rank has made."""
    if THREAD.rank is not me:
        raise NotARankError(
            f"a group, or a communication, of simulated rank {me.number} was used in another thread: by another rank, "
            "by a thread that is none, or after the ranks had ended; make groups on every rank, and do not keep them "
            "in globals or caches, which simulated ranks share; call collectives, and backward, in the function that "
            "each rank runs, and wait there for what it has started; or run the program on processes "
            "(diffcoll.testing.spawn)"
        )


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait while ranks of another thread run; on a simulated rank an error."""
    if THREAD.rank is not None:
        got = f"simulated rank {THREAD.rank.number}"
        raise RuntimeError(message("simulate", "the caller", got, "a thread that is none"))
    with _one_world:
        yield
