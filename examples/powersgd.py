"""PowerSGD as a hook of GradientAverager: gradients are sent as two thin matrices, and what is lost is sent later.

    python examples/powersgd.py

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019).
In every step, for each matrix, with M_r the gradient of rank r plus its residual, and Q of the last step:

    P = orthonormal columns of Σ_r M_r Q        Q_r = M_rᵀ P        Q = Σ_r Q_r
    used on all ranks: P Qᵀ                     residual of rank r: M_r − P Q_rᵀ

So what was used plus all residuals is Σ_r M_r: nothing is lost, it is sent in later steps.
"""

import torch
from torch import Tensor, nn

import diffcoll as dc
from diffcoll.testing import spawn


class PowerSGD:
    """A `comm_hook` that sends matrices in a given rank, and vectors as they are.

    Args:
        rank: of the approximation; a matrix of no higher rank is sent as it is.
        seed: of the first projection; the same on all ranks.
    """

    def __init__(self, rank: int = 1, seed: int = 0) -> None:
        self.rank = rank
        self.generator = torch.Generator().manual_seed(seed)
        self.projections: dict[str, Tensor] = {}
        self.residuals: dict[str, Tensor] = {}

    def __call__(self, bucket: dc.GradientBucket) -> Tensor:
        matrices = {name: g.flatten(1) for name, g in bucket.gradients.items() if self._is_compressed(g)}
        rest = [g for name, g in bucket.gradients.items() if name not in matrices]
        for name, m in matrices.items():
            if name not in self.projections:
                q = torch.randn(m.shape[1], self.rank, generator=self.generator, dtype=m.dtype)
                self.projections[name], self.residuals[name] = q.to(m.device), torch.zeros_like(m)
            m += self.residuals[name]  # a view of the row
        sums = _sums(bucket, [*(m @ self.projections[name] for name, m in matrices.items()), *rest])
        ps = [torch.linalg.qr(p).Q for p in sums[: len(matrices)]]
        mine = [m.T @ p for m, p in zip(matrices.values(), ps, strict=True)]
        qs = _sums(bucket, mine)
        for (name, m), p, q_of_rank, q in zip(matrices.items(), ps, mine, qs, strict=True):
            self.residuals[name] = m - p @ q_of_rank.T
            self.projections[name] = q
            m.copy_(p @ q.T)
        for g, total in zip(rest, sums[len(matrices) :], strict=True):
            g.copy_(total)
        return bucket.row

    def _is_compressed(self, g: Tensor) -> bool:
        return g.dim() > 1 and min(g.flatten(1).shape) > self.rank


def _sums(bucket: dc.GradientBucket, xs: list[Tensor]) -> list[Tensor]:
    """Return the sum over ranks of each x, in one message."""
    if not xs:
        return []
    total = bucket.all_reduce(torch.cat([x.reshape(-1) for x in xs])).wait()
    parts = total.split([x.numel() for x in xs])
    return [part.view(x.shape) for part, x in zip(parts, xs, strict=True)]


def train(rank: int, compressed: bool, steps: int = 150) -> list[float]:
    torch.manual_seed(rank)  # the averager broadcasts rank 0's parameters
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    dc.GradientAverager(net, comm_hook=PowerSGD(rank=1) if compressed else None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(64, 8)
    y = (x[:, :2].prod(1, keepdim=True)).tanh()
    losses = []
    for _ in range(steps):
        loss = (net(x) - y).square().mean()
        losses.append(dc.global_mean(loss).item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    for compressed in (False, True):
        losses = spawn(train, range(2), [compressed] * 2)[0]
        print(f"{'PowerSGD' if compressed else 'exact   '}  loss {losses[0]:.3f} → {losses[-1]:.3f}")
    numbers = 8 * 32 + 32 * 1 + 32 + 1
    print(f"numbers per step and rank: {numbers} exact, {(8 + 32) + (32 + 32 + 1)} with rank 1")
