"""Losses and layers of `diffcoll.nn` beside the usual code: variants of one step that compute the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.nn import functional as distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from benchmarks.measuring import Steps
from diffcoll.nn.functional import clip_loss, info_nce_loss, vocab_parallel_cross_entropy


def gradients(loss: Callable[..., Tensor], *xs: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the tensors that require one."""
    return torch.autograd.grad(loss(*xs), [x for x in xs if x.requires_grad])


# ── CLIP: both modalities gathered, and two matrices of logits ───────────────────────────────────────────


def two_matrices(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        images, texts = (torch.cat(distributed.all_gather(x)) for x in (image, text))  # type: ignore[no-untyped-call]
    targets = torch.arange(len(image)) + dist.get_rank() * len(image)
    to_texts, to_images = scale * image @ texts.T, scale * text @ images.T
    return (F.cross_entropy(to_texts, targets) + F.cross_entropy(to_images, targets)) / 2


def clip(rank: int, rows: int = 1024, dims: int = 512, chunk: int = 256) -> Steps:
    """The loss of CLIP on this rank's pairs."""
    torch.manual_seed(rank)
    image, text = (F.normalize(torch.randn(rows, dims)).requires_grad_() for _ in range(2))
    scale = torch.tensor(20.0)
    losses: dict[str, Callable[..., Tensor]] = {
        "two matrices": two_matrices,
        "diffcoll": clip_loss,
        f"diffcoll, chunk_size={chunk}": partial(clip_loss, chunk_size=chunk),
    }
    return {name: partial(gradients, loss, image, text, scale) for name, loss in losses.items()}


# ── GradCache: a checkpoint of the encoder for each chunk of rows ────────────────────────────────────────


class Encoder(nn.Sequential):
    """Encodes both parts of the pairs, in chunks of rows if asked for."""

    def __init__(self, dims: int, layers: int, chunk: int | None = None) -> None:
        torch.manual_seed(0)
        super().__init__(*(module for _ in range(layers) for module in (nn.Linear(dims, dims), nn.GELU())))
        self.chunk = chunk

    def encode(self, x: Tensor) -> Tensor:
        encode: Callable[[Tensor], Tensor] = super().forward
        if self.chunk is None:
            return encode(x)
        return torch.cat([checkpoint(encode, c, use_reentrant=False) for c in torch.split(x, self.chunk)])

    def forward(self, pair: list[Tensor]) -> list[Tensor]:
        return [self.encode(x) for x in pair]


def grad_cache(rank: int, rows: int = 1024, dims: int = 512, layers: int = 8, chunk: int = 128) -> Steps:
    """InfoNCE over the pairs of all ranks: a plain step, and one that keeps the activations of one chunk."""
    torch.manual_seed(rank)
    pair = torch.randn(2, rows, dims).unbind()

    def step(encode: nn.Module, chunk_size: int | None, backward: Callable[[Tensor], object]) -> list[Tensor | None]:
        encode.zero_grad()
        backward(info_nce_loss(*encode(pair), temperature=0.05, chunk_size=chunk_size))
        return [p.grad for p in encode.parameters()]

    plain, cached = Encoder(dims, layers), Encoder(dims, layers, chunk)
    in_block, of_cached = dc.GradientAverager(plain).backward, dc.GradientAverager(cached).backward
    return {
        "diffcoll.GradientAverager": partial(step, plain, None, in_block),
        "DistributedDataParallel": partial(step, DistributedDataParallel(Encoder(dims, layers)), None, Tensor.backward),
        "diffcoll, GradCache": partial(step, cached, None, of_cached),
        "diffcoll, GradCache, loss in chunks": partial(step, cached, chunk, of_cached),
    }


# ── a cross-entropy over a sharded vocabulary ────────────────────────────────────────────────────────────


def gathered_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = dc.all_gather(dc.sum_gradients(hidden) @ weight.T, dim=1, grad_placement="replicate")
    return F.cross_entropy(logits, target)


def vocabulary(rank: int, tokens: int = 1024, words: int = 8192, dims: int = 256, chunk: int = 256) -> Steps:
    """The cross-entropy of tokens over a vocabulary whose rows the ranks share."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dims, generator=g).requires_grad_()
    weight = (torch.randn(words, dims, generator=g) / dims**0.5).chunk(dist.get_world_size())[rank]
    xs = hidden, weight.clone().requires_grad_(), torch.randint(words, (tokens,), generator=g)
    losses: dict[str, Callable[..., Tensor]] = {
        "diffcoll, all logits gathered": gathered_logits,
        "diffcoll": vocab_parallel_cross_entropy,
        f"diffcoll, chunk_size={chunk}": partial(vocab_parallel_cross_entropy, chunk_size=chunk),
    }
    return {name: partial(gradients, loss, *xs) for name, loss in losses.items()}


# ── SyncBatchNorm: beside local statistics and two all_reduces of the same size ──────────────────────────


class Messages(Function):
    """The identity, with the messages of a SyncBatchNorm in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(2 * x.shape[1] + 1))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(2 * g.shape[1]))
        return g


class LocalNorm(nn.BatchNorm2d):
    """BatchNorm2d and the messages."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Messages.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return y


def batch_norm(rank: int, images: int = 4) -> Steps:
    """A step of a network of 15 convolutions, each with a batch norm."""

    def network(norm: Callable[[int], nn.Module]) -> nn.Module:
        layers: list[nn.Module] = []
        for channels in (3, *[32] * 14):
            layers += nn.Conv2d(channels, 32, 3, padding=1, bias=False), norm(32), nn.ReLU()
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    torch.manual_seed(rank)
    x, target = torch.randn(images, 3, 32, 32), torch.randint(10, (images,))

    def step(model: nn.Module) -> None:
        F.cross_entropy(model(x), target).backward()  # type: ignore[no-untyped-call]

    norms: dict[str, Callable[[int], nn.Module]] = {
        "BatchNorm2d and messages": LocalNorm,
        "diffcoll.nn.SyncBatchNorm": dc.nn.SyncBatchNorm,
    }
    return {name: partial(step, network(norm)) for name, norm in norms.items()}


def batch_norm_layer(shape: tuple[int, ...], rank: int) -> Steps:
    """One layer alone: of few values a channel, where calls cost, and of many, where memory does."""
    torch.manual_seed(rank)
    x = torch.randn(shape, requires_grad=True)

    def step(model: nn.Module) -> None:
        y = model(x)
        torch.autograd.grad(y, x, y.detach())

    return {
        "BatchNorm2d and messages": partial(step, LocalNorm(shape[1])),
        "diffcoll.nn.SyncBatchNorm": partial(step, dc.nn.SyncBatchNorm(shape[1])),
    }
