"""SimCLR, SupCon and Barlow Twins on handwritten digits: losses of two views of each image, in the batch of all ranks.

SupCon's positives are all images of a class on all ranks. Barlow Twins has no negatives: its cross-correlation and
batch norm are those of all ranks.

    python examples/two_views.py [--steps 100]    three processes, and one; with torchrun or mpiexec: see on_ranks.py
"""

import torch
from digit_images import chosen, digits, mlp, nearest_neighbours, view
from on_ranks import main
from torch import nn

import diffcoll as dc


class SimCLR(nn.Module):
    """An encoder, whose features are used later, and a projector."""

    def __init__(self, norm=None):
        super().__init__()
        self.encoder, self.projector = mlp(64), mlp(64, norm=norm)
        self.loss = dc.nn.NTXentLoss(temperature=0.5)

    def forward(self, first, second, labels):
        return self.loss(self.projector(self.encoder(first)), self.projector(self.encoder(second)))


class SupCon(SimCLR):
    """The same with labels."""

    def __init__(self):
        super().__init__()
        self.loss = dc.nn.SupConLoss(temperature=0.1)

    def forward(self, first, second, labels):
        views = torch.stack([self.projector(self.encoder(x)) for x in (first, second)], 1)
        return self.loss(views, labels)


class BarlowTwins(SimCLR):
    """The same with batch norm in the projector."""

    def __init__(self):
        super().__init__(norm=dc.nn.SyncBatchNorm(256))
        self.loss = dc.nn.BarlowTwinsLoss(0.02)


def batch(generator):
    images, labels = chosen(generator)
    return view(images, generator), view(images, generator), labels


if __name__ == "__main__":
    main([SimCLR, SupCon, BarlowTwins], batch, lambda model: nearest_neighbours(model.encoder(digits()[0])))
