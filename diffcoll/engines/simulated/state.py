"""What the process has one of, and each simulated rank for itself: a rank saves it when it gives way to another one.

That is random numbers, the default dtype, the variables of a launcher, warnings, output streams and forward mode.
"""

from __future__ import annotations

import contextlib
import ctypes
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


#: Bytes of the state of NumPy's MT19937: 624 words, and the position of the next one.
_MT19937 = 625 * 4


class State:
    """The state of the process when this was made.

    NumPy's takes 50 µs to get and as much to set, so it is copied as memory unless numbers have been drawn.

    Args:
        before: what was restored last; None: nothing.
    """

    #: The state of the process now; None: it may be another one.
    _now: State | None = None
    _half_drawn: bool

    def __init__(self, before: State | None = None) -> None:
        numpy = sys.modules.get("numpy")
        self._torch, self._python = torch.default_generator.get_state(), random.getstate()
        self._numpy: Any = None
        self._bits = _bits_of_numpy()
        self._memory = ctypes.string_at(self._bits, _MT19937) if self._bits else b""
        if before is not None and self._memory and self._memory == before._memory and not before._half_drawn:
            self._numpy = before._numpy
        elif numpy is not None:
            self._numpy = numpy.random.get_state()
        # Numbers of the normal distribution are drawn in pairs, of which the second is kept elsewhere.
        self._half_drawn = self._numpy is not None and bool(self._numpy[3])
        self._devices = [generator.get_state() for generator in _device_generators()]
        self._dtype = torch.get_default_dtype()
        self._variables = {name: os.environ.get(name) for name in _VARIABLES}
        self._attributes = [getattr(module, name) for module, name in _ATTRIBUTES]
        State._now = self

    def restore(self, stream: int | None = None) -> None:
        """Make it the process's again; `stream` seeds generators of an accelerator that was not in use."""
        now, State._now = State._now, None
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        if now is not None and self._bits and self._bits == now._bits and not (now._half_drawn or self._half_drawn):
            ctypes.memmove(self._bits, self._memory, _MT19937)
        elif self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for i, generator in enumerate(_device_generators()):
            if self._devices:
                generator.set_state(self._devices[i])
            elif stream is not None:
                generator.manual_seed(stream)
        torch.set_default_dtype(self._dtype)
        for name, value in self._variables.items():
            if now is not None and now._variables[name] == value:
                continue
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


def _bits_of_numpy() -> int:
    """Return the address of the state of NumPy's global generator; 0: it is not an MT19937."""
    numpy: Any = sys.modules.get("numpy")
    if not hasattr(getattr(numpy, "random", None), "get_bit_generator"):  # NumPy 1.24 and later
        return 0
    bits = numpy.random.get_bit_generator()
    return int(bits.ctypes.state_address) if type(bits).__name__ == "MT19937" else 0


def _device_generators() -> Sequence[Any]:
    """Return the generators of an accelerator in use; asking for one that is not would set it up."""
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else torch.get_device_module(kind)
    in_use = module is not None and getattr(module, "is_initialized", lambda: False)()
    return getattr(module, "default_generators", ()) if in_use else ()


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Restore what ranks share with the caller, and may change for themselves and leave behind."""
    environment, precision = dict(os.environ), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly, check_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)  # the public one imports Inductor
        torch.autograd.set_detect_anomaly(anomaly, check_nan)
        for name in {*os.environ} - {*environment}:
            del os.environ[name]
        os.environ.update(environment)


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
