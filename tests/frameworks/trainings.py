"""Small trainings, on one process: what trainings on ranks within somebody's framework are compared with.

Three ranks and two micro-batches, so that no two factors are equal; rows, and tokens, differ on each rank and in each
micro-batch, and one rank has none in some. SGD: Adam would hide a factor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import diffcoll as dc

RANKS, UPDATES, RATE = 3, 20, 0.1
ROWS = (3, 2, 4), (2, 5, 1), (4, 0, 3), (1, 3, 2)  # of each rank, micro-batch by micro-batch
EQUAL = ((3, 3, 3),)  # what most published losses ask for


@dataclass(frozen=True)
class Training:
    """What is trained: whole(model, micro-batches) is the loss of one process, whose rows are those of all ranks."""

    model: Callable[[], nn.Module]
    rows: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    whole: Callable[[nn.Module, list[tuple[Tensor, ...]]], Tensor]
    sizes: Sequence[tuple[int, ...]] = ROWS
    #: Bound of the gradient's norm.
    max_norm: float = math.inf

    def batches(self, micro_batches: int, updates: int) -> list[list[list[tuple[Tensor, ...]]]]:
        """Return [rank][update][micro-batch]."""
        generator = torch.Generator().manual_seed(1)
        sizes = [
            [self.sizes[(u * micro_batches + m) % len(self.sizes)] for m in range(micro_batches)]
            for u in range(updates)
        ]
        drawn = [[[self.rows(n, generator) for n in ranks] for ranks in micro] for micro in sizes]
        return [[[micro[r] for micro in update] for update in drawn] for r in range(RANKS)]

    def on_one_process(self, micro_batches: int = 1, updates: int = UPDATES) -> dict[str, Tensor]:
        """Return the parameters after the updates with the batches of all ranks."""
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for update in zip(*self.batches(micro_batches, updates), strict=True):
            whole = [tuple(map(torch.cat, zip(*ranks, strict=True))) for ranks in zip(*update, strict=True)]
            optimizer.zero_grad()
            self.whole(model, whole).backward()
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
            optimizer.step()
        return parameters(model)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters, by the names that they have before a framework wraps the model."""
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


# ── pairs ────────────────────────────────────────────────────────────────────────────────────────────────


class Towers(nn.Module):
    """Two encoders and the scale of their logits, a parameter after the collective."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 4).double(), nn.Linear(5, 4).double()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.double))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.scale.exp()


def pairs_of(rows, generator):
    return tuple(torch.randn(rows, d, generator=generator, dtype=torch.double) for d in (6, 5))


def pairs(model, batch, update):
    """What is right under a mean over ranks, if nobody divides by the micro-batches."""
    return dc.nn.functional.clip_loss(*model(*batch)) / len(update)


def mean_of_clip_losses(model, micro_batches):
    return sum(pairs(model, batch, micro_batches) for batch in micro_batches)


CLIP = Training(Towers, pairs_of, mean_of_clip_losses)


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────


class Words(nn.Module):
    """Logits of tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7)).double()

    def forward(self, x):
        return self.layers(x)


def tokens_of(rows, generator):
    x = torch.randn(rows, 3, 6, generator=generator, dtype=torch.double)
    labels = torch.randint(0, 7, (rows, 3), generator=generator)
    return x, labels.masked_fill(torch.rand(rows, 3, generator=generator) < 0.4, -100)


def tokens(model, batch, update):
    """The same for the mean over the labels of all ranks and micro-batches."""
    x, labels = batch
    total = dc.all_reduce(sum((labels != -100).sum() for _, labels in update))
    losses = F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="sum")
    return dc.get_world_size() * losses / total


def cross_entropy(model, micro_batches):
    x, labels = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    return F.cross_entropy(model(x).flatten(0, 1), labels.flatten())


TOKENS = Training(Words, tokens_of, cross_entropy)


# ── what is passed ───────────────────────────────────────────────────────────────────────────────────────


def undivided(loss):
    """For a framework that divides by the micro-batches; of pairs, it is the loss as it is."""
    return lambda model, batch, update: len(update) * loss(model, batch, update)


def summed(loss):
    """For a sum over ranks."""
    return lambda model, batch, update: loss(model, batch, update) / dc.get_world_size()


def without_torchvision(*more: str) -> None:
    """Let this process import packages that import torchvision, and others: their names lead to nothing.

    PyPI's wheel of torchvision loads with a CUDA build of PyTorch alone.
    """
    names = ["", ".transforms", ".transforms.functional", ".ops", ".ops.misc", ".datasets", ".models"]
    for name in [f"torchvision{name}" for name in names] + list(more):
        sys.modules[name] = MagicMock()
