"""Programs with several streams, without synchronization but their own; each returns pairs of equal tensors.

On the ranks of a group that all have the same input and the same loss. A wait or a record_stream that the library
leaves out is a pair that differs.
"""

import contextlib
from functools import cache

import torch
from runs import OVERLAPPING, truth

import diffcoll as dc

SHAPE = (8, 16)
CALLS = {**OVERLAPPING, "reduce": dc.reduce, "shift": dc.shift}
WHERE = ("nowhere", "input", "collective", "use")
#: GPU cycles that take longer than the host needs to queue a program.
LONG = 100_000_000


class Streams:
    """A side stream of the accelerator, and explicit synchronization with it, as a user writes it."""

    def __init__(self, device):
        self.side = torch.Stream(device=device)

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


def moved(x, device):
    """Return x on the device, where it has other values until the device has run."""
    if device == "cpu":
        return x
    y = torch.empty_like(x, device=device).fill_(77)
    if device == "cuda":
        torch.cuda._sleep(LONG // 100)
    return y.copy_(x.pin_memory(), non_blocking=True)


def values():
    """Return the input of every rank, without requires_grad."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def late_input(device):
    if device == "cuda":
        torch.cuda._sleep(LONG)
    return moved(values(), device).requires_grad_()


@cache
def right_of(call, r, n):
    """Value and gradient on rank r of n."""
    leaves = [values().requires_grad_() for _ in range(n)]
    ys = truth(call, leaves)
    return ys[r].detach(), torch.autograd.grad(torch.stack([y.square().sum() for y in ys]).sum(), leaves)[r]


def collective(call, where, device, r=0, n=2):
    """Value and gradient, with the input, the collective or the use of its result on another stream."""
    streams = Streams(device)

    def stream_of(part):
        return streams.on_side() if where == part else contextlib.nullcontext()

    with stream_of("input"):
        x = late_input(device)
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
    right_y, right_g = right_of(call, r, n)
    return [(kept, right_y), (g, right_g)]


def awaited_elsewhere(call, device, r=0, n=2):
    """Start on one stream, wait on another, then allocate on the first what both have released."""
    streams = Streams(device)
    x = late_input(device)
    with torch.no_grad():
        pending = call(x, async_op=True)
        with streams.on_side():
            y = pending.wait()
            kept = y * 1
            del pending, y
        for factor in (0.25, 0.5, 1, 2, 4):  # sizes of what the calls allocate
            for _ in range(4):
                torch.full((int(values().numel() * factor),), 77.0, device=device)
    streams.back(kept)
    return [(kept, right_of(call, r, n)[0])]


def differing(pairs):
    """Return the pairs that differ."""
    cpu = ([torch.as_tensor(t).cpu() for t in pair] for pair in pairs)
    return [pair for pair in cpu if not torch.allclose(*pair, rtol=1e-5, atol=1e-6)]
