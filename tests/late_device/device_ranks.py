"""Runs a function on two processes whose tensors are on the test device, over gloo and over MPI.

The backend of torch.distributed that sends the device's tensors through gloo treats streams as NCCL does: it has a
stream of its own, which waits for the caller's; the wait for a call makes the current stream wait for its end, not the
host; inputs and outputs are kept until then. A call is a kernel, which ends with its messages.
"""

from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import late
import torch
import torch.distributed as dist
from runs import spawned

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.engines import c10d, mpi

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
        dist.Backend.register_backend(NAME, GlooGroup, devices=["cpu", "late"])
        c10d.SUMS[NAME] = c10d.SUMS["nccl"]
        dc.set_default_group(dist.new_group(backend=NAME))
    with late.order(order):
        found = body(r)
        torch.accelerator.synchronize()  # this rank's messages, for which the other one may wait
        return found


def let_mpi_reach_the_device(_):
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


# ── gloo for the device ──────────────────────────────────────────────────────────────────────────────────

NAME = "late_gloo"


class StreamWork(dist.Work):
    """A call; `end` is an event on the backend's stream."""

    def __init__(self, kept=None, end=None):
        super().__init__()
        self.kept, self.end = kept, end

    def wait(self, timeout=None):
        """Make the current stream wait for the call."""
        if self.end is not None:
            torch.accelerator.current_stream().wait_event(self.end)
        self.kept = None
        return True


class MessageWork(StreamWork):
    """A message between two ranks: one kernel starts it; a second one, queued by the wait, waits for it.

    So a rank that receives first and sends then does not wait for another one that does the same.
    """

    def __init__(self, group, tensor, start):
        super().__init__([tensor])
        self.group, self.started = group, []
        group._call(lambda x: self.started.append(start([x])), tensor)

    def wait(self, timeout=None):
        """Make the current stream wait for the message."""
        if self.end is None:
            with self.group.stream:
                late.queue(lambda x: self.started.pop().wait(), *self.kept)
            self.end = self.group.stream.record_event()
        return super().wait()


class GlooGroup(dist.ProcessGroup):
    """A group with a stream of its own."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo, self.stream = dist.ProcessGroupGloo(store, rank, size, timeout), torch.Stream(device="late")

    def getBackendName(self):
        return NAME

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        return self._name

    def _get_backend(self, device):
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=60)), supports_coalescing=False)

    def _call(self, function, *tensors):
        """Queue it on the backend's stream; call it at once if the tensors are the CPU's."""
        if tensors[0].is_cpu:
            function(*tensors)
            return StreamWork()
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream:
            late.queue(function, *tensors)
        return StreamWork(tensors, self.stream.record_event())

    def allreduce(self, tensors, opts=None):
        return self._call(lambda x: self.gloo.allreduce([x], opts).wait(), *tensors)

    def reduce(self, tensors, opts=None):
        return self._call(lambda x: self.gloo.reduce([x], opts).wait(), *tensors)

    def broadcast(self, tensors, opts=None):
        return self._call(lambda x: self.gloo.broadcast([x], opts).wait(), *tensors)

    def all_gather_single(self, output, x, opts=None):
        return self._call(lambda x, y: self.gloo._allgather_base(y, x, opts).wait(), x, output)

    def reduce_scatter_single(self, output, x, opts=None):
        return self._call(lambda y, x: self.gloo._reduce_scatter_base(y, x, opts).wait(), output, x)

    def send(self, tensors, dst, tag):
        return self._message(self.gloo.send, tensors, dst, tag)

    def recv(self, tensors, src, tag):
        return self._message(self.gloo.recv, tensors, src, tag)

    def _message(self, call, tensors, peer, tag):
        if tensors[0].is_cpu:
            return call(tensors, peer, tag)
        return MessageWork(self, tensors[0], lambda tensors: call(tensors, peer, tag))
