"""The test device: what is not synchronized is a wrong number, what is synchronized a right one."""

import contextlib
import signal

import late
import pytest
import torch
from gpu.streams import Streams
from runs import python

X = torch.arange(200.0)


@pytest.mark.parametrize("then", ["reads", "writes", "reuses memory"])
def test_only_what_is_not_synchronized_is_wrong(then, order):
    def is_right(synchronizes):
        """Whether a kernel of another stream and what this stream does then are right."""
        streams, x = Streams("late"), X.to("late") + 0
        with streams.on_side():
            y = x * 3
        if then == "reuses memory":
            if synchronizes:
                x.record_stream(streams.side)
            del x
            torch.full(X.shape, 77.0, device="late").cpu()
        elif synchronizes:
            streams.back(y)
        if then == "writes":
            x.zero_().cpu()
        with contextlib.nullcontext() if then == "reads" else streams.side:
            return torch.equal((y + 1).cpu(), X * 3 + 1)

    assert is_right(synchronizes=True)
    assert is_right(synchronizes=False) == (order == "early")


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


READS = """
import ctypes, late, torch
late.register()
x = torch.ones(3, device="late")
print(x.cpu().tolist(), flush=True)
ctypes.string_at(x.data_ptr(), 4)
"""


def test_host_code_cannot_read_its_memory():
    done = python("-c", READS, returns=-signal.SIGSEGV, environment={"PYTHONPATH": str(late.FOLDER)})
    assert done.stdout == "[1.0, 1.0, 1.0]\n"
