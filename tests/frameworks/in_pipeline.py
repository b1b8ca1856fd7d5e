"""Pipeline schedules divide by their micro-batches with `scale_grads=True`; FSDP or an averager takes the mean.

3 × 2 ranks: rows over "dp", layers over "pp".
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from trainings import RATE, Training
from variants import Way

import diffcoll as dc


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)).double()

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


def rows_of(rows, generator):
    return tuple(torch.randn(rows, 6, generator=generator, dtype=torch.double) for _ in range(2))


def clip(features, others, group=None):
    return dc.nn.functional.clip_loss(F.normalize(features, dim=1), F.normalize(others, dim=1), 5.0, group=group)


def mean_of_micro_batches(model, batches):
    return sum(clip(model(x), others) for x, others in batches) / len(batches)


#: Micro-batches of a rank have as many rows; ranks of "dp" have not.
PAIRS = Training(Layers, rows_of, mean_of_micro_batches, sizes=((3, 2, 4),))


def pipeline(data="FSDP", schedule=ScheduleGPipe, scale_grads=True, divides=False):
    def train(model, updates):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "pp"))
        group, layer = mesh["dp"].get_group(), model.layers[mesh.get_local_rank("pp")]
        if data == "FSDP":
            fully_shard(layer, mesh=mesh["dp"])
        else:
            averager = dc.GradientAverager(layer, group=group)
        stage = PipelineStage(layer, mesh.get_local_rank("pp"), 2, torch.device("cpu"), group=mesh["pp"].get_group())

        def loss(features, others):
            return clip(features, others, group) / (len(updates[0]) if divides else 1)

        steps = schedule(stage, len(updates[0]), loss_fn=loss, scale_grads=scale_grads)
        optimizer = torch.optim.SGD(layer.parameters(), RATE)
        for update in updates:
            x, others = (torch.cat(part) for part in zip(*update, strict=True))
            if stage.is_first:
                steps.step(x)
            else:
                steps.step(target=others)
            if data != "FSDP":
                with averager.reduce():
                    pass
            optimizer.step()
            optimizer.zero_grad()
        return of_all_stages(model, mesh["pp"].get_group())

    return train


def of_all_stages(model, group):
    found = {}
    for stage, layer in enumerate(model.layers):
        for name, p in layer.named_parameters():
            p = p.full_tensor() if isinstance(p, DTensor) else p
            found[f"layers.{stage}.{name}"] = p.detach().clone()
            dist.broadcast(found[f"layers.{stage}.{name}"], group=group, group_src=stage)
    return found


RIGHT = {
    "FSDP": Way(pipeline(), PAIRS, (2,), 2),
    "GradientAverager": Way(pipeline("GradientAverager"), PAIRS, (2,), 2),
    "1F1B": Way(pipeline(schedule=Schedule1F1B), PAIRS, (2,), 2),
    "nobody divides": Way(pipeline(scale_grads=False, divides=True), PAIRS, (2,), 2),
}
FACTORS = [
    ("Pipeline schedules × FSDP, six ranks", Way(pipeline(), PAIRS, copies=2)),
    ("Pipeline schedules, `scale_grads=False`", Way(pipeline(scale_grads=False), PAIRS, copies=2)),
]
