"""A training on several streams, on two ranks of the test device; and the same on one CPU, without the library."""

import contextlib
from threading import get_ident

import late
import pytest
import torch
from device_ranks import BACKENDS, N, on_two
from gpu.streams import Streams
from torch import nn

import diffcoll as dc

STEPS, ROWS, WIDTH = 5, 6, 24


class Model(nn.Module):
    """Two towers, each of which may run on a stream of its own; one parameter is used in odd steps only."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH))
        self.odd = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, step, streams=(None, None)):
        y = self.stem(x).sin()
        sides = []
        for tower, stream in zip((self.left, self.right), streams, strict=True):
            with on(stream):
                sides.append(tower(y))
            if stream is not None:
                y.record_stream(stream.side)
        for side, stream in zip(sides, streams, strict=True):
            if stream is not None:
                stream.back(side.detach())
        z = self.stem(sides[0] * sides[1])
        return (z * self.odd if step % 2 else z).square().sum(1)


def on(stream):
    return contextlib.nullcontext() if stream is None else stream.on_side()


def new_model():
    torch.manual_seed(0)
    return Model().double()


def batch(r, step):
    """Different on every rank and in every step."""
    make = torch.Generator().manual_seed(100 * r + step)
    return torch.randn(ROWS + r, WIDTH, dtype=torch.float64, generator=make)


def attach_hooks(model, stream=None):
    """Hooks that autograd calls in its own thread, with kernels on the stream of their node, and on another one."""

    def clamp(module, given, gradients):
        return (gradients[0].clamp(-0.3, 0.3),)

    def elsewhere(g):
        with on(stream):
            h = g.cos() * g
        if stream is not None:
            g.record_stream(stream.side)
            stream.back(h)
        return h

    model.right.register_full_backward_hook(clamp)
    model.left[2].weight.register_hook(elsewhere)
    model.stem.bias.register_hook(lambda g: 3 * g)


def on_rank(r, reduction, **settings):
    """Train; returns the parameters after each step, and how often the host has waited in each."""
    *streams, loader = (Streams("late") for _ in range(3))
    model = new_model().to("late")
    attach_hooks(model, Streams("late"))
    threads = set()
    model.stem.weight.register_hook(lambda g: threads.add(get_ident()))
    _nodes = []
    for tower, stream in zip((model.left, model.right), streams, strict=True):
        with on(stream):  # a gradient is accumulated on the stream that was current when its node was made
            _nodes += [torch.autograd.graph.get_gradient_edge(p).node for p in tower.parameters()]
    averager = dc.GradientAverager(model, reduction="sum" if reduction == "sum" else "mean", **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    found, waits = [], []
    for step in range(STEPS):
        before = late.host_waits()
        with loader.on_side():
            x = torch.full((ROWS + r, WIDTH), 77.0, dtype=torch.float64, device="late")
            x.copy_(batch(r, step).pin_memory(), non_blocking=True)
        loader.back(x)
        optimizer.zero_grad()
        half = len(x) // 2
        if reduction == "sum":
            model(x[:half], step, streams).sum().backward()
        rows = model(x[half:] if reduction == "sum" else x, step, streams)
        counted = torch.full((), len(x), device="late") if r == 0 else len(x)
        count = counted if reduction == "count" else None
        averager.backward(rows.mean() if reduction == "mean" else rows.sum(), count=count)
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        waits.append(late.host_waits() - before)
    averager.close()
    assert threads.isdisjoint({get_ident()})
    return [p.cpu() for p in found], waits


def on_cpu(n, reduction):
    """Return the parameters after each step of the same training in one process."""
    model = new_model()
    attach_hooks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    found, rows = [], [ROWS + r for r in range(n)]
    for step in range(STEPS):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for r in range(n):
            optimizer.zero_grad()
            halves = (rows[r] // 2, rows[r] - rows[r] // 2) if reduction == "sum" else (rows[r],)
            for part in batch(r, step).split(halves):
                losses = model(part, step)
                (losses.mean() if reduction == "mean" else losses.sum()).backward()
            share = {"sum": 1, "mean": 1 / n, "count": 1 / sum(rows)}[reduction]
            for t, p in zip(total, model.parameters(), strict=True):
                t += 0 if p.grad is None else share * p.grad
        for p, t in zip(model.parameters(), total, strict=True):
            p.grad = None if p.grad is None else t
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return found


#: With buckets of 20 KB, gradients of several streams are in one bucket, and there are several buckets.
SETTINGS = [("mean", 25), ("mean", 2e-2), ("count", 2e-2), ("sum", 2e-2), ("sum", 1e-4)]


def differing(found, reduction):
    """Return the steps after which parameters differ from those of one CPU."""
    pairs = zip(found, on_cpu(N, reduction), strict=True)
    return [step for step, pair in enumerate(pairs) if not torch.allclose(*pair, rtol=1e-10, atol=1e-12)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("reduction", "bucket_mb"), SETTINGS)
def test_parameters_are_those_of_one_cpu(backend, reduction, bucket_mb, order):
    def body(r):
        return on_rank(r, reduction, bucket_mb=bucket_mb)

    for found, waits in on_two(backend, order, body):
        assert differing(found, reduction) == []
        if backend == "gloo":  # in the first step the ranks agree on the order
            assert waits[1:STEPS] == [0] * (STEPS - 1)
