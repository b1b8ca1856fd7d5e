"""The same training with a parameter server and with all-reduce, on three processes.

    python examples/parameter_server.py

Rank 0 is the server: gradients are reduced to it, only it has an optimizer, and it broadcasts the parameters.
"""

import torch
from torch import nn

import diffcoll as dc
from diffcoll.testing import spawn

STEPS = 20


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def loss(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 8, generator=g, dtype=torch.double)
    return (net(x).squeeze(1) - x.sum(1).sin()).square().mean()


def by_all_reduce(rank: int) -> list[torch.Tensor]:
    net = network()
    averager = dc.GradientAverager(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        averager.backward(loss(net, rank, step))
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def by_server(rank: int) -> list[torch.Tensor]:
    net, n = network(), dc.get_world_size()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01) if rank == 0 else None
    for step in range(STEPS):
        gradients = torch.autograd.grad(loss(net, rank, step), list(net.parameters()))
        for p, g in zip(net.parameters(), gradients, strict=True):
            p.grad = dc.reduce(g, dst=0) / n
        if optimizer is not None:
            optimizer.step()
        with torch.no_grad():
            for p, new in zip(net.parameters(), dc.broadcast([p.detach() for p in net.parameters()]), strict=True):
                p.copy_(new)
    return [p.detach() for p in net.parameters()]


def main() -> None:
    server, all_reduce = spawn(by_server, range(3)), spawn(by_all_reduce, range(3))
    largest = max((a - b).abs().max().item() for a, b in zip(server[2], all_reduce[0], strict=True))
    nbytes = sum(p.nbytes for p in server[0])
    print(f"after {STEPS} steps of Adam the parameters differ by {largest:.0e}")
    print(f"per step the server sends and receives {2 * nbytes} B, with all-reduce each rank {4 * nbytes // 3} B")
    assert largest < 1e-12


if __name__ == "__main__":
    main()
