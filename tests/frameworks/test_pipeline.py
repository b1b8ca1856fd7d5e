"""Pipeline schedules divide by their micro-batches with `scale_grads=True`; FSDP or an averager takes the mean."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trainings import RATE, Training, row_of_the_table
from variants import assert_as_one_process, factors

import diffcoll as dc
from diffcoll.testing import RanksFailedError, spawn


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)).double()

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


def rows_of(rows, generator):
    return tuple(torch.randn(rows, 6, generator=generator, dtype=torch.double) for _ in range(2))


def clip(features, others, summed=False, **options):
    loss = dc.nn.functional.clip_loss(F.normalize(features, dim=1), F.normalize(others, dim=1), 5.0, **options)
    return loss / dc.get_world_size(options.get("group")) if summed else loss


def mean_of_micro_batches(model, batches):
    return sum(clip(model(x), others) for x, others in batches) / len(batches)


def of_all_rows(model, batches):
    x, others = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return clip(model(x), others)


#: Micro-batches of a rank have as many rows; ranks of "dp" have not.
PAIRS = Training(Layers, rows_of, clip, mean_of_micro_batches, sizes=((3, 2, 4),))
WHOLE = dataclasses.replace(PAIRS, whole=of_all_rows)


def pipeline(data="FSDP", schedule=ScheduleGPipe, scale_grads=True, times=1.0, calls=1, cached=False, **options):
    """3 × 2 ranks: rows over "dp", layers over "pp". `calls` of the schedule in an update, of as many micro-batches."""

    def train(model, updates):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "pp"))
        group, layer = mesh["dp"].get_group(), model.layers[mesh.get_local_rank("pp")]
        averager = None
        if data == "DDP":
            layer = DistributedDataParallel(layer, process_group=group)
        elif data == "FSDP":
            fully_shard(layer, mesh=mesh["dp"])
        elif data != "nobody":
            averager = dc.GradientAverager(layer, group=group)
        stage = PipelineStage(layer, mesh.get_local_rank("pp"), 2, torch.device("cpu"), group=mesh["pp"].get_group())

        def loss(features, others):
            if cached:  # `others` is the gradient of the features
                return (features * others).sum()
            return clip(features, others, group=group, **options) * times

        micro_batches = len(updates[0]) // calls
        steps = schedule(stage, micro_batches, loss_fn=loss, scale_grads=scale_grads)
        optimizer = torch.optim.SGD(layer.parameters(), RATE)
        for update in updates:
            for call in range(calls):
                parts = update[call * micro_batches : (call + 1) * micro_batches]
                x, others = (torch.cat(part) for part in zip(*parts, strict=True))
                if cached:
                    others = gradient_of_features(steps, stage, x, others, group)
                if stage.is_first:
                    steps.step(x)
                else:
                    steps.step(target=others)
            if averager is not None:
                with averager.reduce():
                    pass
            optimizer.step()
            optimizer.zero_grad()
        return of_all_stages(model, mesh["pp"].get_group())

    return train


def gradient_of_features(steps, stage, x, others, group):
    """A forward of all micro-batches, then the loss of all their rows, on the last stage."""
    with torch.no_grad():
        features = steps.eval(x) if stage.is_first else steps.eval(target=others)
    if not stage.is_last:
        return None
    features.requires_grad_()
    clip(features, others, group=group).backward()
    return features.grad


def of_all_stages(model, group):
    found = {}
    for stage, layer in enumerate(model.layers):
        for name, p in layer.named_parameters():
            p = p.full_tensor() if isinstance(p, DTensor) else p
            found[f"layers.{stage}.{name}"] = p.detach().clone()
            dist.broadcast(found[f"layers.{stage}.{name}"], group=group, group_src=stage)
    return found


def test_pairs_as_one_process():
    right = {data: pipeline(data) for data in ("FSDP", "GradientAverager")}
    right |= {
        "1F1B": pipeline(schedule=Schedule1F1B),
        "nobody divides": pipeline(scale_grads=False, times=1 / 2),
    }
    assert_as_one_process(PAIRS, right, 2, copies=2)


def test_two_calls_in_an_update_as_one_process():
    assert_as_one_process(PAIRS, {"": pipeline(scale_grads=False, times=1 / 4, calls=2)}, 4, copies=2)


def test_loss_of_all_micro_batches_as_one_process():
    assert_as_one_process(WHOLE, {"": pipeline(scale_grads=False, cached=True)}, 2, copies=2)


def test_factors_of_the_table():
    ways = {
        "[Pipeline schedules](pipeline.md) × FSDP, six ranks": pipeline(),
        "[Pipeline schedules](pipeline.md), `scale_grads=False`": pipeline(scale_grads=False),
    }
    found = [factors(PAIRS, ways, k, copies=2) for k in (1, 2)]
    for row in ways:
        assert [each[row] for each in found] == [float(cell) for cell in row_of_the_table(row)[:2]]


def test_factors_of_mistakes():
    ways = {
        "nobody averages": pipeline("nobody"),
        "sum": pipeline(summed=True),
        "divided as well": pipeline(times=1 / 2),
    }
    found = factors(PAIRS, ways, 2, copies=2)
    assert found == {"nobody averages": "differs", "sum": 0.333333, "divided as well": 0.5}
    assert factors(PAIRS, {"two calls": pipeline(calls=2, times=1 / 2)}, 4, copies=2) == {"two calls": "wrong"}
    assert factors(WHOLE, {"of micro-batches": pipeline()}, 2, copies=2) == {"of micro-batches": "wrong"}


def test_ddp_around_a_stage_raises_in_the_second_update():
    assert factors(PAIRS, {"": pipeline("DDP")}, 2, copies=2)[""] == 1
    batches = [mine for mine in PAIRS.batches(2, 2) for _ in range(2)]
    with pytest.raises(RanksFailedError, match="rebuilt parameter indices size is not same"):
        spawn(lambda mine: pipeline("DDP")(Layers(), mine), batches, timeout=20)


@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "step"])
def test_rows_that_the_micro_batches_do_not_divide(is_training):
    """8 rows, as 3, 3 and 2: a later stage takes 3 of each, and the last 3 have a row of those before."""

    def on_rank(rank):
        layer = Layers().layers[rank]
        stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
        steps = ScheduleGPipe(stage, 3, loss_fn=lambda features, others: features.square().mean())
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
        call = steps.step if is_training else steps.eval
        with torch.set_grad_enabled(is_training):
            found = call(x) if rank == 0 else call(target=x)
        return found, Layers()(x)

    if is_training:
        with pytest.raises(RanksFailedError, match="Failed to run stage backward"):
            spawn(on_rank, range(2), timeout=20)
    else:
        _, (found, right) = spawn(on_rank, range(2))
        assert len(found) == 9
        torch.testing.assert_close(found[:8], right)


def test_accumulated_gradients_are_divided_again():
    """The second call in an update divides what the first left in .grad by the micro-batches, too."""

    def on_rank(rank, calls):
        layer = Layers().layers[rank]
        stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
        steps = ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
        x = torch.ones(8, 6, dtype=torch.double)
        for _ in range(calls):
            if rank == 0:
                steps.step(x)
            else:
                steps.step(target=x)
        return layer[0].weight.grad

    once, twice = (spawn(lambda rank, n=calls: on_rank(rank, n), range(2)) for calls in (1, 2))
    for one, both in zip(once, twice, strict=True):
        torch.testing.assert_close(both, (1 + 1 / 4) * one)
