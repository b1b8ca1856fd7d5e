"""Cost of CLIP's loss on two gloo processes: collectives, time of a step, and peak memory above the features.

    python examples/contrastive_cost.py                    # 1024 pairs per rank, 512 dimensions
    python examples/contrastive_cost.py 4096 256 512       # pairs per rank, dimensions, chunk_size

The baseline is the usual code: both modalities gathered by torch.distributed.nn.functional, and two matrices of logits.
Steps of the variants alternate; the time is their median. Memory is measured in processes of its own.
"""

import sys
import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cost import table
from torch.distributed.nn import functional as distributed

from diffcoll.nn.functional import clip_loss


def two_matrices(image, text, scale):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        images, texts = torch.cat(distributed.all_gather(image)), torch.cat(distributed.all_gather(text))
    targets = torch.arange(len(image)) + dist.get_rank() * len(image)
    to_texts, to_images = scale * image @ texts.T, scale * text @ images.T
    return (F.cross_entropy(to_texts, targets) + F.cross_entropy(to_images, targets)) / 2


def step(loss, xs):
    return torch.autograd.grad(loss(*xs), xs)[:2]  # that of the scale is a part of the whole, and parts differ


def steps(rows, dims, chunk):
    torch.manual_seed(dist.get_rank())
    image, text = (F.normalize(torch.randn(rows, dims)).requires_grad_() for _ in range(2))
    ours = {"clip_loss": clip_loss, f"chunk_size={chunk}": partial(clip_loss, chunk_size=chunk)}
    xs = image, text, torch.tensor(20.0, requires_grad=True)
    return {name: partial(step, loss, xs) for name, loss in {"two matrices": two_matrices, **ours}.items()}


def main(rows=1024, dims=512, chunk=256, repeats=3):
    table(f"{rows} pairs per rank, {dims} dimensions", steps, (rows, dims, chunk), repeats)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
