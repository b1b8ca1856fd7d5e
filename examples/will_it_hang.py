"""64 ranks without memory: tensor × data parallelism by DTensor, in which one rank skips a layer.

python examples/will_it_hang.py [29]    the rank that skips it; -1: none
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import diffcoll as dc
from diffcoll.testing import simulate

WIDTH = 1024


class MLP(nn.Module):
    """A layer, whose sum over tp is in `down`."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """A stack of layers, of which a rank may skip one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(3))

    def forward(self, x, skipped):
        for i, layer in enumerate(self.layers):
            x = x if i == skipped else layer(x)
        return x


def step(rank, wrong):
    mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = Model()
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model(torch.ones(16, WIDTH), skipped=1 if rank == wrong else None).sum().backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad.to_local(), group=mesh["dp"].get_group())


if __name__ == "__main__":
    try:
        simulate(step, range(64), [int((sys.argv[1:] or [29])[0])] * 64)
        print("no rank waits for ever")
    except dc.CollectiveMismatchError as error:
        print(error)
