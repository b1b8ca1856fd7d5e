"""Which simulated rank a thread is, which world a backward belongs to, and errors where ranks cannot meet."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from diffcoll.core.torch_private.autograd import after_backward, backward_at_work
from diffcoll.engines.rank_threads import wrap_backward_code
from diffcoll.engines.replacing import Replacing

#: A graph is compiled or traced for one rank, but simulated ranks share one cache of graphs, or one autograd graph.
NO_GRAPHS = (
    "torch.compile, export, make_fx and linearize do not work within a simulated world: its ranks share compiled and "
    "traced graphs; call the function without them, or compile on real processes (testing.spawn)"
)

#: What to do about a collective in a thread that a rank has started.
OWN_THREAD = (
    'call collectives in the rank\'s own thread, or run on real processes alone (testing.spawn; on=["gloo"] in checks)'
)


class _OfThread(threading.local):
    #: The simulated rank that this thread is.
    rank: Any = None
    #: The world whose ranks registered the backward code that this thread executes.
    backward_of: Any = None


THREAD = _OfThread()

#: Held while a world runs that is in no other; how long a thread waits for it, in seconds.
_one_world = threading.Lock()
_PATIENCE = 600


def _renew() -> None:
    """In a copy of the process the thread that holds the lock does not exist."""
    global _one_world
    _one_world = threading.Lock()


os.register_at_fork(after_in_child=_renew)


class NotARankError(RuntimeError):
    """A thread that is no rank called a collective while a world runs."""


@contextmanager
def uncaught() -> Iterator[list[NotARankError]]:
    """Collect what ends a thread that a rank has started, and would be printed alone."""
    found: list[NotARankError] = []

    def hook(args: threading.ExceptHookArgs) -> None:
        if isinstance(args.exc_value, NotARankError):
            found.append(args.exc_value)
        else:
            before(args)

    before, threading.excepthook = threading.excepthook, hook
    try:
        yield found
    finally:
        threading.excepthook = before


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait while another thread runs a world: the state that ranks save and restore is the process's.

    A world within a world belongs to it and does not wait.
    """
    if THREAD.rank is not None or THREAD.backward_of is not None:
        yield
        return
    lock = _one_world
    if not lock.acquire(timeout=_PATIENCE):
        raise RuntimeError(
            f"simulated ranks in another thread have not ended for {_PATIENCE} s; simulations take turns, since random "
            "numbers and the environment are the process's; call simulate in the thread of a rank, not in one that it "
            "starts and waits for"
        )
    try:
        yield
    finally:
        lock.release()


def current(world: Any) -> Any:
    """Return the rank of this world that this thread is; raise if it is none."""
    me = THREAD.rank
    if not world.running:
        raise RuntimeError(
            "a collective of a simulated world was used after the world had ended; "
            "under simulate(rules=True) call backward inside the function, and wait there for what it has started"
        )
    if me is None or me.world is not world:
        raise NotARankError(
            "a collective of a simulated world was called from a thread that is not one of its ranks; call it in the "
            "rank's own thread (with torch.autograd.set_multithreading_enabled(True) the backward of an accelerator's "
            "tensors runs in another one)"
        )
    if os.getpid() != world.process:
        raise RuntimeError(
            "a collective of a simulated world was called in a child process of a rank, such as a worker of a "
            "DataLoader, which cannot reach the other ranks; call it in the rank itself"
        )
    return me


# ── the backward of a world ──────────────────────────────────────────────────────────────────────────────
#
# When `simulate` has returned, its ranks have ended. A backward of their graph may still call a collective: when a
# checkpoint is recomputed, in the backward of a Function, or in a hook. There `group=None` would mean a group of the
# caller's, such as a single rank. So functions that a rank registers with autograd store its world, and so does each
# backward pass, by its id, when it reaches a result of the world.

_running = 0  # how many worlds are running, nested
_backwards: dict[int, weakref.ref[Any]] = {}


@contextmanager
def running() -> Iterator[None]:
    """While a world runs, bind to it the backward code that its ranks register."""
    global _running
    _running += 1
    try:
        with _wrapped_backward_code():
            yield
    finally:
        _running -= 1


def backward_starts(world: Any) -> None:
    """Record, until it ends, that the current backward pass belongs to this world."""
    task = backward_at_work()
    if task not in _backwards:
        _backwards[task] = weakref.ref(world, lambda _: _forget(task))  # a backward that fails calls no callback
        after_backward(lambda: _forget(task))


def _forget(task: int) -> None:
    _backwards.pop(task, None)


@contextmanager
def _in_backward_of(world: Any) -> Iterator[None]:
    before, THREAD.backward_of = THREAD.backward_of, world
    try:
        with _wrapped_backward_code():  # for higher-order derivatives and recomputed checkpoints
            yield
    finally:
        THREAD.backward_of = before


def _wrapper() -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return a decorator that binds backward code to this thread's world; None outside of worlds."""
    world = THREAD.backward_of if THREAD.rank is None else THREAD.backward_of or THREAD.rank.world
    if world is None:
        return None

    def decorate(code: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **more: Any) -> Any:
            with _in_backward_of(world):
                return code(*args, **more)

        return within

    return decorate


_wrapped_backward_code = Replacing(partial(wrap_backward_code, _wrapper))


def refuse_in_backward(operation: str) -> None:
    """Raise if this thread runs a backward of ranks that cannot take part, or is no rank while a world runs."""
    me, world = THREAD.rank, THREAD.backward_of
    if me is None and world is None and not (_running or _backwards):
        return
    if me is None and world is None and _running:
        raise NotARankError(
            f"{operation}: called while simulated ranks run, from a thread that is not one of them; {OWN_THREAD}"
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
