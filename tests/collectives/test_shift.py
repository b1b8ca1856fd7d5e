import pytest
import torch

import diffcoll as dc

XS = [[1.0], [2.0], [3.0]]
WS = [5.0, 7.0, 11.0]


@pytest.mark.parametrize(
    ("offset", "wrap", "received", "returned"),
    [
        (1, True, [3, 1, 2], [7, 11, 5]),
        (-1, False, [2, 3, 0], [0, 5, 7]),
        (0, False, [1, 2, 3], [5, 7, 11]),
        (5, True, [2, 3, 1], [11, 5, 7]),
        (5, False, [0, 0, 0], [0, 0, 0]),
    ],
)
def test_ring_and_line(run, gradients, offset, wrap, received, returned):
    got = run(lambda x: dc.shift(torch.tensor(x), offset, wrap=wrap), XS)
    assert [y.item() for y in got] == received
    assert gradients(lambda x, w: w * dc.shift(x, offset, wrap=wrap).sum(), XS, WS) == [[g] for g in returned]


def test_there_and_back_is_the_identity(run):
    got = run(lambda x: dc.shift(dc.shift(torch.tensor(x), 2), -2), XS)
    assert [y.tolist() for y in got] == XS
