"""`benchmarks averager`: a training step with GradientAverager, with DistributedDataParallel, and with neither.

The floor of an averager in Python is a hook of each parameter that counts, and one message when all gradients are
there. It checks nothing, and knows no buckets, accumulation or unused parameters.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import diffcoll
from benchmarks.measuring import OURS, Step, Steps

#: The call of a model, and its backward with the reduction of the gradients.
System = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], object]]


class _Many(nn.Module):
    """Residual layers with two small parameters each."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _few() -> nn.Module:
    """Few large parameters."""
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1024))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def _counting(model: nn.Module) -> System:
    parameters, n, count = [*model.parameters()], dist.get_world_size(), itertools.count(1)

    @torch.no_grad()
    def after_accumulation(_: Tensor) -> None:
        if next(count) % len(parameters) == 0:
            row = torch.cat([p.grad.view(-1) for p in parameters])  # type: ignore[union-attr]
            dist.all_reduce(row)
            row /= n
            for p, piece in zip(parameters, row.split_with_sizes([p.numel() for p in parameters]), strict=True):
                p.grad = piece.view(p.shape)

    for p in parameters:
        p.register_post_accumulate_grad_hook(after_accumulation)  # type: ignore[no-untyped-call]
    return model, Tensor.backward


def _static_graph(model: nn.Module) -> System:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True), Tensor.backward


SYSTEMS: dict[str, Callable[[nn.Module], System]] = {
    "DDP": lambda model: (DistributedDataParallel(model), Tensor.backward),
    "DDP, bucket views, static": _static_graph,
    "without communication": lambda model: (model, Tensor.backward),
    "a hook that counts": _counting,
    OURS: lambda model: (model, diffcoll.GradientAverager(model).backward),
}


def _step(model: nn.Module, system: Callable[[nn.Module], System], x: Tensor) -> Step:
    call, backward = system(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        backward(call(x).square().mean())
        optimizer.step()

    return step


def steps(make: Callable[[], nn.Module], shape: tuple[int, ...], rank: int) -> Steps:
    """Return a training step of a model on this rank's batch of a shape, with each system."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return {name: _step(make(), system, x) for name, system in SYSTEMS.items()}


MODELS: dict[str, Callable[[int], Steps]] = {
    "240 small parameters": partial(steps, partial(_Many, 120, 64), (32, 64)),
    "2,000 small parameters": partial(steps, partial(_Many, 1000, 16), (32, 16)),
    "few large parameters": partial(steps, _few, (64, 1024)),
    "a transformer": partial(steps, _transformer, (8, 32, 256)),
}
