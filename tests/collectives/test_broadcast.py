import torch

import diffcoll as dc
from diffcoll.testing import new_group

XS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_the_last_rank_sends(run, gradients):
    assert [y.tolist() for y in run(lambda x: dc.broadcast(torch.tensor(x), src=2), XS)] == [[5, 6]] * 3
    found = gradients(lambda x, w: w * dc.broadcast(x, src=2).sum(), XS, [1.0, 10.0, 100.0])
    assert found == [[0, 0], [0, 0], [111, 111]]


def test_replicated_keeps_one(gradients):
    found = gradients(lambda x: 7 * dc.broadcast(x, src=1, grad_placement="replicate").sum(), XS)
    assert found == [[0, 0], [7, 7], [0, 0]]


def test_src_is_a_rank_within_the_group(run, gradients):
    """pytorch#130515."""

    def call(x):
        group = new_group([1, 2])
        return dc.broadcast(x, src=1, group=group) if dc.get_rank() else x

    assert [y.tolist() for y in run(lambda x: call(torch.tensor(x)), XS)] == [[1, 2], [5, 6], [5, 6]]
    found = gradients(lambda x, w: w * call(x).sum(), XS, [1.0, 10.0, 100.0])
    assert found == [[1, 1], [0, 0], [110, 110]]
