"""Dice, IoU and Tversky losses on ranks against one process with the whole batch."""

import pytest
import torch
from references import ratio
from releases import compiles, one_graph
from runs import gloo, gloo_messages, refusal, rules, truth

import diffcoll as dc
from diffcoll.nn.functional import dice_loss, iou_loss, tversky_loss
from diffcoll.testing import assert_matches_single_process, ranks, simulate

SIZES = ((6,), (4, 4), (5, 3), (5, 0, 3), (0, 2, 1))
DIMS = [None, "per class", (0, 2, 3), (0, -1), 0, (2, 3), (1, 2, 3)]


LOSSES = {"dice": dice_loss, "iou": iou_loss, "tversky": tversky_loss}


def call(kind, p, t, **options):
    weights = {"alpha": 0.3, "beta": 0.8} if kind == "tversky" else {}
    return LOSSES[kind](p, t, **weights, **options)


def segmented(n, seed=0):
    """Images of three unbalanced classes; soft targets, so that they have gradients too."""
    g = torch.Generator().manual_seed(100 * seed + n)
    rate = torch.tensor([0.8, 0.15, 0.05])[:, None, None]
    p = torch.rand(n, 3, 4, 2, generator=g).pow(1 / rate)
    t = 0.9 * (torch.rand(n, 3, 4, 2, generator=g) < rate) + 0.05
    return p.double(), t.double()


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("kind", LOSSES)
def test_matches_one_process(kind, dims):
    def distributed(p, t):
        return call(kind, p, t, dims=dims, smooth=0.5)

    def single(p, t):
        return ratio(kind, p, t, 0.5, dims)

    on = ["simulated", "gloo"] if (kind, dims) in [("dice", "per class"), ("tversky", (2, 3))] else ["simulated"]
    assert_matches_single_process(distributed, single, segmented, sizes=SIZES, order=2, on=on, tolerance=1e-10)


def test_matches_one_process_as_a_sum_and_on_mpi():
    def distributed(p, t):
        return sum(call(kind, p, t, dims=dims, rank_reduction="sum") for kind in LOSSES for dims in (None, (1, 2, 3)))

    def single(p, t):
        return sum(ratio(kind, p, t, dims=dims) for kind in LOSSES for dims in (None, (1, 2, 3)))

    on = ["simulated", "mpi"]
    assert_matches_single_process(
        distributed, single, segmented, sizes=[(3, 0, 4)], rank_reduction="sum", order=2, on=on
    )


def test_the_losses_of_the_note():
    p, t = torch.tensor([0.9, 0.8, 0.6, 0.3, 0.2]), torch.tensor([1, 1, 0, 0, 0])
    parts = p.split([3, 2]), t.split([3, 2])
    for loss, whole in ((dice_loss, 0.2414), (iou_loss, 0.3415)):
        for value in simulate(loss, *parts):
            assert abs(value - whole) < 1e-4
    both = simulate(lambda p, t: (iou_loss(p, t), tversky_loss(p, t, alpha=1, beta=1)), *parts)
    torch.testing.assert_close(both[0][0], both[0][1])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64])
def test_targets_of_any_dtype(dtype):
    p, t = segmented(6)
    t = (t > 0.5).to(dtype)
    parts = p.float().split([4, 2]), t.split([4, 2])
    for value in simulate(dice_loss, *parts):
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(value.double(), ratio("dice", p, t.double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    """Sums of 200 000 pixels, which float16 cannot hold."""
    p = torch.rand(2, 100_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for value in simulate(dice_loss, p.split(1), (p > 0.3).split(1)):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), ratio("dice", p.double(), (p > 0.3).double()), rtol=1e-5, atol=0)
    p.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dice_loss(p, p.detach() > 0.3).backward()
    assert p.grad.dtype == dtype and p.grad.any()


def test_a_class_that_is_nowhere():
    """smooth=0: nothing predicted and nothing there is 0/0, as on one process; with a prediction it is 1."""
    none, some = torch.zeros(2, 3), torch.tensor([[0.0, 0.5, 0.2]])
    assert all(torch.isnan(v) for v in simulate(lambda p: dice_loss(p, 0 * p, smooth=0), none.split(1)))
    assert simulate(lambda p: dice_loss(p, 0 * p, smooth=0), [none, some]) == [1, 1]


@pytest.mark.parametrize(("dims", "numbers"), [(None, [[7], [7]]), ((0, 2, 3), [[13], [13]]), ((2, 3), [[3], []])])
def test_what_is_sent(dims, numbers):
    def body(p, t):
        values = []
        forward = gloo_messages(lambda: values.append(dice_loss(p.requires_grad_(), t, dims=dims)))
        return [forward, gloo_messages(values[0].backward)]

    found = gloo(body, *(x.split([5, 3]) for x in segmented(8)))[0]
    assert found == [[("all_reduce", numel) for numel in each] for each in numbers]


def test_torch_func():
    p, t = segmented(6)
    parts = p.split([4, 2]), t.split([4, 2])
    found = rules(lambda p, t: torch.func.grad(dice_loss)(p, t) / 2, *parts)
    torch.testing.assert_close(torch.cat(found), torch.func.grad(dice_loss)(p, t))
    classes = rules(lambda p, t: torch.vmap(dice_loss, 1)(p, t), *parts)
    torch.testing.assert_close(classes[1].mean(), ratio("dice", p, t, dims="per class"))


@pytest.mark.parametrize("dims", [None, (2, 3)])
@pytest.mark.parametrize("kind", LOSSES)
def test_an_empty_batch_is_an_error_on_every_rank(kind, dims):
    def body(p):
        return refusal(ValueError, call, kind, p, p, dims=dims)

    text = f"{kind}_loss: batch: got 0 rows on all ranks together, expected at least 1; skip this step on all ranks"
    assert simulate(body, [torch.zeros(0, 3, 2, 2)] * 2) == [text, text]


# ── values that are no probabilities ─────────────────────────────────────────────────────────────────────

LOGITS = "apply torch.sigmoid to logits of one class, torch.softmax over the classes to those of several"
ELSEWHERE = "values outside [0, 1] on another rank"


def refused(p, t, **options):
    return refusal((ValueError, RuntimeError), dice_loss, p, t, **options)


@pytest.mark.parametrize("dims", [None, "per class", (2, 3)])
@pytest.mark.parametrize("bad", [0, 2])
def test_logits_on_one_rank_are_an_error_on_all(bad, dims):
    p, t = (list(x.split([3, 0, 4])) for x in segmented(7))
    p[bad] = p[bad].logit()
    low, high = p[bad].min().item(), p[bad].max().item()
    for run in (truth, rules):
        texts = run(lambda p, t: refused(p.requires_grad_(), t, dims=dims), p, t)
        for r, text in enumerate(texts):
            got = f"values from {low:.4g} to {high:.4g}" if r == bad else ELSEWHERE
            assert text == f"dice_loss: probabilities: got {got}, expected values in [0, 1] on every rank; {LOGITS}"


@ranks(3, on="gloo")
def test_logits_on_one_process_are_an_error_on_all_and_the_next_batch_works():
    rank = dc.get_rank()
    p, t = segmented(6 + rank)
    assert "probabilities: got values" in refused(p.logit() if rank == 1 else p, t, dims="per class")
    assert "targets: got values" in refused(p, t * 255 if rank == 2 else t, dims=(2, 3))
    assert 0 < dice_loss(p, t) < 1


def test_targets_that_are_no_fractions():
    p, t = segmented(6)
    mask = (t > 0.5).to(torch.uint8)
    texts = simulate(
        refused, p.split([4, 2]), (mask * torch.tensor([1] * 4 + [255] * 2).view(-1, 1, 1, 1)).split([4, 2])
    )
    assert f"targets: got {ELSEWHERE}" in texts[0]
    assert "targets: got values from 0 to 255" in texts[1] and "divide a mask of 0 and 255 by 255" in texts[1]
    indices = mask.argmax(1, keepdim=True).expand_as(p) + 1
    assert "for class indices, F.one_hot" in refused(p.half(), indices)
    assert "got values from -inf to inf" in refused(torch.tensor([[torch.inf, -torch.inf, 0.5]]), torch.ones(1, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounding_and_nan_are_no_error(dtype):
    """Interpolated probabilities may be one rounding above 1; NaN is the loss of a model that has diverged."""
    above = torch.ones(2, 3, dtype=dtype) * (1 + torch.finfo(dtype).eps)
    assert above.max() > 1
    dice_loss(above, above), dice_loss(above.double(), above), dice_loss(1 - above, above)
    with pytest.raises(ValueError, match="values from"):
        dice_loss(above * (1 + 8 * torch.finfo(dtype).eps), above)
    assert dice_loss(above * torch.nan, above).isnan()


def test_logits_within_torch_func_and_compiled():
    p, t = segmented(4)
    one = p.clone()
    one[2, 1] = -3.0  # one class of one image
    for call in (torch.func.grad(dice_loss), torch.vmap(dice_loss, 1), torch.vmap(torch.func.grad(dice_loss))):
        with pytest.raises(ValueError, match=r"probabilities: got values from -3 to .*, expected values"):
            call(one, t)
        assert not call(p, t).isnan().any()


@compiles
def test_compiles_to_one_graph_in_which_logits_are_an_error():
    p, t = segmented(4)
    wrong = p.clone()
    wrong[3] = 1.5
    compiled = one_graph(lambda p: iou_loss(p, t, dims="per class"))
    torch.testing.assert_close(compiled(p), ratio("iou", p, t, dims="per class"))
    with pytest.raises(
        RuntimeError, match=r"^iou_loss: probabilities: got values outside \[0, 1\], expected .*sigmoid"
    ):
        compiled(wrong)
    batched = one_graph(lambda p: torch.vmap(dice_loss)(p, t))
    assert batched(wrong).isnan().tolist() == [False, False, False, True]
    torch.testing.assert_close(batched(p), torch.vmap(dice_loss)(p, t))


def test_one_ratio_of_all_classes_hides_a_class():
    """1 % of the pixels are foreground; the model always says background."""
    foreground = torch.arange(6000).view(6, 10, 100) % 100 == 0
    t = torch.stack([~foreground, foreground], 1)
    p = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).expand(6, 2, 10, 100)
    for dims, expected in ((None, 0.01), ("per class", (1 - 2 * 0.99 / 1.99 + 1) / 2)):
        values = simulate(lambda p, t, dims=dims: dice_loss(p, t, dims=dims), p.split([1, 5]), t.split([1, 5]))
        assert all(abs(value - expected) < 0.01 for value in values), (values, expected)


X = torch.ones(2, 3, 4)
BAD = [
    ((X, X[:, 0].long()), {}, r"targets: got shape \(2, 4\), expected \(2, 3, 4\), .*; for class indices, F.one_hot"),
    ((X[0, 0, 0], X[0, 0, 0]), {}, r"probabilities: got shape \(\), expected \(b, …\)"),
    ((X[:, :0], X[:, :0]), {}, r"probabilities: got shape \(2, 0, 4\), expected \(b, …\)"),
    ((X.long(), X), {}, "probabilities: got torch.int64, expected a floating-point tensor"),
    ((X, None), {}, "targets: got NoneType, expected a tensor"),
    ((X, X), {"dims": (0, 3)}, r"dims: got \(0, 3\), expected different dimensions of \(2, 3, 4\), at least one"),
    ((X, X), {"dims": (1, -2)}, r"dims: got \(1, -2\), expected different dimensions"),
    ((X, X), {"dims": ()}, r"dims: got \(\), expected different dimensions"),
    ((X, X), {"dims": "hw"}, "dims: got 'hw', expected \"per class\", None, an integer or a sequence of integers"),
    ((X[:, 0, 0], X[:, 0, 0]), {"dims": "per class"}, r"dims: got 'per class' for shape \(2,\), expected \(b, C, …\)"),
    ((X, X), {"smooth": -1}, "smooth: got -1, expected a finite non-negative number"),
    ((X, X), {"rank_reduction": "none"}, 'rank_reduction: got \'none\', expected "mean" or "sum"'),
]


@pytest.mark.parametrize(("arguments", "options", "text"), BAD)
@pytest.mark.parametrize("kind", LOSSES)
def test_errors(kind, arguments, options, text):
    with pytest.raises((TypeError, ValueError), match=f"^{kind}_loss: {text}"):
        call(kind, *arguments, **options)
