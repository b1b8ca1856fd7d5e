"""`benchmarks averager`: a training step with GradientAverager, with DistributedDataParallel, and with neither.

The floor of an averager in Python is a hook of each parameter that counts, and one message when all gradients are
there. It checks nothing, and knows no buckets, accumulation or unused parameters.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from statistics import geometric_mean

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import diffcoll
from benchmarks.measuring import ON_GLOO, OURS, Bench, Step, Steps, peak

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


#: The models, and the shape of a rank's batch.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "many small": (partial(_Many, 120, 64), (32, 64)),
    "2,000 small": (partial(_Many, 1000, 16), (32, 16)),
    "few large": (_few, (64, 1024)),
    "transformer": (_transformer, (8, 32, 256)),
}

LOCAL, FLOOR = "local", "a hook that counts"
OURS_ON_GLOO = OURS + ON_GLOO
SYSTEMS: dict[str, Callable[[nn.Module], System]] = {
    LOCAL: lambda model: (model, Tensor.backward),
    "DDP": lambda model: (DistributedDataParallel(model), Tensor.backward),
    "DDP, bucket views, static": lambda model: (
        DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True),
        Tensor.backward,
    ),
    FLOOR: lambda model: _counting(model),
    OURS: lambda model: (model, diffcoll.GradientAverager(model).backward),
    OURS_ON_GLOO: lambda model: (model, diffcoll.GradientAverager(model, group=dist.group.WORLD).backward),
}


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


def _step(make: Callable[[], nn.Module], shape: tuple[int, ...], system: str, rank: int) -> Step:
    torch.manual_seed(0)
    model = make()
    call, backward = SYSTEMS[system](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad()
        backward(call(x).square().mean())
        optimizer.step()

    return step


def _steps(model: str, systems: list[str], rank: int) -> Steps:
    return {system: _step(*MODELS[model], system, rank) for system in systems}


def _peak(model: str, system: str, rank: int) -> float:
    return peak(partial(_steps, model, [system]), system, rank)


def table(bench: Bench) -> Table:
    """A row for each model and system, and the geometric means of the ratios to the faster DDP."""
    systems = [s for s in SYSTEMS if s != OURS_ON_GLOO or bench.engine == "mpi"]
    grid = Table(
        *("model", "system", "ms", "ratio to the faster DDP", "exposed communication, ms", "peak memory of a step, MB"),
        title=f"one training step, float32: {bench.title}",
    )
    ratios: dict[str, list[float]] = {OURS: [], OURS_ON_GLOO: []}
    for model in MODELS:
        times = bench.times(partial(_steps, model, systems), bench.rounds)
        found = {name: taken.warm for name, taken in times.items()}
        better = min(value for name, value in found.items() if name.startswith("DDP"))
        for name, value in found.items():
            if name in ratios:
                ratios[name].append(value / better)
            exposed = "" if name == LOCAL else f"{value - found[LOCAL]:.1f}"
            memory = max(bench.on_ranks(partial(_peak, model, name))) / 2**20
            grid.add_row(model, name, f"{value:.1f}", f"{value / better:.2f}×", exposed, f"{memory:.0f}")
        grid.add_section()
    for name, values in ratios.items():
        if values:
            grid.add_row("geometric mean", name, "", f"{geometric_mean(values):.2f}×", "", "")
    return grid
