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


def averaged(size=30, sides=1, **settings):
    """Steps of gradients that are accumulated on several streams in turn, in one bucket or several."""
    streams = [Streams("late") for _ in range(sides)]
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, size).to("late")) for _ in range(6)]
    before = [p.detach().cpu() for p in parameters]

    def stream_of(i):
        return streams[i % (sides + 1) - 1].on_side() if i % (sides + 1) else contextlib.nullcontext()

    _nodes = []
    for i, p in enumerate(parameters):
        with stream_of(i):  # a gradient is accumulated on the stream that was current when its node was made
            _nodes.append(torch.autograd.graph.get_gradient_edge(p).node)
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
        if step > 1:  # the ranks agree on the order of buckets in the first
            pairs.append((waits, 0))
    return pairs


def reused_for_a_bucket(size=150):
    """A kernel on this stream reads memory that is freed and becomes that of the bucket, which another stream fills."""
    streams = Streams("late")
    torch.manual_seed(0)
    a, b = (nn.Parameter(torch.randn(size, size).to("late")) for _ in range(2))
    with streams.on_side():  # its gradient is accumulated there
        _node = torch.autograd.graph.get_gradient_edge(a).node
    averager = dc.GradientAverager([a, b], reduction="sum")
    held = []
    for _ in range(2):
        a.grad = b.grad = None
        with streams.on_side():
            loss = a.square().sum()
        streams.back(loss.detach())
        loss = loss + b.square().sum()
        kept = torch.full((2 * size * size,), 3.0, device="late") * 3  # as large as two gradients
        averager.backward(loss)  # allocates a bucket, since the gradients of the last block are held
        held += [a.grad, b.grad]
    right = [4 * p.detach().cpu() for p in (a, b)]
    return [*zip([g.cpu() for g in held], right * 2, strict=True), (kept.cpu(), torch.full(kept.shape, 9.0))]


SETTINGS = ({}, {"bucket_mb": 1e-4}, {"bucket_mb": 8e-3}, {"bucket_mb": 12e-3})


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("size", [30, 150])  # small gradients are copied when a bucket is sent, others at once
def test_averager(size, sides, order):
    def body(r):
        found = []
        for settings in SETTINGS:
            scaled = {name: mb * (size / 30) ** 2 for name, mb in settings.items()}
            found += differing(averaged(size, sides, **scaled))
        return found

    assert on_two("gloo", order, body) == [[], []]


def test_memory_that_becomes_a_buckets(order):
    assert on_two("gloo", order, lambda r: differing(reused_for_a_bucket())) == [[], []]
