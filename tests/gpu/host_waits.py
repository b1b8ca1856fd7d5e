"""What makes the host wait for the device."""

import contextlib
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import diffcoll as dc
from gpu.calls import collectives, exchanging
from gpu.row import MIXED, row

#: Calls of CUDA's runtime that wait; `set_sync_debug_mode` does not see all of them.
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


def losses(device, r=0):
    """Return losses without arguments."""
    make, f = torch.Generator().manual_seed(r), dc.nn.functional

    def data(*shape):
        return torch.randn(shape, generator=make).to(device)

    x, y = (F.normalize(data(32, 64)).requires_grad_() for _ in range(2))
    scale, bias = (torch.tensor(v, device=device, requires_grad=True) for v in (2.0, -1.0))
    labels, mask = torch.arange(32, device=device) % 5, (data(32, 64) > 0).float()
    probabilities, image = data(32, 64).sigmoid().requires_grad_(), data(4, 8, 8, 8).requires_grad_()
    hidden, shard = data(16, 32).requires_grad_(), data(50, 32).requires_grad_()
    target = torch.arange(16, device=device)
    norms = dc.nn.SyncBatchNorm(64).to(device), dc.nn.SyncBatchNorm(8).to(device)
    return {
        "clip_loss": lambda: f.clip_loss(x, y, scale),
        "clip_loss, a number as scale": lambda: f.clip_loss(x, y, 10.0),
        "clip_loss in chunks": lambda: f.clip_loss(x, y, scale, chunk_size=16),
        "clip_loss ids": lambda: f.clip_loss(x, y, scale, ids=labels),
        "info_nce_loss labels": lambda: f.info_nce_loss(x, y, labels=labels),
        "token_mean": lambda: f.token_mean(x, mask),
        "siglip_loss": lambda: f.siglip_loss(x, y, scale, bias),
        "siglip_loss, numbers": lambda: f.siglip_loss(x, y, 10.0, -1.0),
        "info_nce_loss": lambda: f.info_nce_loss(x, y),
        "nt_xent_loss": lambda: f.nt_xent_loss(x, y),
        "supcon_loss": lambda: f.supcon_loss(x, labels),
        "barlow_twins_loss": lambda: f.barlow_twins_loss(x, y),
        "vicreg_loss": lambda: f.vicreg_loss(x, y),
        "dice_loss": lambda: f.dice_loss(probabilities, mask),
        "koleo_loss": lambda: f.koleo_loss(x),
        "sigreg_loss": lambda: f.sigreg_loss(x, x.t()),
        "vocab_parallel_cross_entropy": lambda: f.vocab_parallel_cross_entropy(hidden, shard, target),
        "SyncBatchNorm of rows": lambda: norms[0](x).square(),
        "SyncBatchNorm of images": lambda: norms[1](image).square(),
    }


def averaging(device):
    """Return steps of an averager, which run their backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)).to(device)
    averager, optimizer = dc.GradientAverager(model), torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 64, device=device)

    def step(count=None, batches=1):
        optimizer.zero_grad()
        for _ in range(batches - 1):
            model(x).square().mean().backward()
        averager.backward(model(x).square().mean(), count=count)
        optimizer.step()

    return {
        "averager": step,
        "averager, two batches": lambda: step(batches=2),
        "averager, a count of the device": lambda: step((x > 0).sum()),
        "averager, a count of the host": lambda: step(32),
    }


def every_call(rank):
    x = torch.randn(32, 64, device=rank.device, requires_grad=True)

    def joint_backward():
        with dc.joint_backward() as joint:
            return joint(dc.all_reduce(x).sum() * (rank.r == 0))

    calls = {**collectives(x, rank.n), **exchanging(x), "joint_backward": joint_backward, **losses(rank.device, rank.r)}
    steps = {name: lambda call=call: call().sum().backward() for name, call in calls.items()}
    return {**steps, **averaging(rank.device)}


@contextlib.contextmanager
def waits_are_errors(rank):
    set_mode = torch.cuda.set_sync_debug_mode if rank.on_gpu else lambda mode: None
    set_mode("error")
    try:
        yield
    finally:
        set_mode("default")


@row(2, seconds=90)
def host_waits(rank):
    """Forward and backward, the third time, while PyTorch raises where the host waits for the device; and profiled."""
    steps = every_call(rank)
    for name, step in steps.items():
        with rank.part(name):
            for _ in range(2):
                step()
            rank.wait()
            with waits_are_errors(rank):
                step()
    one = torch.ones(1, device=rank.device)
    steps["what waits"] = one.item
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if rank.on_gpu else []
    with torch.profiler.profile(activities=kinds) as profile:
        for name, step in steps.items():
            with torch.profiler.record_function(f"step: {name}"), contextlib.suppress(Exception):
                step()
    events = profile.events()
    spans = {e.name: e.time_range for e in events if e.name.startswith("step: ") and "CPU" in str(e.device_type)}
    waits = [e for e in events if e.name in WAITS]
    for name, span in spans.items():
        with rank.part(f"profile of {name.removeprefix('step: ')}"):
            found = {e.name for e in waits if span.start <= e.time_range.start <= span.end}
            assert bool(found) == (rank.on_gpu and name == "step: what waits"), found
    with rank.part("what waits raises"):
        with rank.refused(RuntimeError) if rank.on_gpu else contextlib.nullcontext(), waits_are_errors(rank):
            one.item()


@row(2, alone=True)
def host_exchanges(rank):
    """How long the host takes to exchange sizes while the device is busy for a quarter of a second, in milliseconds."""
    mixed = dist.new_group(backend=MIXED if rank.on_gpu else "gloo")
    x = torch.randn(4 + rank.r, 8, device=rank.device)
    sizes = [4 + r for r in range(rank.n)]
    ways = {
        "sizes=[…]": lambda: dc.all_gather(x, sizes=sizes),
        "sizes='auto' in the default group": lambda: dc.all_gather(x, sizes="auto"),
        "sizes='auto' in a group with gloo": lambda: dc.all_gather(x, sizes="auto", group=mixed),
    }
    for name, call in ways.items():
        with rank.part(name):
            for _ in range(3):
                assert len(call()) == sum(sizes)
            idle, busy = (statistics.median(milliseconds(rank, call, is_busy) for _ in range(3)) for is_busy in (0, 1))
            rank.figure("idle", idle)
            rank.goal("beside work", busy, idle + 20)


def milliseconds(rank, call, is_busy):
    """Return how long a call takes the host."""
    rank.wait()
    dist.barrier()
    rank.wait()
    if is_busy and rank.on_gpu:
        torch.cuda._sleep(500_000_000)
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3
