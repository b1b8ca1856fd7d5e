"""The test device "late" of late_device.cpp: builds and registers it, once per process."""

import contextlib
import fcntl
import itertools
import types
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

#: Kernels that the host has not waited for run as late as possible, or before all others.
ORDERS = ("late", "early")
FOLDER = Path(__file__).parent
BUILD = FOLDER.parents[1] / "build" / "late_device"


@cache
def register():
    """Make it this process's accelerator, which cannot be undone."""
    BUILD.mkdir(parents=True, exist_ok=True)
    sources, flags = [str(FOLDER / "late_device.cpp")], ["-O0", "-g0"]
    with open(BUILD / "used", "w") as used:
        fcntl.flock(used, fcntl.LOCK_EX)  # PyTorch's own lock is a file, which a process that is killed leaves behind
        (BUILD / "lock").unlink(missing_ok=True)
        cpp_extension.load("late_device", sources, flags, build_directory=str(BUILD), is_python_module=False)
    torch.utils.rename_privateuse1_backend("late")
    module = types.ModuleType("torch.late")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.device_count, module.current_device = lambda: 1, lambda: 0
    torch._register_device_module("late", module)


@contextlib.contextmanager
def order(name):
    """Run kernels in one of `ORDERS`."""
    torch.ops.late.others_first(name == "early")
    try:
        yield
    finally:
        torch.accelerator.synchronize()
        torch.ops.late.others_first(False)


def host_waits():
    """Return how often the host has waited for the device."""
    return torch.ops.late.host_waits()


_functions, _numbers = {}, itertools.count()


@cache
def _operators():
    """The operators that are written in Python."""
    library = torch.library.Library("late_python", "DEF")
    library.define("call(Tensor(a!)[] tensors, int number) -> ()")

    def call(tensors, number):
        _functions.pop(number)(*tensors)

    library.impl("call", call, "CPU")
    return library


def queue(function, *tensors):
    """Queue a function of tensors on the current stream; it gets CPU tensors that share the device's memory."""
    _operators()
    _functions[number := next(_numbers)] = function
    torch.ops.late_python.call([t.detach() for t in tensors], number)
