"""The test device "late" of late_device.cpp: builds and registers it, once per process."""

import contextlib
import types
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

#: Kernels that the host has not waited for run as late as possible, or before all others.
ORDERS = ("late", "early")


@cache
def register():
    """Make it this process's accelerator, which cannot be undone."""
    folder = Path(__file__).parent
    build = folder.parents[1] / "build" / "late_device"
    build.mkdir(parents=True, exist_ok=True)
    sources, flags = [str(folder / "late_device.cpp")], ["-O0", "-g0"]
    cpp_extension.load("late_device", sources, flags, build_directory=str(build), is_python_module=False)
    torch.utils.rename_privateuse1_backend("late")
    module = types.ModuleType("torch.late")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
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


class Streams:
    """A side stream, and explicit synchronization with it, as a user writes it."""

    def __init__(self):
        self.side = torch.Stream(device="late")

    @contextlib.contextmanager
    def on_side(self):
        """Run on the side stream, after what has been queued on the current one."""
        self.side.wait_stream(torch.accelerator.current_stream())
        with self.side:
            yield

    def back(self, *tensors):
        """Make the current stream wait for the side stream."""
        here = torch.accelerator.current_stream()
        here.wait_stream(self.side)
        for t in tensors:
            t.record_stream(here)
