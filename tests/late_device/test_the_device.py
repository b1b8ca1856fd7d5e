"""The test device: what is not synchronized is a wrong number, what is synchronized a right one."""

import signal
import subprocess
import sys

import late
import pytest
import torch

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


def test_gradients_are_those_of_the_cpu(order):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    model(X.view(10, 20) / 100).square().mean().backward()
    right = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.to("late")(X.view(10, 20).to("late") / 100).square().mean().backward()
    for p, g in zip(model.parameters(), right, strict=True):
        torch.testing.assert_close(p.grad.cpu(), g)


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
    streams, x = late.Streams(), X.to("late")
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
        streams, x = late.Streams(), X.to("late") + 0
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
    streams, before = late.Streams(), late.host_waits()
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


def in_a_process(program):
    """Run a program in which the device is registered."""
    start = (
        f"import sys; sys.path.insert(0, {str(late.FOLDER)!r}); import late, threading, time, torch; late.register()\n"
    )
    return subprocess.run([sys.executable, "-c", start + program], capture_output=True, text=True, timeout=60)


def test_host_code_cannot_read_its_memory():
    done = in_a_process("""
import ctypes
x = torch.ones(3, device="late")
print(x.cpu().tolist(), flush=True)
ctypes.string_at(x.data_ptr(), 4)
""")
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "[1.0, 1.0, 1.0]\n")


def test_a_thread_may_use_the_device_while_another_runs_a_function_on_it():
    """The other needs the GIL to go on, which this one has while it waits for the device."""
    done = in_a_process("""
x, stream = torch.zeros(3, device="late"), torch.Stream(device="late")
began = threading.Event()

def slow(x):
    began.set()
    time.sleep(0.5)
    x += 7

late.queue(slow, x)
thread = threading.Thread(target=lambda: print(x.cpu().tolist(), flush=True))
thread.start()
began.wait()
stream.record_event()
thread.join()
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[7.0, 7.0, 7.0]\n", "")


def test_a_build_that_was_killed_does_not_stop_the_next():
    """PyTorch waits without end while the file is there."""
    lock = late.BUILD / "lock"
    lock.touch()
    assert in_a_process("print(torch.zeros(1, device='late').cpu().item())").stdout == "0.0\n"
    assert not lock.exists()


def test_outputs_are_resized(order):
    x = X.view(2, 20, 5)
    y = x.to("late")
    for call in (
        lambda x: torch.cat([x, x], out=x.new_empty(0)),
        lambda x: x.median(0).values,
        lambda x: torch.stack([x.frexp()[0], x.frexp()[1]]),
        lambda x: x.logsumexp(1),
        lambda x: x.flatten()[:30].clone().resize_(5, 3),
    ):
        torch.testing.assert_close(call(y).cpu(), call(x))
    small = y[0].clone()
    assert torch.equal(small.resize_(200).cpu()[:100], x[0].flatten())
    assert torch.equal(torch.add(small, 1, out=torch.empty(0, device="late")).cpu()[:100], x[0].flatten() + 1)


def test_convolutions_are_those_of_the_cpu(order):
    x, w, b = (torch.randn(shape, dtype=torch.float64) for shape in [(2, 3, 6, 6), (4, 3, 3, 3), (4,)])
    found = []
    for device in ("cpu", "late"):
        leaves = [t.to(device).requires_grad_() for t in (x, w, b)]
        y = torch.nn.functional.conv2d(*leaves, padding=1)
        found.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    for right, got in zip(*found, strict=True):
        torch.testing.assert_close(got.cpu(), right)
