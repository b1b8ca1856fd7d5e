import torch

import diffcoll as dc

XS = [[1.0], [2.0, 3.0], []]


def test_uneven_blocks_and_nothing_elsewhere(run, gradients):
    for sizes in ([1, 2, 0], "auto"):
        got = run(lambda x: dc.gather(torch.tensor(x), dst=2, sizes=sizes), XS)  # noqa: B023
        assert [y.tolist() for y in got] == [[], [], [1, 2, 3]]

    def loss(x):
        y = dc.gather(x, dst=2, sizes="auto")
        return (y * torch.tensor([1.0, 10.0, 100.0])).sum() if dc.get_rank() == 2 else y.sum()

    assert gradients(loss, XS) == [[1], [10, 100], []]


def test_0d(run):
    assert [y.tolist() for y in run(lambda r: dc.gather(torch.tensor(r + 5), dst=1), range(3))] == [[], [5, 6, 7], []]


def test_along_the_last_dim(run):
    got = run(lambda r: dc.gather(torch.full((2, r), r), dim=-1, sizes=[0, 1, 2]), range(3))
    assert got[0].tolist() == [[1, 2, 2]] * 2
    assert [tuple(y.shape) for y in got] == [(2, 3), (2, 0), (2, 0)]
