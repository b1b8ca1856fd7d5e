"""Learning rate and number of ranks: linear regression on 1, 2, 4 and 8 simulated ranks.

    python examples/learning_rate.py

Every rank has a batch of the same size, so N ranks use N times as many samples per step. The linear rule multiplies the
rate by N and takes N times fewer steps: the parameters follow nearly the same path if N times the rate is small.
"""

import torch
from torch import nn

import diffcoll as dc
from diffcoll.testing import simulate

BATCH, SAMPLES, RATE = 8, 1024, 0.002
TRUE = torch.linspace(-1, 1, 10, dtype=torch.double)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 10, generator=g, dtype=torch.double)
    return x, x @ TRUE + 0.1 * torch.randn(SAMPLES, generator=g, dtype=torch.double)


def train(rank: int, n: int, rate: float, reduction: str) -> torch.Tensor:
    w = nn.Parameter(torch.zeros(10, dtype=torch.double))
    averager = dc.GradientAverager([w], reduction=reduction)
    optimizer = torch.optim.SGD([w], lr=rate)
    x, y = samples()
    for step in range(SAMPLES // (BATCH * n)):
        mine = slice((step * n + rank) * BATCH, (step * n + rank + 1) * BATCH)
        optimizer.zero_grad()
        averager.backward((x[mine] @ w - y[mine]).square().mean())
        optimizer.step()
    return w.detach()


def on(n: int, rate: float, reduction: str = "mean") -> torch.Tensor:
    return simulate(lambda r: train(r, n, rate, reduction), range(n), rules=True, torch_distributed=True)[0]


def main() -> None:
    one = on(1, RATE)
    print("ranks  steps  rate as before  rate × N  (distance from one rank's result)")
    for n in (2, 4, 8):
        same, linear = ((on(n, rate) - one).norm().item() for rate in (RATE, n * RATE))
        print(f"{n:5}  {SAMPLES // (BATCH * n):5}  {same:14.3f}  {linear:8.3f}")
        assert linear < 0.1 * same
        # reduction="sum" multiplies the gradient of the mean by N, as the linear rule multiplies the rate.
        assert torch.allclose(on(n, RATE, "sum"), on(n, n * RATE), atol=1e-12)


if __name__ == "__main__":
    main()
