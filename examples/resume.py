"""Train on three processes, save, continue from the checkpoint on two: the curve of one process that never stopped.

    python examples/resume.py

Rank 0 saves the parameters, under the names of the module, the optimizer's state and the step. These are equal on all
ranks. Buffers (running statistics) and random states would not be: this network has no buffers, and no random numbers
are drawn while it trains. The batch of a step is the same whatever the number of ranks; each rank takes a part.

Only rank 0 reads the file, so no shared disk is needed. All ranks need the optimizer's state: those without it would
make other steps, and the parameters would differ without an error.
"""

import io
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import diffcoll as dc
from diffcoll.testing import spawn

BATCH, STEPS = 20, 12


def load(file: Path) -> Any:
    """Load a file of rank 0 on all ranks."""
    data = torch.empty(0, dtype=torch.uint8)
    if dc.get_rank() == 0:
        data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    length = int(dc.broadcast(torch.tensor(len(data))))
    data = dc.broadcast(data if dc.get_rank() == 0 else torch.empty(length, dtype=torch.uint8))
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu")


def train(rank: int, folder: str, start: int, stop: int) -> list[float]:
    torch.manual_seed(rank)  # the averager broadcasts rank 0's parameters
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    file = Path(folder, "checkpoint.pt")
    if start:
        saved = load(file)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    averager = dc.GradientAverager(net)
    n, losses = dc.get_world_size(), []
    for step in range(start, stop):
        x = torch.randn(BATCH, 6, dtype=torch.double, generator=torch.Generator().manual_seed(step))
        x = x.tensor_split(n)[rank]  # 7, 7 and 6, or 10 and 10
        optimizer.zero_grad()
        loss = (net(x).squeeze(1) - x.sum(1).cos()).square().sum()
        averager.backward(loss, count=len(x))
        optimizer.step()
        losses.append(dc.global_mean(loss / len(x), len(x)).item())
    if rank == 0:  # whoever reads a shared file in the same run must wait for this: put a barrier after it
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": stop}, file)
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        never_stopped = spawn(train, range(1), [folder], [0], [STEPS])[0]
        half = STEPS // 2
        three = spawn(train, range(3), [folder] * 3, [0] * 3, [half] * 3)
        two = spawn(train, range(2), [folder, "/nowhere"], [half] * 2, [STEPS] * 2)
    curve = three[0] + two[1]
    for step, (a, b) in enumerate(zip(never_stopped, curve, strict=True)):
        print(f"step {step:2} on {3 if step < half else 2} ranks: {b:.12f}, one process {a:.12f}")
    assert max(abs(a - b) for a, b in zip(never_stopped, curve, strict=True)) < 1e-10


if __name__ == "__main__":
    main()
