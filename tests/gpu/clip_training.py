"""Training of a CLIP model with SyncBatchNorm, and a GradScaler when one rank's gradient overflows."""

import copy

import references
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import diffcoll as dc
from gpu.calls import averaged, ddp
from gpu.measuring import distance, flat
from gpu.row import row

PAIRS, STEPS = 16, 3


class Model(nn.Module):
    """Features of images, and a scale of shape (1,): fully_shard refuses parameters without dimensions."""

    def __init__(self, batch_norm):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), batch_norm(8), nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return F.normalize(self.head(x), dim=1), self.scale


def fsdp2(model):
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh), torch.Tensor.backward


def train(model, backward, loss, rows, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        make = torch.Generator().manual_seed(step)
        views = torch.randn(2, PAIRS, 3, 8, 8, generator=make, dtype=torch.float64)[:, rows].to(device)
        optimizer.zero_grad()
        features, scale = model(views.flatten(0, 1))
        backward(loss(*features.chunk(2), scale.sum()))
        optimizer.step()


def parameters(model):
    return flat(model.parameters()).cpu()


@row(2)
def training(rank):
    """What three steps change, against one process with the whole batch in float64 on the CPU."""
    torch.manual_seed(0)
    one = Model(nn.BatchNorm2d).double()
    start, at_start = copy.deepcopy(one.state_dict()), parameters(one)
    train(one, torch.Tensor.backward, lambda x, y, scale: references.clip(x, y, scale, 0).mean(), slice(None), "cpu")
    right = parameters(one) - at_start
    rows = slice(rank.r * PAIRS // rank.n, (rank.r + 1) * PAIRS // rank.n)
    for wrap in (averaged, ddp, fsdp2):
        with rank.part(wrap.__name__):
            model = Model(dc.nn.SyncBatchNorm).double()
            model.load_state_dict(start)
            wrapped, backward = wrap(model.to(rank.device))
            train(wrapped, backward, dc.nn.functional.clip_loss, rows, rank.device)
            rank.check("change", distance(parameters(wrapped) - at_start, right), 1e-11)


@row(2)
def gradient_scaler(rank):
    """Half precision: a gradient overflows on rank 1 in the second step, which all ranks skip."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)).to(rank.device)
    averager = dc.GradientAverager(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(rank.device, init_scale=2.0**10)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank.r)).to(rank.device)
    for step, moves in enumerate((True, False, True)):
        with rank.part(f"step {step}"):
            before = parameters(model)
            optimizer.zero_grad()
            with torch.autocast(rank.device, torch.float16):
                loss = model(x).square().mean()
            averager.backward(scaler.scale(loss * (float("inf") if step == rank.r == 1 else 1.0)))
            scaler.step(optimizer)
            scaler.update()
            after = parameters(model)
            assert torch.equal(before, after) != moves, f"moved: {not moves}, expected {moves}"
            assert scaler.get_scale() == 2.0 ** (10 if step == 0 else 9), scaler.get_scale()
            others = [None] * rank.n
            dist.all_gather_object(others, after)
            assert all(torch.equal(after, other) for other in others), "other parameters on another rank"
