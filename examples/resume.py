"""Train on three processes, save, resume on two: the loss curve equals that of one uninterrupted process.

    python examples/resume.py

All ranks have the same state, so one of them saves it: parameters under the names of the module, the optimizer's state,
and the step. The global batch does not depend on the number of ranks; each rank takes a part of it.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import diffcoll as dc
from diffcoll.testing import spawn

BATCH, STEPS = 20, 12


def train(rank: int, folder: str, start: int, stop: int) -> list[float]:
    torch.manual_seed(rank)  # different parameters; GradientAverager broadcasts rank 0's
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    file = Path(folder, "checkpoint.pt")
    if start:
        saved = torch.load(file)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    averager = dc.GradientAverager(net, reduction="weighted")
    n, losses = dc.get_world_size(), []
    for step in range(start, stop):
        x = torch.randn(BATCH, 6, dtype=torch.double, generator=torch.Generator().manual_seed(step))
        x = x.tensor_split(n)[rank]  # 7, 7 and 6, or 10 and 10
        optimizer.zero_grad()
        loss = (net(x).squeeze(1) - x.sum(1).cos()).square().mean()
        averager.set_weight(len(x))
        loss.backward()
        optimizer.step()
        losses.append(dc.global_mean(loss, len(x)).item())
    if rank == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": stop}, file)
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        never_stopped = spawn(train, range(1), [folder], [0], [STEPS])[0]
        half = STEPS // 2
        three = spawn(train, range(3), [folder] * 3, [0] * 3, [half] * 3)
        two = spawn(train, range(2), [folder] * 2, [half] * 2, [STEPS] * 2)
    curve = three[0] + two[1]
    for step, (a, b) in enumerate(zip(never_stopped, curve, strict=True)):
        print(f"step {step:2} on {3 if step < half else 2} ranks: {b:.12f}, one process {a:.12f}")
    assert max(abs(a - b) for a, b in zip(never_stopped, curve, strict=True)) < 1e-10


if __name__ == "__main__":
    main()
