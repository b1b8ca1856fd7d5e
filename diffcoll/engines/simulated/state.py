"""What the process has one of, and each simulated rank for itself: a rank saves it when it gives way to another one.

That is random numbers, the variables of a launcher, warnings, output streams, and the level of forward mode.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from diffcoll.engines.rank_state import launched_as

_VARIABLES = tuple(launched_as(0, 1))
#: A rank may be in `warnings.catch_warnings`, or have redirected its output, when it gives way.
_WARNINGS = ("filters", "showwarning", "_showwarnmsg_impl")
_STREAMS = ("stdout", "stderr", "excepthook")


class State:
    """The state of the process when this was made."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = numpy and numpy.random.get_state()
        self._devices = [generator.get_state() for generator in _device_generators()]
        self._dtype = torch.get_default_dtype()
        self._variables = {name: os.environ.get(name) for name in _VARIABLES}
        self._warnings = [getattr(warnings, name, None) for name in _WARNINGS]
        self._streams = [getattr(sys, name) for name in _STREAMS]
        self._forward_mode = _forward_mode()

    def restore(self, stream: int | None = None) -> None:
        """Make it the process's again; `stream` seeds generators of an accelerator that was not in use."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for i, generator in enumerate(_device_generators()):
            if self._devices:
                generator.set_state(self._devices[i])
            elif stream is not None:
                generator.manual_seed(stream)
        torch.set_default_dtype(self._dtype)
        for name, value in self._variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        own = list(zip(_WARNINGS, self._warnings, strict=True))
        if any(getattr(warnings, name, None) is not value for name, value in own):
            for name, value in own:
                setattr(warnings, name, value)
            with warnings.catch_warnings():  # clears what the warnings module has cached of other filters
                pass
        for name, stream_or_hook in zip(_STREAMS, self._streams, strict=True):
            setattr(sys, name, stream_or_hook)
        _set_forward_mode(self._forward_mode)


def _device_generators() -> Sequence[Any]:
    """Return the generators of an accelerator in use; asking for one that is not would set it up."""
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else torch.get_device_module(kind)
    in_use = module is not None and getattr(module, "is_initialized", lambda: False)()
    return getattr(module, "default_generators", ()) if in_use else ()


# ── forward mode ─────────────────────────────────────────────────────────────────────────────────────────
#
# It has one level, kept in globals of the process, not of the thread. So the globals are part of a rank's state; the
# first rank enters the level and the last one exits it.


def _forward_mode() -> tuple[int, int]:
    """Return the current level of forward mode and the nesting depth of torch.func.jvp."""
    return forward_ad._current_level, eager_transforms.JVP_NESTING


def _set_forward_mode(state: tuple[int, int]) -> None:
    forward_ad._current_level, eager_transforms.JVP_NESTING = state


@contextlib.contextmanager
def shared_forward_mode() -> Iterator[None]:
    """Let threads of which one runs at a time be in forward mode at the same time."""
    if _forward_mode() != (-1, 0):
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
