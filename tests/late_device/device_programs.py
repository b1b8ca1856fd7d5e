"""Programs of two ranks on the test device, without synchronization but their own; each returns pairs of equal tensors.

A wait or a record_stream that the library leaves out is a pair that differs, or a host wait.
"""

import contextlib

import late
import torch
from runs import OVERLAPPING, truth
from torch import nn

import diffcoll as dc

SHAPE = (8, 16)
CALLS = {**OVERLAPPING, "reduce": dc.reduce, "shift": dc.shift}
WHERE = ("nowhere", "input", "collective", "use")


def values():
    """Return two equal blocks: in a mirror image, ranks send the same to both ranks."""
    return torch.randn(SHAPE[0] // 2, *SHAPE[1:], generator=torch.Generator().manual_seed(1)).repeat(2, 1)


def late_input():
    """Return x, which has other values until the device has run."""
    x = torch.full(SHAPE, 77.0, device="late")
    x.copy_(values().pin_memory(), non_blocking=True)
    return x.requires_grad_()


def right_of(call):
    """Value and gradient on rank 0, if rank 1 has the same input and the same loss."""
    leaves = [values().requires_grad_() for _ in range(2)]
    ys = truth(call, leaves)
    return ys[0].detach(), torch.autograd.grad(torch.stack([y.square().sum() for y in ys]).sum(), leaves)[0]


def collective(call, where):
    """Value and gradient, with the input, the collective or the use of its result on another stream."""
    streams, before = late.Streams(), late.host_waits()

    def stream_of(part):
        return streams.on_side() if where == part else contextlib.nullcontext()

    with stream_of("input"):
        x = late_input()
    if where == "input":
        streams.back(x.detach())
    with stream_of("collective"):
        y = call(x)
    if where == "collective":
        streams.back(y.detach())
    with stream_of("use"):
        kept = y.detach().clone()
        loss = y.square().sum()
    if where == "use":
        streams.back(loss.detach(), kept)
    (g,) = torch.autograd.grad(loss, x)
    waits = late.host_waits() - before
    right_y, right_g = right_of(call)
    return [(kept.cpu(), right_y), (g.cpu(), right_g), (waits, 0)]


def awaited_elsewhere(call):
    """Start on one stream, wait on another, then allocate on the first what both have released."""
    streams, before = late.Streams(), late.host_waits()
    x = late_input()
    with torch.no_grad():
        pending = call(x, async_op=True)
        with streams.on_side():
            y = pending.wait()
            kept = y * 1
            del pending, y
        for factor in (0.25, 0.5, 1, 2, 4):  # sizes of what the calls allocate
            for _ in range(4):
                torch.full((int(values().numel() * factor),), 77.0, device="late")
    waits = late.host_waits() - before
    torch.accelerator.current_stream().synchronize()
    with streams.side:
        return [(kept.cpu(), right_of(call)[0]), (waits, 0)]


def averaged(size=30, sides=1, **settings):
    """Steps of gradients that are accumulated on several streams in turn, in one bucket or several."""
    streams = [late.Streams() for _ in range(sides)]
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
    streams = late.Streams()
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
        kept = torch.full((2 * size * size + 1,), 3.0, device="late") * 3  # as large as two gradients and the count
        averager.backward(loss)  # allocates a bucket, since the gradients of the last block are held
        held += [a.grad, b.grad]
    right = [4 * p.detach().cpu() for p in (a, b)]
    return [*zip([g.cpu() for g in held], right * 2, strict=True), (kept.cpu(), torch.full(kept.shape, 9.0))]


def differing(pairs):
    """Return the pairs that differ."""
    return [pair for pair in pairs if not torch.allclose(*map(torch.as_tensor, pair), rtol=1e-5, atol=1e-6)]
