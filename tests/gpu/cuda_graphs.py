"""Captured in a CUDA graph and replayed with other data: the numbers of a call outside of it."""

import torch
import torch.nn.functional as F
from torch import nn

import diffcoll as dc
from gpu.calls import averaged, collectives, exchanging, training_step
from gpu.measuring import distance, flat
from gpu.row import row


def captured(rank, call, warm_up=3):
    """Return a function that replays the call, and its result, which a replay overwrites; on the CPU it is repeated."""
    if not rank.on_gpu:
        result = call() or ()

        def repeat():
            for old, new in zip(result, call() or (), strict=True):
                old.detach().copy_(new)

        return repeat, result
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            call()
    torch.cuda.current_stream().wait_stream(side)
    rank.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own threads call CUDA meanwhile
        result = call()
    return graph.replay, result


def data(rank, seed):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * seed + rank.r)).to(rank.device)


@row(1, 2)
def cuda_graphs(rank):
    """Forward and backward of every collective, a loss and SyncBatchNorm."""
    x, z = data(rank, 0).requires_grad_(), data(rank, 1)
    norm = dc.nn.SyncBatchNorm(16).to(rank.device)

    def started():
        y = dc.all_reduce(x, async_op=True)
        return y.wait() * dc.all_gather(x, async_op=True).wait().sum()

    calls = {
        **collectives(x, rank.n),
        **exchanging(x),
        "two in flight": started,
        "SyncBatchNorm": lambda: norm(x),
        "clip_loss": lambda: dc.nn.functional.clip_loss(F.normalize(x), F.normalize(z), 10.0),
    }
    for i, (name, of) in enumerate(calls.items()):
        with rank.part(name):

            def call(of=of):
                y = of()
                return y.detach(), *torch.autograd.grad((y.sin() * (1 + rank.r)).sum(), x)

            replay, results = captured(rank, call)
            with torch.no_grad():
                x.copy_(data(rank, 7 + i))
            replay()
            rank.wait()
            for what, result, right in zip(("value", "gradient"), results, call(), strict=True):
                rank.check(what, distance(result, right), 1e-6)


@row(1, 2)
def cuda_graph_of_a_step(rank):
    """A training step with the averager: three replays change what three steps change."""
    with rank.part("averager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(rank.device)
        x = data(rank, 0)
        step = training_step(model, *averaged(model), lambda call: call(x).square().mean(), set_to_none=False)
        replay, _ = captured(rank, step, warm_up=11)
        start = [p.detach().clone() for p in model.parameters()]
        changes = []
        for again in (replay, step):
            with torch.no_grad():
                for p, value in zip(model.parameters(), start, strict=True):
                    p.copy_(value)
            for _ in range(3):
                again()
            rank.wait()
            changes.append(flat(model.parameters()) - flat(start))
        rank.check("change", distance(*changes), 1e-6)
