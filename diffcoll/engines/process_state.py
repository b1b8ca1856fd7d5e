"""State of the process that each rank has for itself: random numbers, settings, warnings, streams, the environment.

Simulated ranks take turns. Each keeps its own state while the others run. A copy of the process that a rank forks is
not a rank.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch

#: What `warnings.catch_warnings` saves and restores; a rank may be in such a block when another one runs.
_WARNINGS = ("filters", "showwarning", "_showwarnmsg_impl")
_STREAMS = ("stdout", "stderr")


def launched_as(rank: int, size: int, port: int = 29500) -> dict[str, str]:
    """Return the variables of the environment that torchrun sets for a rank on one host."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1"}


def seed_rank(seed: int, rank: int) -> None:
    """Seed the generators, those of other devices too, for one rank: torch's, Python's, and NumPy's if imported."""
    _seed_devices(_stream(seed, rank))
    _seed_cpu(_stream(seed, rank))


def states_of_ranks(seed: int, size: int, launched: bool) -> Iterator[Any]:
    """Yield the process's state for each rank, with the generators as `seed_rank` leaves them, and its environment.

    If the ranks are launched, that has a launcher's variables.

    The generators of other devices are shared by all ranks and seeded once.
    """
    _seed_devices(_stream(seed, size - 1))
    for rank in range(size):
        _seed_cpu(_stream(seed, rank))
        *state, environment = process_state()
        environment = dict(environment)
        if launched:
            for name, value in launched_as(rank, size).items():
                environment[os.environ.encodekey(name)] = os.environ.encodevalue(value)
        yield *state, environment


def process_state() -> Any:
    """Return the state of the generators of the CPU, torch's settings, warnings, streams, and the environment itself.

    The environment is the dict behind `os.environ`, whatever has imported that; ranks must not change the caller's.
    """
    numpy = sys.modules.get("numpy")
    generators = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    handling = [getattr(warnings, w, None) for w in _WARNINGS]
    streams = [getattr(sys, s) for s in _STREAMS]
    return generators, _settings(), handling, streams, os.environ._data  # type: ignore[attr-defined]


def _settings() -> tuple[Any, ...]:
    """Return the default dtype, whether algorithms are deterministic, and the mode that detects anomalies."""
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    return torch.get_default_dtype(), *strict, *anomaly


def set_process_state(state: Any) -> None:
    """Restore a state returned by `process_state`."""
    generators, settings, handling, streams, environment = state
    os.environ._data = environment  # type: ignore[attr-defined]
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    if generators[2] is not None:
        sys.modules["numpy"].random.set_state(generators[2])
    if settings != _settings():
        dtype, strict, warn_only, *anomaly = settings
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        torch.autograd.set_detect_anomaly(*anomaly)
    if any(getattr(warnings, name, None) is not value for name, value in zip(_WARNINGS, handling, strict=True)):
        for name, value in zip(_WARNINGS, handling, strict=True):
            setattr(warnings, name, value)
        with warnings.catch_warnings():  # clears what the warnings module has cached of other filters
            pass
    for name, stream in zip(_STREAMS, streams, strict=True):
        setattr(sys, name, stream)


def forget_environment(state: Any) -> None:
    """Undo what a rank with this state has set or deleted in the environment that new processes inherit."""
    *_, of_rank = state
    mine = os.environ._data  # type: ignore[attr-defined]
    for name in of_rank.keys() | mine.keys():
        if name not in mine:
            os.unsetenv(name)
        elif mine[name] != of_rank.get(name):
            os.putenv(name, mine[name])


def _stream(seed: int, rank: int) -> int:
    return seed * 1_000_003 + rank


def _seed_devices(stream: int) -> None:
    """Seed the generators of other devices, if PyTorch is built for one.

    `torch.manual_seed` formats a stack trace for each kind of device that is not in use yet. Whether there is a device
    is not asked: on CUDA that would keep copies of the process from using it.
    """
    if torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(stream)


def _seed_cpu(stream: int) -> None:
    torch.default_generator.manual_seed(stream)
    random.seed(stream)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(stream % 2**32)


@contextlib.contextmanager
def copies_end_here() -> Iterator[None]:
    """End a copy of this process, which the block has forked, where it leaves the block.

    It exits as a program does: after an exception with its traceback.
    """
    me, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == me:
            raise
        code = _exit_code(error)
    if os.getpid() != me:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    traceback.print_exception(error)
    return 1
