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
from gpu.row import row

COPIES = "a Python number, or a number that is read, waits for the device"


@contextlib.contextmanager
def waits_are_errors(rank):
    if rank.on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if rank.on_gpu:
            torch.cuda.set_sync_debug_mode("default")


class Calls:
    """Calls without arguments, which return what backward is called on, or None."""

    def __init__(self, rank):
        make = torch.Generator(rank.device).manual_seed(rank.r)

        def data(*shape):
            return torch.randn(shape, device=rank.device, generator=make)

        self.rank = rank
        self.x, self.y = (F.normalize(data(32, 64)).requires_grad_() for _ in range(2))
        self.scale, self.bias = (torch.tensor(v, device=rank.device, requires_grad=True) for v in (2.0, -1.0))
        self.labels = torch.arange(32, device=rank.device) % 5
        self.probabilities, self.mask = data(32, 64).sigmoid().requires_grad_(), (data(32, 64) > 0).float()
        self.image = data(4, 8, 8, 8).requires_grad_()
        self.norms = dc.nn.SyncBatchNorm(64).to(rank.device), dc.nn.SyncBatchNorm(8).to(rank.device)
        self.hidden, self.shard = data(16, 32).requires_grad_(), data(50, 32).requires_grad_()
        self.target = torch.arange(16, device=rank.device)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)).to(rank.device)
        self.averager = dc.GradientAverager(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def joint_backward(self):
        with dc.joint_backward() as joint:
            return joint(dc.all_reduce(self.x).sum() * (self.rank.r == 0))

    def losses(self):
        f, x, y, scale = dc.nn.functional, self.x, self.y, self.scale
        return {
            "clip_loss": lambda: f.clip_loss(x, y, scale),
            "clip_loss, a number as scale": lambda: f.clip_loss(x, y, 10.0),
            "clip_loss in chunks": lambda: f.clip_loss(x, y, scale, chunk_size=16),
            "clip_loss ids": lambda: f.clip_loss(x, y, scale, ids=self.labels),
            "info_nce_loss labels": lambda: f.info_nce_loss(x, y, labels=self.labels),
            "token_mean": lambda: f.token_mean(x, self.mask),
            "siglip_loss": lambda: f.siglip_loss(x, y, scale, self.bias),
            "info_nce_loss": lambda: f.info_nce_loss(x, y),
            "nt_xent_loss": lambda: f.nt_xent_loss(x, y),
            "supcon_loss": lambda: f.supcon_loss(x, self.labels),
            "barlow_twins_loss": lambda: f.barlow_twins_loss(x, y),
            "vicreg_loss": lambda: f.vicreg_loss(x, y),
            "dice_loss": lambda: f.dice_loss(self.probabilities, self.mask),
            "koleo_loss": lambda: f.koleo_loss(x),
            "sigreg_loss": lambda: f.sigreg_loss(x, seed=1),
            "vocab_parallel_cross_entropy": lambda: f.vocab_parallel_cross_entropy(
                self.hidden, self.shard, self.target
            ),
        }

    def layers(self):
        return {
            "SyncBatchNorm of rows": lambda: self.norms[0](self.x).square(),
            "SyncBatchNorm of images": lambda: self.norms[1](self.image).square(),
        }

    def averaging(self):
        def backward(x):
            self.model(x).square().mean().backward()

        def step(count=None):
            self.optimizer.zero_grad()
            with self.averager.reduce(count):
                backward(self.x)
            self.optimizer.step()

        def accumulated():
            self.optimizer.zero_grad()
            backward(self.x)
            with self.averager.reduce():
                backward(self.y)
            self.optimizer.step()

        def counted():
            step(count=(self.x > 0).sum())

        def counted_by_the_host():
            step(count=32)

        steps = {"averager": step, "averager, two batches": accumulated}
        counts = {"averager, a count of the device": counted, "averager, a count of the host": counted_by_the_host}
        return {**steps, **counts}


@row(ranks=(2,), seconds=90)
def host_waits(rank):
    """Forward and backward after two of them, while PyTorch raises where the host waits for the device."""
    calls = Calls(rank)
    groups = (
        (collectives(calls.x, rank.n), ""),
        (exchanging(calls.x), ""),
        ({"joint_backward": calls.joint_backward}, ""),
        (calls.losses(), ""),
        (calls.layers(), ""),
        (calls.averaging(), ""),
    )
    for group, known in groups:
        for name, call in group.items():
            with rank.part(name, known, "synchronizing"):
                for _ in range(2):
                    run(call)
                rank.wait()
                with waits_are_errors(rank):
                    run(call)
    with rank.part("what waits raises"):
        try:
            with waits_are_errors(rank):
                torch.ones(1, device=rank.device).item()
        except RuntimeError:
            assert rank.on_gpu
        else:
            assert not rank.on_gpu


def run(call):
    y = call()
    if y is not None:
        y.sum().backward()


@row(ranks=(2,), seconds=60, alone=True)
def host_exchanges(rank):
    """How long the host takes to exchange sizes while the device is busy for a quarter of a second, in milliseconds."""
    mixed = dist.new_group(backend="cpu:gloo,cuda:nccl" if rank.on_gpu else "gloo")
    x = torch.randn(4 + rank.r, 8, device=rank.device)
    sizes = [4 + r for r in range(rank.n)]
    expected = sum(sizes)
    ways = {
        "sizes=[…]": lambda: dc.all_gather(x, sizes=sizes),
        "sizes='auto' in the default group": lambda: dc.all_gather(x, sizes="auto"),
        "sizes='auto' in a group with gloo": lambda: dc.all_gather(x, sizes="auto", group=mixed),
    }
    for name, call in ways.items():
        with rank.part(name):
            for _ in range(3):
                assert len(call()) == expected
            idle = statistics.median(milliseconds(rank, call, busy=False) for _ in range(3))
            busy = statistics.median(milliseconds(rank, call, busy=True) for _ in range(3))
            rank.figure("idle", idle)
            rank.goal("beside work", busy, idle + 20)


def milliseconds(rank, call, busy):
    """Return how long a call takes the host."""
    rank.wait()
    dist.barrier()
    rank.wait()
    if busy and rank.on_gpu:
        torch.cuda._sleep(500_000_000)
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3
