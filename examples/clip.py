"""CLIP with a learned scale: the upper and the lower half of handwritten digits, two encoders.

As CLIP does, the model learns the logarithm of the scale, and keeps the scale at 100 or below. The logarithm is a
parameter like any other: its gradient is averaged with the others.

    python examples/clip.py [--steps 100]    three processes, and one; with torchrun or mpiexec: see on_ranks.py
"""

import math

import torch
from digit_images import chosen, digits, mlp, nearest_neighbours, view
from on_ranks import main
from torch import nn

import diffcoll as dc


class CLIP(nn.Module):
    """One encoder for each half."""

    def __init__(self):
        super().__init__()
        self.upper, self.lower = mlp(32), mlp(32)
        self.log_scale, self.loss = nn.Parameter(torch.tensor(1 / 0.07).log()), dc.nn.CLIPLoss(normalize=True)

    def forward(self, upper, lower):
        with torch.no_grad():
            self.log_scale.clamp_(max=math.log(100))
        return self.loss(self.upper(upper), self.lower(lower), self.log_scale.exp())

    def features(self, images):
        return torch.cat([self.upper(images[:, :32]), self.lower(images[:, 32:])], 1)


def batch(generator):
    images, _ = chosen(generator)
    return view(images, generator)[:, :32], view(images, generator)[:, 32:]


if __name__ == "__main__":
    main([CLIP], batch, lambda model: nearest_neighbours(model.features(digits()[0])))
