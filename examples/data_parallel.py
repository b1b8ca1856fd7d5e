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
STEPS = 60


def images(seed: int, count: int, blobs: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    masks = torch.zeros(count, 1, 16, 16, dtype=torch.double)
    for mask in masks if blobs else ():
        i, j = torch.randint(13, (2,), generator=g).tolist()
        mask[0, i : i + 3, j : j + 3] = 1
    noise = torch.randn(masks.shape, generator=g, dtype=torch.double)
    return masks + 0.7 * noise, masks


def batch(rank: int) -> tuple[Tensor, Tensor]:
    return images(rank, IMAGES[rank], blobs=rank != 2)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)).double()


def sums(logits: Tensor, masks: Tensor) -> Tensor:
    p = logits.sigmoid()
    return torch.stack([(p * masks).sum(), p.sum(), masks.sum()])


def dice(overlap: Tensor, predicted: Tensor, there: Tensor) -> Tensor:
    return 1 - (2 * overlap + 1) / (predicted + there + 1)


def train(rank: int, way: str) -> tuple[Tensor, float]:
    net = network()
    if way == "one process":
        x, masks = (torch.cat(v) for v in zip(*[batch(r) for r in range(len(IMAGES))], strict=True))
    else:
        x, masks = batch(rank)
        averager = dc.GradientAverager(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = sums(net(x), masks)
        loss = dice(*(dc.all_reduce(found) if way == "one loss" else found))
        if way == "one process":
            loss.backward()
        else:
            averager.backward(loss)
        optimizer.step()
    x, masks = images(99, 32, blobs=True)
    guess, there = net(x) > 0, masks > 0
    union = (guess | there).sum()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), ((guess & there).sum() / union).item()


def main() -> None:
    alone, iou = train(0, "one process")
    print(f"one process        IoU on new images {iou:.3f}")
    for way in ("many losses", "one loss"):
        (parameters, iou), *others = spawn(train, range(len(IMAGES)), [way] * len(IMAGES))
        error = (parameters - alone).abs().max().item()
        print(f"{way:18} IoU on new images {iou:.3f}, parameters off by {error:.0e}")
        assert all(torch.equal(parameters, other) for other, _ in others)
        assert error < 1e-8 if way == "one loss" else error > 1e-2


if __name__ == "__main__":
    main()
