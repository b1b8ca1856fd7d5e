"""A backend of torch.distributed on the test device: two ranks, of which the other has what this one has."""

import contextlib

import torch.distributed as dist
from stream_group import StreamGroup, StreamWork
from torch.testing._internal.distributed.fake_pg import FakeStore


class MirrorGroup(StreamGroup):
    """Two ranks; this one is 0."""

    kind = "mirror"

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.expected = []

    def _reduce(self, x, op):
        if op == dist.ReduceOp.SUM:
            x.mul_(2)
        elif op not in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            raise NotImplementedError(op)

    def allreduce(self, tensors, opts=None):
        """Sum, max or min."""
        return self._run(lambda: self._reduce(tensors[0], opts.reduceOp), *tensors)

    def reduce(self, tensors, opts=None):
        """Reduce to the root; the other rank's memory is left alone."""
        return self._run(lambda: opts.rootRank == 0 and self._reduce(tensors[0], opts.reduceOp), *tensors)

    def broadcast(self, tensors, opts=None):
        """Both ranks have the same."""
        return self._run(lambda: None, *tensors)

    def all_gather_single(self, output, x, opts=None):
        """Copy the input to both places."""
        return self._run(lambda: [y.copy_(x.view(-1)) for y in output.view(-1).chunk(2)], x, output)

    def reduce_scatter_single(self, output, x, opts=None):
        """Sum of both ranks' first part."""

        def kernel():
            output.view(-1).copy_(x.view(-1).chunk(2)[0])
            self._reduce(output, opts.reduceOp)

        return self._run(kernel, output, x)

    def recv(self, tensors, src, tag):
        """Expect what the next `send` sends: for calls that send the same to every rank."""
        work = StreamWork(tensors)
        self.expected.append((tensors[0], work))
        return work

    def send(self, tensors, dst, tag):
        """Fill the first tensor that is expected."""
        into, work = self.expected.pop(0)
        sent = self._run(lambda: into.copy_(tensors[0]), tensors[0], into)
        work.end = sent.end
        return sent


@contextlib.contextmanager
def group():
    """Make the default group one of two such ranks."""
    if "MIRROR" not in dist.Backend._plugins:
        dist.Backend.register_backend(
            "mirror", lambda store, rank, size, _: MirrorGroup(rank, size), devices=["cpu", "late"]
        )
    dist.init_process_group("mirror", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()
