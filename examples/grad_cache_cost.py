"""Cost of GradCache on two gloo processes: collectives, time of a step, and peak memory above inputs and model.

    python examples/grad_cache_cost.py                     # 1024 pairs per rank, 512 dimensions, 8 layers, chunks: 128
    python examples/grad_cache_cost.py 4096 256 12 256     # pairs per rank, dimensions, layers, chunk_size

GradCache is a checkpoint of the encoder for each chunk of rows, within the module whose gradients are averaged. The
baseline is the plain step under a GradientAverager: encoder, InfoNCE over the pairs of both ranks, backward.
Steps of the variants alternate; the time is their median. Memory is measured in processes of its own.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from cost import table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.nn.functional import info_nce_loss


class Encoder(nn.Sequential):
    """Encodes both parts of the pairs, in chunks of rows if asked for."""

    def __init__(self, dims, layers, chunk=None):
        super().__init__(*(module for _ in range(layers) for module in (nn.Linear(dims, dims), nn.GELU())))
        self.chunk = chunk

    def encode(self, x):
        if self.chunk is None:
            return super().forward(x)
        return torch.cat(
            [checkpoint(super(Encoder, self).forward, c, use_reentrant=False) for c in x.split(self.chunk)]
        )

    def forward(self, pair):
        return [self.encode(x) for x in pair]


def step(encode, pair, loss):
    encode.zero_grad()
    loss(encode(pair)).backward()
    return [p.grad for p in encode.parameters()]


def steps(rows, dims, layers, chunk):
    torch.manual_seed(dist.get_rank())
    pair = torch.randn(2, rows, dims).unbind()

    def loss(features, chunk_size=None):
        return info_nce_loss(*features, temperature=0.05, chunk_size=chunk_size)

    def encoder(chunk=None):
        torch.manual_seed(0)
        return Encoder(dims, layers, chunk)

    averaged, cached = encoder(), encoder(chunk)
    averagers = {model: dc.GradientAverager(model) for model in (averaged, cached)}

    def in_block(model, *arguments):
        with averagers[model].reduce():
            step(model, *arguments)
        return [p.grad for p in model.parameters()]

    variants = {
        "GradientAverager": (in_block, averaged, pair, loss),
        "DistributedDataParallel": (step, DistributedDataParallel(encoder()), pair, loss),
        "GradCache": (in_block, cached, pair, loss),
        "GradCache, loss in chunks": (in_block, cached, pair, partial(loss, chunk_size=chunk)),
    }
    return {name: partial(*variant) for name, variant in variants.items()}


def main(rows=1024, dims=512, layers=8, chunk=128, repeats=5):
    title = f"{rows} pairs per rank, {dims} dimensions, {layers} layers, chunk_size={chunk}"
    table(title, steps, (rows, dims, layers, chunk), repeats)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
