"""SimCLR on handwritten digits: two views of each image, NT-Xent of the batch of all ranks.

python examples/simclr.py [--steps 100]    three processes with unequal parts of each batch, and one process
torchrun --nproc-per-node 3 examples/simclr.py
mpiexec -n 3 python examples/simclr.py
"""

from digit_images import chosen, digits, mlp, nearest_neighbours, view
from on_ranks import Task, main
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
    main(Task(SimCLR, batch, SimCLR.forward, lambda model: nearest_neighbours(model.encoder(digits()[0]))))
