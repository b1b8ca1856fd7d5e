"""GradientAverager against DistributedDataParallel: gradients, and the time of a step."""

from functools import partial

import torch
from torch import nn

from gpu.calls import averaged, ddp, training_step
from gpu.measuring import distance, flat, peak, times
from gpu.row import row


def small_layers(rank):
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(120))), (32, 64)


def transformer(rank):
    width, depth = (512, 6) if rank.on_gpu else (32, 2)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), (8, 64, width)


def large_layers(rank):
    width = 4096 if rank.on_gpu else 64
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(6))), (32, width)


def tiny_layers(rank):
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(1000 if rank.on_gpu else 50))), (32, 16)


def convolutions(rank):
    """Weights that are channels last in memory."""
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last), (5, 3, 8, 8)


MODELS = (small_layers, transformer, large_layers, tiny_layers)


def built(rank, make, dtype=torch.float32):
    """Return the model, the same on every rank, and the shape of its input."""
    torch.manual_seed(0)
    model, shape = make(rank)
    return model.to(rank.device, dtype), shape


@row(1, seconds=90, alone=True)
def averager_times(rank):
    """A training step by SGD, against the faster of DDP and DDP with a static graph; and its peak of memory."""
    for make in MODELS:
        with rank.part(make.__name__):
            steps = {}
            for name, wrap in {"averaged": averaged, "DDP": ddp, "static DDP": partial(ddp, static_graph=True)}.items():
                model, shape = built(rank, make)
                x = torch.randn(shape, device=rank.device)
                steps[name] = training_step(model, *wrap(model), lambda call, x=x: call(x).square().mean(), lr=1e-6)
            calls, rounds = (2, 7) if make is tiny_layers else (5, 21)
            found = times(rank, steps, calls, rounds)
            for name, (wall, host) in found.items():
                memory = peak(rank, steps[name]) / 1e6
                rank.figure(name, f"{wall * 1e3:.2f} ms, host {host * 1e3:.2f}, {memory:.0f} MB")
            faster = min(found["DDP"][0], found["static DDP"][0])
            rank.goal("ratio to the faster DDP", found["averaged"][0] / faster, 1.05)


@row(2)
def averager_gradients(rank):
    """Gradients of two backward passes, one of which accumulates, against one process that has all batches."""
    for make in (*MODELS, convolutions):
        dtype, bound = (torch.float32, 1e-4) if make is transformer else (torch.float64, 1e-11)
        model, shape = built(rank, make, dtype)
        generators = [torch.Generator().manual_seed(s) for s in range(rank.n)]
        batches = [[torch.randn(shape, generator=g).to(rank.device, dtype) for _ in range(2)] for g in generators]
        losses = [model(x).square().mean() for each in batches for x in each]
        right = flat(torch.autograd.grad(sum(losses) / rank.n, list(model.parameters())))
        for name, wrap in {"averaged": averaged, "in buckets": partial(averaged, bucket_mb=0.05), "DDP": ddp}.items():
            with rank.part(f"{make.__name__} {name}"):
                model, _ = built(rank, make, dtype)
                call, backward = wrap(model)
                for x in batches[rank.r]:
                    backward(call(x).square().mean())
                rank.check("gradients", distance(flat([p.grad for p in model.parameters()]), right), bound)
