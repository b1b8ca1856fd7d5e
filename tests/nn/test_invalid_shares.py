"""share and token_mean refuse wrong arguments; weights that are invalid on one rank are an error on all."""

from math import inf, nan

import pytest
import torch
from references import data
from runs import gloo, refusal, rules, runs_on

import diffcoll as dc
from diffcoll.nn.functional import share, token_mean
from diffcoll.testing import new_group

VALID = "finite non-negative weights on every rank"
INVALID = {
    "negative": ([1.0, -2.0], f"weight: got values from -2 to 1, expected {VALID}"),
    "nan": ([1.0, nan], f"weight: got values from nan to nan, expected {VALID}"),
    "inf": ([1.0, inf], f"weight: got values from 1 to inf, expected {VALID}"),
    "gradient": (
        [1.0, 2.0],
        "weight: got a tensor that requires a gradient, expected a constant; weight.detach() if it is a constant; "
        "weighted_mean differentiates weights too",
    ),
}


@runs_on("truth", "rules", "gloo", "mpi")
def test_invalid_weights_on_one_rank_are_an_error_on_all(run):
    def body(r):
        texts = []
        for name, (bad, _) in INVALID.items():
            w = torch.tensor(bad if r == 1 else [1.0, 2.0], requires_grad=name == "gradient" and r == 1)
            texts.append(refusal(ValueError, token_mean, torch.ones(2), w))
            texts.append(refusal(ValueError, share, torch.ones(()), w[1]))
        texts.append(refusal(ValueError, share, torch.ones(()), -2 if r == 1 else 2))
        return texts, dc.all_reduce(torch.ones(())).item()

    of_others = f"weight: got invalid weights on another rank, expected {VALID}"
    for r, (texts, after) in enumerate(run(body, range(3))):
        assert after == 3  # the group works
        for text, (name, (_, mine)) in zip(texts[:-1:2], INVALID.items(), strict=True):
            assert text == f"token_mean: {mine if r == 1 else of_others}", name
        number = {"negative": "-2", "nan": "nan", "inf": "inf"}
        for text, (name, (_, mine)) in zip(texts[1::2], INVALID.items(), strict=True):
            of_one = f"weight: got {number[name]}, expected {VALID}" if name in number else mine
            assert text == f"share: {of_one if r == 1 else of_others}"
        assert texts[-1] == f"share: {f'weight: got -2, expected {VALID}' if r == 1 else of_others}"


def test_a_weight_that_no_token_has_is_refused_too():
    assert "got values from -1 to -1" in refusal(
        ValueError, token_mean, torch.empty(0, 2), torch.tensor([[-1.0, -1.0]])
    )


def test_check_mode_compares_options_where_messages_are_sent():
    def body(r):
        pair = new_group([0, 1])
        calls = [
            lambda: share(torch.ones(()), 1, rank_reduction="sum" if r else "mean"),
            lambda: token_mean(torch.ones(2), groups=[None, new_group([r])] if r else None),
        ]
        with dc.check_mode():
            texts = [refusal(dc.CollectiveMismatchError, call) for call in calls]
            share(torch.ones(()), 1, total=2, rank_reduction="sum" if r else "mean", groups=pair)
            for _ in range(r):
                share(torch.ones(()), 1, total=2)
        return texts

    for of_reduction, of_sizes in rules(body, range(2)):
        assert "rank 1: share(sizes=[2], rank_reduction='sum')" in of_reduction
        assert "rank 0: token_mean(sizes=[2], rank_reduction='mean')" in of_sizes
        assert "rank 1: token_mean(sizes=[2, 1], rank_reduction='mean')" in of_sizes


def test_a_total_on_one_rank_only():
    """That rank sends nothing: in check mode an error at its next message."""

    def body(r):
        with pytest.raises(dc.CollectiveMismatchError) as caught, dc.check_mode():
            share(torch.ones(()), 1, total=2 if r else None)
            dc.all_reduce(torch.ones(1))
        return str(caught.value)

    for text in rules(body, range(2)):
        assert "rank 0: share(sizes=[2]" in text and "rank 1: call 1: all_reduce(" in text


X = torch.ones(4, 4)
ONE = torch.ones(())
BAD = [
    (lambda: share(X, 1), ValueError, "share: loss: got shape (4, 4), expected a 0-d tensor; loss.mean(), or token_me"),
    (lambda: share(1.0, 1), TypeError, "share: loss: got float, expected a tensor"),
    (lambda: share(ONE.long(), 1), TypeError, "share: loss: got torch.int64, expected a floating-point tensor"),
    (lambda: share(ONE, None), TypeError, "weight: got NoneType, expected a number or a real tensor with one element"),
    (lambda: share(ONE, True), TypeError, "weight: got bool, expected a number or"),
    (lambda: share(ONE, ONE * 1j), TypeError, "weight: got torch.complex64, expected a number or a real tensor"),
    (
        lambda: share(ONE, X),
        ValueError,
        "weight: got shape (4, 4), expected a number or a real tensor with one element; w",
    ),
    (lambda: share(ONE, 1, total=X), ValueError, "total: got shape (4, 4), expected a number or"),
    (lambda: share(ONE, 1, total="2"), TypeError, "total: got str, expected a number or"),
    (
        lambda: share(ONE, 1, total=-1),
        ValueError,
        "total: got -1, expected the finite sum of all ranks' weights, 0 only",
    ),
    (lambda: share(ONE, 1, total=0), ValueError, "total: got 0, expected the finite sum of all ranks' weights"),
    (lambda: token_mean(X, total=torch.tensor(0)), ValueError, "total: got 0, expected the finite sum of all ranks'"),
    (lambda: share(ONE, 1, total=nan), ValueError, "total: got nan, expected the finite sum"),
    (lambda: share(ONE, 1, total=inf), ValueError, "total: got inf, expected the finite sum"),
    (lambda: share(ONE, -1, total=3), ValueError, f"weight: got -1, expected {VALID}"),
    (
        lambda: share(ONE, 1, total=X[0, :1].requires_grad_()),
        ValueError,
        "total: got a tensor that requires a gradient",
    ),
    (lambda: share(ONE, 1, rank_reduction="none"), ValueError, "share: rank_reduction: got 'none'"),
    (lambda: share(ONE, 1, groups="dp"), TypeError, "share: group: got str, expected None, a torch.distributed.Proc"),
    (lambda: token_mean([1.0]), TypeError, "token_mean: losses: got list, expected a tensor"),
    (lambda: token_mean(X, 1.0), TypeError, "token_mean: weight: got float, expected a real tensor, or None"),
    (
        lambda: token_mean(X, X[:3]),
        ValueError,
        "got shape (3, 4), expected a shape that broadcasts to the losses', (4, 4)",
    ),
    (
        lambda: token_mean(X, X[0]),
        ValueError,
        "weight: got shape (4,), expected 2 dimensions, as the losses have; weight",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD)
def test_errors(call, error, text):
    assert text in refusal(error, call)


def test_dtensors_are_refused():
    def body(x):
        from torch.distributed.tensor import distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,))
        return refusal(TypeError, token_mean, distribute_tensor(x, mesh))

    for text in gloo(body, [X] * 2):
        assert text.startswith(
            "token_mean: losses: got a DTensor, expected a plain tensor; pass x.to_local(), and as groups"
        )


def test_a_mesh_dimension_is_a_group_and_a_mesh_is_not():
    def body(x):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        found = token_mean(x, groups=[mesh["dp"], mesh["cp"]])
        return found, token_mean(x), refusal((TypeError, ValueError), token_mean, x, groups=mesh)

    for found, of_all, text in gloo(body, data(4).split(1)):
        torch.testing.assert_close(found, of_all)
        assert "token_mean: group: got a DeviceMesh" in text
