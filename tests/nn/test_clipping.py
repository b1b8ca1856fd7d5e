"""clip_grad_norm_: the norm and the clipped gradients of one process that has all parameters."""

from math import inf, nan

import pytest
import torch
from runs import gloo, refusal, rules
from torch import nn
from torch.nn.utils import clip_grad_norm_ as on_one_process

import diffcoll as dc
from diffcoll.testing import new_group

#: rank of (tensor parallel 2) × (expert parallel 2) → its coordinates.
RANKS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def parameter(size, seed, dtype=torch.float64, scale=1.0):
    p = nn.Parameter(torch.zeros(size, dtype=dtype))
    p.grad = scale * torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return p


def whole(dtype=torch.float64, scale=1.0):
    """Norms, which all ranks have; a weight split over tp; experts split over ep, and their weights over tp too."""
    return {
        "norm": parameter(3, 0, dtype, scale),
        "weights": [parameter(4 + tp, 10 + tp, dtype, scale) for tp in range(2)],
        "experts": [parameter(2, 20 + ep, dtype, scale) for ep in range(2)],
        "split experts": [[parameter(ep, 30 + 2 * tp + ep, dtype, scale) for ep in range(2)] for tp in range(2)],
    }


def flat(parameters):
    rest = [p for row in parameters["split experts"] for p in row]
    return [parameters["norm"], *parameters["weights"], *parameters["experts"], *rest]


def of_rank(r, parameters):
    tp, ep = RANKS[r]
    return [
        [parameters["norm"]],
        [parameters["weights"][tp]],
        [parameters["experts"][ep]],
        [parameters["split experts"][tp][ep]],
    ]


def axes(r):
    """The groups of this rank; all ranks make all groups."""
    tp = [new_group([ep, 2 + ep]) for ep in range(2)][RANKS[r][1]]
    ep = [new_group([2 * tp, 2 * tp + 1]) for tp in range(2)][RANKS[r][0]]
    return tp, ep


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize("norm_type", [2.0, 1, 3.5, inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128, torch.bfloat16])
def test_as_on_one_process(dtype, norm_type, max_norm):
    def clipped(r):
        tp, ep = axes(r)
        lists = of_rank(r, whole(dtype))
        total = dc.nn.clip_grad_norm_(lists, max_norm, [(), (tp,), (ep,), (tp, ep)], norm_type=norm_type)
        return total, [p.grad for listed in lists for p in listed]

    one = whole(dtype)
    # The norm of half precision is that of the same numbers in float64.
    exact = [p.grad.to(torch.complex128 if dtype.is_complex else torch.float64).abs() for p in flat(one)]
    expected = torch.linalg.vector_norm(torch.cat(exact), norm_type)
    on_one_process([p for p in flat(one) if p.numel()], max_norm, norm_type=norm_type)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}.get(dtype, 1e-12)
    for r, (total, gradients) in enumerate(rules(clipped, range(4))):
        assert total.dtype == torch.float64
        torch.testing.assert_close(
            total, expected, rtol=1e-6 if dtype in (torch.float32, torch.bfloat16) else 1e-12, atol=0
        )
        wanted = [p.grad for listed in of_rank(r, one) for p in listed]
        torch.testing.assert_close(gradients, wanted, rtol=tolerance, atol=tolerance)


def test_on_gloo_with_pieces_that_some_ranks_lack():
    """Rank 1 has an expert without a gradient, rank 2 has none; a tied weight counts once."""

    def clipped(r):
        replicated, mine = parameter(3, 0), [parameter(2, 5 + r)] * 2 if r != 2 else []
        if r == 1:
            mine[0].grad = None
        lists = [replicated], mine
        total = dc.nn.clip_grad_norm_([iter(listed) for listed in lists], 0.5, [(), (None,)])
        return total, replicated.grad, mine[0].grad if mine else None

    one = [parameter(3, 0), parameter(2, 5)]
    expected = on_one_process(one, 0.5)
    for r, (total, replicated, mine) in enumerate(gloo(clipped, range(3))):
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(replicated, one[0].grad)
        assert mine is None if r else torch.allclose(mine, one[1].grad)


def test_large_gradients_do_not_overflow():
    """Squares of float32 numbers above 1e19 are infinite."""

    def total(r):
        return dc.nn.clip_grad_norm_([[parameter(3, r, torch.float32, 1e25)]], 1.0, [(None,)])

    expected = torch.cat([parameter(3, r, torch.float32, 1e25).grad.double() for r in range(3)]).norm()
    for found in rules(total, range(3)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [inf, nan])
def test_gradients_that_are_not_finite(bad):
    def body(r):
        p = parameter(3, r)
        if r == 1:
            p.grad[0] = bad
        text = refusal(RuntimeError, dc.nn.clip_grad_norm_, [[p]], 1.0, [(None,)], error_if_nonfinite=True)
        assert not torch.equal(p.grad, torch.zeros(3))  # nothing was changed
        return text, dc.nn.clip_grad_norm_([[p]], 1.0, [(None,)])

    for text, total in rules(body, range(3)):
        assert text.startswith(
            f"clip_grad_norm_: parameters: got gradients of norm {bad}, expected a finite norm; skip"
        )
        assert not total.isfinite()


WRONG = {
    "a model's parameters": lambda p: ((m for m in [p]), 1.0, [()]),
    "no lists": lambda p: ([p], 1.0, [()]),
    "no tuples of groups": lambda p: ([[p]], 1.0, [None]),
    "another number": lambda p: ([[p], []], 1.0, [()]),
    "twice": lambda p: ([[p], [p]], 1.0, [(), ()]),
    "a negative norm": lambda p: ([[p]], -1.0, [()]),
}
TEXTS = {
    "a model's parameters": "parameters: got a generator, expected a list with one list of parameters for each split",
    "no lists": "parameters: got a list of Parameter, expected a list with one list of parameters for each split",
    "no tuples of groups": "groups: got a list of NoneType, expected a list with one list of groups for each split",
    "another number": "groups: got 1 entries, expected 2, one for each list of parameters",
    "twice": "parameters: got a parameter in two lists, expected each in one",
    "a negative norm": "max_norm: got -1.0, expected a finite non-negative number",
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what):
    p = parameter(2, 0)
    before = p.grad.clone()
    assert TEXTS[what] in refusal((TypeError, ValueError), dc.nn.clip_grad_norm_, *WRONG[what](p))
    assert torch.equal(p.grad, before)


def test_an_axis_that_is_named_twice_is_refused():
    """Its ranks would count twice in the norm."""

    def body(r):
        p = parameter(2, r)
        text = refusal(ValueError, dc.nn.clip_grad_norm_, [[p]], 1.0, [(new_group([0, 1, 2]), None)])
        assert torch.equal(p.grad, parameter(2, r).grad)
        return text

    assert set(rules(body, range(3))) == {
        "clip_grad_norm_: groups: got two groups with the ranks [0, 1, 2], expected groups that have only this rank in "
        "common; name each axis of the mesh once"
    }


def test_wrong_options_and_gradients():
    p = parameter(2, 0)
    assert "norm_type: got 0, expected a number above 0, or inf" in refusal(
        ValueError, dc.nn.clip_grad_norm_, [[p]], 1.0, [()], norm_type=0
    )
    p.grad = p.grad.to_sparse()
    assert "a gradient of layout torch.sparse_coo, expected dense gradients; p.grad = p.grad.to_dense()" in refusal(
        TypeError, dc.nn.clip_grad_norm_, [[p]], 1.0, [()]
    )
