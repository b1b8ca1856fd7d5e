"""Segmentation with Dice: where the ink of noisy handwritten digits is; one ratio for the batch of all ranks.

python examples/segmentation.py [--steps 100]    three processes, and one; with torchrun or mpiexec: see on_ranks.py
"""

import torch
from digit_images import TESTED, chosen, digits
from on_ranks import main
from torch import nn

import diffcoll as dc


def noisy(images, generator):
    """Return images with noise, and where their ink is, both (b, 1, 8, 8)."""
    images = images.view(-1, 1, 8, 8)
    return images + 0.4 * torch.randn(images.shape, dtype=images.dtype, generator=generator), images > 0.5


class Segmentation(nn.Module):
    """Probabilities of ink."""

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(1, 16, 3, padding=1), dc.nn.SyncBatchNorm(16), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)]
        self.net, self.loss = nn.Sequential(*layers), dc.nn.DiceLoss()

    def forward(self, images, ink):
        return self.loss(self.net(images).sigmoid(), ink)


def batch(generator):
    return noisy(chosen(generator)[0], generator)


def overlap(model):
    """Return the intersection over union of the images that are not trained on, in percent."""
    images, ink = noisy(digits()[0][:TESTED], torch.Generator().manual_seed(2))
    found = model.net(images) > 0
    return 100 * float((found & ink).sum() / (found | ink).sum())


if __name__ == "__main__":
    main([Segmentation], batch, overlap)
