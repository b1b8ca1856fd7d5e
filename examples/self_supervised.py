"""SimCLR, CLIP and Barlow Twins on handwritten digits: three processes with unequal parts train as one process does.

* simclr: two augmented views of each image, NT-Xent.
* clip: the upper and the lower half of each image, two encoders, a learned temperature.
* barlow: two augmented views, SyncBatchNorm in the projector, no negatives.

Features are evaluated by nearest neighbours with three labelled images per class; with raw pixels that is 71 %.

    python examples/self_supervised.py [--steps 100] [--file FILE.png]    one process, three processes, and a plot
    torchrun --nproc-per-node 3 examples/self_supervised.py
    mpiexec -n 3 python examples/self_supervised.py
"""

import argparse
import os

import matplotlib
import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.nn import functional as F

import diffcoll as dc
from diffcoll.testing import spawn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH, TESTED = 192, 597


def mlp(inputs: int, *, norm: bool = False) -> nn.Sequential:
    middle = [dc.nn.SyncBatchNorm(256)] if norm else []
    return nn.Sequential(nn.Linear(inputs, 256), *middle, nn.ReLU(), nn.Linear(256, 64))


class SimCLR(nn.Module):
    """Two augmented views, NT-Xent."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.projector = mlp(64), mlp(64)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        z1, z2 = (self.projector(self.encoder(x)) for x in (first, second))
        return dc.nn.functional.nt_xent_loss(z1, z2, temperature=0.5)

    def features(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class CLIP(nn.Module):
    """The upper and the lower half of each image, and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = mlp(32), mlp(32)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        image, text = self.upper(first[:, :32]), self.lower(second[:, 32:])
        return dc.nn.functional.clip_loss(image, text, self.log_scale.exp(), normalize=True)

    def features(self, x: Tensor) -> Tensor:
        return torch.cat([self.upper(x[:, :32]), self.lower(x[:, 32:])], 1)


class BarlowTwins(nn.Module):
    """Two augmented views, SyncBatchNorm, no negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.projector = mlp(64), mlp(64, norm=True)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        z1, z2 = (self.projector(self.encoder(x)) for x in (first, second))
        return dc.nn.functional.barlow_twins_loss(z1, z2, lambd=0.02)

    def features(self, x: Tensor) -> Tensor:
        return self.encoder(x)


METHODS = {"simclr": SimCLR, "clip": CLIP, "barlow": BarlowTwins}


def view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return the images moved by at most one pixel, with noise."""
    padded = F.pad(images.view(-1, 8, 8), (1, 1, 1, 1))
    moved = torch.stack([padded[:, i : i + 8, j : j + 8] for i, j in ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))])
    chosen = torch.randint(len(moved), (len(images),), generator=generator)
    noise = torch.randn(images.shape, dtype=images.dtype, generator=generator)
    return moved[chosen, torch.arange(len(images))].flatten(1) + 0.2 * noise


def train(method: str, steps: int) -> tuple[list[float], float]:
    """Train on this rank's part of each batch; part r is r + 1 times as large as part 0.

    Returns:
        The loss of the whole batch at each step, and the accuracy of nearest neighbours.
    """
    data = load_digits()
    images, labels = torch.as_tensor(data.data) / 16, data.target
    unlabelled = images[TESTED:]
    rank, n = dc.get_rank(), dc.get_world_size()
    ends = [BATCH * r * (r + 1) // (n * (n + 1)) for r in range(n + 1)]
    mine = slice(ends[rank], ends[rank + 1])

    torch.manual_seed(0)
    model = METHODS[method]().double()
    averager = dc.GradientAverager(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)  # of the whole batch: the same on every rank
    losses = []
    for _ in range(steps):
        batch = unlabelled[torch.randint(len(unlabelled), (BATCH,), generator=generator)]
        loss = model(*(view(batch, generator)[mine] for _ in range(2)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(dc.global_mean(loss.detach()).item())
    averager.detach()

    with torch.no_grad():
        features = F.normalize(model.eval().features(images), dim=1)
    return losses, accuracy(features, labels)


def accuracy(features: Tensor, labels: np.ndarray) -> float:
    few = [TESTED + i for c in range(10) for i in (labels[TESTED:] == c).nonzero()[0][:3]]
    return KNeighborsClassifier(1).fit(features[few], labels[few]).score(features[:TESTED], labels[:TESTED])


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def connect():
    """Set up the ranks of the launcher; return the name of the engine and a group of this rank alone."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        return "gloo", dist.new_subgroups(1)[0]
    from mpi4py import MPI

    dc.set_default_group(MPI.COMM_WORLD)
    return "MPI", MPI.COMM_SELF


def launched(steps: int) -> None:
    engine, alone = connect()
    for method in METHODS:
        losses, found = train(method, steps)
        with dc.set_default_group(alone):
            off = difference(losses, train(method, steps)[0])
        if dc.get_rank() == 0:
            n = dc.get_world_size()
            print(f"{n} ranks on {engine}, {method}: accuracy {found:.1%}, losses differ from one process by {off:.0e}")
        assert off < 1e-8
    if engine == "gloo":
        dist.destroy_process_group()


def main(file: str, steps: int) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
    on_three = spawn(lambda rank: [train(method, steps) for method in METHODS], range(3), timeout=300)[0]
    for method, axis, (losses, found) in zip(METHODS, axes, on_three, strict=True):
        single, expected = train(method, steps)
        off = difference(losses, single)
        print(f"{method}: accuracy {expected:.1%} on one process, {found:.1%} on three, losses differ by {off:.0e}")
        assert off < 1e-8
        assert found > 0.71 or steps < 100
        assert abs(found - expected) < 0.01
        axis.plot(single, color="black", label="one process")
        axis.plot(range(0, steps, 5), losses[::5], "o", color="tab:green", markersize=4, label="3 processes")
        axis.set(xlabel="step", title=f"{method}: accuracy {found:.1%}")
    axes[0].set_ylabel("loss of the whole batch")
    axes[0].legend()
    figure.savefig(file, dpi=120)
    print(f"wrote {file}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--file", default="self_supervised.png")
    options = parser.parse_args()
    if {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} & os.environ.keys():
        launched(options.steps)
    else:
        main(options.file, options.steps)
