"""A backend of torch.distributed that sends the test device's tensors between processes, through gloo.

A call is a kernel on the backend's stream: it runs when the device runs that stream, and ends with its messages.
"""

import torch
import torch.distributed as dist
from late import queue
from stream_group import StreamGroup, StreamWork

NAME = "late_gloo"
#: The dtypes in which gloo adds those that it does not add itself.
ADDED = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.int16: torch.int32, torch.bool: torch.uint8}


class MessageWork(StreamWork):
    """A message between two ranks: one kernel starts it; a second one, queued by the wait, waits for it.

    So a rank that receives first and sends then does not wait for another one that does the same.
    """

    def __init__(self, group, tensor, start):
        super().__init__([tensor])
        self.group, self.started = group, []
        group._run(lambda: queue(lambda x: self.started.append(start([x])), tensor), tensor)

    def wait(self, timeout=None):
        """Make the current stream wait for the message."""
        if self.end is None:
            with self.group.stream:
                queue(lambda x: self.started.pop().wait(), *self.kept)
            self.end = self.group.stream.record_event()
        return super().wait()

    def is_completed(self):
        """Whether the device has done it."""
        return self.end is not None and self.end.query()


class GlooGroup(StreamGroup):
    """Real ranks."""

    kind = NAME

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _call(self, function, *tensors):
        if tensors[0].is_cpu:
            return self._run(lambda: function(*tensors), *tensors)
        return self._run(lambda: queue(function, *tensors), *tensors)

    def allreduce(self, tensors, opts=None):
        """Sum, max or min."""

        def kernel(x):
            wide = x.to(ADDED.get(x.dtype, x.dtype))
            self.gloo.allreduce([wide], opts).wait()
            x.copy_(wide)

        return self._call(kernel, *tensors)

    def reduce(self, tensors, opts=None):
        """Reduce to the root."""

        def kernel(x):
            wide = x.to(ADDED.get(x.dtype, x.dtype), copy=True)
            self.gloo.reduce([wide], opts).wait()
            if opts.rootRank == self.rank():
                x.copy_(wide)

        return self._call(kernel, *tensors)

    def broadcast(self, tensors, opts=None):
        """Copy the root's."""
        return self._call(lambda x: self.gloo.broadcast([x], opts).wait(), *tensors)

    def all_gather_single(self, output, x, opts=None):
        """Copy every rank's input."""
        return self._call(lambda x, y: self.gloo._allgather_base(y, x, opts).wait(), x, output)

    def reduce_scatter_single(self, output, x, opts=None):
        """Sum of every rank's part for this one."""

        def kernel(y, x):
            dtype = ADDED.get(y.dtype, y.dtype)
            wide = y.to(dtype)
            self.gloo._reduce_scatter_base(wide, x.to(dtype), opts).wait()
            y.copy_(wide)

        return self._call(kernel, output, x)

    def send(self, tensors, dst, tag):
        """Start it when the device runs the stream."""

        def start(tensors):
            return self.gloo.send(tensors, dst, tag)

        return start(tensors) if tensors[0].is_cpu else MessageWork(self, tensors[0], start)

    def recv(self, tensors, src, tag):
        """Start it when the device runs the stream."""

        def start(tensors):
            return self.gloo.recv(tensors, src, tag)

        return start(tensors) if tensors[0].is_cpu else MessageWork(self, tensors[0], start)


def group():
    """Return a group of all ranks of the default group; all of them call it."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, GlooGroup, devices=["cpu", "late"])
    return dist.new_group(backend=NAME)
