import torch

import diffcoll as dc

XS = [[1.0], [2.0], [3.0]]


def test_some_send_some_receive_some_keep(run, gradients):
    pairs = [(0, 2), (1, 1)]
    assert [y.tolist() for y in run(lambda x: dc.permute(torch.tensor(x), pairs), XS)] == [[0], [2], [1]]
    assert gradients(lambda x, w: w * dc.permute(x, pairs).sum(), XS, [5.0, 7.0, 11.0]) == [[11], [7], [0]]


def test_nobody_sends(run, gradients):
    assert [y.tolist() for y in run(lambda x: dc.permute(torch.tensor(x), []), XS)] == [[0]] * 3
    assert gradients(lambda x: dc.permute(x, []).sum(), XS) == [[0]] * 3


def test_what_only_moves_may_be_anything(run):
    got = run(lambda r: dc.permute(torch.tensor([r == 0, True]), [(0, 1), (1, 0)]), range(3))
    assert [y.tolist() for y in got] == [[False, True], [True, True], [False, False]]
