"""Three ways to average gradients of unequal batches, compared with one process that has the whole batch.

python examples/averaging.py
"""

import torch
from torch import nn

import diffcoll as dc
from diffcoll.testing import spawn

TOKENS = [700, 200, 0]  # on each rank; rank 2 has an empty batch


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS[rank], 16, generator=g, dtype=torch.double) + rank
    return x, torch.randint(4, (TOKENS[rank],), generator=g)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def gradient(rank: int, reduction: str) -> tuple[torch.Tensor, float]:
    net = model()
    averager = dc.GradientAverager(net, reduction=reduction)
    x, t = batch(rank)
    if reduction == "sum":
        loss = nn.functional.cross_entropy(net(x), t, reduction="sum") / sum(TOKENS)
    else:
        loss = nn.functional.cross_entropy(net(x), t) if len(t) or reduction == "weighted" else net(x).sum()
    if reduction == "weighted":
        averager.set_weight(len(t))
    loss.backward()
    logged = dc.global_mean(loss * (len(TOKENS) if reduction == "sum" else 1), None if reduction == "sum" else len(t))
    return flat(net), logged.item()


def main() -> None:
    net = model()
    x, t = (torch.cat(v) for v in zip(*[batch(r) for r in range(3)], strict=True))
    loss = nn.functional.cross_entropy(net(x), t)
    loss.backward()
    expected = flat(net)
    print(f"{'one process':16} loss {loss.item():.6f}")
    for reduction in ("mean", "sum", "weighted"):
        (g, logged), *others = spawn(gradient, range(3), [reduction] * 3)
        error = ((g - expected).norm() / expected.norm()).item()
        print(f"{reduction:16} loss {logged:.6f}, gradient off by {error:.1e}")
        assert all(torch.equal(g, other) for other, _ in others)
        assert abs(logged - loss.item()) < 1e-12
        assert error > 0.1 if reduction == "mean" else error < 1e-12


if __name__ == "__main__":
    main()
