import torch

import diffcoll as dc
from diffcoll.testing import simulate

XS = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0]]


def test_blocks_and_their_gradients(run, gradients):
    assert [y.tolist() for y in run(lambda x: dc.reduce_scatter(torch.tensor(x)), XS)] == [[111], [222], [333]]
    # block r is in ℓ_r only, with weight w_r
    assert gradients(lambda x, w: w * dc.reduce_scatter(x).sum(), XS, [5.0, 7.0, 11.0]) == [[5, 7, 11]] * 3


def test_uneven_and_mean(run, gradients):
    def call(x):
        return dc.reduce_scatter(x, "mean", sizes=[2, 0, 1])

    assert [y.tolist() for y in run(lambda x: call(torch.tensor(x)), XS)] == [[37, 74], [], [111]]
    assert gradients(lambda x, w: w * call(x).sum(), XS, [6.0, 9.0, 12.0]) == [[2, 2, 4]] * 3


def test_last_dim_of_a_transposed_tensor(run):
    def body(r):
        x = (torch.arange(12.0).reshape(6, 2) * 10**r).t()  # 2 × 6, not contiguous
        return dc.reduce_scatter(x, dim=-1)

    for r, y in enumerate(run(body, range(3))):
        assert y.tolist() == [[111 * v for v in (4 * r, 4 * r + 2)], [111 * v for v in (4 * r + 1, 4 * r + 3)]]


def test_half_precision_is_added_up_in_single():
    """60000 + 60000 overflows in float16; the sum of all does not."""
    xs = [torch.full((3,), v, dtype=torch.float16) for v in (60000.0, 60000.0, -60000.0)]
    for rules in (False, True):
        ys = simulate(dc.reduce_scatter, xs, rules=rules)
        assert [y.item() for y in ys] == [60000.0] * 3
        assert ys[0].dtype == torch.float16
