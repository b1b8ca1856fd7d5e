"""Train on three processes, save, continue from the checkpoint on two: the curve of one process that never stopped.

    python examples/resume.py

Rank 0 saves what is equal on all ranks: parameters, the optimizer's state and the step; buffers (running statistics)
and random states would not be. Only rank 0 reads the file, but all ranks need the optimizer's state: those without it
would make other steps, without an error.
"""

import io
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import diffcoll as dc
from diffcoll.testing import spawn

STEPS = 12


def load(file: Path) -> Any:
    content = file.read_bytes() if dc.get_rank() == 0 else b""
    length = int(dc.broadcast(torch.tensor(len(content))))
    data = torch.frombuffer(bytearray(content or length), dtype=torch.uint8)
    return torch.load(io.BytesIO(dc.broadcast(data).numpy()))


def train(rank: int, folder: str, is_resumed: bool, stop: int) -> list[float]:
    torch.manual_seed(rank)  # the averager broadcasts rank 0's parameters
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    file, start, losses = Path(folder, "checkpoint.pt"), 0, []
    if is_resumed:
        model_state, optimizer_state, start = load(file)
        net.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    averager = dc.GradientAverager(net)
    for step in range(start, stop):
        x = torch.randn(20, 6, dtype=torch.double, generator=torch.Generator().manual_seed(step))
        x = x.tensor_split(dc.get_world_size())[rank]  # 7, 7 and 6, or 10 and 10
        optimizer.zero_grad()
        loss = (net(x).squeeze(1) - x.sum(1).cos()).square().sum()
        averager.backward(loss, count=len(x))
        optimizer.step()
        losses.append(dc.global_mean(loss / len(x), len(x)).item())
    if rank == 0:  # whoever reads a shared file in the same run must wait for this: put a barrier after it
        torch.save((net.state_dict(), optimizer.state_dict(), stop), file)
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        never_stopped = spawn(train, range(1), [folder], [False], [STEPS])[0]
        three = spawn(train, range(3), [folder] * 3, [False] * 3, [STEPS // 2] * 3)[0]
        two = spawn(train, range(2), [folder, "/nowhere"], [True] * 2, [STEPS] * 2)[1]
    for step, (a, b) in enumerate(zip(never_stopped, three + two, strict=True)):
        print(f"step {step:2} on {3 if step < STEPS // 2 else 2} ranks: {b:.12f}, one process {a:.12f}")
        assert abs(a - b) < 1e-10
