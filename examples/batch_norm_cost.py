"""Cost of SyncBatchNorm on two gloo processes: a training step of a small ResNet with 15 batch norms on 32 × 32 images.

    python examples/batch_norm_cost.py               # 4 images per rank, few steps
    python examples/batch_norm_cost.py 4 16 32       # other batches, more steps
    python examples/batch_norm_cost.py 4 --steps 3   # 3 steps

The baseline is BatchNorm, which normalizes with local statistics, plus two all_reduces of torch.distributed for each
layer, of the same size as those of SyncBatchNorm. Steps alternate; times are the first quartile.
"""

import argparse
from functools import partial
from statistics import quantiles

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cost import alternating
from torch import nn

import diffcoll as dc
from diffcoll.testing import spawn


class Block(nn.Module):
    """A residual block."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.main = nn.Sequential(*convolved(before, after, 3, stride), nn.ReLU(), *convolved(after, after, 3, 1))
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolved(before, after, 1, stride))

    def forward(self, x):
        return F.relu(self.main(x) + self.shortcut(x))


def convolved(before, after, size, stride):
    return nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)


def resnet():
    shapes = (16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)
    blocks = [Block(*shape) for shape in shapes]
    return nn.Sequential(
        *convolved(3, 16, 3, 1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


class Messages(torch.autograd.Function):
    """The identity, with an all_reduce in each direction."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(torch.zeros(2 * x.shape[1] + 1))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        dist.all_reduce(torch.zeros(2 * g.shape[1]))
        return g


class LocalNorm(nn.BatchNorm2d):
    """The baseline."""

    def forward(self, x):
        return Messages.apply(super().forward(x))


def step(model, x, target):
    F.cross_entropy(model(x), target).backward()


def times(batch, layout, repeats):
    """Return wall and CPU time of a step of both models."""
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(batch, 3, 32, 32).contiguous(memory_format=layout)
    target = torch.randint(10, (batch,))
    baseline, ours = resnet(), dc.nn.convert_sync_batchnorm(resnet())
    for module in baseline.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = LocalNorm
    models = {"baseline": baseline, "SyncBatchNorm": ours}
    found = alternating(
        {name: partial(step, model.to(memory_format=layout), x, target) for name, model in models.items()}, repeats
    )
    return [[quantiles(each)[0] for each in zip(*both, strict=True)] for both in found.values()]


def main(batches, steps):
    print(f"{'':24}wall time, ms: baseline, SyncBatchNorm    ratio    CPU time: ratio")
    for batch in batches or (4,):
        for layout in (torch.contiguous_format, torch.channels_last):
            (wall, cpu), (ours, cpu_ours) = spawn(times, [batch] * 2, [layout] * 2, [steps] * 2, timeout=600)[0]
            name = f"{batch:3} {str(layout).removeprefix('torch.').removesuffix('_format')}"
            print(f"{name:24}{wall:24.1f}{ours:15.1f}{ours / wall:9.2f}{cpu_ours / cpu:19.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("batches", nargs="*", type=int)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    main(options.batches, options.steps or (30 if options.batches else 12))
