"""What each rank has for itself although the process has one of it.

That is random numbers, a launcher's variables, warnings, output streams, and whether this thread is a simulated rank.
Simulated ranks take turns: each gives way with its state, and takes it up again.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


class _OfThread(threading.local):
    #: The simulated rank that this thread is.
    rank: Any = None
    #: Why this thread may not call collectives now; "": it may.
    refusal: str = ""


THREAD = _OfThread()
#: While ranks are simulated: the threads that were there before, which are none of them.
outsiders: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class NotARankError(RuntimeError):
    """A thread that is no rank called a collective while ranks are simulated."""


def refuse_thread(operation: str) -> None:
    """Raise if this thread may not call collectives: a rank has started it, or it differentiates a joint graph."""
    if THREAD.refusal:
        raise RuntimeError(f"{operation}: {THREAD.refusal}")
    if outsiders and THREAD.rank is None and threading.current_thread() not in outsiders:
        raise NotARankError(
            f"{operation}: called in a thread that a simulated rank has started; call collectives in the rank's own "
            "thread, or run the program on processes (diffcoll.testing.spawn)"
        )


def launched_as(rank: int, size: int, port: int = 29500) -> dict[str, str]:
    """Return the variables of the environment that torchrun sets for a rank on one host."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1"}


def seed_rank(seed: int, rank: int) -> None:
    """Seed the generators of this process for one rank: torch's on all devices, Python's, NumPy's if imported."""
    stream = _stream(seed, rank)
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(stream)  # `torch.manual_seed` formats a stack trace for absent devices
    else:
        torch.manual_seed(stream)
    random.seed(stream)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(stream % 2**32)


def _stream(seed: int, rank: int) -> int:
    return seed * 1_000_003 + rank


#: What `warnings.catch_warnings` saves and restores; a rank may be in such a block when it gives way.
_WARNINGS = ("filters", "showwarning", "_showwarnmsg_impl")
_STREAMS = ("stdout", "stderr")
_LAUNCHER = tuple(launched_as(0, 1))


@dataclass
class RankState:
    """The state of one rank while others run."""

    cpu: torch.Tensor
    python: Any
    variables: dict[str, str | None]
    numpy: Any = None
    devices: list[torch.Tensor] = field(default_factory=list)
    #: Seeds the generators that were not in use when the state was made: NumPy's, an accelerator's.
    stream: int | None = None
    warnings: Sequence[Any] = ()
    streams: Sequence[Any] = ()

    @classmethod
    def of_rank(cls, seed: int, rank: int, size: int) -> RankState:
        """Return the state that a rank begins with."""
        stream = _stream(seed, rank)
        cpu = torch.Generator().manual_seed(stream).get_state()
        return cls(cpu, random.Random(stream).getstate(), dict(launched_as(rank, size)), None, [], stream).alike()

    @classmethod
    def of_process(cls, stream: int | None = None) -> RankState:
        """Return the state as it is now."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            {name: os.environ.get(name) for name in _LAUNCHER},
            numpy and numpy.random.get_state(),
            [generator.get_state() for generator in _device_generators()],
            stream,
        ).alike()

    def alike(self) -> RankState:
        """Take the process's warnings and streams."""
        self.warnings = [getattr(warnings, name, None) for name in _WARNINGS]
        self.streams = [getattr(sys, name) for name in _STREAMS]
        return self

    def set(self) -> None:
        """Make it the process's state."""
        torch.set_rng_state(self.cpu)
        random.setstate(self.python)
        if (numpy := sys.modules.get("numpy")) is not None:
            if self.numpy is not None:
                numpy.random.set_state(self.numpy)
            elif self.stream is not None:
                numpy.random.seed(self.stream % 2**32)
        for i, generator in enumerate(_device_generators()):
            if self.devices:
                generator.set_state(self.devices[i])
            elif self.stream is not None:
                generator.manual_seed(self.stream)
        for name, value in self.variables.items():
            if value is None:
                os.environ.pop(name, None)
            elif os.environ.get(name) != value:
                os.environ[name] = value
        if any(getattr(warnings, name, None) is not value for name, value in zip(_WARNINGS, self.warnings)):  # noqa: B905
            for name, value in zip(_WARNINGS, self.warnings, strict=True):
                setattr(warnings, name, value)
            with warnings.catch_warnings():  # clears what the warnings module has cached of other filters
                pass
        for name, stream in zip(_STREAMS, self.streams, strict=True):
            setattr(sys, name, stream)


def _device_generators() -> Sequence[Any]:
    """Return the generators of an accelerator in use; asking for one that is not would set it up."""
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else torch.get_device_module(kind)
    in_use = module is not None and getattr(module, "is_initialized", lambda: False)()
    return getattr(module, "default_generators", ()) if in_use else ()
