"""What the process has one of, and each simulated rank for itself: a rank saves it when it gives way to another one.

That is random numbers, the default dtype, the variables of a launcher, warnings, output streams and forward mode.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from diffcoll.engines.rank_state import launched_as

#: As bytes, which take half of the time, where the system has them.
_ENVIRONMENT: Any = getattr(os, "environb", os.environ)
#: The dict behind it, where this Python has one: reading it takes a tenth of the time.
_MEMORY: Any = getattr(_ENVIRONMENT, "_data", _ENVIRONMENT)
_VARIABLES = [name.encode() if os.supports_bytes_environ else name for name in launched_as(0, 1)]
#: Bytes of the state of an MT19937: 624 words, and the position of the next one.
_MT19937 = ctypes.c_char * (625 * 4)
_RANDOM: Any = random.getstate.__self__  # type: ignore[attr-defined]  # the generator of Python's functions


def _bits_of_random() -> Any:
    """Return the memory of Python's generator, if its words are there; its state is a tuple of 625 new objects."""
    if sys.implementation.name != "cpython" or type(_RANDOM).__basicsize__ < object.__basicsize__ + 625 * 4:
        return None
    bits = _MT19937.from_address(id(_RANDOM) + object.__basicsize__)
    *words, position = random.getstate()[1]
    return bits if bits.raw == struct.pack("625I", position, *words) else None


_RANDOM_BITS = _bits_of_random()


def _python() -> Any:
    return (_RANDOM_BITS.raw, _RANDOM.gauss_next) if _RANDOM_BITS else random.getstate()


def _set_python(state: Any) -> None:
    if _RANDOM_BITS:
        _RANDOM_BITS.raw, _RANDOM.gauss_next = state
    else:
        random.setstate(state)


#: NumPy's state when it was last read or set.
_known: tuple[bytes, Any] = b"", None


def _numpy() -> tuple[bytes, Any]:
    """Return the memory of NumPy's generator, and its state, which takes 50 µs to get: only if numbers were drawn."""
    global _known
    bits, numpy = _bits_of_numpy(), sys.modules.get("numpy")
    memory = bits.raw if bits else b""
    # Numbers of the normal distribution are drawn in pairs, of which the second is not in this memory.
    if numpy is not None and (not memory or memory != _known[0] or _known[1][3]):
        _known = memory, numpy.random.get_state()
    return _known


def _set_numpy(state: tuple[bytes, Any]) -> None:
    global _known
    bits, now = _bits_of_numpy(), _numpy()
    if bits and state[0] and not (state[1][3] or now[1][3]):
        bits.raw = state[0]
    elif state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])
    _known = state


def _bits_of_numpy() -> Any:
    """Return the memory of NumPy's global generator; None: it is not an MT19937."""
    generator: Any = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
    bits: Any = getattr(generator, "_bit_generator", None)
    return _MT19937.from_address(bits.ctypes.state_address) if type(bits).__name__ == "MT19937" else None


def _variables() -> list[Any]:
    return [*map(_MEMORY.get, _VARIABLES)]


def _set_variables(values: list[Any]) -> None:
    for name, value, now in zip(_VARIABLES, values, _variables(), strict=True):
        if value == now:
            continue
        if value is None:
            del _ENVIRONMENT[name]
        else:
            _ENVIRONMENT[name] = value


#: How to get and to set each part of a state, but for that of accelerators.
_PARTS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.default_generator.get_state, torch.default_generator.set_state),
    (_python, _set_python),
    (_numpy, _set_numpy),
    (_variables, _set_variables),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        # The public function imports Inductor.
        lambda modes: torch._C._set_deterministic_algorithms(modes[0], warn_only=modes[1]),
    ),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.autograd.set_detect_anomaly(*modes),
    ),
    # A rank may be in `warnings.catch_warnings` or in forward mode, or have redirected its output, when it gives way.
    *(
        (partial(getattr, module, name), partial(setattr, module, name))
        for module, names in (
            (warnings, ("filters", "showwarning", "_showwarnmsg_impl")),
            (sys, ("stdout", "stderr", "excepthook")),
            (forward_ad, ("_current_level",)),
            (eager_transforms, ("JVP_NESTING",)),
        )
        for name in names
        if hasattr(module, name)
    ),
]


class State:
    """The state of the process when this was made."""

    def __init__(self) -> None:
        self._parts = [get() for get, _ in _PARTS]
        self._devices = [generator.get_state() for generator in _device_generators()]

    def restore(self, stream: int | None = None) -> None:
        """Make it the process's again; `stream` seeds generators of an accelerator that was not in use."""
        filters = warnings.filters
        for (_, set_part), value in zip(_PARTS, self._parts, strict=True):
            set_part(value)
        if warnings.filters is not filters:
            with warnings.catch_warnings():  # clears what the warnings module has cached of other filters
                pass
        for i, generator in enumerate(_device_generators()):
            if self._devices:
                generator.set_state(self._devices[i])
            elif stream is not None:
                generator.manual_seed(stream)


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
