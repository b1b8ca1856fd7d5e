"""SimCLR on handwritten digits: two views of each image, NT-Xent of the batch of all ranks.

python examples/simclr.py [--steps 100]    three processes, and one; with torchrun or mpiexec: see on_ranks.py
"""

from digit_images import chosen, digits, mlp, nearest_neighbours, view
from on_ranks import main
from torch import nn

import diffcoll as dc


class SimCLR(nn.Module):
    """An encoder, whose features are used later, and a projector."""

    def __init__(self):
        super().__init__()
        self.encoder, self.projector = mlp(64), mlp(64)
        self.loss = dc.nn.NTXentLoss(temperature=0.5)

    def forward(self, first, second):
        return self.loss(self.projector(self.encoder(first)), self.projector(self.encoder(second)))


def batch(generator):
    images, _ = chosen(generator)
    return view(images, generator), view(images, generator)


if __name__ == "__main__":
    main(SimCLR, batch, lambda model: nearest_neighbours(model.encoder(digits()[0])))
