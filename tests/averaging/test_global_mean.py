"""global_mean: an average for logging."""

import math

import pytest
import torch
from training import everywhere

import diffcoll as dc


def tensors(dtype, *values):
    return [torch.tensor(value, dtype=dtype) for value in values]


def cases():
    """The three ranks' values, their weights, the mean, and its dtype on rank 0."""
    losses = [x.requires_grad_() for x in tensors(torch.float32, 1.0, 2.0, 3.0)]
    half_complex = tensors(torch.complex64, [1, 0], [1 + 2j, 0], [1 + 4j, 3])
    no_batch, large = (3.0 * 2**25 + 5.0) / (2**25 + 1), [0, 2**25, torch.tensor(1)]
    return [
        (losses, None, 2.0, torch.float32),
        ([1, 2, 3], [0, 1, 2], 8 / 3, torch.float64),
        ([math.nan, 2.0, 4.0], tensors(torch.int64, 0, 1, 1), 3.0, torch.float64),
        (tensors(torch.bfloat16, [0.0, 0.0], [1.0, 3.0], [2.0, 6.0]), None, [1.0, 3.0], torch.float32),
        (tensors(torch.int64, 0, 2, 4), None, 2.0, torch.float32),
        ([z.to(torch.complex32) for z in half_complex], None, [1 + 2j, 1], torch.complex64),
        # ranks without a batch pass 0.0, others have other dtypes; large weights are exact
        ([0.0, torch.tensor(3.0), torch.tensor(5.0).bfloat16()], large, no_batch, torch.float64),
        ([torch.zeros(2).double(), *tensors(None, [3.0] * 2, [5.0] * 2)], large, [no_batch] * 2, torch.float64),
        ([*tensors(torch.complex64, 1j, 3j), torch.tensor(2j).to(torch.complex128)], [1, 2, 1], 2.25j, torch.complex64),
    ]


@everywhere
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_global_mean(run):
    def body(r):
        means = [dc.global_mean(values[r], weights and weights[r]) for values, weights, *_ in cases()]
        return means, dc.global_mean(3, weight=0)

    found = run(body, range(3))
    assert [(m.tolist(), m.dtype, m.requires_grad) for m in found[0][0]] == [(*case[2:], False) for case in cases()]
    for means, nothing in found:
        torch.testing.assert_close(means, found[0][0], check_dtype=False, rtol=1e-6, atol=0)
        assert nothing.isnan()
