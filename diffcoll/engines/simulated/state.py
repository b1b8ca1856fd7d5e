"""What the process has one of, and each simulated rank for itself: a rank saves it when it gives way to another one.

That is random numbers, the default dtype, the variables of a launcher, warnings, output streams and forward mode.
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
#: A rank may be in `warnings.catch_warnings` or in forward mode, or have redirected its output, when it gives way.
_ATTRIBUTES = [
    (module, name)
    for module, names in (
        (warnings, ("filters", "showwarning", "_showwarnmsg_impl")),
        (sys, ("stdout", "stderr", "excepthook")),
        (forward_ad, ("_current_level",)),
        (eager_transforms, ("JVP_NESTING",)),
    )
    for name in names
    if hasattr(module, name)
]


class State:
    """The state of the process when this was made."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = numpy and numpy.random.get_state()
        self._devices = [generator.get_state() for generator in _device_generators()]
        self._dtype = torch.get_default_dtype()
        self._variables = {name: os.environ.get(name) for name in _VARIABLES}
        self._attributes = [getattr(module, name) for module, name in _ATTRIBUTES]

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
        filters = warnings.filters
        for (module, name), value in zip(_ATTRIBUTES, self._attributes, strict=True):
            setattr(module, name, value)
        if warnings.filters is not filters:
            with warnings.catch_warnings():  # clears what the warnings module has cached of other filters
                pass


def _device_generators() -> Sequence[Any]:
    """Return the generators of an accelerator in use; asking for one that is not would set it up."""
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else torch.get_device_module(kind)
    in_use = module is not None and getattr(module, "is_initialized", lambda: False)()
    return getattr(module, "default_generators", ()) if in_use else ()


@contextlib.contextmanager
def shared_forward_mode() -> Iterator[None]:
    """Let threads of which one runs at a time be in forward mode at the same time.

    It has one level, kept in globals of the process, not of the thread: a part of a rank's state. The first rank enters
    the level, and the last one exits it.
    """
    if forward_ad._current_level >= 0:
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
