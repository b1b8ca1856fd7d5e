import torch

import diffcoll as dc

X = [[1.0, 2.0, 3.0]] * 3


def test_slices_and_gathered_gradients(run, gradients):
    def call(x):
        return dc.split(x, sizes=[1, 0, 2])

    assert [y.tolist() for y in run(lambda x: call(torch.tensor(x)), X)] == [[1], [], [2, 3]]
    # every copy of x receives the whole gradient
    assert gradients(lambda x, w: w * call(x).sum(), X, [5.0, 7.0, 11.0]) == [[5, 11, 11]] * 3


def test_there_and_back(gradients):
    """Split, compute on the block, gather: the loss is one number and counts once."""

    def loss(x):
        return dc.all_gather(dc.split(x).square(), grad_placement="replicate").sum()

    assert gradients(loss, X) == [[2, 4, 6]] * 3


def test_it_is_a_copy():
    x = torch.arange(4.0)
    y = dc.split(x)
    y.zero_()
    assert x.tolist() == [0, 1, 2, 3]
