"""What the ranks of these tests run: `python host_programs.py NAME`, under torchrun or mpiexec."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import diffcoll as dc

ROWS = (3, 0, 4, 2), (2, 5, 1, 3), (4, 2, 0, 1)  # of each rank, step by step


def trained(loss, size, averaged):
    """Train a small model; loss(model, rows of each rank)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)).double()
    if averaged:
        net = dc.nn.convert_sync_batchnorm(net)
        averager = dc.GradientAverager(net, bucket_mb=1e-4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        rows = ROWS[step % len(ROWS)][:size]
        xs = torch.randn(sum(rows), 5, generator=generator, dtype=torch.double).split(rows)
        optimizer.zero_grad()
        averager.backward(loss(net, xs)) if averaged else loss(net, xs).backward()
        optimizer.step()
    if averaged:
        averager.close()
    return [x.detach() for x in (*net.parameters(), *net.buffers())]


def of_all_rows(net, xs):
    q, k = (F.normalize(z, dim=1) for z in net(torch.cat(xs)).split(2, dim=1))
    return F.cross_entropy(q @ k.T / 0.3, torch.arange(len(q)))


def training(rank, size):
    """The averager, SyncBatchNorm and a loss of all ranks' rows, against one process."""
    alone = trained(of_all_rows, size, averaged=False)
    for more in {}, {"chunk_size": 3}:

        def loss(net, xs, more=more):
            return dc.nn.functional.info_nce_loss(*net(xs[rank]).split(2, dim=1), temperature=0.3, **more)

        torch.testing.assert_close(trained(loss, size, averaged=True), alone)


def disagreement(rank, size):
    """Check mode names the ranks that differ."""
    try:
        dc.all_reduce(torch.ones(2 + rank // (size - 1)))
    except dc.CollectiveMismatchError as error:
        text = str(error)
    assert f"rank {size - 1}" in text and "(3,)" in text, text


def many_bytes(rank, size):
    """8 MiB each to both others."""
    x = torch.full((1 << 20,), rank + 1.0, dtype=torch.double)
    for _ in range(4):
        y = dc.all_gather(x)
    assert y.view(size, -1).mean(1).tolist() == [r + 1.0 for r in range(size)]


def summed(rank, size):
    """A sum of 8 MB over two hosts of two ranks, in one step or (STEPS=2) in the two of notes/how-to/recipes.md."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
    x = torch.full((2 << 20,), rank + 1.0, requires_grad=True)
    if os.environ["STEPS"] == "2":
        part = dc.all_reduce(dc.reduce_scatter(x, group=mesh["ranks"]), group=mesh["hosts"])
        y = dc.all_gather(part, group=mesh["ranks"])
    else:
        y = dc.all_reduce(x)
    (y * (rank + 1)).sum().backward()
    assert y.unique().tolist() == [10.0] and x.grad.unique().tolist() == [10.0]


PROGRAMS = {
    "summed": summed,
    "training": training,
    "disagreement": disagreement,
    "bytes": many_bytes,
}

if __name__ == "__main__":
    name, engine = sys.argv[1], sys.argv[2]
    if engine == "mpi":
        from mpi4py import MPI

        dc.set_default_group(MPI.COMM_WORLD)
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    else:
        dist.init_process_group(engine, timeout=timedelta(seconds=30))
        rank, size = dist.get_rank(), dist.get_world_size()
    PROGRAMS[name](rank, size)
    print(f"{name}: rank {rank} of {size} on {os.uname().nodename}: right", flush=True)
