"""The test device: what is not synchronized is a wrong number, what is synchronized a right one."""

import signal
import subprocess
import sys

import late
import pytest
import torch
from gpu.streams import Streams

X = torch.arange(200.0)


def test_operators_are_those_of_the_cpu(order):
    x, w = X.to("late"), X.flip(0).to("late")
    y = torch.cat([x * w + 1, (x - w).square()]).view(20, 20) @ torch.eye(20).to("late")
    y[1:3] -= 7
    y.t()[4].mul_(2)
    right = torch.cat([X * X.flip(0) + 1, (X - X.flip(0)).square()]).view(20, 20)
    right[1:3] -= 7
    right.t()[4].mul_(2)
    assert torch.equal(y.cpu(), right)
    assert torch.equal(torch.view_as_real(torch.view_as_complex(x.view(-1, 2)) * 2).cpu().view(-1), X * 2)
    assert torch.equal(x.nonzero().cpu(), X.nonzero())
    assert float(x.sum()) == float(X.sum())


#: Whether the program synchronizes, and in which order its result is right.
EXPECTED = [(True, {"late": True, "early": True}), (False, {"late": False, "early": True})]


def on_both_orders(body):
    """Return whether the result is right, in each order."""
    found = {}
    for name in late.ORDERS:
        with late.order(name):
            found[name] = body()
    return found


def tripled(waits):
    """Return x, and 3 x of another stream, for which the current one waits or not."""
    streams, x = Streams("late"), X.to("late")
    with streams.on_side():
        y = x * 3
    if waits:
        streams.back(y)
    return streams, x, y


@pytest.mark.parametrize(("waits", "right"), EXPECTED)
def test_reading_what_another_stream_writes(waits, right):
    def body():
        _, _, y = tripled(waits)
        return torch.equal((y + 1).cpu(), X * 3 + 1)

    assert on_both_orders(body) == right


@pytest.mark.parametrize(("waits", "right"), EXPECTED)
def test_writing_what_another_stream_reads(waits, right):
    def body():
        streams, x, y = tripled(waits)
        x.zero_()
        x.cpu()
        with streams.side:
            return torch.equal(y.cpu(), X * 3)

    assert on_both_orders(body) == right


@pytest.mark.parametrize(("records", "right"), EXPECTED)
def test_reusing_what_another_stream_reads(records, right):
    def body():
        streams, x = Streams("late"), X.to("late") + 0
        with streams.on_side():
            y = x * 3
        if records:
            x.record_stream(streams.side)
        del x
        torch.full(X.shape, 77.0, device="late").cpu()
        with streams.side:
            return torch.equal(y.cpu(), X * 3)

    assert on_both_orders(body) == right


def test_events_and_host_waits(order):
    streams, before = Streams("late"), late.host_waits()
    with streams.side:
        y = torch.full((5,), 3.0, device="late")
    event = streams.side.record_event()
    assert not event.query()
    torch.accelerator.current_stream().wait_event(event)
    pinned = torch.ones(5, pin_memory=True)
    y += pinned.to("late", non_blocking=True)
    y[0] = 2.0
    assert late.host_waits() == before
    assert y.tolist() == [2, 4, 4, 4, 4]
    assert event.query()
    assert late.host_waits() == before + 1


def test_host_code_cannot_read_its_memory():
    program = f"""
import ctypes, sys
sys.path.insert(0, {str(late.FOLDER)!r})
import late, torch
late.register()
x = torch.ones(3, device="late")
print(x.cpu().tolist(), flush=True)
ctypes.string_at(x.data_ptr(), 4)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "[1.0, 1.0, 1.0]\n")
