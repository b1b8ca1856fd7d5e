"""Trains on this rank's part of each batch, and compares processes with unequal parts with one process.

What simclr.py, clip.py, supcon.py, barlow_twins.py, retrieval.py and segmentation.py share.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import diffcoll as dc
from diffcoll.testing import spawn

BATCH = 192


@dataclass
class Task:
    """What is trained."""

    #: Makes the model, in float64; it holds the loss, if that has parameters.
    model: Callable[[], nn.Module]
    #: Draws a whole batch of `BATCH` rows, the same on every rank.
    batch: Callable[[torch.Generator], Sequence[Tensor]]
    #: The loss of the whole batch, from this rank's rows.
    loss: Callable[..., Tensor]
    #: Measures the model, in percent.
    score: Callable[[nn.Module], float]
    steps: int = 100


def train(task: Task) -> tuple[list[float], float]:
    """Return the loss of the whole batch at each step, and the score; part r is r + 1 times as large as part 0."""
    rank, n = dc.get_rank(), dc.get_world_size()
    ends = [BATCH * r * (r + 1) // (n * (n + 1)) for r in range(n + 1)]
    torch.manual_seed(0)
    model = task.model().double()
    averager = dc.GradientAverager(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(task.steps):
        mine = (x[ends[rank] : ends[rank + 1]] for x in task.batch(generator))
        loss = task.loss(model, *mine)
        optimizer.zero_grad()
        averager.backward(loss)
        optimizer.step()
        losses.append(loss.item())  # the loss of the whole batch on every rank
    averager.close()
    with torch.no_grad():
        return losses, task.score(model.eval())


def connect():
    """Set up the ranks of the launcher; return the name of the engine and a group of this rank alone."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        return "gloo", dist.new_subgroups(1)[0]
    from mpi4py import MPI

    dc.set_default_group(MPI.COMM_WORLD)
    return "MPI", MPI.COMM_SELF


def main(task: Task) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=task.steps)
    task.steps = parser.parse_args().steps
    if {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} & os.environ.keys():
        engine, alone = connect()
        n, (losses, score) = dc.get_world_size(), train(task)
        with dc.set_default_group(alone):
            single, expected = train(task)
    else:
        engine, n = "gloo", 3
        losses, score = spawn(lambda rank: train(task), range(n), timeout=300)[0]
        single, expected = train(task)
    off = max(abs(a - b) for a, b in zip(losses, single, strict=True))
    if dc.get_rank() == 0:
        print(
            f"{n} ranks on {engine}: score {score:.1f} %, on one process {expected:.1f} %; losses differ by {off:.0e}"
        )
    assert off < 1e-8
    if dist.is_initialized():
        dist.destroy_process_group()
