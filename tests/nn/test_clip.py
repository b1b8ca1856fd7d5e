"""clip_loss: value, gradients and second order are those of open_clip's formula on one process."""

import pytest
import torch
import torch.nn.functional as F
from references import OPTIONS, SIZES, Scale, batch, holds, masks, precision, softmax
from runs import gloo, rules

import diffcoll as dc
from diffcoll.nn import CLIPLoss
from diffcoll.nn.functional import clip_loss
from diffcoll.testing import simulate

scale = Scale(logit_scale=2.0)


def open_clip(image, text, logit_scale):
    """As open_clip.loss.ClipLoss on one process."""
    logits_per_image = logit_scale * image @ text.T
    logits_per_text = logit_scale * text @ image.T
    labels = torch.arange(len(image))
    return (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_text, labels)) / 2


def reference(image, text, labels=None, ids=None):
    logits = scale.logit_scale * image @ text.T
    positive, excluded = masks(len(image), labels, ids)
    return (softmax(logits, positive, excluded) + softmax(logits.T, positive, excluded)) / 2


def ours(**options):
    return lambda image, text: clip_loss(image, text, scale.logit_scale, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_loss_of_one_process(options):
    holds(ours(**options), lambda x, y: open_clip(x, y, scale.logit_scale), batch(2), scale)


def test_its_sum():
    holds(ours(rank_reduction="sum"), reference, batch(2), scale, rank_reduction="sum")


def test_on_processes():
    holds(ours(chunk_size=3), reference, batch(2), scale, on=["gloo"], sizes=[(5, 3), (5, 0, 3)])


def test_on_mpi():
    holds(ours(), reference, batch(2), scale, on=["mpi"], sizes=[(5, 3)])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_labels_and_ids(options):
    def labelled(x, y, labels):
        return clip_loss(x, y, scale.logit_scale, labels=labels, **options)

    def without_false_negatives(x, y, ids):
        return clip_loss(x, y, scale.logit_scale, ids=ids, **options)

    def both(x, y, labels, ids):
        return clip_loss(x, y, scale.logit_scale, labels=labels, ids=ids, **options)

    holds(labelled, reference, batch(2, 1), scale, sizes=SIZES[1:4])
    holds(without_false_negatives, lambda x, y, ids: reference(x, y, ids=ids), batch(2, 1), scale, sizes=SIZES[1:4])
    holds(both, reference, batch(2, 2), scale, sizes=SIZES[1:4])


def test_numbers_and_normalization():
    holds(
        lambda x, y: clip_loss(x, y, 10.0, normalize=True),
        lambda x, y: open_clip(F.normalize(x), F.normalize(y), 10.0),
        batch(2),
        sizes=SIZES[2:4],
    )


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_precision_at_scale_100(chunk_size):
    def right(x, y):
        return open_clip(x, y, 100.0)

    def loss(x, y):
        return clip_loss(x, y, 100.0, chunk_size=chunk_size)

    precision(loss, right, torch.float32, 1e-4)
    precision(loss, right, torch.bfloat16, 1e-2)
    precision(loss, right, torch.float16, 2e-3)


def test_autocast_does_not_reach_the_logits():
    x, y = (F.normalize(torch.randn(8, 16)).requires_grad_() for _ in range(2))
    found = []
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            loss = clip_loss(x, y, 100.0, chunk_size=3, normalize=True)
        found.append([loss, *torch.autograd.grad(loss, (x, y))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_half_precision_features_are_sent_as_they_are():
    """Ranks with half-precision features: their loss is that of the same numbers in one process."""
    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(8, 16, generator=g).bfloat16() for _ in range(2)]
    for normalize in (False, True):
        losses = simulate(
            lambda *x, normalize=normalize: clip_loss(*x, 20.0, normalize=normalize),
            *(x.split([5, 0, 3]) for x in xs),
        )
        torch.testing.assert_close(sum(losses) / 3, clip_loss(*(x.float() for x in xs), 20.0, normalize=normalize))


def test_the_ranks_in_one_graph_have_these_gradients():
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 6, generator=g, dtype=torch.double, requires_grad=True) for _ in range(2))
    right = torch.autograd.grad(reference(x, y), (x, y))
    losses = simulate(ours(chunk_size=2), x.split([5, 0, 3]), y.split([5, 0, 3]))
    torch.testing.assert_close(torch.autograd.grad(sum(losses) / 3, (x, y)), right)


def test_it_is_deterministic_whatever_the_ranks_delays():
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 16, generator=g) for _ in range(2))

    def gradients(x, y, seed):
        import random
        import time

        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        found = []
        delays = random.Random(seed)
        for _ in range(5):
            time.sleep(delays.random() / 50)
            loss = clip_loss(x, y, 20.0)
            time.sleep(delays.random() / 50)
            found.append((loss.detach(), *torch.autograd.grad(loss, (x, y))))
        return found

    for found in gloo(gradients, x.split([40, 24]), y.split([40, 24]), [1, 2]):
        assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))


def test_an_empty_batch_is_an_error_on_all_ranks():
    def message(r):
        with pytest.raises(ValueError, match=r"clip_loss: features: got an empty batch on every rank") as caught:
            clip_loss(torch.ones(0, 4), torch.ones(0, 4), 1.0)
        return str(caught.value)

    assert len(set(rules(message, range(2)))) == 1


@pytest.mark.parametrize("on", [simulate, gloo])
def test_ranks_that_differ_get_an_error(on):
    """Labels on one rank, labels of two dtypes, another exchange, and features of another dtype."""
    x, marks = torch.ones(2, 4), torch.arange(2)

    def body(r):
        texts = []
        for odd in ({"labels": marks}, {"labels": marks, "ids": marks.int()}, {"exchange": "ring"}, {"x": x.double()}):
            usual = {"labels": marks, "ids": marks} if "ids" in odd else {}
            options = {"x": x, **usual, **(odd if r == 1 else {})}
            features = options.pop("x")
            with pytest.raises(dc.CollectiveMismatchError) as caught:
                clip_loss(features, features, 1.0, **options)
            texts.append(str(caught.value))
        return texts

    for texts in on(body, range(2)):
        assert all(text.startswith("clip_loss: the ranks differ in labels or ids (given on all") for text in texts)
        assert all("rank 1 differs from rank 0" in text for text in texts)


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((X, [1.0], 1.0), {}, TypeError, "text: got list, expected a tensor of shape (b, D); torch.as_tensor(x)"),
        ((X.int(), X, 1.0), {}, TypeError, "image: got torch.int32, expected float16, bfloat16, float32 or float64"),
        ((X, X[0], 1.0), {}, ValueError, "text: got shape (4,), expected shape (b, D); flatten the features"),
        ((X, X[:1], 1.0), {}, ValueError, "text: got shape (1, 4), expected shape (2, 4), as image has; row i of"),
        ((X, X.double(), 1.0), {}, TypeError, "text: got torch.float64, expected torch.float32, as image has"),
        ((X, X, torch.ones(2)), {}, ValueError, "logit_scale: got a torch.float32 tensor of shape (2,), expected a n"),
        ((X, X, "1"), {}, TypeError, "logit_scale: got str, expected a number, or"),
        ((X, X, 1.0), {"labels": torch.ones(3)}, ValueError, "labels: got shape (3,), expected a tensor of shape (2,)"),
        (
            (X, X, 1.0),
            {"labels": X[:, 0]},
            TypeError,
            "labels: got torch.float32, expected integers or bool; number the",
        ),
        ((X, X, 1.0), {"ids": X[:, 0].half()}, TypeError, "ids: got torch.float16, expected integers or bool"),
        ((X, X, 1.0), {"ids": [1, 2]}, TypeError, "ids: got list, expected a tensor of shape (2,), one number per"),
        ((X, X, 1.0), {"rank_reduction": "none"}, ValueError, 'rank_reduction: got \'none\', expected "mean" or "sum"'),
        ((X, X, 1.0), {"chunk_size": 0}, ValueError, "chunk_size: got 0, expected None or a positive integer"),
        ((X, X, 1.0), {"exchange": "all"}, ValueError, 'exchange: got \'all\', expected "gather" or "ring"'),
    ],
)
def test_invalid_arguments(arguments, options, error, text):
    with pytest.raises(error) as caught:
        clip_loss(*arguments, **options)
    assert str(caught.value).startswith(f"clip_loss: {text}")


def test_the_module():
    loss = CLIPLoss(rank_reduction="sum", chunk_size=2)
    assert repr(loss) == "CLIPLoss(normalize=False, rank_reduction='sum', chunk_size=2, exchange='gather')"
    x, y, marks = torch.randn(5, 4), torch.randn(5, 4), torch.tensor([0, 1, 1, 2, 0])
    assert loss(x, y, 3.0) == clip_loss(x, y, 3.0, rank_reduction="sum", chunk_size=2)
    found = loss(x, y, 3.0, labels=marks, ids=marks)
    assert found == clip_loss(x, y, 3.0, labels=marks, ids=marks, rank_reduction="sum", chunk_size=2)
    assert "clip_loss" in dc.nn.functional.__all__ and not list(loss.parameters())


def test_the_messages():
    """One modality is gathered, in its dtype, its gradient in float32; one number per column is reduced."""
    with torch.profiler.profile() as profile:
        x, y = (torch.ones(7, 5, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        clip_loss(x, y, 1.0).backward()
    calls = [e.name for e in profile.events() if e.name.startswith("diffcoll.")]
    sent = [(name.split(":")[0].removeprefix("diffcoll."), int(name.split()[-2])) for name in calls]
    assert sent == [
        ("all_gather", 16),  # a digest of what ranks agree on, and the number of rows
        ("all_gather", 7 * 5 * 2),
        ("all_to_all", 7 * 4),  # of which a reduce-scatter of logsumexp is made
        ("all_to_all backward", 7 * 4),
        ("all_gather backward", 7 * 5 * 4),
    ]
