"""InfoNCE on handwritten digits: with a differentiable gather, three processes give the loss curve of one.

Trains the same small encoder on one process and with two gathers on three, and plots the loss of the whole batch. The
training loop, with the loss and the averaging of gradients, is in `diffcoll/cli/digits.py`.

    python examples/digits_contrastive.py [FILE.png]
"""

import sys

import matplotlib

from diffcoll.cli import digits
from diffcoll.testing import spawn

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(file: str) -> None:
    images = digits.load()
    alone = digits.train(images, None)
    right = spawn(lambda rank: digits.train(images, digits.differentiable), range(3))[0]
    wrong = spawn(lambda rank: digits.train(images, digits.detached), range(3))[0]

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(alone.losses, color="black", label="one process, whole batch")
    axes.plot(right.losses, "o", color="tab:green", markersize=5, label="3 processes, diffcoll.all_gather")
    axes.plot(wrong.losses, color="tab:red", label="3 processes, the usual detached gather")
    axes.set(xlabel="step", ylabel="loss of the whole batch", title="InfoNCE on digits")
    axes.legend()
    figure.savefig(file, dpi=150)

    for name, trained in (("diffcoll.all_gather", right), ("detached gather", wrong)):
        loss, parameters = digits.difference(trained, alone)
        print(f"{name}: loss curve differs by {loss:.0e}, final parameters by {parameters:.0e}")
    assert max(digits.difference(right, alone)) < 1e-9
    assert min(digits.difference(wrong, alone)) > 1e-3
    print(f"wrote {file}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "digits_contrastive.png")
