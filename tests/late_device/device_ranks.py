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
N = 2
#: Includes the time for which a process waits while another compiles the device.
TIMEOUT = 90


def on_two(backend, order, body):
    """Return body(r) of both ranks, whose default group moves tensors of the device; kernels run in that order."""
    return spawned(partial(_begin, backend, order, body), range(N), backend=backend, timeout=TIMEOUT)


def _begin(backend, order, body, r):
    late.register()
    if backend == "gloo":  # MPI's default group, made before, moves what it can copy to the CPU
        dc.set_default_group(over_gloo.group())
    with late.order(order):
        found = body(r)
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
