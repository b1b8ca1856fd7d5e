"""Trains on this rank's part of each batch, and compares processes with unequal parts with one process.

What two_views.py, clip.py, retrieval.py and segmentation.py share. Each of them runs so:

    python examples/clip.py [--steps 100]          three processes, which it starts
    torchrun --nproc-per-node 3 examples/clip.py
    mpiexec -n 3 python examples/clip.py
"""

import argparse
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import diffcoll as dc
from diffcoll.testing import spawn

BATCH = 192


def train(make_model, batch, score, steps: int) -> tuple[list[float], float]:
    """Return the loss of the whole batch at each step, and the score; part r is r + 1 times as large as part 0."""
    rank, n = dc.get_rank(), dc.get_world_size()
    ends = [BATCH * r * (r + 1) // (n * (n + 1)) for r in range(n + 1)]
    torch.manual_seed(0)
    model = make_model().double()
    averager = dc.GradientAverager(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        loss = model(*(x[ends[rank] : ends[rank + 1]] for x in batch(generator)))
        optimizer.zero_grad()
        averager.backward(loss)
        optimizer.step()
        losses.append(loss.item())  # the loss of the whole batch on every rank
    averager.close()
    with torch.no_grad():
        return losses, score(model.eval())


def connect():
    """Set up the ranks of the launcher; return the name of the engine and a group of this rank alone."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        return "gloo", dist.new_subgroups(1)[0]
    from mpi4py import MPI

    dc.set_default_group(MPI.COMM_WORLD)
    return "MPI", MPI.COMM_SELF


def main(
    models: Sequence[Callable[[], nn.Module]],
    batch: Callable[[torch.Generator], Sequence[Tensor]],
    score: Callable[[nn.Module], float],
    steps: int = 100,
) -> None:
    """Train each model on ranks and on one process; the losses must be equal.

    Args:
        models: classes of models, whose forward returns the loss of the whole batch from this rank's rows.
        batch: draws a whole batch of `BATCH` rows, the same on every rank.
        score: measures a model, in percent.
        steps: of training, unless the command line says otherwise.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps)
    steps = parser.parse_args().steps
    is_launched = bool({"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} & os.environ.keys())
    engine, alone = connect() if is_launched else ("gloo", None)
    for model in models:
        training = model, batch, score, steps
        if is_launched:
            n, (losses, percent) = dc.get_world_size(), train(*training)
        else:
            n, (losses, percent) = 3, spawn(lambda rank, training=training: train(*training), range(3), timeout=300)[0]
        with dc.set_default_group(alone):
            single, expected = train(*training)
        off = max(abs(a - b) for a, b in zip(losses, single, strict=True))
        if dc.get_rank() == 0:
            scores = f"score {percent:.1f} %, on one process {expected:.1f} %"
            print(f"{model.__name__}, {n} ranks on {engine}: {scores}; losses differ by {off:.0e}")
        assert off < 1e-8
    if dist.is_initialized():
        dist.destroy_process_group()
