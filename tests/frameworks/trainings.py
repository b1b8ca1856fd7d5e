"""Small trainings: on one process, and what those on ranks within somebody's framework share.

Three ranks and two micro-batches, so that no two factors are equal; rows, and tokens, differ on each rank and in each
micro-batch, and one rank has none in some. SGD: Adam would hide a factor.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from runs import ROOT
from test_notes import blocks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import diffcoll as dc

RANKS, UPDATES, RATE = 3, 6, 0.1
SIZES = (3, 2, 4), (2, 5, 1), (4, 0, 3), (1, 3, 2)  # of each rank, micro-batch by micro-batch
EQUAL = ((3, 3, 3),)  # what most published losses ask for


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters, not sharded, by the names that they have before a framework wraps the model."""
    wholes = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {name.removeprefix("module."): p.detach().clone() for name, p in wholes.items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE)


@dataclass(frozen=True)
class Training:
    """What is trained: the mean of loss(model, micro-batch, all micro-batches of the update) over the micro-batches.

    On one process the loss is that of all ranks' rows; on ranks its gradient is right after a mean over them.
    """

    model: Callable[[], nn.Module]
    rows: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    sizes: Sequence[tuple[int, ...]] = SIZES
    #: Bound of the gradient's norm.
    max_norm: float = math.inf

    def batches(self, micro_batches: int, updates: int) -> list[list[list[tuple[Tensor, ...]]]]:
        """Return [rank][update][micro-batch]."""
        generator, sizes = torch.Generator().manual_seed(1), itertools.cycle(self.sizes)
        drawn = [[[self.rows(n, generator) for n in next(sizes)] for _ in range(micro_batches)] for _ in range(updates)]
        return [[[micro[r] for micro in update] for update in drawn] for r in range(RANKS)]

    def on_one_process(self, micro_batches: int = 1, updates: int = UPDATES) -> dict[str, Tensor]:
        """Return the parameters after the updates with the batches of all ranks."""
        model = self.model()
        optimizer = sgd(model)
        for update in zip(*self.batches(micro_batches, updates), strict=True):
            whole = [tuple(map(torch.cat, zip(*ranks, strict=True))) for ranks in zip(*update, strict=True)]
            optimizer.zero_grad()
            sum(self.loss(model, batch, whole) for batch in whole).div(micro_batches).backward()
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
            optimizer.step()
        return parameters(model)


# ── pairs, tokens ────────────────────────────────────────────────────────────────────────────────────────


def normal(*dims: int) -> Callable[[int, torch.Generator], tuple[Tensor, ...]]:
    """Return a function that draws rows of so many numbers each."""
    return lambda n, generator: tuple(torch.randn(n, d, generator=generator, dtype=torch.double) for d in dims)


def layers(*sizes: int, bias: bool = True) -> nn.Sequential:
    """Linear layers with a tanh between them."""
    torch.manual_seed(0)
    linear = [nn.Linear(*pair, bias=bias) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*[module for layer in linear for module in (layer, nn.Tanh())][:-1]).double()


class Towers(nn.Module):
    """Two encoders and the scale of their logits, a parameter after the collective.

    The scale is of shape (1,): fully_shard refuses parameters without dimensions.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 4).double(), nn.Linear(5, 4).double()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.double))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.scale[0].exp()


def of_pairs(model, batch, update):
    return dc.nn.functional.clip_loss(*model(*batch))


def tokens_of(rows, generator):
    x = torch.randn(rows, 3, 6, generator=generator, dtype=torch.double)
    labels = torch.randint(0, 7, (rows, 3), generator=generator)
    return x, labels.masked_fill(torch.rand(rows, 3, generator=generator) < 0.4, -100)


def of_tokens(model, batch, update):
    """The mean over the labels of all ranks and micro-batches."""
    x, labels = batch
    total = dc.all_reduce(sum((labels != -100).sum() for _, labels in update))
    losses = F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="sum")
    return dc.get_world_size() * len(update) * losses / total


CLIP = Training(Towers, normal(6, 5), of_pairs)
TOKENS = Training(lambda: layers(6, 8, 7), tokens_of, of_tokens)


# ── ways to train ────────────────────────────────────────────────────────────────────────────────────────


class Way(NamedTuple):
    """One way to train: train(model, [update][micro-batch], loss); a loss of its own is divided by `loss.factor`."""

    train: Callable[..., Any]
    training: Training = CLIP
    micro_batches: tuple[int, ...] = (1, 2)
    #: So many ranks after each other have the same rows, as with tensor parallelism.
    copies: int = 1


def loop(
    model, updates, loss, optimizer=None, averager=None, backward=Tensor.backward, around=None, before_step=lambda: None
):
    """Train by a plain loop; around(is_last) surrounds a micro-batch, the last one is in a block of the averager."""
    optimizer = optimizer or sgd(model)
    for update in updates:
        for k, batch in enumerate(update, 1):
            is_last = k == len(update)
            with around(is_last) if around else contextlib.nullcontext():
                with averager.reduce() if averager and is_last else contextlib.nullcontext():
                    backward(loss(model, batch, update))
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def ddp(sync="last", hook=None, **options):
    """Return a function that trains with DDP."""

    def train(model, updates, loss):
        wrapped = DistributedDataParallel(model, **options)
        if hook:
            wrapped.register_comm_hook(None, hook)

        def around(is_last):
            return contextlib.nullcontext() if is_last or sync == "always" else wrapped.no_sync()

        loop(wrapped, updates, loss, around=around)

    return train


def of_page(page: str, name: str) -> Any:
    """Return a function or a class of a page of notes/with, from the first block that defines it."""
    text = (ROOT / "notes" / "with" / page).read_text("utf-8")
    namespace = {"__name__": page}
    exec(next(code for _, code in blocks(text) if re.search(rf"^(def|class) {name}\b", code, re.MULTILINE)), namespace)
    return namespace[name]
