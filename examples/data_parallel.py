"""Segmentation with a Dice loss on three processes: the mean of local losses, and one loss of the whole batch.

    python examples/data_parallel.py

Few pixels belong to a blob; one rank has none. The model is trained with the mean of the ranks' Dice losses, as DDP
does, with the Dice loss of all pixels through `diffcoll.all_reduce`, and on one process with the whole batch.
"""

import torch
from torch import Tensor, nn

import diffcoll as dc
from diffcoll.testing import spawn

IMAGES = [6, 4, 2]  # on each rank


def images(seed: int, count: int, blobs: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    masks = torch.zeros(count, 1, 16, 16, dtype=torch.double)
    for mask in masks if blobs else ():
        i, j = torch.randint(13, (2,), generator=g).tolist()
        mask[0, i : i + 3, j : j + 3] = 1
    return masks + 0.7 * torch.randn(masks.shape, generator=g, dtype=torch.double), masks


def train(batch: tuple[Tensor, Tensor], is_one_loss: bool) -> tuple[Tensor, float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)).double()
    averager = dc.GradientAverager(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    x, masks = batch
    for _ in range(60):
        optimizer.zero_grad()
        p = net(x).sigmoid()
        sums = torch.stack([(p * masks).sum(), p.sum(), masks.sum()])
        overlap, predicted, there = dc.all_reduce(sums) if is_one_loss else sums
        averager.backward(1 - (2 * overlap + 1) / (predicted + there + 1))
        optimizer.step()
    x, masks = images(99, 32, blobs=True)
    guess, right = net(x) > 0, masks > 0
    return nn.utils.parameters_to_vector(net.parameters()).detach(), (
        (guess & right).sum() / (guess | right).sum()
    ).item()


def main() -> None:
    batches = [images(rank, count, blobs=rank != 2) for rank, count in enumerate(IMAGES)]
    alone, iou = train(tuple(map(torch.cat, zip(*batches, strict=True))), True)
    print(f"one process        IoU on new images {iou:.3f}")
    for way, is_one_loss in (("many losses", False), ("one loss", True)):
        (parameters, iou), *others = spawn(train, batches, [is_one_loss] * len(IMAGES))
        error = (parameters - alone).abs().max().item()
        print(f"{way:18} IoU on new images {iou:.3f}, parameters off by {error:.0e}")
        assert all(torch.equal(parameters, other) for other, _ in others)
        assert error < 1e-8 if is_one_loss else error > 1e-2


if __name__ == "__main__":
    main()
