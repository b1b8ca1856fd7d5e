"""Runs a function on two processes whose tensors are on the test device, over gloo and over MPI."""

from functools import partial
from types import SimpleNamespace

import late
import over_gloo
import torch
from runs import spawned

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.engines import mpi

BACKENDS = ("gloo", "mpi")
#: The device's own backend, which `gloo` stands for.
OWN = over_gloo.NAME
N = 2
#: Includes the time for which a process waits while another compiles the device.
TIMEOUT = 90


def on_two(backend, order, body):
    """Return body(r, …) of both ranks, whose default group moves tensors of the device; kernels run in that order."""
    return run(backend, order, body, range(N))


def run(backend, order, body, *per_rank):
    """Do the same on any number of ranks, with each rank's arguments, as `spawn` does."""
    return spawned(partial(_begin, backend, order, body), *per_rank, backend=backend, timeout=TIMEOUT)


def _begin(backend, order, body, *arguments):
    late.register()
    if backend == "gloo":  # MPI's default group, made before, moves what it can copy to the CPU
        dc.set_default_group(over_gloo.group())
    with late.order(order):
        found = body(*arguments)
        torch.accelerator.synchronize()  # this rank's messages, for which the other one may wait
        return found


def let_mpi_reach_the_device():
    """Make this rank's MPI one that reads and writes the device's memory, when it is told to, as if it were CUDA's."""
    from mpi4py import MPI

    def fromaddress(address, nbytes):
        return MPI.buffer.fromaddress(torch.ops.late.for_kernels(address), nbytes)

    class Reaching:
        buffer = SimpleNamespace(fromaddress=fromaddress)

        def __getattr__(self, name):
            return getattr(MPI, name)

    mpi.MpiEngine.reaches = lambda engine, x: True
    engine = resolve(None, "test")
    engine._mpi = Reaching()


def moved(x):
    """Return x on the device, where it has other values until the device has run."""
    y = torch.full(x.shape, 77.0, device="late").to(x.dtype)
    return y.copy_(x.pin_memory(), non_blocking=True)
