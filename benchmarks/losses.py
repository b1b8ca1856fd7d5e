"""Losses and layers of `diffcoll.nn` beside the usual code: variants of one step that compute the same."""

from __future__ import annotations

import itertools
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


# ── a cross-entropy over a sharded vocabulary, by hand as in Megatron-LM ─────────────────────────────────


class SumGradients(Function):
    """Megatron's f: the gradients of hidden are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class CrossEntropy(Function):
    """Of this rank's logits, which it overwrites; the gradient is computed from the softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        first = dist.get_rank() * logits.shape[1]
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits -= largest[:, None]
        here = (target >= first) & (target < first + logits.shape[1])
        index = torch.where(here, target - first, 0)
        predicted = logits.gather(1, index[:, None]).squeeze(1) * here
        exponentials = logits.exp_()
        sums = torch.stack([predicted, exponentials.sum(1)])
        dist.all_reduce(sums)
        ctx.save_for_backward(exponentials.div_(sums[1][:, None]), index, here)
        return sums[1].log() - sums[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        softmax, index, here = ctx.saved_tensors
        softmax[torch.arange(len(index)), index] -= here.to(g.dtype)
        return softmax.mul_(g[:, None]), None


def by_hand(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = SumGradients.apply(hidden) @ weight.T  # type: ignore[no-untyped-call]
    loss: Tensor = CrossEntropy.apply(logits, target).mean()  # type: ignore[no-untyped-call]
    return loss


def vocabulary(rank: int, tokens: int = 1024, words: int = 8192, dims: int = 256, chunk: int = 256) -> Steps:
    """The cross-entropy of tokens over a vocabulary whose rows the ranks share."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dims, generator=g).requires_grad_()
    weight = (torch.randn(words, dims, generator=g) / dims**0.5).chunk(dist.get_world_size())[rank]
    xs = hidden, weight.clone().requires_grad_(), torch.randint(words, (tokens,), generator=g)
    losses: dict[str, Callable[..., Tensor]] = {
        "by hand": by_hand,
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
        widths = [3, *[16] * 5, *[32] * 5, *[64] * 5]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            stride = 1 if before in (3, after) else 2
            layers += nn.Conv2d(before, after, 3, stride, 1, bias=False), norm(after), nn.ReLU()
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    torch.manual_seed(rank)
    x, target = torch.randn(images, 3, 32, 32), torch.randint(10, (images,))

    def step(model: nn.Module, x: Tensor) -> None:
        F.cross_entropy(model(x), target).backward()  # type: ignore[no-untyped-call]

    found: Steps = {}
    for layout, name in ((torch.contiguous_format, ""), (torch.channels_last, ", channels last")):
        for label, norm in (
            ("BatchNorm2d and messages", LocalNorm),
            ("diffcoll.nn.SyncBatchNorm", dc.nn.SyncBatchNorm),
        ):
            model = network(norm).to(memory_format=layout)  # type: ignore[call-overload]
            found[label + name] = partial(step, model, x.contiguous(memory_format=layout))
    return found
