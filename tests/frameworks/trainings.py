"""Small trainings, on one process and on ranks inside somebody's framework, and the factor between their gradients.

Three ranks and two micro-batches, so that no two factors are equal; rows, and tokens, differ on each rank and in each
micro-batch, and one rank has none in some. SGD: Adam would hide a factor.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import diffcoll as dc
from diffcoll.testing import RanksFailedError, spawn

RANKS, UPDATES, RATE = 3, 20, 0.1
PAGES = Path(__file__).parents[2] / "notes" / "with"
ROWS = (3, 2, 4), (2, 5, 1), (4, 0, 3), (1, 3, 2)  # of each rank, micro-batch by micro-batch
EQUAL = ((3, 3, 3),)  # what most published losses ask for


class Towers(nn.Module):
    """Two encoders and the scale of their logits, a parameter after the collective."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 4).double(), nn.Linear(5, 4).double()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.double))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.scale.exp()


class Words(nn.Module):
    """Logits of tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7)).double()

    def forward(self, x):
        return self.layers(x)


def pairs_of(rows, generator):
    return tuple(torch.randn(rows, d, generator=generator, dtype=torch.double) for d in (6, 5))


def tokens_of(rows, generator):
    x = torch.randn(rows, 3, 6, generator=generator, dtype=torch.double)
    labels = torch.randint(0, 7, (rows, 3), generator=generator)
    return x, labels.masked_fill(torch.rand(rows, 3, generator=generator) < 0.4, -100)


def clip(model, image, text, summed=False):
    """`summed`: for gradients that are summed over ranks."""
    loss = dc.nn.functional.clip_loss(*model(image, text))
    return loss / dc.get_world_size() if summed else loss


def token_mean(model, x, labels, total=None):
    """`total`: the labels of all ranks and micro-batches, which all ranks know."""
    losses = F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="none")
    if total is None:
        return dc.nn.functional.token_mean(losses, labels.flatten() != -100)
    return dc.get_world_size() * losses.sum() / total  # those of ignored labels are 0


def mean_of_clip_losses(model, micro_batches):
    return sum(clip(model, *batch) for batch in micro_batches) / len(micro_batches)


def cross_entropy(model, micro_batches):
    x, labels = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    return F.cross_entropy(model(x).flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Training:
    """What is trained: on a rank by the loss of each micro-batch, on one process by that of the whole update."""

    model: Callable[[], nn.Module]
    rows: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    whole: Callable[[nn.Module, list[tuple[Tensor, ...]]], Tensor]
    sizes: Sequence[tuple[int, ...]] = ROWS

    def batches(self, micro_batches: int, updates: int) -> list[list[list[tuple[Tensor, ...]]]]:
        """Return [rank][update][micro-batch]."""
        generator = torch.Generator().manual_seed(1)
        sizes = [
            [self.sizes[(u * micro_batches + m) % len(self.sizes)] for m in range(micro_batches)]
            for u in range(updates)
        ]
        drawn = [[[self.rows(n, generator) for n in ranks] for ranks in micro] for micro in sizes]
        return [[[micro[r] for micro in update] for update in drawn] for r in range(RANKS)]

    def on_one_process(
        self, micro_batches: int = 1, updates: int = UPDATES, max_norm: float = math.inf
    ) -> dict[str, Tensor]:
        """Return the parameters after the updates with the batches of all ranks, and gradients clipped to max_norm."""
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for update in zip(*self.batches(micro_batches, updates), strict=True):
            whole = [tuple(map(torch.cat, zip(*ranks, strict=True))) for ranks in zip(*update, strict=True)]
            optimizer.zero_grad()
            self.whole(model, whole).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        return parameters(model)

    def on_ranks(self, train: Callable[..., Any], micro_batches: int = 1, updates: int = UPDATES) -> dict[str, Tensor]:
        """Train on gloo processes by train(model, [update][micro-batch]); return the parameters, equal on all ranks.

        `train` changes the model, or returns the parameters that it has trained.
        """

        def on_rank(mine):
            model = self.model()
            return train(model, mine) or parameters(model)

        first, *others = spawn(on_rank, self.batches(micro_batches, updates), timeout=100)
        for other in others:
            for name in first:
                assert torch.equal(first[name], other[name]), f"{name} differs between ranks"
        return first

    def assert_as_one_process(self, train: Callable[..., Any], micro_batches: int = 1) -> None:
        """Check that all updates on ranks give what they give on one process, to rounding."""
        expected, found = self.on_one_process(micro_batches), self.on_ranks(train, micro_batches)
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(
                found[name], expected[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
            )

    def factor(self, train: Callable[..., Any], micro_batches: int = 1) -> dict[str, float | str]:
        """Return what each parameter's gradient on one process is multiplied by; "wrong": another direction."""
        start = parameters(self.model())
        expected, found = self.on_one_process(micro_batches, 1), self.on_ranks(train, micro_batches, 1)
        return {name: _factor(found[name] - start[name], expected[name] - start[name]) for name in expected}


def _factor(found: Tensor, expected: Tensor) -> float | str:
    ratio = float((found * expected).sum() / expected.square().sum())
    return round(ratio, 6) if torch.allclose(found, ratio * expected, rtol=1e-7, atol=1e-11) else "wrong"


CLIP = Training(Towers, pairs_of, clip, mean_of_clip_losses)
TOKENS = Training(Words, tokens_of, token_mean, cross_entropy)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters, by the names that they have before a framework wraps the model."""
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def row_of_the_table(name: str) -> list[str]:
    """Return the cells of a row of the table of factors in notes/with/README.md."""
    text = (PAGES / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)
    return row.split(" | ")


def failures(*call: Any, timeout: float = 30) -> list[tuple[str, str] | None]:
    """Run a call on ranks, `spawn(*call)`, that fails; return each rank's (kind of failure, message)."""
    try:
        spawn(*call, timeout=timeout)
    except RanksFailedError as error:
        return [failed and (failed.kind, failed.message) for failed in error.failures.values()]
    raise AssertionError("no rank failed")


def cell(factor: float | str) -> str:
    """Return what the table says of a factor."""
    return factor if isinstance(factor, str) else f"{factor:g}"


def without_torchvision(*more: str) -> None:
    """Let this process import packages that import torchvision, and others: their names lead to nothing.

    PyPI's wheel of torchvision loads with a CUDA build of PyTorch alone.
    """
    names = ["", ".transforms", ".transforms.functional", ".ops", ".ops.misc", ".datasets", ".models"]
    for name in [f"torchvision{name}" for name in names] + list(more):
        sys.modules[name] = MagicMock()
