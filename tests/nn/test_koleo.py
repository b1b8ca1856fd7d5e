"""KoLeo on ranks against one process with the whole batch, row by row from the published formula."""

from functools import partial

import pytest
import torch
from references import data, holds, koleo
from runs import gloo, gloo_messages, refusal, rules

import diffcoll as dc
from diffcoll.nn.functional import koleo_loss
from diffcoll.testing import simulate

SIZES = ((6,), (4, 4), (5, 3), (1, 6), (5, 0, 3), (0, 2, 1))


def rows(n):
    """Neighbours are in pairs i, i + n // 2, which most splits separate."""
    half = data(n - n // 2, 4, seed=n)
    return (torch.cat([half, half[: n // 2] + 0.2 * data(n // 2, 4, seed=1)]),)


@pytest.mark.parametrize("rank_reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"normalize": False, "eps": 0.1}], ids=str)
def test_matches_one_process(options, rank_reduction):
    ours = partial(koleo_loss, rank_reduction=rank_reduction, **options)
    on = ["simulated", "gloo"] if rank_reduction == "mean" else ["simulated"]
    holds(ours, partial(koleo, **options), rows, sizes=SIZES, rank_reduction=rank_reduction, on=on)


def test_the_nearest_row_of_another_rank_counts():
    """Each rank's own rows are far apart; the gradient of a distance goes to both of its rows."""
    x = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 1.0], [4.0, 2.0]], dtype=torch.double)
    ours = partial(koleo_loss, normalize=False, eps=0.0, rank_reduction="sum")
    parts = [part.clone().requires_grad_() for part in x.split(2)]
    losses = simulate(ours, parts)
    torch.testing.assert_close(sum(losses).item(), -torch.tensor([1.0, 2.0, 1.0, 2.0]).log().sum().item() / 4)
    found = torch.cat(torch.autograd.grad(sum(losses), parts))
    expected = torch.tensor([[0, 0.5], [0, 0.25], [0, -0.5], [0, -0.25]], dtype=torch.double)
    torch.testing.assert_close(found, expected)


def test_equal_rows_have_finite_gradients():
    x = torch.ones(4, 3).split([3, 1])
    for g in rules(torch.func.grad(koleo_loss), x):
        assert g.isfinite().all()


def test_what_is_sent():
    """The numbers of rows, then the features; backward one reduce_scatter of them."""

    def body(x):
        values = []
        forward = gloo_messages(lambda: values.append(koleo_loss(x.requires_grad_())))
        return forward, gloo_messages(values[0].backward)

    forward, backward = gloo(body, rows(8)[0].split([5, 3]))[0]
    assert [n for name, n in forward if name == "send"] == [2, 5 * 4]
    assert [n for name, n in backward if name == "send"] == [3 * 4]  # the gradient of the other rank's rows


def test_half_precision_is_computed_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        x = rows(64)[0].to(dtype)
        values = simulate(koleo_loss, x.split([40, 24]))
        assert values[0].dtype == torch.float32
        torch.testing.assert_close(sum(values).double() / 2, koleo(x.double()), rtol=2e-5, atol=0)

        def cast(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return koleo_loss(x)

        assert simulate(cast, x.split([40, 24])) == values


@pytest.mark.parametrize("sizes", [(0, 0), (0, 1)])
def test_a_row_without_a_neighbour_is_an_error_on_every_rank(sizes):
    def body(x):
        return refusal(ValueError, koleo_loss, x)

    expected = (
        f"koleo_loss: batch: got {sum(sizes)} rows on all ranks together, expected at least 2; "
        "skip this step on all ranks"
    )
    assert simulate(body, torch.ones(sum(sizes), 3).split(sizes)) == [expected] * 2


def test_check_mode_compares_options():
    def body(x, eps):
        with dc.check_mode():
            return refusal(dc.CollectiveMismatchError, koleo_loss, x, eps=eps)

    for text in rules(body, rows(8)[0].split([5, 3]), [1e-8, 1e-6]):
        assert "eps=1e-08" in text and "eps=1e-06" in text


DIFFERENT = [{"eps": 1e-6}, {"normalize": False}, {"rank_reduction": "sum"}, {"size": 4}, {"dtype": torch.double}]


def test_ranks_that_differ_are_an_error():
    """Without check mode, in the message that there is; equal numbers are equal."""

    def body(r):
        texts = []
        for more in DIFFERENT:
            options = {"size": 3, "dtype": torch.float32, **(more if r else {})}
            x = torch.ones(2, options.pop("size"), dtype=options.pop("dtype"))
            texts.append(refusal(dc.CollectiveMismatchError, koleo_loss, x, **options))
        koleo_loss(x.float(), eps=[1, 1.0][r])
        return texts

    what = "eps, normalize, rank_reduction, dtype or size of the features"
    for texts in gloo(body, range(2)):
        assert all(text.startswith(f"koleo_loss: the ranks differ in {what}; ") for text in texts)


X = torch.ones(4, 3)
BAD = [
    (X[0], {}, r"features: got shape \(3,\), expected shape \(b, D\); flatten the features"),
    (X.long(), {}, "features: got torch.int64, expected float16, bfloat16, float32 or float64"),
    ([1.0], {}, r"features: got list, expected a tensor of shape \(b, D\)"),
    (X, {"eps": -1.0}, "eps: got -1.0, expected a finite non-negative number"),
    (X, {"normalize": 1}, "normalize: got int, expected True or False"),
    (X, {"rank_reduction": "none"}, 'rank_reduction: got \'none\', expected "mean" or "sum"'),
]


@pytest.mark.parametrize(("features", "options", "text"), BAD)
def test_errors(features, options, text):
    with pytest.raises((TypeError, ValueError), match=f"^koleo_loss: {text}"):
        koleo_loss(features, **options)
