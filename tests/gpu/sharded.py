"""Sharded models: the recipe for tensor parallelism, and the harness on modules of the device."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, assert_matches_single_process
from gpu.row import row


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


@row(2)
def tensor_parallel(rank):
    """As in notes/how-to/tensor-parallelism.md, on ranks with other numbers of columns."""

    def gradients(loss, *tensors):
        tensors = [t.clone().requires_grad_() for t in tensors]
        return [g.cpu() for g in torch.autograd.grad(loss(*tensors), tensors)]

    def on_ranks(x, columns, rows):
        hidden = torch.tanh(dc.sum_gradients(x) @ columns)
        return dc.all_reduce(hidden @ rows, grad_placement="replicate").square().sum()

    def on_one_process(x, first, second):
        return (torch.tanh(x @ first) @ second).square().sum()

    x, first, second = numbers(5, 4), numbers(4, 7, seed=1), numbers(7, 3, seed=2)
    mine = x, first.split([4, 3], 1)[rank.r], second.split([4, 3])[rank.r]
    found = gradients(on_ranks, *(t.to(rank.device) for t in mine))
    to_x, to_first, to_second = gradients(on_one_process, x, first, second)
    right = to_x, to_first.split([4, 3], 1)[rank.r], to_second.split([4, 3])[rank.r]
    for name, g, right_g in zip(("x", "columns", "rows"), found, right, strict=True):
        rank.check(name, (g - right_g).abs().max(), 1e-12)


@row(1, starts_ranks=True, seconds=120)
def sharded_harness(rank):
    """Modules of the device on simulated ranks: DTensor's plan, FSDP2, both; and a loss with a wrong factor."""

    def loss(module, x):
        return module(x).square().mean()

    def plan(whole, mesh):
        return parallelize_module(whole, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def fsdp(whole, mesh):
        return fully_shard(whole, mesh=mesh["dp"])

    def both(whole, mesh):
        return fsdp(plan(whole, mesh), mesh)

    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double().to(rank.device)
    x, rows = numbers(4, 6).to(rank.device), {"x": {"dp": Shard(0)}}
    for shard, axes in ((plan, {"tp": 2}), (fsdp, {"dp": 2}), (both, {"dp": 2, "tp": 2})):
        more = {"module": module, "shard": shard, "ranks": axes, "placements": rows if "dp" in axes else {}}
        with rank.part(shard.__name__):
            assert_matches_single_process(loss, loss, x, **more, on=["simulated"])
        with rank.part(f"{shard.__name__}, a wrong factor"), rank.refused(GradientMismatchError):
            assert_matches_single_process(lambda *a: 2 * loss(*a), loss, x, **more, on=["simulated"])
