"""Tensors on an accelerator: every collective on gloo, the device's own backend and MPI, the averager, compiled code,
streams, host synchronization.

On gloo and MPI two processes share one device; its own backend, such as NCCL, has as many ranks as DIFFCOLL_TEST_RANKS
says, by default one; that of the test device has two. `make test-gpu` runs these tests, as rows, on a GPU. Skipped
without an accelerator. DIFFCOLL_TEST_DEVICE names another one than `torch.accelerator` finds: late, the test device of
tests/late_device (`make test-device`); one that a package registers, as torch_openreg does (`make test-device
DEVICE=openreg`); cpu, without streams, which checks that the tests themselves run, and nothing that is specific to
accelerators.
"""

import contextlib
import dataclasses
import os
import sys
import warnings
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from releases import compiles
from runs import OVERLAPPING, kept, truth
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.testing import cases


def accelerator():
    """Return the type of this process's accelerator; None if there is none."""
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else None


DEVICE = os.environ.get("DIFFCOLL_TEST_DEVICE") or accelerator() or "cuda"
HAS_STREAMS = DEVICE != "cpu"
IS_LATE, IS_CUDA = DEVICE == "late", DEVICE == "cuda"
if IS_LATE:
    sys.path.insert(0, str(Path(__file__).parents[1] / "late_device"))
    import device_ranks as on_test_device
    import late as test_device  # cloudpickle would take `late` for torch.late

    test_device.register()
    OWN = on_test_device.OWN

    @pytest.fixture(autouse=True, params=test_device.ORDERS)
    def order(request, monkeypatch):
        """Both orders in which the device may run what nobody has waited for."""
        monkeypatch.setenv("LATE_ORDER", request.param)

elif HAS_STREAMS:  # a package that registers a device may be imported with torch, here and on the ranks
    OWN = dist.Backend.default_device_backend_map.get(DEVICE)
else:
    OWN = "nccl"

FOUND = accelerator()
pytestmark = pytest.mark.skipif(
    HAS_STREAMS and FOUND != DEVICE,
    reason=f"the accelerator of this process: got {FOUND}, expected {DEVICE}",
)

SEED = 1
EXACT = 1e-12
#: Number of ranks for each backend: gloo, if it moves the device's tensors; MPI; the device's own, if there is one, and
#: the same with gloo for the CPU. The test device's own backend replaces gloo.
RANKS = {"gloo": 2} if DEVICE in dist.Backend.backend_capability["gloo"] else {}
RANKS |= {"mpi": 2}
if IS_LATE:
    RANKS |= {OWN: 2}
elif OWN not in (None, "gloo"):
    n_own = int(os.environ.get("DIFFCOLL_TEST_RANKS", "1"))
    RANKS |= {OWN: n_own, f"cpu:gloo,{DEVICE if HAS_STREAMS else 'cuda'}:{OWN}": n_own}
TWO = [name for name, n in RANKS.items() if n == 2 and name != "mpi"]
ITS_OWN = [name for name in RANKS if name not in ("gloo", "mpi")]
GLOO_AND_OWN = list(dict.fromkeys([*TWO, *ITS_OWN[:1]]))
#: GPU cycles that take longer than the host needs to queue a test's operations.
LONG = 200_000_000
#: Initializing a device and its backend in a process is slow.
TIMEOUT = 110


@cache
def complete():
    """Give this process what torch_openreg lacks: it has no record_stream, and abs for float32 alone."""
    if DEVICE != "openreg" or FOUND != DEVICE:
        return None
    library = torch.library.Library("aten", "IMPL")
    library.impl("record_stream", lambda x, stream: None, "PrivateUse1")  # its kernels run on the host
    library.impl("abs", lambda x: x.cpu().abs().to(x.device), "PrivateUse1")
    if not hasattr(torch.openreg, "_is_in_bad_fork"):  # torch.manual_seed asks for it
        torch.openreg._is_in_bad_fork = lambda: False
    return library


complete()


def on_ranks(backend, body):
    """Run body(r) on the ranks of a backend; on the CPU, gloo replaces the device's own."""

    def quiet(r):
        complete()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # MPI warns that it cannot read CUDA memory
            return body(r)

    if IS_LATE:
        kind = "mpi" if backend == "mpi" else "gloo"
        return on_test_device.run(kind, os.environ["LATE_ORDER"], quiet, range(RANKS[backend]))
    there = backend if HAS_STREAMS else backend.replace(OWN, "gloo")
    return kept(quiet, range(RANKS[backend]), backend=there, timeout=TIMEOUT)


class OnDevice(cases.Case):
    """A call whose tensors are on the device."""

    def x(self, rank, seed):
        return super().x(rank, seed).to(DEVICE)

    def w(self, y, rank, seed):
        return super().w(y, rank, seed).to(DEVICE)

    def v(self, g, rank, seed):
        return super().v(g, rank, seed).to(DEVICE)


def table(n):
    """Every collective, also with inputs transposed in memory."""
    rows = cases.table(n)
    rows += [dataclasses.replace(c, layout="transposed") for c in rows if any(s and len(s) > 1 for s in c.shapes)]
    return rows


def here(case):
    return OnDevice(**{f.name: getattr(case, f.name) for f in dataclasses.fields(case)})


def on_cpu(measured):
    """Move results to the CPU, after asserting that they were on the device."""
    found = [getattr(measured, f.name) for f in dataclasses.fields(measured)]
    assert all(t is None or t.device.type == DEVICE for t in found)
    return type(measured)(*(t if t is None else t.cpu() for t in found))


def assert_is_truth(got, expected, case):
    for r, measured in enumerate(got):
        for name, error in cases.errors(measured, expected, r).items():
            assert error < EXACT, f"{case}: {name} of rank {r} is off by {error:.1e}"


# ── every collective ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", RANKS)
def test_value_and_gradients_to_second_order_are_those_of_truth(backend):
    """The whole table: uneven and empty blocks, async_op, ties."""
    n = RANKS[backend]

    def body(r):
        return [on_cpu(cases.on_rank(here(case), r, SEED)) for case in table(n)]

    found = list(zip(*on_ranks(backend, body), strict=True))
    assert len(found) == len(table(n)) > 100
    for case, got in zip(table(n), found, strict=True):
        assert_is_truth(got, cases.in_truth(case, SEED), case)


@pytest.mark.parametrize("backend", RANKS)
def test_every_dtype(backend):
    """Small integers, whose sums are exact in every dtype."""
    n = RANKS[backend]
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int16, torch.int64, torch.uint8]

    def data(case, s):
        return (case.x(s, 3) * 3).round().clamp(-4, 4).abs()

    def body(r):
        checked = 0
        for case in cases.table(n):
            if case.arguments.get("op", "sum") != "sum":
                continue
            for dtype in dtypes:
                xs = [data(case, s).to(dtype) for s in range(n)]
                y = here(case).call(xs[r].to(DEVICE), r)
                assert (y.dtype, y.device.type) == (dtype, DEVICE)
                torch.testing.assert_close(y.cpu(), case.truth(xs)[r], rtol=0, atol=0, msg=f"{case} {dtype}")
                checked += 1
            xs = [data(case, s) > 2 for s in range(n)]
            if case.name in ("all_gather", "all_to_all", "broadcast", "gather", "permute", "shift"):
                assert torch.equal(here(case).call(xs[r].to(DEVICE), r).cpu(), case.truth(xs)[r]), case
        return checked

    assert min(on_ranks(backend, body)) > 100


@pytest.mark.parametrize("backend", GLOO_AND_OWN)
def test_large_sums_and_gathers(backend):
    """Sizes above the threshold from which a sum is split in two halves."""
    n = RANKS[backend]

    def body(r):
        def data(s):
            return torch.randn(1 << 21, generator=torch.Generator().manual_seed(s))

        x = data(r).to(DEVICE).requires_grad_()
        y = dc.all_reduce(x)
        torch.testing.assert_close(y.cpu(), sum(data(s) for s in range(n)))
        z = dc.all_gather(x, async_op=True)
        (y.square() * (r + 1)).sum().backward()
        factor = 2 * sum(range(1, n + 1))
        torch.testing.assert_close(x.grad.cpu(), factor * sum(data(s) for s in range(n)))
        torch.testing.assert_close(z.wait().cpu(), torch.cat([data(s) for s in range(n)]), rtol=0, atol=0)
        return True

    assert all(on_ranks(backend, body))


@pytest.mark.parametrize("backend", RANKS)
def test_sizes_that_ranks_tell_each_other_and_what_they_compare(backend):
    """Sizes and checks exchanged by the library are on a device that the group supports."""
    n = RANKS[backend]

    def body(r):
        x = torch.arange(r + 1.0, device=DEVICE)
        with dc.check_mode():
            gathered = dc.all_gather(x, sizes="auto")
            scattered = dc.scatter(torch.arange(2.0 * n, device=DEVICE) * (1 + 10 * r))
        mean = dc.all_reduce(torch.full((2,), 1.0 + r, dtype=torch.bfloat16, device=DEVICE), "mean")
        logged = dc.global_mean(2.0 + r, weight=r + 1)
        if n > 1:
            with pytest.raises(dc.CollectiveMismatchError), dc.check_mode():
                dc.all_reduce(torch.ones(1 + r, device=DEVICE))
        assert {t.device.type for t in (gathered, scattered, mean)} == {DEVICE}
        return gathered.tolist(), scattered.tolist(), mean.tolist(), logged.item()

    weights = range(1, n + 1)
    mean = sum(w * w for w in weights) / sum(weights)
    for r, (gathered, scattered, means, logged) in enumerate(on_ranks(backend, body)):
        assert gathered == [float(i) for s in range(n) for i in range(s + 1)]
        assert scattered == [2.0 * r, 2.0 * r + 1]
        assert means == [(n + 1) / 2] * 2
        assert logged == pytest.approx(mean + 1)


@pytest.mark.parametrize("backend", TWO)
def test_transforms_and_joint_backward(backend):
    """Forward mode, vmap, and losses that ignore outputs on some ranks; the graph has nodes of both devices."""

    def body(r):
        x = torch.tensor([1.0 + r, 2.0], dtype=torch.float64, device=DEVICE)
        jvp = torch.func.jvp(lambda x: dc.all_reduce(x, "product"), (x,), (torch.ones_like(x),))[1]
        mapped = torch.func.vmap(dc.all_reduce)(torch.stack([x, 2 * x]))
        x.requires_grad_()
        with dc.joint_backward() as joint:
            y, z = dc.all_reduce(x), dc.all_gather(x * x)
            loss = joint(3 * y.sum() if r == 0 else z.sum())
        loss.backward()
        return jvp, mapped, x.grad

    for r, (jvp, mapped, g) in enumerate(on_ranks(backend, body)):
        assert jvp.tolist() == [3.0, 4.0]
        assert mapped.tolist() == [[3.0, 4.0], [6.0, 8.0]]
        assert g.tolist() == [3 + 2 * (1.0 + r), 3 + 4.0]


@pytest.mark.skipif(not HAS_STREAMS, reason="on the CPU, backward runs in the thread that calls it")
@pytest.mark.parametrize("backend", TWO)
def test_a_second_backward_in_a_thread_of_autograds_own_raises(backend):
    """There ranks may run collectives in different orders; the table above runs backward in the calling thread."""

    def body(r):
        for start in (dc.all_reduce, lambda x: dc.all_reduce(x, async_op=True).wait()):
            x = torch.ones(2, device=DEVICE, requires_grad=True)
            (g,) = torch.autograd.grad(start(x).pow(3).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match=r"all_reduce: second-order .*set_multithreading_enabled\(False\)"):
                g.sum().backward()
        return g.tolist()

    assert on_ranks(backend, body) == [[24.0, 24.0]] * 2


# ── the averager ─────────────────────────────────────────────────────────────────────────────────────────


class Model(nn.Module):
    """Small and large parameters, channels_last convolutions, and a branch that is used in odd steps only."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(4 * 36, 200)
        self.branch = nn.Linear(200, 200)
        self.head = nn.Linear(200, 1)

    def convolved(self, x):
        if DEVICE != "openreg":
            return self.conv(x)
        # torch_openreg has no convolution
        return self.conv.weight.flatten(1) @ nn.functional.unfold(x, 3) + self.conv.bias[:, None]

    def forward(self, x, odd=True):
        x = self.wide(self.convolved(x).relu().flatten(1)).tanh()
        if odd:
            x = x + self.branch(x)
        return self.head(x)


def made():
    torch.manual_seed(0)
    return Model().double().to(DEVICE)


def batch(s, step):
    return torch.randn(5, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + s)).to(
        DEVICE
    )


def steps(model, r, backward=torch.Tensor.backward):
    """Three training steps, the last one with an unused branch; returns all parameters after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        backward(model(batch(r, step), step < 2).square().mean())
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return found


@pytest.mark.parametrize("backend", RANKS)
def test_the_averager_does_what_ddp_does(backend):
    def body(r):
        results = {}
        counts = {"a count of the host": 1, "a count of the device": torch.ones((), device=DEVICE)}
        for name in ("one bucket", "several buckets", *counts):
            model = made()
            averager = dc.GradientAverager(model, bucket_mb=25 if name == "one bucket" else 0.05)
            results[name] = steps(model, r, partial(averager.backward, count=counts.get(name)))
            averager.close()
        if backend != "mpi" and not IS_LATE:  # DDP takes no backend in Python
            ddp = DistributedDataParallel(made(), find_unused_parameters=True)
            results["DDP"] = steps(ddp, r)
        return results

    n = RANKS[backend]
    reference = []
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        torch.stack([model(batch(s, step), step < 2).square().mean() for s in range(n)]).mean().backward()
        optimizer.step()
        reference.append(torch.cat([p.detach().flatten() for p in model.parameters()]).cpu())
    for results in on_ranks(backend, body):
        assert len(results) >= 3
        for name, found in results.items():
            for step, (values, expected) in enumerate(zip(found, reference, strict=True)):
                torch.testing.assert_close(
                    values, expected, rtol=1e-10, atol=1e-10, msg=lambda m, at=(name, step): f"{at}: {m}"
                )


@pytest.mark.parametrize("backend", GLOO_AND_OWN)
def test_average_in_half_precision_and_comm_dtype(backend):
    """float32 gradients sent in bfloat16; bfloat16 parameters with weights."""
    n = RANKS[backend]

    def body(r):
        p = nn.Parameter(torch.zeros(4, device=DEVICE))
        dc.GradientAverager([p], comm_dtype=torch.bfloat16).backward((p * (r + 1.0)).sum())
        q = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16, device=DEVICE))
        count = torch.tensor(1.0 if r else 257.0, device=DEVICE)  # the sum of two is 258, but not in bfloat16
        dc.GradientAverager([q]).backward((q * r).sum(), count=count)
        return p.grad.tolist(), q.grad.float().tolist()

    ranks = range(n)
    mean, weighted = (sum(ranks) + n) / n, sum(ranks) / (256 + n)
    for g, h in on_ranks(backend, body):
        assert g == [mean] * 4
        assert h == torch.tensor([weighted] * 4).bfloat16().tolist()


@pytest.mark.parametrize("backend", RANKS)
def test_a_mean_over_tokens(backend):
    """Weights on the device, of another number on each rank."""

    def body(r):
        x = torch.full((2,), r + 1.0, device=DEVICE, requires_grad=True)
        loss = dc.nn.functional.token_mean(x, torch.tensor([1, r], device=DEVICE))
        loss.backward()
        return loss.item(), x.grad.tolist()

    n = RANKS[backend]
    tokens = n + sum(range(n))
    for r, (loss, g) in enumerate(on_ranks(backend, body)):
        torch.testing.assert_close(g, [n / tokens, n * r / tokens])
        torch.testing.assert_close(loss, sum((r + 1.0) ** 2 for r in range(n)) / tokens)


# ── compiled ─────────────────────────────────────────────────────────────────────────────────────────────


@compiles
@pytest.mark.parametrize("backend", GLOO_AND_OWN)
def test_a_compiled_function_with_two_collectives(backend):
    n = RANKS[backend]
    compiler = "inductor" if HAS_STREAMS and not IS_LATE else "aot_eager"

    def loss(x, r):
        y = dc.all_gather(x.sin(), dim=1)
        return (r + 1) * (dc.all_reduce(x * y.sum(), "max").square().sum() + y.cos().sum())

    def data(r):
        return torch.linspace(-1, 1 + r, 6, dtype=torch.float64).view(2, 3)

    def body(r):
        x = data(r).to(DEVICE).requires_grad_()
        total = torch.compile(loss, fullgraph=True, backend=compiler)(x, r)
        (g,) = torch.autograd.grad(total, x)
        return total, g

    leaves = [data(r).requires_grad_() for r in range(n)]
    totals = truth(loss, leaves, range(n))
    right = torch.autograd.grad(torch.stack(totals).sum(), leaves)
    for r, (total, g) in enumerate(on_ranks(backend, body)):
        torch.testing.assert_close(total, totals[r].detach())
        torch.testing.assert_close(g, right[r])


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────


class Streams:
    """Streams used by the tests; no-ops on the CPU."""

    def __init__(self):
        self.side = torch.Stream(device=DEVICE) if HAS_STREAMS else None

    def on_side(self):
        """Use a side stream, which waits for the current stream first."""
        if self.side is None:
            return contextlib.nullcontext()
        self.side.wait_stream(torch.accelerator.current_stream())
        return self.side

    def back(self, *tensors):
        """Make the current stream wait for the side stream, without blocking the host."""
        if self.side is not None:
            torch.accelerator.current_stream().wait_stream(self.side)
            for t in tensors:
                t.record_stream(torch.accelerator.current_stream())


def long_kernel():
    """Queue a kernel that takes long. PyTorch has one for CUDA alone.

    Kernels of the test device are late anyway; those of torch_openreg run on the host, which would wait for them.
    """
    if IS_CUDA:
        torch.cuda._sleep(LONG)
    elif DEVICE not in ("cpu", "late", "openreg"):
        x = torch.ones(4096, 4096, device=DEVICE)
        for _ in range(20):
            x = x @ x


ONLY_AT_ONCE = {"shift": dc.shift, "scan": dc.scan, "gather": dc.gather, "reduce": dc.reduce, "scatter": dc.scatter}
SHAPE = (64, 1024)


def late_input(r):
    """Return x, which a kernel writes long after the host returns; until then its memory has other values."""
    make = torch.Generator().manual_seed(r)
    values = torch.randn(SHAPE, generator=make).to(DEVICE)
    x = torch.full(SHAPE, 77.0, device=DEVICE)
    long_kernel()
    x.copy_(values)
    return x.requires_grad_()


def values_of(call, r, n):
    """Value and gradient of `loss_of` by truth, on the CPU."""
    leaves = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(s)).requires_grad_() for s in range(n)]
    ys = truth(call, leaves)
    gs = torch.autograd.grad(torch.stack([loss_of(y, s) for s, y in enumerate(ys)]).sum(), leaves, allow_unused=True)
    return ys[r].detach(), gs[r]


def loss_of(y, r):
    return (y.square() * (r + 1)).sum()


def assert_all_right(results, calls, n):
    for r, found in enumerate(results):
        assert list(found) == list(calls)
        for name, (y, g) in found.items():
            right_y, right_g = values_of(calls[name], r, n)
            torch.testing.assert_close(y, right_y, msg=lambda m, name=name: f"{name}: {m}")
            torch.testing.assert_close(g, right_g, msg=lambda m, name=name: f"{name}, gradient: {m}")


@pytest.mark.parametrize("backend", RANKS)
@pytest.mark.parametrize("where", ["nowhere", "input", "collective", "use"])
def test_input_that_is_not_there_yet_and_side_streams(backend, where):
    """A long kernel is queued before the input and before the gradient; no explicit synchronization.

    The input, the collective or the use of the result is on another stream, in backward too.
    """
    calls = {**OVERLAPPING, **ONLY_AT_ONCE}

    def body(r):
        found = {}
        streams = Streams()

        def stream_of(part):
            return streams.on_side() if where == part else contextlib.nullcontext()

        for name, call in calls.items():
            with stream_of("input"):
                x = late_input(r)
            streams.back(x.detach())
            with stream_of("collective"):
                y = call(x)
            if where == "collective":
                streams.back(y.detach())
            with stream_of("use"):
                long_kernel()
                loss = loss_of(y, r)
                kept = y.detach().clone()
            streams.back(loss.detach(), kept)
            (g,) = torch.autograd.grad(loss, x)
            found[name] = kept, g
        return found

    assert_all_right(on_ranks(backend, body), calls, RANKS[backend])


@pytest.mark.parametrize("backend", RANKS)
def test_started_on_one_stream_and_awaited_on_another(backend):
    """Memory held from start to wait is not reused before both streams have finished with it."""

    def body(r):
        found = {}
        streams = Streams()
        for name, call in OVERLAPPING.items():
            x = late_input(r)
            pending = call(x, async_op=True)
            with streams.on_side():
                long_kernel()
                y = pending.wait()
                kept = y.detach().clone()
                loss = loss_of(y, r)
            # Reuses memory of the size that the wait has released, on the stream of the start.
            torch.full(SHAPE, 77.0, device=DEVICE)
            streams.back(loss.detach(), kept)
            (g,) = torch.autograd.grad(loss, x)
            found[name] = kept, g
        return found

    assert_all_right(on_ranks(backend, body), OVERLAPPING, RANKS[backend])


@pytest.mark.parametrize("backend", GLOO_AND_OWN)
def test_the_averager_and_gradients_of_several_streams(backend):
    """One bucket whose gradients are accumulated on two streams, one of them late."""
    n = RANKS[backend]

    def body(r):
        streams = Streams()
        torch.manual_seed(0)
        a, b = (nn.Parameter(torch.randn(300, 300, dtype=torch.float64).to(DEVICE)) for _ in range(2))
        averager = dc.GradientAverager([a, b])

        def slow(g):
            long_kernel()
            return g * 1

        found = []
        for step in range(3):
            a.grad = b.grad = None
            with streams.on_side():
                left = (a * (r + 1 + step)).square()
                left.register_hook(slow)
                left = left.sum()
            streams.back(left.detach())
            averager.backward(left + (b * (r + 2)).square().sum())
            found.append((a.grad.clone(), b.grad.clone()))
        return a, b, found

    for a, b, found in on_ranks(backend, body):
        for step, (ga, gb) in enumerate(found):
            torch.testing.assert_close(ga, 2 * a * sum((r + 1 + step) ** 2 for r in range(n)) / n)
            torch.testing.assert_close(gb, 2 * b * sum((r + 2) ** 2 for r in range(n)) / n)


# ── the host does not wait ───────────────────────────────────────────────────────────────────────────────

WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


def steps_of_collectives(n):
    """Forward and backward of every collective with known sizes, without arguments."""
    x = torch.randn(4 * n, 8, device=DEVICE, requires_grad=True)
    sizes = [4 * n] * n
    every = {
        **{name: lambda call=call: call(x) for name, call in OVERLAPPING.items()},
        **{f"{name}, async": lambda call=call: call(x, async_op=True).wait() for name, call in OVERLAPPING.items()},
        **{name: lambda call=ONLY_AT_ONCE[name]: call(x) for name in ("shift", "scan", "gather", "reduce")},
        **{op: lambda op=op: dc.all_reduce(x, op) for op in ("mean", "product", "min", "logsumexp")},
        **{f"reduce {op}": lambda op=op: dc.reduce(x, op=op) for op in ("mean", "product", "max")},
        "sizes": lambda: dc.all_gather(x, sizes=sizes),
        "split": lambda: dc.split(x),
        "sum_gradients": lambda: dc.sum_gradients(x),
        "tree": lambda: torch.cat(dc.all_reduce([x, x.sin()])),
        "token_mean": lambda: dc.nn.functional.token_mean(x, x > 0),
        "mean in half precision": lambda: dc.all_reduce(x.bfloat16(), "mean"),
    }
    return {name: lambda call=call: call().sum().backward() for name, call in every.items()}


def steps_of_averagers(n):
    """A block of each kind, without arguments."""
    data, model = batch(0, 0), made()
    averager = dc.GradientAverager(model)

    def step(count=None):
        model.zero_grad()
        averager.backward(model(data).square().mean(), count=count)

    count = torch.full((), 2.0, device=DEVICE)
    return {"mean": step, "count": partial(step, count=2), "count of the device": partial(step, count=count)}


STEPS = {"collectives": (steps_of_collectives, 25), "averager": (steps_of_averagers, 3)}


@contextlib.contextmanager
def waits_are_errors():
    """Raise if the host waits for the device; torch.accelerator has no such mode."""
    if IS_LATE:
        before = test_device.host_waits()
        yield
        if test_device.host_waits() > before:
            raise RuntimeError("synchronizing")
    elif IS_CUDA:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        yield


#: What other devices' runtimes call a wait is not known here.
of_cuda = pytest.mark.skipif(DEVICE not in ("cuda", "cpu"), reason="host waits in a profile are known of CUDA alone")


@pytest.mark.parametrize("backend", ITS_OWN)
@pytest.mark.parametrize("of", STEPS)
def test_the_host_does_not_wait(backend, of):
    """Forward and backward, after initialization steps, under torch.cuda.set_sync_debug_mode("error") on CUDA."""
    make, count = STEPS[of]

    def body(r):
        steps = make(RANKS[backend])
        done = []
        for name, step in steps.items():
            for _ in range(2):  # the backend connects, the averager orders its buckets
                step()
            with waits_are_errors():
                try:
                    step()
                except RuntimeError as error:
                    raise AssertionError(name) from error
            done.append(name)
        if IS_CUDA or IS_LATE:  # check that the mode raises
            with pytest.raises(RuntimeError, match="synchronizing"), waits_are_errors():
                torch.ones(1, device=DEVICE).item()
        return done

    for done in on_ranks(backend, body):
        assert len(done) >= count


@of_cuda
@pytest.mark.parametrize("backend", ITS_OWN)
@pytest.mark.parametrize("of", STEPS)
def test_a_profile_has_no_synchronization(backend, of):
    """No synchronizing CUDA runtime call in forward and backward; a planted one is found in the same profile."""
    make, count = STEPS[of]

    def body(r):
        steps = make(RANKS[backend])
        x = torch.ones(1, device=DEVICE)
        for step in (*steps.values(), *steps.values()):
            step()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if IS_CUDA:
            torch.accelerator.synchronize()
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as profile:
            for name, step in steps.items():
                with torch.profiler.record_function(f"step: {name}"):
                    step()
            with torch.profiler.record_function("step: waits"):
                x.item()
        events = profile.events()
        spans = {e.name: e.time_range for e in events if e.name.startswith("step: ") and "CPU" in str(e.device_type)}
        waits = [e for e in events if e.name in WAITS]
        return {
            name.removeprefix("step: "): sorted({e.name for e in waits if span.start <= e.time_range.start <= span.end})
            for name, span in spans.items()
        }

    for found in on_ranks(backend, body):
        assert len(found) > count
        assert bool(found.pop("waits")) == IS_CUDA
        assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize("backend", ITS_OWN)
def test_the_group_is_the_devices_own(backend):
    """The tests of the device's own backend run on it."""

    def body(r):
        return resolve(None, "test").backends[DEVICE]

    assert on_ranks(backend, body) == [OWN if HAS_STREAMS else "gloo"] * RANKS[backend]
