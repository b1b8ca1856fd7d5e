"""`grad_placement` in the words of torch.distributed.tensor."""

import pytest
import torch
from releases import compiles, one_graph
from runs import runs_on
from torch.distributed.tensor import Partial, Replicate

import diffcoll as dc

XS = [[1.0, -2.0], [3.0, 0.5], [-7.0, 4.0]]
COLLECTIVES = [dc.all_reduce, dc.all_gather, dc.broadcast]


@runs_on("truth", "rules", "gloo")
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("word", "placement"), [("partial", Partial), ("replicate", Replicate)])
def test_placements_are_other_spellings(gradients, collective, word, placement):
    """Also where some ranks use one and some the other, in check mode."""
    ws = [1.0, 1.0, 1.0] if word == "replicate" else [1.0, 10.0, 100.0]

    def loss(spelling):
        def of_rank(x, w):
            with dc.check_mode():
                return w * collective(x, grad_placement=spelling()).square().sum()

        return of_rank

    words = gradients(loss(lambda: word), XS, ws)
    assert gradients(loss(placement), XS, ws) == words
    assert gradients(loss(lambda: word if dc.get_rank() == 1 else placement()), XS, ws) == words


@compiles
def test_in_a_graph():
    placement, x = Replicate(), torch.tensor([2.0], requires_grad=True)
    one_graph(lambda x: dc.all_reduce(x, grad_placement=placement).square().sum())(x).backward()
    assert x.grad.tolist() == [4.0]
