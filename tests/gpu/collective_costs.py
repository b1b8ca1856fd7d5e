"""The time of a collective with its backward against other ways to write it, with one rank."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.nn.functional as nn_functional

import diffcoll as dc
from gpu.measuring import distance, times
from gpu.row import row


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return AllReduce.forward(ctx, g)


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(y, x.contiguous())
        return y

    @staticmethod
    def backward(ctx, g):
        return ReduceScatter.forward(ctx, g)


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
        dist.reduce_scatter_tensor(y, x.contiguous())
        return y

    @staticmethod
    def backward(ctx, g):
        return AllGather.forward(ctx, g)


def ways(n):
    """Return for each collective: ours, two lines in a Function, torch.distributed.nn, functional collectives."""
    group, funcol = dist.group.WORLD, functional_collectives

    def nn_reduce_scatter(x):
        parts = list(x.chunk(n))
        return nn_functional.reduce_scatter(torch.empty_like(parts[0]), parts)

    return {
        "all_reduce": {
            "ours": dc.all_reduce,
            "two lines": AllReduce.apply,
            "nn": nn_functional.all_reduce,
            "functional": lambda x: funcol.wait_tensor(funcol.all_reduce(x, "sum", group)),
        },
        "all_gather": {
            "ours": dc.all_gather,
            "two lines": AllGather.apply,
            "nn": lambda x: torch.cat(nn_functional.all_gather(x)),
            "functional": lambda x: funcol.wait_tensor(funcol.all_gather_tensor_autograd(x, 0, group)),
        },
        "reduce_scatter": {
            "ours": dc.reduce_scatter,
            "two lines": ReduceScatter.apply,
            "nn": nn_reduce_scatter,
            "functional": lambda x: funcol.wait_tensor(funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group)),
        },
        "mean": {"ours": lambda x: dc.all_reduce(x, "mean")},
        "max": {"ours": lambda x: dc.all_reduce(x, "max")},
        "product": {"ours": lambda x: dc.all_reduce(x, "product")},
    }


@row(seconds=90, alone=True)
def collective_times(rank):
    """Microseconds of a call with its backward, and of the host alone."""
    sizes = {"4 B": (1, 50), "1 MB": (1 << 18, 20), "134 MB": (1 << 25, 5)} if rank.on_gpu else {"4 B": (1, 1)}
    for size, (elements, calls) in sizes.items():
        x = torch.randn(max(elements // 16, 1), min(elements, 16), device=rank.device, requires_grad=True)
        for name, each in ways(rank.n).items():
            with rank.part(f"{name} of {size}"):
                steps = {way: step_of(call, x) for way, call in each.items()}
                for way, step in steps.items():
                    if way != "functional" or name != "all_reduce":  # that one has no derivative on all releases
                        rank.check(way, distance(step()[0], 2 * x), 1e-6)
                found = times(rank, steps, calls)
                for way, (wall, host) in found.items():
                    rank.figure(way, f"{wall * 1e6:.0f} µs, host {host * 1e6:.0f}")
                if len(each) > 1:
                    rank.goal("host against two lines", found["ours"][1] / found["two lines"][1], 1.5, "more Python")


def step_of(call, x):
    def step():
        y = call(x)
        return torch.autograd.grad(y, x, 2 * x.detach()) if y.requires_grad else (y,)

    return step
