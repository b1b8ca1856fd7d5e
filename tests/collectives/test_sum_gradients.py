import pytest
import torch

import diffcoll as dc
from diffcoll.testing import simulate


def test_one_weight_used_by_all(run, gradients):
    # ℓ_r = w² c_r; the gradient of the shared weight is 2w Σ c = 4 · 111
    found = gradients(lambda w, c: c * dc.sum_gradients(w).square().sum(), [[2.0]] * 3, [1.0, 10.0, 100.0])
    assert found == [[444]] * 3
    assert [y.item() for y in run(lambda r: dc.sum_gradients(torch.tensor(5)), range(3))] == [5] * 3


def test_a_row_parallel_layer(gradients):
    """Megatron's pair: g = all_reduce(replicated) after the layer, f = sum_gradients before it."""
    parts = [torch.tensor(v, dtype=torch.double) for v in (2.0, 3.0, 5.0)]

    def loss(x, part):
        return dc.all_reduce(part * dc.sum_gradients(x), grad_placement="replicate").square().sum()

    assert gradients(loss, [[1.0]] * 3, parts) == [[200]] * 3  # (10 x)² has derivative 200 x


def test_y_is_a_copy_that_may_be_changed(gradients):
    def loss(x, a):
        y = dc.sum_gradients(x)
        y.mul_(a)
        return y.sum() + 0 * x.sum()

    assert gradients(loss, [[1.0, 2.0]] * 2, [3.0, 5.0]) == [[8, 8]] * 2
    x = torch.ones(3)
    dc.sum_gradients(x).zero_()
    assert x.tolist() == [1, 1, 1]


def test_an_x_that_differs_is_found_in_truth():
    xs = [torch.tensor(float(r)) for r in range(3)]
    with pytest.raises(dc.CollectiveMismatchError, match="declared replicated, or its gradient, differs"):
        simulate(dc.sum_gradients, xs)
