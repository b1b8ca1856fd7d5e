"""What all losses, layers and statistics have alike: errors of arguments, modules of functions, numbers that are sent.

A wrong argument of one call raises before anything is sent, and the error names function and argument.
"""

import copy
import pickle
from contextlib import nullcontext
from functools import partial
from inspect import signature

import pytest
import torch
from references import CONTRASTIVE, LOSSES, batch, data
from runs import gloo, gloo_messages, refusal, rules, runs_on
from torch.nn import Parameter

import diffcoll as dc
from diffcoll import nn
from diffcoll.nn import functional as f

X, Y, IDS = torch.ones(2, 4), torch.randn(5, 2, 4), torch.tensor([0, 1, 1, 2, 0])
IMAGES = torch.ones(2, 3, 2, 2)
INTEGERS, BOOL = torch.ones(2, 4).long(), torch.ones(2, 2, dtype=torch.bool)
HIDDEN, WEIGHT, TARGET = torch.ones(2, 3, 4), torch.ones(9, 4), torch.tensor([[0, 8, -100], [5, 5, 3]])
clip, of_vocabulary = partial(f.clip_loss, X, X, 1.0), f.vocab_parallel_cross_entropy
vocabulary = partial(of_vocabulary, HIDDEN, WEIGHT, TARGET)
QUEUE, LABELLED = nn.FeatureQueue(3, 3), nn.FeatureQueue(3, 3, labels=True)
MISTAKES = [
    ("clip_loss: image_features", TypeError, lambda: f.clip_loss(X.int(), X, 1.0)),
    ("clip_loss: text_features", TypeError, lambda: f.clip_loss(X, [1.0], 1.0)),
    ("clip_loss: text_features", ValueError, lambda: f.clip_loss(X, X[:1], 1.0)),
    ("clip_loss: text_features", TypeError, lambda: f.clip_loss(X, X.double(), 1.0)),
    ("clip_loss: logit_scale", ValueError, lambda: f.clip_loss(X, X, torch.ones(2))),
    ("clip_loss: logit_scale", TypeError, lambda: f.clip_loss(X, X, "1")),
    ("clip_loss: ids", TypeError, lambda: clip(ids=X[:, 0])),
    ("clip_loss: ids", ValueError, lambda: clip(ids=IDS)),
    ("clip_loss: chunk_size", ValueError, lambda: clip(chunk_size=0)),
    ("clip_loss: sizes", ValueError, lambda: clip(sizes=[3])),
    ("clip_loss: sizes", ValueError, lambda: clip(sizes="all")),
    ("clip_loss: exclude", TypeError, lambda: clip(exclude=BOOL.long())),
    ("clip_loss: exclude", ValueError, lambda: clip(exclude=BOOL[:, :1])),
    ("clip_loss: exclude", ValueError, lambda: clip(exclude=BOOL[:1])),
    ("siglip_loss: logit_bias", ValueError, lambda: f.siglip_loss(X, X, 1.0, torch.ones(2))),
    ("siglip_loss()", TypeError, lambda: f.siglip_loss(X, X, 1.0)),
    ("info_nce_loss: query", ValueError, lambda: f.info_nce_loss(Y, Y)),
    ("info_nce_loss: positive", ValueError, lambda: f.info_nce_loss(X, Y)),
    ("info_nce_loss: negatives", TypeError, lambda: f.info_nce_loss(X, X, [X])),
    ("info_nce_loss: negatives", ValueError, lambda: f.info_nce_loss(X, X, Y)),
    ("info_nce_loss: negatives", ValueError, lambda: f.info_nce_loss(X, X, X[:, :3])),
    ("info_nce_loss: negatives", ValueError, lambda: f.info_nce_loss(X, X, X[0])),
    ("info_nce_loss: exclude", ValueError, lambda: f.info_nce_loss(X, X, Y[:2], exclude=BOOL[:, :1])),
    ("info_nce_loss: exclude_negatives", ValueError, lambda: f.info_nce_loss(X, X, Y[:2], exclude_negatives=BOOL[:1])),
    ("info_nce_loss: exclude_negatives", ValueError, lambda: f.info_nce_loss(X, X, Y[:2, :1], exclude_negatives=BOOL)),
    ("info_nce_loss: exclude_negatives", ValueError, lambda: f.info_nce_loss(X, X, Y[:, 0], exclude_negatives=BOOL)),
    ("info_nce_loss: exclude_negatives", ValueError, lambda: f.info_nce_loss(X, X, exclude_negatives=BOOL)),
    ("info_nce_loss: exclude_negatives", TypeError, lambda: f.info_nce_loss(X, X, Y[:2], exclude_negatives=BOOL.int())),
    ("info_nce_loss: exclude_positives", ValueError, lambda: f.info_nce_loss(X, X, exclude_positives=BOOL)),
    ("info_nce_loss: exclude_positives", TypeError, lambda: f.info_nce_loss(X, Y[:2], exclude_positives=BOOL.int())),
    ("info_nce_loss: labels", ValueError, lambda: f.info_nce_loss(X, X, labels=IDS)),
    ("info_nce_loss: false_negative_margin", TypeError, lambda: f.info_nce_loss(X, X, false_negative_margin="0.1")),
    ("info_nce_loss: temperature", ValueError, lambda: f.info_nce_loss(X, X, temperature=0)),
    ("nt_xent_loss: out1", ValueError, lambda: f.nt_xent_loss(Y[:, 0], Y[1:, 0])),
    ("supcon_loss: labels", TypeError, lambda: f.supcon_loss(Y, None)),
    ("supcon_loss: features", ValueError, lambda: f.supcon_loss(Y[0, 0], IDS)),
    ("barlow_twins_loss: z_a", ValueError, lambda: f.barlow_twins_loss(X[0], X[0])),
    ("barlow_twins_loss: z_b", ValueError, lambda: f.barlow_twins_loss(X, X[:1])),
    ("barlow_twins_loss: z_a", TypeError, lambda: f.barlow_twins_loss(INTEGERS, INTEGERS)),
    ("barlow_twins_loss: lambda_param", ValueError, lambda: f.barlow_twins_loss(X, X, lambda_param=-1.0)),
    ("vicreg_loss: z_b", TypeError, lambda: f.vicreg_loss(X, [1.0])),
    ("vicreg_loss: eps", ValueError, lambda: f.vicreg_loss(X, X, eps=torch.inf)),
    ("koleo_loss: x", ValueError, lambda: f.koleo_loss(X[0])),
    ("koleo_loss: eps", TypeError, lambda: f.koleo_loss(X, eps="0")),
    ("sigreg_loss: directions", ValueError, lambda: f.sigreg_loss(X, X)),
    ("sigreg_loss: directions", TypeError, lambda: f.sigreg_loss(X, INTEGERS.T)),
    ("sigreg_loss: num_points", ValueError, lambda: f.sigreg_loss(X, X.T, num_points=1)),
    ("sigreg_loss: t_max", ValueError, lambda: f.sigreg_loss(X, X.T, t_max=0)),
    ("dice_loss: targets", ValueError, lambda: f.dice_loss(X, X[:, :3])),
    ("iou_loss: targets", ValueError, lambda: f.iou_loss(X.sum(), X.sum())),
    ("dice_loss: probabilities", TypeError, lambda: f.dice_loss(INTEGERS, X)),
    ("dice_loss: smooth", ValueError, lambda: f.dice_loss(X, X, smooth=-1.0)),
    ("tversky_loss: alpha", ValueError, lambda: f.tversky_loss(X, X, alpha=-1.0)),
    ("dice_loss: dims", ValueError, lambda: f.dice_loss(X[0], X[0], dims="per class")),
    ("iou_loss: dims", ValueError, lambda: f.iou_loss(IMAGES, IMAGES)),
    ("tversky_loss: dims", TypeError, lambda: f.tversky_loss(X, X, dims="classes")),
    ("sinkhorn: scores", ValueError, lambda: f.sinkhorn(X[0])),
    ("sinkhorn: epsilon", ValueError, lambda: f.sinkhorn(X, epsilon=0.0)),
    ("sinkhorn: iterations", ValueError, lambda: f.sinkhorn(X, iterations=0)),
    ("moments: x", TypeError, lambda: f.moments(X * 1j, 0)),
    ("moments: dim", ValueError, lambda: f.moments(X, ())),
    ("moments: weight", ValueError, lambda: f.moments(X, 0, weight=X[:, 0])),
    ("moments: weight", TypeError, lambda: f.moments(X, 0, weight=1.0)),
    ("weighted_mean: x", TypeError, lambda: f.weighted_mean(INTEGERS)),
    ("weighted_mean: weight", ValueError, lambda: f.weighted_mean(X.T, weight=X[:, 0])),
    ("token_mean: losses", TypeError, lambda: f.token_mean(INTEGERS)),
    ("token_mean: losses", ValueError, lambda: f.token_mean(X.mean())),
    ("token_mean: weight", ValueError, lambda: f.token_mean(X, X[:, 0])),
    ("vocab_parallel_cross_entropy: hidden", TypeError, lambda: of_vocabulary([1.0], WEIGHT, TARGET)),
    ("vocab_parallel_cross_entropy: weight_shard", ValueError, lambda: of_vocabulary(HIDDEN, X.T, TARGET)),
    ("vocab_parallel_cross_entropy: target", ValueError, lambda: of_vocabulary(HIDDEN, WEIGHT, TARGET[:1])),
    ("vocab_parallel_cross_entropy: target", TypeError, lambda: of_vocabulary(HIDDEN, WEIGHT, TARGET.double())),
    ("vocab_parallel_cross_entropy: bias_shard", ValueError, lambda: vocabulary(bias_shard=X[0])),
    ("vocab_parallel_cross_entropy: label_smoothing", ValueError, lambda: vocabulary(label_smoothing=1.5)),
    ("vocab_parallel_cross_entropy: z_loss", ValueError, lambda: vocabulary(z_loss=-1.0)),
    ("vocab_parallel_cross_entropy: reduction", ValueError, lambda: vocabulary(reduction="max")),
    ("vocab_parallel_cross_entropy: ignore_index", TypeError, lambda: vocabulary(ignore_index=0.5)),
    ("vocab_parallel_cross_entropy: chunk_size", ValueError, lambda: vocabulary(chunk_size=0)),
    ("FeatureQueue: size", ValueError, lambda: nn.FeatureQueue(0, 3)),
    ("FeatureQueue: dim", ValueError, lambda: nn.FeatureQueue(3, 0)),
    ("FeatureQueue.enqueue: features", ValueError, lambda: QUEUE.enqueue(X)),
    ("FeatureQueue.enqueue: labels", ValueError, lambda: QUEUE.enqueue(X[:, :3], IDS[:2])),
    ("FeatureQueue.enqueue: labels", ValueError, lambda: LABELLED.enqueue(X[:, :3])),
    ("FeatureQueue.enqueue: labels", ValueError, lambda: LABELLED.enqueue(X[:, :3], IDS[:3])),
    ("FeatureQueue.labels", ValueError, QUEUE.labels),
    ("SyncBatchNorm: x", ValueError, lambda: nn.SyncBatchNorm(4)(X[0])),
    ("SyncBatchNorm: x", ValueError, lambda: nn.SyncBatchNorm(3)(X)),
    ("SyncBatchNorm: x", TypeError, lambda: nn.SyncBatchNorm(4)(INTEGERS)),
    ("SyncBatchNorm: x", ValueError, lambda: nn.SyncBatchNorm(4)(X[:1])),  # one value for each channel, on one rank
]


@pytest.mark.parametrize(
    ("text", "error", "call"), MISTAKES, ids=[f"{text} {i}" for i, (text, *_) in enumerate(MISTAKES)]
)
def test_mistakes(text, error, call):
    assert refusal(error, call).startswith(text)


@runs_on("rules", "gloo")
def test_ranks_with_features_of_different_sizes(run):
    """The error says which; D is what most often differs."""

    def body(d):
        x = torch.ones(2, d)
        for call in (partial(f.clip_loss, x, x, 1.0), partial(of_vocabulary, x, x, torch.tensor([0, 1]))):
            assert "rank 0 has D = 4, rank 1 has 5" in refusal(dc.CollectiveMismatchError, call)

    run(body, [4, 5])


@runs_on("rules", "gloo")
def test_a_mask_of_too_few_columns_on_one_rank(run):
    """All ranks raise, before features are sent."""

    def body(rows, columns):
        x, mask = data(rows, 4), torch.zeros(rows, columns, dtype=torch.bool)
        for call in (partial(f.clip_loss, x, x, 1.0), partial(f.nt_xent_loss, x, x), partial(f.info_nce_loss, x, x)):
            refusal((ValueError, dc.CollectiveMismatchError), call, exclude=mask if rows else None)

    run(body, [2, 0, 3], [5, 5, 4])


# ── ranks whose features need no gradient ────────────────────────────────────────────────────────────────

#: Whose backward sends what all ranks have of the loss, whatever their features need.
TAKE_SUCH_A_RANK = ["barlow twins", "vicreg", "sigreg", "dice", "token mean"]


def step(x, y, labels, name, needed, context, frozen=()):
    """The gradients of x and y, which rank 1 may not need."""
    x, y = (t.clone().requires_grad_(i not in frozen and (needed or dc.get_rank() != 1)) for i, t in enumerate((x, y)))
    with context() as region:
        loss = LOSSES[name].ours(x, y, labels)
    if loss.requires_grad:
        (region or (lambda loss: loss))(loss).backward()
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, y)]


@pytest.mark.parametrize("name", [*TAKE_SUCH_A_RANK, *CONTRASTIVE, "koleo"])
def test_an_empty_rank_that_needs_no_gradient(name):
    """An error on all ranks, unless all run backward anyway, or none does."""
    parts = [t.split([3, 0, 2]) for t in batch(5)[:3]]

    def of(needed, context, **more):
        return rules(partial(step, name=name, needed=needed, context=context, **more), *parts)

    right = of(True, nullcontext)
    for found in (of(False, dc.joint_backward), of(False, nullcontext) if name in TAKE_SUCH_A_RANK else right):
        torch.testing.assert_close(found, right)
    assert all((g == 0).all() for of_rank in of(False, torch.no_grad) for g in of_rank)
    if name not in TAKE_SUCH_A_RANK:
        rules(partial(refusal, dc.CollectiveMismatchError, step, name=name, needed=False, context=nullcontext), *parts)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_images_that_need_no_gradient_beside_frozen_texts(name):
    """No gradient of the gathered texts is sent, but CLIP's reduce-scatter has a backward."""
    parts = [t.split([3, 0, 2]) for t in batch(5)[:3]]
    locked = partial(step, name=name, context=nullcontext, frozen=[1])
    right = rules(partial(locked, needed=True), *parts)
    if name == "clip":
        rules(partial(refusal, dc.CollectiveMismatchError, locked, needed=False), *parts)
    else:
        torch.testing.assert_close(rules(partial(locked, needed=False), *parts), right)


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────


def values(names, x, y, labels):
    return [LOSSES[name].ours(x, y, labels).item() for name in names]


@runs_on("rules", "gloo")
def test_every_rank_returns_the_same_number(run):
    first, *others = run(partial(values, LOSSES), *(t.split([4, 0, 3, 1]) for t in batch(8, torch.float32)[:3]))
    assert others == [first] * 3


@pytest.mark.parametrize("n", [1, 3])
def test_the_loss_of_no_rows_is_nan(n):
    for found in rules(partial(values, [*CONTRASTIVE, "koleo"]), *([t] * n for t in batch(0)[:3])):
        assert all(value != value for value in found)


# ── modules ──────────────────────────────────────────────────────────────────────────────────────────────

A, B = Y.unbind(1)
P, T = Y.sigmoid(), (Y > 0).float()
ROWS = {"temperature": 0.2, "normalize": False, "chunk_size": 2}
#: The module, its function, what `forward` takes, and every option but those of the group.
MODULES = [
    (nn.CLIPLoss, f.clip_loss, (A, B), {"logit_scale": 3.0, "normalize": True, "chunk_size": 2}),
    (
        nn.SigLIPLoss,
        f.siglip_loss,
        (A, B),
        {"logit_scale": 3.0, "logit_bias": -1.0, "normalize": True, "chunk_size": 2},
    ),
    (nn.InfoNCELoss, f.info_nce_loss, (A, B, Y.cos()), {**ROWS, "decoupled": True, "false_negative_margin": 0.0}),
    (nn.NTXentLoss, f.nt_xent_loss, (A, B), {**ROWS, "decoupled": True}),
    (nn.SupConLoss, f.supcon_loss, (Y, IDS), ROWS),
    (nn.BarlowTwinsLoss, f.barlow_twins_loss, (A, B), {"lambda_param": 0.1, "eps": 0.2}),
    (nn.VICRegLoss, f.vicreg_loss, (A, B), {"lambda_param": 1.0, "mu_param": 2.0, "nu_param": 3.0, "eps": 0.1}),
    (nn.KoLeoLoss, f.koleo_loss, (A,), {"eps": 0.1, "normalize": False}),
    (nn.SIGRegLoss, f.sigreg_loss, (A, B.T), {"num_points": 5, "t_max": 2.0}),
    (nn.DiceLoss, f.dice_loss, (P, T), {"smooth": 0.5, "dims": "per class"}),
    (nn.IoULoss, f.iou_loss, (P, T), {"smooth": 0.5, "dims": "per class"}),
    (nn.TverskyLoss, f.tversky_loss, (P, T), {"alpha": 0.3, "beta": 0.8, "smooth": 0.5, "dims": "per class"}),
    (
        nn.VocabParallelCrossEntropy,
        of_vocabulary,
        (Y[:, 0], WEIGHT * torch.randn(9, 1), IDS + 4),
        {"label_smoothing": 0.3, "z_loss": 0.2, "ignore_index": 5, "reduction": "sum", "chunk_size": 2},
    ),
]


@pytest.mark.parametrize(("module", "function", "arguments", "options"), MODULES)
def test_a_module_is_its_function(module, function, arguments, options):
    """Options are its attributes, and what is set last is used; so do copies."""
    more = function.keywords if isinstance(function, partial) else {}
    expected, later = function(*arguments, **options), module()
    for name, value in options.items():
        setattr(later, name, value)
    for loss in (module(**options), pickle.loads(pickle.dumps(copy.deepcopy(later)))):
        assert loss(*arguments, **more) == expected
    assert {*signature(module).parameters} - {"sizes", "group"} == {*options}


def test_scales_of_modules():
    """Passed to `forward` by the names of open_clip's outputs, or a parameter of the module, not both."""
    learned = nn.InfoNCELoss(Parameter(torch.tensor(0.5)))
    assert [name for name, _ in learned.named_parameters()] == ["temperature"]
    torch.testing.assert_close(learned(A, B), f.info_nce_loss(A, B, temperature=0.5))
    outputs = {"image_features": A, "text_features": B, "logit_scale": torch.tensor(3.0)}
    assert f.clip_loss(**outputs) == nn.CLIPLoss()(**outputs) == nn.CLIPLoss(3.0)(A, B)
    with_bias = {**outputs, "logit_bias": torch.tensor([-1.0])}
    assert f.siglip_loss(**with_bias) == nn.SigLIPLoss()(**with_bias) == nn.SigLIPLoss(3.0, -1.0)(A, B)
    refusal(TypeError, nn.CLIPLoss(), A, B)
    refusal(TypeError, nn.CLIPLoss(3.0), A, B, logit_scale=3.0)


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

#: A loss of (b, 4), and how many numbers its messages have, those of backward at the end.
MESSAGES = {
    "barlow_twins": (lambda x: f.barlow_twins_loss(x, x.cos()), [2 * 4 + 1, 4 * 4 + 4 * 4, 1]),
    "vicreg": (lambda x: f.vicreg_loss(x, x.cos()), [2 * 4 + 1, 4 * 4 + 4 * 4 + 1, 1]),
    "sigreg": (lambda x: f.sigreg_loss(x, data(4, 5), num_points=4), [2 * 5 * 3 + 1, 1]),
    "dice": (lambda x: f.dice_loss(x.sigmoid(), x > 0), [3, 1]),
    "dice of each class": (lambda x: f.dice_loss(x.sigmoid(), x > 0, dims="per class"), [3 * 4, 1]),
    "dice of each row": (lambda x: f.dice_loss(x.sigmoid(), x > 0, dims=1), [2, 1]),
    "loss_of_sums": (lambda x: f.loss_of_sums(torch.div, x.square().sum(), x.new_tensor(4.0)), [2, 2]),
    "token_mean": (lambda x: f.token_mean(x.square()), [2, 1]),
    # two numbers for each token, or three; in backward hidden's gradient, if it needs one
    "vocabulary": (lambda x: of_vocabulary(HIDDEN.clone().requires_grad_(), x, TARGET % 8), [4, 2 * 6, 6 * 4]),
    "vocabulary, smoothed": (lambda x: of_vocabulary(HIDDEN, x, TARGET % 8, label_smoothing=0.3), [4, 3 * 6]),
    "sinkhorn": (lambda x: f.token_mean(x * f.sinkhorn(x, iterations=2)), [4, 4, 2, 1]),
}


def test_what_is_sent():
    def body(x):
        found, values = {}, []
        for name, (loss, _) in MESSAGES.items():
            forward = gloo_messages(lambda loss=loss: values.append(loss(x.requires_grad_())))
            messages = forward + gloo_messages(values[-1].backward)
            found[name] = [n for kind, n in messages if "recv" not in kind]
        return found

    for found in gloo(body, data(8, 4).split([5, 3])):
        assert found == {name: numbers for name, (_, numbers) in MESSAGES.items()}
