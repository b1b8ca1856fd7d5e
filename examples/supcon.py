"""Supervised contrastive learning on handwritten digits: all images of a class on all ranks are positives.

python examples/supcon.py [--steps 100]    three processes, and one; with torchrun or mpiexec: see on_ranks.py
"""

import torch
from digit_images import chosen, digits, mlp, nearest_neighbours, view
from on_ranks import main
from torch import nn

import diffcoll as dc


class SupCon(nn.Module):
    """An encoder, whose features are used later, and a projector."""

    def __init__(self):
        super().__init__()
        self.encoder, self.projector = mlp(64), mlp(64)
        self.loss = dc.nn.SupConLoss(temperature=0.1)

    def forward(self, first, second, labels):
        views = torch.stack([self.projector(self.encoder(x)) for x in (first, second)], 1)
        return self.loss(views, labels)


def batch(generator):
    images, labels = chosen(generator)
    return view(images, generator), view(images, generator), labels


if __name__ == "__main__":
    main(SupCon, batch, lambda model: nearest_neighbours(model.encoder(digits()[0])))
