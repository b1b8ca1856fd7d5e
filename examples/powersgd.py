"""PowerSGD on gradients of `.grad`: they are sent as two thin matrices, and what is lost is sent later.

    python examples/powersgd.py

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019).
In every step, for each matrix, with M_r the gradient of rank r plus its residual, and Q of the last step:

    P = orthonormal columns of mean_r M_r Q        Q_r = M_rᵀ P        Q = mean_r Q_r
    used on all ranks: P Qᵀ                        residual of rank r: M_r − P Q_rᵀ

What was used plus the mean of all residuals is mean_r M_r: nothing is lost.
"""

import torch
from torch import Tensor, nn

import diffcoll as dc
from diffcoll.testing import spawn


class PowerSGD:
    """Replaces each `.grad` by a mean over ranks: matrices in a given rank, those of no higher rank as they are."""

    def __init__(self, rank: int) -> None:
        self.rank, self.generator = rank, torch.Generator().manual_seed(0)  # the same on all ranks
        self.projections: dict[int, Tensor] = {}
        self.residuals: dict[int, Tensor] = {}

    @torch.no_grad()
    def reduce(self, net: nn.Module) -> None:
        """Call it after backward, on all ranks; every parameter has a gradient."""
        grads = dict(enumerate(p.grad for p in net.parameters() if p.grad is not None))
        matrices = {i: g.flatten(1) for i, g in grads.items() if g.dim() > 1 and min(g.flatten(1).shape) > self.rank}
        rest = {i: g for i, g in grads.items() if i not in matrices}
        for i, m in matrices.items():
            matrices[i] = m = m + self.residuals.get(i, 0)
            if i not in self.projections:
                q = torch.randn(m.shape[1], self.rank, generator=self.generator, dtype=m.dtype)
                self.projections[i] = q.to(m.device)
        products = {i: m @ self.projections[i] for i, m in matrices.items()}
        products, means = dc.all_reduce((products, rest), "mean")
        for i, g in rest.items():
            g.copy_(means[i])
        ps = {i: torch.linalg.qr(product).Q for i, product in products.items()}
        mine = {i: m.T @ ps[i] for i, m in matrices.items()}
        for i, q in dc.all_reduce(mine, "mean").items():
            self.residuals[i], self.projections[i] = matrices[i] - ps[i] @ mine[i].T, q
            grads[i].copy_((ps[i] @ q.T).view_as(grads[i]))  # `flatten` has copied channels-last gradients


def train(rank: int, rank_of_matrices: int) -> float:
    torch.manual_seed(0)
    net, powersgd = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), PowerSGD(rank_of_matrices)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(rank))
    for _ in range(150):
        optimizer.zero_grad()
        loss = (net(x) - x[:, :2].prod(1, keepdim=True).tanh()).square().mean()
        loss.backward()
        powersgd.reduce(net)
        optimizer.step()
    return dc.global_mean(loss).item()


if __name__ == "__main__":
    for k, numbers in (8, 8 * 32 + 32 + 32 + 1), (1, (8 + 32) + (32 + 32 + 1)):
        print(f"rank {k}: {numbers} numbers per step, loss {spawn(train, range(2), [k] * 2)[0]:.3f}")
