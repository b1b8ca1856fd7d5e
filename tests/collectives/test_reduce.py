import torch

import diffcoll as dc

XS = [[1.0, 2.0], [30.0, 40.0], [500.0, 600.0]]


def test_the_sum_is_on_dst_and_zeros_elsewhere(run, gradients):
    got = [y.tolist() for y in run(lambda x: dc.reduce(torch.tensor(x), dst=1), XS)]
    assert got == [[0, 0], [531, 642], [0, 0]]
    # the other ranks' y is a constant zero, so their weights have no effect
    assert gradients(lambda x, w: w * dc.reduce(x, dst=1).sum(), XS, [2.0, 3.0, 5.0]) == [[3, 3]] * 3


def test_mean_and_infinities(run, gradients):
    assert gradients(lambda x, w: w * dc.reduce(x, 2, "mean").sum(), XS, [3.0, 6.0, 9.0]) == [[3, 3]] * 3
    got = run(lambda r: dc.reduce(torch.tensor([torch.inf, 1.0]) * (r + 1)), range(3))
    assert [y.tolist() for y in got] == [[torch.inf, 6], [0, 0], [0, 0]]


def test_dtypes_that_a_backend_may_not_add(run):
    got = run(lambda r: dc.reduce(torch.tensor([100 * r, -r], dtype=torch.int16), dst=2), range(3))
    assert [y.tolist() for y in got] == [[0, 0], [0, 0], [300, -3]]
    assert got[0].dtype == torch.int16
