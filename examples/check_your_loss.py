"""Check a distributed loss of your own: a CLIP loss with a gather that is wrong, the report, and the fix.

    python examples/check_your_loss.py

The gather is the one that is copied most. Its forward is right, so the values are, and training runs.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, assert_matches_single_process


class GatherLayer(torch.autograd.Function):
    """Gathers the rows of all ranks; the backward keeps this rank's slice of its own gradient."""

    @staticmethod
    def forward(ctx, x):
        blocks = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(blocks, x.contiguous())
        return torch.cat(blocks)

    @staticmethod
    def backward(ctx, g):
        return g.chunk(dist.get_world_size())[dist.get_rank()]


def clip_loss(gather):
    """Return the loss of this rank's images and texts against those of all ranks."""

    def loss(scale, image, text):
        image, text = F.normalize(image), F.normalize(text)
        targets = torch.arange(len(image)) + dc.get_rank() * len(image)
        images_to_texts = scale.logit_scale * image @ gather(text).T
        texts_to_images = scale.logit_scale * text @ gather(image).T
        return (F.cross_entropy(images_to_texts, targets) + F.cross_entropy(texts_to_images, targets)) / 2

    return loss


def batch(rows):
    return torch.randn(rows, 8, dtype=torch.double), torch.randn(rows, 8, dtype=torch.double)


def check(gather):
    torch.manual_seed(0)
    scale = nn.ParameterDict({"logit_scale": torch.tensor(2.0, dtype=torch.double)})
    options = {"module": scale, "ranks": (4, 4), "losses": "mean", "on": ["simulated"]}
    return assert_matches_single_process(clip_loss(gather), clip_loss(lambda x: x), batch, **options)


if __name__ == "__main__":
    try:
        check(GatherLayer.apply)
    except GradientMismatchError as error:
        print(error)
    print()
    print("With diffcoll.all_gather:")
    print(check(dc.all_gather))
