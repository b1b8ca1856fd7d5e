"""Pipeline schedules divide by their micro-batches with `scale_grads=True`; FSDP or an averager takes the mean.

3 × 2 ranks: rows over "dp", layers over "pp".
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from trainings import Training, Way, layers, normal, parameters, sgd

import diffcoll as dc


def clip(model, batch, update):
    features, others = model(batch[0]), batch[1]
    return dc.nn.functional.clip_loss(F.normalize(features, dim=1), F.normalize(others, dim=1), 5.0)


def pipeline(by_fsdp=True, schedule=ScheduleGPipe, scale_grads=True):
    def train(model, updates, loss):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "pp"))
        dc.set_default_group(mesh["dp"].get_group())  # the loss is of it
        r, group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
        stage_module = model[:2] if r == 0 else model[2:]
        if by_fsdp:
            fully_shard(stage_module, mesh=mesh["dp"])
        else:
            averager = dc.GradientAverager(stage_module)
        stage = PipelineStage(stage_module, r, 2, torch.device("cpu"), group=group)

        def loss_of(features, others):
            return loss(lambda _: features, (None, others), updates[0])

        steps = schedule(stage, len(updates[0]), loss_fn=loss_of, scale_grads=scale_grads)
        optimizer = sgd(stage_module)
        for update in updates:
            x, others = (torch.cat(part) for part in zip(*update, strict=True))
            if stage.is_first:
                steps.step(x)
            else:
                steps.step(target=others)
            if not by_fsdp:
                with averager.reduce():
                    pass
            optimizer.step()
            optimizer.zero_grad()
        return of_all_stages(model, group)

    return train


def of_all_stages(model, group):
    found = parameters(model)
    for name, p in found.items():
        dist.broadcast(p, group=group, group_src=0 if name.startswith("0.") else 1)
    return found


#: Micro-batches of a rank have as many rows; ranks of "dp" have not.
PAIRS = Training(lambda: layers(6, 6, 6), normal(6, 6), clip, sizes=((3, 2, 4),))
DIVIDED = "Pipeline schedules × FSDP, six ranks"
ROWS = [
    (DIVIDED, Way(pipeline(), PAIRS, copies=2)),
    (DIVIDED, Way(pipeline(by_fsdp=False), PAIRS, copies=2)),
    (DIVIDED, Way(pipeline(schedule=Schedule1F1B), PAIRS, (2,), copies=2)),
    ("Pipeline schedules, `scale_grads=False`", Way(pipeline(scale_grads=False), PAIRS, copies=2)),
]
