"""Trains under torchrun's agent, which restarts all ranks after one was killed, and resumes from rank 0's file."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import diffcoll as dc

folder, victim, fault = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(3, 2).double()
saved = folder / "model.pt"
first = 0
if saved.exists():
    first, state = torch.load(saved)
    model.load_state_dict(state)
averager = dc.GradientAverager(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
batches = torch.randn(6, size, 2, 3, generator=generator, dtype=torch.double)


def kill(_):
    os.kill(os.getpid(), signal.SIGKILL)


for step in range(first, len(batches)):
    optimizer.zero_grad()
    loss = model(batches[step, rank]).pow(2).mean()
    if not (folder / "killed").exists() and (rank, step) == (victim, fault):
        (folder / "killed").touch()
        loss.register_hook(kill)
    averager.backward(loss)
    optimizer.step()
    if rank == 0:
        torch.save((step + 1, model.state_dict()), folder / "new.pt")
        (folder / "new.pt").replace(saved)

torch.manual_seed(0)
alone = nn.Linear(3, 2).double()
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
for x in batches:
    optimizer.zero_grad()
    alone(x.flatten(0, 1)).pow(2).mean().backward()
    optimizer.step()
for p, q in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(p, q)
print(f"elastic: rank {rank} of {size} on {os.uname().nodename}: right, first step {first}", flush=True)
