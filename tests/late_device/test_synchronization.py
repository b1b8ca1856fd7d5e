"""The averager on several streams of the test device, on two ranks that have the same.

A wait or a record_stream that the library leaves out is a number that differs, or a wait of the host.
"""

import contextlib

import late
import pytest
import torch
from device_ranks import on_two
from gpu.streams import Streams, differing
from torch import nn

import diffcoll as dc
from diffcoll.averaging import buckets


def parameter(*size, stream):
    """Return a parameter whose gradient is accumulated on this stream, and the node that does it."""
    p = nn.Parameter(torch.randn(size).to("late"))
    with stream:  # which counts is the one that is current when the node is made
        return p, torch.autograd.graph.get_gradient_edge(p).node


def averaged(backend, size=30, sides=1, **settings):
    """Steps of gradients that are accumulated on several streams in turn, in one bucket or several."""
    buckets.SMALL_ON_ACCELERATOR = 64 << 10
    streams = [Streams("late") for _ in range(sides)]
    torch.manual_seed(0)

    def stream_of(i):
        return streams[i % (sides + 1) - 1].on_side() if i % (sides + 1) else contextlib.nullcontext()

    parameters, _nodes = zip(*(parameter(size, size, stream=stream_of(i)) for i in range(6)), strict=True)
    before = [p.detach().cpu() for p in parameters]
    averager = dc.GradientAverager(parameters, reduction="sum", **settings)
    pairs = []
    for step in range(4):
        for p in parameters:
            p.grad = None
        waits, losses = late.host_waits(), []
        for i, p in enumerate(parameters):
            with stream_of(i):
                losses.append((p * (step + i + 1)).square().sum())
        for side in streams:
            side.back(*(loss.detach() for loss in losses))
        averager.backward(sum(losses))
        found = [p.grad.clone() for p in parameters]
        waits = late.host_waits() - waits
        pairs += [(g.cpu(), 4 * (step + i + 1) ** 2 * x) for i, (g, x) in enumerate(zip(found, before, strict=True))]
        if backend == "gloo" and step > 1:  # the ranks agree on the order of buckets in the first
            pairs.append((waits, 0))
    return pairs


#: Small gradients are copied when a bucket is sent, those of 150 × 150 at once.
SIZES = [("gloo", 30, 1), ("gloo", 30, 2), ("gloo", 150, 1), ("gloo", 150, 2), ("mpi", 30, 1)]
BUCKETS = (25, 1e-4, 8e-3, 12e-3)


@pytest.mark.parametrize(("backend", "size", "sides"), SIZES)
def test_averager(backend, size, sides, order):
    def body(r):
        return [differing(averaged(backend, size, sides, bucket_mb=mb * (size / 30) ** 2)) for mb in BUCKETS]

    assert on_two(backend, order, body) == [[[]] * len(BUCKETS)] * 2


def reused_for_a_bucket(size=150):
    """A kernel on this stream reads memory that is freed and becomes that of the bucket, which another stream fills."""
    buckets.SMALL_ON_ACCELERATOR = 64 << 10
    streams = Streams("late")
    (p, _node), (small, _) = (parameter(n, n, stream=streams.on_side()) for n in (size, 1))
    averager = dc.GradientAverager([p, small], reduction="sum")
    held, read = [], []
    for _ in range(2):
        p.grad = small.grad = None
        with streams.on_side():
            loss = p.square().sum() + small.sum()
        read.append(torch.full((size * size + 1,), 3.0, device="late") * 3)  # as large as the gradients
        with averager.reduce():  # allocates a bucket, since the gradient of the last block is held
            with streams.side:
                loss.backward()
            streams.side.synchronize()  # in the order "late" before the kernel that reads, unless one waits for it
        held.append(p.grad)
    right = 4 * p.detach().cpu()
    return [*((g.cpu(), right) for g in held), (torch.cat(read).cpu(), torch.tensor(9.0))]


def test_memory_that_becomes_a_buckets(order):
    assert on_two("gloo", order, lambda r: differing(reused_for_a_bucket())) == [[], []]
