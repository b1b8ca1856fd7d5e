"""global_mean: an average for logging."""

import math

import pytest
import torch
from training import RUNS, everywhere, refused

import diffcoll as dc


@everywhere
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_global_mean(where):
    def body(r):
        loss = torch.tensor(float(r + 1), requires_grad=True)
        means = [
            dc.global_mean(loss),
            dc.global_mean(r + 1, weight=r),
            dc.global_mean(math.nan if r == 0 else 2.0 * r, weight=torch.tensor(min(r, 1))),
            dc.global_mean(torch.tensor([1.0, 3.0], dtype=torch.bfloat16) * r),
            dc.global_mean(torch.tensor(2 * r)),
            dc.global_mean(torch.full((2,), 1 + 2j * r).to(torch.complex32)),
            dc.global_mean(3, weight=0),
        ]
        assert not means[0].requires_grad
        return means

    for *means, nothing in RUNS[where](body, range(3)):
        assert [m.tolist() for m in means] == [2.0, 8 / 3, 3.0, [1.0, 3.0], 2.0, [1 + 2j] * 2]
        assert nothing.isnan()
        wide = [torch.float32, torch.float64, torch.float64, torch.float32, torch.float32, torch.complex64]
        assert [m.dtype for m in means] == wide


@everywhere
def test_numbers_and_tensors_of_other_dtypes(where):
    """A rank without a batch passes 0.0, the others a loss in float32 or bfloat16; large weights are exact."""
    values = [0.0, torch.tensor(3.0), torch.tensor(5.0, dtype=torch.bfloat16)]

    def body(value, tokens):
        return dc.global_mean(value, tokens)

    found = RUNS[where](body, values, [0, 2**25, torch.tensor(1)])
    right = (3.0 * 2**25 + 5.0) / (2**25 + 1)
    assert [mean.item() for mean in found] == [right, 3.0, 3.0]
    assert [mean.dtype for mean in found] == [torch.float64, torch.float32, torch.float32]
    rows = [torch.zeros(2).double(), torch.full((2,), 3.0), torch.full((2,), 5.0)]
    assert RUNS[where](body, rows, [0, 2**25, 1])[0].tolist() == [right] * 2
    found = RUNS[where](body, [torch.tensor(1j), torch.tensor(2j, dtype=torch.complex128), torch.tensor(3j)], [1, 1, 2])
    assert [mean.item() for mean in found] == [2.25j] * 3


WRONG = [
    (lambda: dc.global_mean(1.0, torch.ones(2)), ValueError, "weight"),
    (lambda: dc.global_mean(1.0, math.inf), ValueError, "weight"),
    (lambda: dc.global_mean(1.0, "2"), TypeError, "weight"),
    (lambda: dc.global_mean("x"), TypeError, "value"),
]


@pytest.mark.parametrize(("call", "error", "argument"), WRONG)
def test_wrong_arguments(call, error, argument):
    assert refused(call, error).startswith(f"global_mean: {argument}: ")
