"""PowerSGD on gradients of `.grad`: they are sent as two thin matrices, and what is lost is sent later.

    python examples/powersgd.py

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019).
In every step, for each matrix, with M_r the gradient of rank r plus its residual, and Q of the last step:

    P = orthonormal columns of mean_r M_r Q        Q_r = M_rᵀ P        Q = mean_r Q_r
    used on all ranks: P Qᵀ                        residual of rank r: M_r − P Q_rᵀ

So what was used plus the mean of all residuals is mean_r M_r: nothing is lost, it is sent in later steps.
"""

import torch
from torch import Tensor, nn

import diffcoll as dc
from diffcoll.testing import spawn


class PowerSGD:
    """Replaces each `.grad` by a mean over ranks: matrices in a given rank, vectors as they are.

    Args:
        rank: of the approximation; a matrix of no higher rank is sent as it is.
        seed: of the first projection; the same on all ranks.
    """

    def __init__(self, rank: int = 1, seed: int = 0) -> None:
        self.rank = rank
        self.generator = torch.Generator().manual_seed(seed)
        self.projections: dict[int, Tensor] = {}
        self.residuals: dict[int, Tensor] = {}

    @torch.no_grad()
    def reduce(self, net: nn.Module) -> None:
        """Call it after backward, on all ranks; every parameter has a gradient."""
        gradients = dict(enumerate(p.grad for p in net.parameters() if p.grad is not None))
        matrices = {i: g.flatten(1) for i, g in gradients.items() if self._is_compressed(g)}
        rest = {i: g for i, g in gradients.items() if i not in matrices}
        for i, m in matrices.items():
            if i not in self.projections:
                q = torch.randn(m.shape[1], self.rank, generator=self.generator, dtype=m.dtype)
                self.projections[i], self.residuals[i] = q.to(m.device), torch.zeros_like(m)
            m += self.residuals[i]  # a view of the gradient
        products = {i: m @ self.projections[i] for i, m in matrices.items()}
        means = dc.all_reduce({"products": products, "rest": rest}, "mean")
        ps = {i: torch.linalg.qr(p).Q for i, p in means["products"].items()}
        mine = {i: m.T @ ps[i] for i, m in matrices.items()}
        for i, q in dc.all_reduce(mine, "mean").items():
            self.residuals[i] = matrices[i] - ps[i] @ mine[i].T
            self.projections[i] = q
            matrices[i].copy_(ps[i] @ q.T)
        for i, g in rest.items():
            g.copy_(means["rest"][i])

    def _is_compressed(self, g: Tensor) -> bool:
        return g.dim() > 1 and min(g.flatten(1).shape) > self.rank


def train(rank: int, compressed: bool, steps: int = 150) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    averager, powersgd = None if compressed else dc.GradientAverager(net), PowerSGD(rank=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(rank))
    y = (x[:, :2].prod(1, keepdim=True)).tanh()
    losses = []
    for _ in range(steps):
        loss = (net(x) - y).square().mean()
        losses.append(dc.global_mean(loss).item())
        if averager is not None:
            averager.backward(loss)
        else:
            loss.backward()
            powersgd.reduce(net)
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    for compressed in (False, True):
        losses = spawn(train, range(2), [compressed] * 2)[0]
        print(f"{'PowerSGD' if compressed else 'exact   '}  loss {losses[0]:.3f} → {losses[-1]:.3f}")
    numbers = 8 * 32 + 32 * 1 + 32 + 1
    print(f"numbers per step and rank: {numbers} exact, {(8 + 32) + (32 + 32 + 1)} with rank 1")
