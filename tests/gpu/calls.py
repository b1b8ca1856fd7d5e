"""What several rows call: every collective, a training step, and what averages its gradients."""

import torch
from torch.nn.parallel import DistributedDataParallel

import diffcoll as dc


def collectives(x, n):
    """Return functions without arguments; x: a matrix of a multiple of n rows and columns, as long on each rank."""
    ops = ("mean", "product", "max", "min", "logsumexp")
    return {
        "all_reduce": lambda: dc.all_reduce(x),
        **{f"all_reduce {op}": lambda op=op: dc.all_reduce(x, op) for op in ops},
        "all_reduce replicate": lambda: dc.all_reduce(x, grad_placement="replicate"),
        "all_reduce async_op": lambda: dc.all_reduce(x, async_op=True).wait(),
        "all_reduce of a tree": lambda: torch.cat(dc.all_reduce([x, x.sin()])),
        "all_gather": lambda: dc.all_gather(x),
        "all_gather dim=1": lambda: dc.all_gather(x, dim=1),
        "all_gather stack": lambda: dc.all_gather(x, stack=True),
        "all_gather sizes=[…]": lambda: dc.all_gather(x, sizes=[len(x)] * n),
        "all_gather async_op": lambda: dc.all_gather(x, async_op=True).wait(),
        "reduce_scatter": lambda: dc.reduce_scatter(x),
        "reduce_scatter dim=1": lambda: dc.reduce_scatter(x, dim=1),
        "reduce_scatter max": lambda: dc.reduce_scatter(x, "max"),
        "all_to_all": lambda: dc.all_to_all(x),
        "broadcast": lambda: dc.broadcast(x),
        "reduce": lambda: dc.reduce(x),
        "gather": lambda: dc.gather(x),
        "scatter": lambda: dc.scatter(x),
        "permute": lambda: dc.permute(x, [(r, (r + 1) % n) for r in range(n)]),
        "shift": lambda: dc.shift(x),
        "scan": lambda: dc.scan(x),
        "sum_gradients": lambda: dc.sum_gradients(x),
        "split": lambda: dc.split(x),
        "halo_exchange": lambda: dc.halo_exchange(x, 0, 1, 1),
        "gather_batch sizes=None": lambda: dc.gather_batch({"x": x}, sizes=None).tree["x"],
    }


def exchanging(x):
    """Return those in which ranks tell each other numbers that the host needs."""
    return {
        "all_gather sizes='auto'": lambda: dc.all_gather(x, sizes="auto"),
        "gather_batch": lambda: dc.gather_batch({"x": x}).tree["x"],
        "ring": lambda: torch.cat([block for _, block in dc.ring(x)]),
    }


def averaged(model, **options):
    return model, dc.GradientAverager(model, **options).backward


def ddp(model, **options):
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **options), torch.Tensor.backward


def training_step(model, call, backward, loss, set_to_none=True, **options):
    """Return a step of SGD; `call` and `backward` are those of `averaged` or `ddp`, and loss(call) a tensor."""
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})

    def step():
        optimizer.zero_grad(set_to_none)
        backward(loss(call))
        optimizer.step()

    return step
