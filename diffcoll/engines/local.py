"""Ranks that are threads of one process: the engine of simulated worlds.

One rank runs at a time. It runs until it waits for a rank that has not come yet, then hands over to the next
in line, by that rank's own lock: so a run is deterministic, a hand-over wakes one thread and not all of them,
and a world in which nobody can go on is known at once.

Ranks that do something together *meet*: each leaves an entry, the last to come combines the entries into one
result for each. Under the rules a meeting is one `exchange` of blocks. In a joint world the collectives meet
as a whole, and what combines them is handed in by `diffcoll.testing`: nothing here knows what it means.
"""

from __future__ import annotations

import contextvars
import random
import sys
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

from diffcoll.core._torch import (
    after_backward,
    ambient,
    backward_at_work,
    before_node,
    forward_mode,
    is_traced,
    set_forward_mode,
    shared_forward_mode,
    tree_flatten,
    wrapped_backward_code,
)
from diffcoll.core.errors import CollectiveMismatchError, Origin, not_run, user_line, within_backward
from diffcoll.engines.engine import Blocks, Engine, Wait

__all__ = [
    "LocalEngine",
    "LocalGroup",
    "World",
    "backward_starts",
    "engine_of",
    "here",
    "involved",
    "refuse_in_backward",
    "seed_rank",
]

#: (name of the collective, each rank's tensor, arguments and facts, see `Engine.run_truth`) → each rank's result
Truth = Callable[[str, list[Any], list[dict[str, Any]], list[tuple[object, object]]], list[Any]]


#: A graph is compiled or traced for one rank, and simulated ranks share one cache of graphs, or meet in one graph.
NO_GRAPHS = (
    "torch.compile, export, make_fx and linearize do not work within a simulated world: its ranks share what they "
    "make; call the function as it is there, or compile on real processes (testing.spawn)"
)


@dataclass(frozen=True)
class LocalGroup:
    """Some ranks of a simulated world, in order; also its handle for the user."""

    ranks: tuple[int, ...]
    #: Tells twins apart.
    number: int = 0


@dataclass
class _Entry:
    what: str
    payload: Any
    where: str
    origin: Origin | None  # of a backward
    within: str  # a backward

    def __str__(self) -> str:
        if self.origin is None:
            return f"waits in {self.what} at {self.where}{self.within}"
        return f"waits in {self.origin.backward} of {self.origin.name} called at {self.origin.line}"


@dataclass
class _Meeting:
    ranks: tuple[int, ...]
    entries: dict[int, _Entry] = field(default_factory=dict)
    results: dict[int, Any] | None = None
    off: str = ""  # why it was called off; whoever comes later is told the same


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
        self.waits_for: tuple[_Meeting, str] | None = None
        self.error: BaseException | None = None  # to be raised where this rank waits
        self.outcome: str = ""  # "returned" or "raised …", once it is over
        self.result: Any = None
        self.random: Any = None  # what every rank has of its own, though the process has but one
        self.forward_mode = forward_mode()

    def run(self) -> None:
        self.turn.acquire()
        _rank.here = self
        _random_set(self.random)
        set_forward_mode(self.forward_mode)
        try:
            self.result = self.body()
            self.outcome = "returned"
        except BaseException as error:
            self.outcome = f"raised {type(error).__name__}"
            self.world.failures.append((self.number, error))
        self.world.leave(self)


class World:
    """N simulated ranks; `truth` makes it a joint world, None one in which the library's rules run."""

    def __init__(self, size: int, seed: int = 0, truth: Truth | None = None) -> None:
        self.size = size
        self.seed = seed
        self.truth = truth
        self.running = False
        self.failures: list[tuple[int, BaseException]] = []
        self._ranks: list[_Rank] = []
        self._ready: deque[_Rank] = deque()
        self._over = _closed_lock()
        self._meetings: dict[tuple[LocalGroup, int], _Meeting] = {}

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per rank to the end; results in the order of ranks, or the first rank's error."""
        global _running
        keep, level = _random_get(), forward_mode()
        entered = ambient()
        for number, body in enumerate(bodies):
            seed_rank(self.seed, number)
            context = contextvars.copy_context()
            rank = _Rank(self, number, partial(context.run, _within, entered(), body))
            rank.random = _random_get()
            self._ranks.append(rank)
            rank.start()
        self.running = True
        _running += 1
        self._ready.extend(self._ranks)
        with shared_forward_mode(), wrapped_backward_code(_wrapper):
            try:
                self._ready.popleft().turn.release()
                self._over.acquire()
            finally:
                self.running = False
                _running -= 1
                self._meetings.clear()  # those that were called off hold tensors, whose graph holds the world
                _random_set(keep)
                set_forward_mode(level)
        ranks, self._ranks = self._ranks, []  # the results may hold the world: no cycle back to them
        for rank in ranks:
            rank.join()
        if self.failures:
            number, error = self.failures[0]
            if hasattr(error, "add_note"):  # Python 3.11
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
        turn: int,
        what: str,
        payload: Any,
        combine: Callable[[list[Any]], Sequence[Any]],
        origin: Origin | None = None,
    ) -> Callable[[], Any]:
        """Leave this rank's entry at the group's meeting number `turn`; the returned function waits for it."""
        me = self._current()
        ranks = group.ranks
        meeting = self._meetings.setdefault((group, turn), _Meeting(ranks))
        meeting.entries[me.number] = _Entry(what, payload, user_line(), origin, within_backward())
        gone = [self._ranks[r] for r in ranks if r not in meeting.entries and self._ranks[r].outcome]
        if len(meeting.entries) == len(ranks):
            del self._meetings[group, turn]
        if meeting.off:
            me.error = CollectiveMismatchError(meeting.off)
        elif len({e.what for e in meeting.entries.values()}) > 1:
            self._call_off(meeting, "the ranks are in different collectives")
        elif gone:
            self._call_off(meeting, f"rank {gone[0].number} is gone")
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

        def wait() -> Any:
            while meeting.results is None:
                if me.error is None:
                    me.waits_for = meeting, str(meeting.entries[me.number])
                    self._hand_over(me)
                if me.error is not None:
                    error, me.error = me.error, None
                    raise error
            return meeting.results[me.number]

        return wait

    def _current(self) -> _Rank:
        me = _rank.here
        if not self.running:
            raise RuntimeError(
                "a collective of a simulated world was used after the world had ended; "
                "under simulate(rules=True) call backward inside the function"
            )
        if me is None or me.world is not self:
            raise RuntimeError(
                "a collective of a simulated world was called from a thread that is not one of its ranks "
                "(the backward of CUDA tensors runs on such a thread); simulate on CPU tensors"
            )
        rank: _Rank = me
        return rank

    def _hand_over(self, me: _Rank) -> None:
        """Let the next rank in line run; returns when it is this rank's turn again."""
        if not self._ready:
            self._call_off(None, "no rank can go on")
        following = self._ready.popleft()
        if following is me:
            return
        me.random, me.forward_mode = _random_get(), forward_mode()
        following.turn.release()
        me.turn.acquire()
        _random_set(me.random)
        set_forward_mode(me.forward_mode)

    def leave(self, me: _Rank) -> None:
        """Take a rank that is over out of the world."""
        for meeting in list(self._meetings.values()):
            if me.number in meeting.ranks and me.number not in meeting.entries and not meeting.off:
                self._call_off(meeting, f"rank {me.number} is gone")
        if not self._ready and any(r.waits_for for r in self._ranks):
            self._call_off(None, "no rank can go on")
        (self._ready.popleft().turn if self._ready else self._over).release()

    def _wake(self, meeting: _Meeting) -> None:
        for number in meeting.ranks:
            rank = self._ranks[number]
            if rank.waits_for is not None and rank.waits_for[0] is meeting:
                rank.waits_for = None
                self._ready.append(rank)

    def _call_off(self, meeting: _Meeting | None, why: str) -> None:
        """Raise the same error on the ranks at this meeting (None: on all that wait)."""
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
            waits = rank.waits_for is not None and (meeting is None or rank.waits_for[0] is meeting)
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
        return rank.waits_for[1] if rank.waits_for else "has not come to a collective"


class LocalEngine(Engine):
    """A group of a simulated world."""

    def __init__(self, world: World, group: LocalGroup, rank: int) -> None:
        super().__init__(rank=group.ranks.index(rank), size=len(group.ranks))
        self.world = world
        self.group = group
        self.description = f"a simulated group of {self.size} ranks"
        self.joint = world.truth is not None
        self._turn = 0
        self._twins = 0

    @override
    def twin(self) -> LocalEngine:
        self._twins += 1
        group = LocalGroup(self.group.ranks, self.group.number * 1000 + self._twins)
        return LocalEngine(self.world, group, self.group.ranks[self.rank])

    @override
    def subgroup(self, ranks: Sequence[int]) -> LocalGroup:
        return LocalGroup(tuple(self.group.ranks[r] for r in ranks))

    @override
    def exchange(self, sends: Blocks, recvs: Blocks) -> Wait:
        return self._meet(self.operation, (sends, recvs), _deliver)

    @override
    def run_truth(self, name: str, x: Any, arguments: dict[str, Any], facts: tuple[object, object]) -> Any:
        truth = self.world.truth
        assert truth is not None
        if isinstance(x, torch.Tensor) and is_traced(x):
            raise RuntimeError(f"{name}: {NO_GRAPHS}")

        def combine(payloads: list[Any]) -> list[Any]:
            return truth(name, *map(list, zip(*payloads, strict=True)))

        return self._meet(name, (x, arguments, facts), combine)()

    def _meet(self, what: str, payload: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Wait:
        self._turn += 1
        return self.world.meet(self.group, self._turn, what, payload, combine, self.doing[1] if self.doing else None)


@torch.inference_mode()  # the blocks are memory and no graph, in whatever mode the rank that delivers them is
def _deliver(payloads: list[tuple[Blocks, Blocks]]) -> list[None]:
    """Copy every block from its sender to its receiver."""
    for r, (_, recvs) in enumerate(payloads):
        for s, into in enumerate(recvs):
            block = payloads[s][0][r]
            if into is None or (into.numel() == 0 and (block is None or block.numel() == 0)):
                continue
            if block is None or (block.shape, block.dtype) != (into.shape, into.dtype):
                got = "nothing" if block is None else f"{block.dtype} {tuple(block.shape)}"
                raise CollectiveMismatchError(
                    f"rank {r} expects {into.dtype} {tuple(into.shape)} from rank {s}, which sends {got}"
                )
            into.copy_(block)
    return [None] * len(payloads)


# ── who and where this thread is ─────────────────────────────────────────────────────────────────────────


class _Here(threading.local):
    here: _Rank | None = None
    #: The world whose ranks wrote the code of a backward that this thread runs.
    backward_of: World | None = None


_rank = _Here()


def here() -> _Rank | None:
    """Return the simulated rank that this thread is, if it is one."""
    return _rank.here


# ── the backward of a world ──────────────────────────────────────────────────────────────────────────────
#
# Once `simulate` has returned, its ranks are gone, and `group=None` in a backward of their graph (a checkpoint that
# is recomputed, a Function whose backward calls a collective, a hook) would be a group of the caller's, such as the
# world of one. So code that ranks hand over to autograd remembers their world, and so does the number of each
# backward that passes through a result of the world.

_running = 0  # worlds that run now, one within another
_backwards: dict[int, weakref.ref[World]] = {}


def backward_starts(world: World) -> None:
    """Note that the backward that runs is one of this world; until it ends."""
    task = backward_at_work()
    if task not in _backwards:
        _backwards[task] = weakref.ref(world, lambda _: _forget(task))  # a backward that fails has no end
        after_backward(lambda: _forget(task))


def _forget(task: int) -> None:
    _backwards.pop(task, None)


@contextmanager
def _in_backward_of(world: World) -> Iterator[None]:
    before, _rank.backward_of = _rank.backward_of, world
    try:
        with wrapped_backward_code(_wrapper):  # for derivatives of higher order, and for what is recomputed
            yield
    finally:
        _rank.backward_of = before


def _wrapper() -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return the decorator that makes code of a backward remember this thread's world; None outside of worlds."""
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
    """Whether `group=None` may be a matter of simulated worlds in this thread."""
    return _rank.here is not None or _running > 0 or _rank.backward_of is not None or bool(_backwards)


def refuse_in_backward(operation: str) -> None:
    """Raise if this thread is in a backward of a world whose ranks cannot take part in it, or in no rank's turn."""
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
            f"{operation}: called in a backward of simulated ranks that are gone; under simulate(rules=True) call "
            "backward inside the function"
        )
    raise RuntimeError(
        f"{operation}: called in the backward of a joint graph (by a checkpoint that is recomputed, the backward of an "
        "autograd.Function, or a hook), where the ranks cannot meet; use simulate(rules=True) and call backward inside "
        "the function"
    )


def engine_of(group: object) -> LocalEngine | None:
    """Return this thread's engine for a `LocalGroup`, or, for None, for its whole world; None outside one."""
    me = _rank.here
    if me is None:
        if isinstance(group, LocalGroup):
            raise ValueError("got a group of a simulated world, outside of that world; use it inside simulate()")
        return None
    ranks = tuple(range(me.world.size)) if group is None else getattr(group, "ranks", None)
    if not isinstance(ranks, tuple):
        return None
    if me.number not in ranks:
        raise ValueError("got a group that this rank is not in; call it on the group's ranks only")
    handle = group if isinstance(group, LocalGroup) else LocalGroup(ranks)
    if handle not in me.engines:
        me.engines[handle] = LocalEngine(me.world, handle, me.number)
    return me.engines[handle]


def _closed_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _within(modes: AbstractContextManager[None], body: Callable[[], Any]) -> Any:
    with modes:
        return body()


# ── every rank has random numbers of its own ─────────────────────────────────────────────────────────────


def seed_rank(seed: int, rank: int) -> None:
    """Start the random streams of one rank: torch's, Python's, and NumPy's where it is in use."""
    stream = seed * 1_000_003 + rank
    torch.manual_seed(stream)
    random.seed(stream)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(stream % 2**32)


def _random_get() -> Any:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()


def _random_set(state: Any) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])
