"""What counts as right: label smoothing, soft targets, both directions, and rows that have a positive."""

import pytest
import torch
import torch.nn.functional as F
from references import OPTIONS, SIZES, Scale, batch, data, each_way, hard, holds, masks, passages, softmax
from runs import gloo, profiled, refusal, rules, runs_on

import diffcoll as dc
from diffcoll.nn import InfoNCELoss, SupConLoss
from diffcoll.nn.functional import clip_loss, info_nce_loss, supcon_loss


def smoothed(logits, positive, excluded, smoothing):
    """As PyTorch's, the share of each column being that of the columns that are not excluded."""
    log_p = logits.log_softmax(1) if not excluded.any() else logits.masked_fill(excluded, -torch.inf).log_softmax(1)
    of_all = -log_p.masked_fill(excluded, 0).sum(1) / (~excluded).sum(1)
    return (1 - smoothing) * softmax(logits, positive, excluded) + smoothing * of_all


def extended(pairs, count):
    """Masks of more columns, which are negatives."""
    return [torch.cat([mask, torch.zeros(len(mask), count, dtype=torch.bool)], 1) for mask in pairs]


def similarities(x, y, scale):
    return scale * F.normalize(x) @ F.normalize(y).T


def clip(x, y, scale, smoothing, labels=None, ids=None):
    logits, pairs = scale * x @ y.T, masks(len(x), labels, ids)
    return (smoothed(logits, *pairs, smoothing) + smoothed(logits.T, *pairs, smoothing)).mean() / 2


def of_pairs(x, y, scale, smoothing, labels=None, ids=None):
    return smoothed(similarities(x, y, scale), *masks(len(x), labels, ids), smoothing).mean()


def of_both(x, y, scale, smoothing, labels=None, ids=None):
    return clip(F.normalize(x), F.normalize(y), scale, smoothing, labels, ids)


def of_hard(x, y, scale, smoothing, labels=None, ids=None):
    more = scale * (F.normalize(x)[:, None] * F.normalize(hard(x, y), dim=2)).sum(2)
    pairs = extended(masks(len(x), labels, ids), 2)
    return smoothed(torch.cat([similarities(x, y, scale), more], 1), *pairs, smoothing).mean()


def of_passages(x, y, scale, smoothing, labels=None, ids=None):
    positive, negatives = passages(x, y)
    columns = torch.cat([positive.flatten(0, 1), negatives])
    pairs = extended([mask.repeat_interleave(2, 1) for mask in masks(len(x), labels, ids)], len(negatives))
    return smoothed(similarities(x, columns, scale), *pairs, smoothing).mean()


def of_both_and_hard(x, y, scale, smoothing, labels=None, ids=None):
    """The keys of negatives are no queries."""
    columns = smoothed(similarities(x, y, scale).T, *masks(len(x), labels, ids), smoothing).mean()
    negatives = hard(x, y).flatten(0, 1)
    pairs = extended(masks(len(x), labels, ids), len(negatives))
    return (smoothed(similarities(x, torch.cat([y, negatives]), scale), *pairs, smoothing).mean() + columns) / 2


def info_nce(more):
    """Our loss, with these further arguments of x and y."""
    return lambda x, y, s, **o: info_nce_loss(x, **{"positive": y, **more(x, y)}, temperature=1 / s, **o)


LOSSES = {
    "clip": (clip_loss, clip),
    "info_nce": (info_nce(lambda x, y: {}), of_pairs),
    "both directions": (info_nce(lambda x, y: {"symmetric": True}), of_both),
    "hard negatives": (info_nce(lambda x, y: {"negatives": hard(x, y)}), of_hard),
    "passages": (info_nce(lambda x, y: dict(zip(("positive", "negatives"), passages(x, y), strict=True))), of_passages),
    "both directions, negatives of all": (
        info_nce(lambda x, y: {"negatives": hard(x, y).flatten(0, 1), "symmetric": True}),
        of_both_and_hard,
    ),
}
MARKS = ((), ("labels", "ids"), ("ids",))


def program(loss, marks, module, smoothing, **options):
    """A loss of the rows of a batch."""

    def of(x, y, labels, ids, targets=None):
        chosen = {name: value for name, value in (("labels", labels), ("ids", ids)) if name in marks}
        return loss(x, y, module.scale, **smoothing, **chosen, **options)

    return of


def pair(kind, marks, module, smoothing=0.3, **options):
    ours, reference = LOSSES[kind]
    return (
        program(ours, marks, module, {"label_smoothing": smoothing}, **options),
        program(reference, marks, module, {"smoothing": smoothing}),
    )


# ── label smoothing, and both directions ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
def test_the_reference_is_pytorchs(smoothing):
    x, y, *_ = batch(5)
    right = F.cross_entropy(similarities(x, y, 3.0), torch.arange(5), label_smoothing=smoothing)
    torch.testing.assert_close(of_pairs(x, y, 3.0, smoothing), right)


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("kind", LOSSES)
def test_label_smoothing(kind, marks):
    module = Scale(scale=2.5)
    for options in OPTIONS:
        sizes, order = (SIZES, 2) if options == {} else (SIZES[3:4], 1 if "exchange" in options else 2)
        holds(*pair(kind, marks, module, **options), module=module, sizes=sizes, order=order)


@pytest.mark.parametrize("kind", ["both directions", "both directions, negatives of all"])
@each_way
def test_both_directions_without_smoothing(kind, options):
    module = Scale(scale=2.5)
    for marks in MARKS:
        holds(*pair(kind, marks, module, 0.0, **options), module=module, sizes=[(5, 0, 3)], order=1)


def test_both_directions_are_clips():
    x, y, labels, ids = batch(7)
    marks = {"labels": labels, "ids": ids, "label_smoothing": 0.1}
    found = info_nce_loss(x, y, symmetric=True, temperature=0.2, **marks)
    torch.testing.assert_close(found, clip_loss(x, y, 5.0, normalize=True, **marks))


def decoupled_in_both_directions(x, y, labels, ids):
    logits, terms = similarities(x, y, 2.5), []
    for s in (*logits, *logits.T):
        i = len(terms) % len(x)
        terms.append(s[torch.arange(len(x)) != i].logsumexp(0) - s[i] if len(x) > 1 else 0 * s.sum())
    return torch.stack(terms).mean()


@each_way
def test_both_directions_decoupled(options):
    def ours(x, y, labels, ids):
        return info_nce_loss(x, y, temperature=0.4, decoupled=True, symmetric=True, **options)

    holds(ours, decoupled_in_both_directions, sizes=SIZES[2:4], order=1)


@pytest.mark.parametrize("on", ["gloo", "mpi"])
@each_way
def test_on_processes(on, options):
    module = Scale(scale=2.5)
    programs = [pair(kind, marks, module, **options) for kind in LOSSES for marks in MARKS[:2]]
    programs.append((of_targets(module, **options), of_targets_on_one_process(module)))

    def summed(which):
        return lambda *xs: sum((k + 1) * each[which](*xs) for k, each in enumerate(programs))

    holds(summed(0), summed(1), batch_and_targets, module=module, on=[on], sizes=[(5, 0, 3)], order=1)


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_precision_of_label_smoothing(options):
    x, y = (F.normalize(data(16, 8, seed=seed).float()).requires_grad_() for seed in (0, 1))
    exact = [z.detach().double().requires_grad_() for z in (x, y)]
    value, right = clip_loss(x, y, 100.0, label_smoothing=0.1, **options), clip(*exact, 100.0, 0.1)
    torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)
    for found, want in zip(torch.autograd.grad(value, (x, y)), torch.autograd.grad(right, exact), strict=True):
        assert (found.double() - want).abs().max() <= 1e-4 * want.abs().max()


def test_label_smoothing_of_one_row_is_nothing():
    """Its only column is its positive."""
    x, y, *_ = (t.requires_grad_() if t.is_floating_point() else t for t in batch(1))
    loss = clip_loss(x, y, 3.0, label_smoothing=0.5)
    assert loss == 0 and all(not g.any() for g in torch.autograd.grad(loss, (x, y)))


# ── soft targets ─────────────────────────────────────────────────────────────────────────────────────────


def batch_and_targets(rows):
    """A batch, and targets in percent, integers as they have no gradient; the first row has none."""
    targets = data(rows, rows, seed=3).mul(2).softmax(1).mul(100).long()
    targets[:1] = 0
    return *batch(rows), targets


def of_targets(module, **options):
    def ours(x, y, labels, ids, targets):
        targets = targets.double() / 100
        more = {"targets": targets, "temperature": 1 / module.scale, **options}
        several = {**more, "targets": targets.repeat_interleave(2, 1) / torch.tensor([3.0, 1.5]).repeat(len(targets.T))}
        positive, negatives = passages(x, y)
        return (
            info_nce_loss(x, y, **more)
            + 2 * info_nce_loss(x, y, negatives=hard(x, y), **more)
            + 3 * info_nce_loss(x, positive, negatives=negatives, **several)
        )

    return ours


def of_targets_on_one_process(module):
    def reference(x, y, labels, ids, targets):
        targets = targets.double() / 100

        def loss(columns, own=None, targets=targets):
            logits = similarities(x, columns, module.scale)
            logits = logits if own is None else torch.cat([logits, own], 1)
            return F.cross_entropy(logits, F.pad(targets, (0, logits.shape[1] - targets.shape[1])))

        own = module.scale * (F.normalize(x)[:, None] * F.normalize(hard(x, y), dim=2)).sum(2)
        positive, negatives = passages(x, y)
        several = torch.stack([targets / 3, targets / 1.5], 2).flatten(1)
        return loss(y) + 2 * loss(y, own) + 3 * loss(torch.cat([positive.flatten(0, 1), negatives]), targets=several)

    return reference


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_soft_targets(options):
    module = Scale(scale=2.5)
    sizes, order = (SIZES, 2) if "exchange" not in options else (SIZES[2:4], 1)
    ours = of_targets(module, **options)
    holds(ours, of_targets_on_one_process(module), batch_and_targets, module=module, sizes=sizes, order=order)


def test_distillation_of_both_directions():
    """Two calls, each with a teacher's softmax over its own columns."""
    x, y, *_ = (t.requires_grad_() if t.is_floating_point() else t for t in batch(8))
    teacher = similarities(data(8, 4, seed=1), data(8, 4, seed=2), 4.0)

    def student(x, y, of_rows, of_columns):
        return info_nce_loss(x, y, targets=of_rows) / 2 + info_nce_loss(y, x, targets=of_columns) / 2

    parts = [t.split([5, 0, 3]) for t in (x, y, teacher.softmax(1), teacher.T.softmax(1))]
    logits = similarities(x, y, 10.0)
    right = (F.cross_entropy(logits, teacher.softmax(1)) + F.cross_entropy(logits.T, teacher.T.softmax(1))) / 2
    losses = dc.testing.simulate(student, *parts)
    torch.testing.assert_close(sum(losses) / 3, right)
    torch.testing.assert_close(*(torch.autograd.grad(each, (x, y)) for each in (sum(losses) / 3, right)))


def test_targets_are_not_sent():
    """Nor are label smoothing's sums: the messages are those of the plain loss."""

    def body(r):
        x, y, *_ = (t.requires_grad_() if t.is_floating_point() else t for t in batch(3))
        more = [{}, {"targets": torch.ones(3, 6)}, {"label_smoothing": 0.1}]
        return [profiled(lambda: info_nce_loss(x, y, **each).backward()) for each in more]  # noqa: B023

    for plain, *others in gloo(body, range(2)):
        assert all(each == plain for each in others)


@each_way
def test_transforms(options):
    """vmap over targets and over features, jvp of a gradient."""
    x, y, _, ids, targets = batch_and_targets(4)
    targets = targets.double()
    several = torch.stack([targets, targets.flip(1)])
    with_targets, with_smoothing = (
        lambda x, targets: info_nce_loss(x, y, targets=targets, **options),
        lambda x, ids: info_nce_loss(x, y, ids=ids, label_smoothing=0.2, **options),
    )
    for loss, more in ((with_targets, several), (with_smoothing, torch.stack([ids, ids.flip(0)]))):
        found = torch.func.vmap(loss, (None, 0))(x, more)
        torch.testing.assert_close(found, torch.stack([loss(x, each) for each in more]))
        tangent = torch.ones_like(x)
        jvp = torch.func.jvp(torch.func.grad(lambda x, f=loss, m=more: f(x, m[0])), (x,), (tangent,))[1]
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf, more[0]), leaf, create_graph=True)
        torch.testing.assert_close(jvp, torch.autograd.grad((gradient * tangent).sum(), leaf)[0])


# ── supcon_loss over the rows that have a positive ───────────────────────────────────────────────────────


def of_rows_with_positives(x, y, labels, ids):
    """Masked pairs are excluded; the mean is over the rows that have a positive."""
    z = F.normalize(torch.cat([x, y], 1))
    itself = torch.eye(len(x), dtype=torch.bool)
    positive = (labels[:, None] == labels) & ~itself & (labels != -1)
    terms = softmax(2.5 * z @ z.T, positive, itself | ((ids[:, None] == ids) & ~positive))
    rows = positive.any(1)
    return terms[rows].sum() / rows.sum().clamp(min=1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_only_rows_with_positives(options):
    def ours(x, y, labels, ids):
        return supcon_loss(
            torch.cat([x, y], 1), labels, ids=ids, temperature=0.4, only_rows_with_positives=True, **options
        )

    def some(rows):
        """The last row of a label has none, and a third of them no label."""
        x, y, labels, ids = batch(rows)
        return x, y, torch.where(torch.arange(rows) % 3 == 2, -1, labels), ids

    order = 1 if "exchange" in options else 2
    holds(ours, of_rows_with_positives, some, sizes=SIZES, order=order)
    if not options:
        holds(ours, of_rows_with_positives, some, sizes=[(5, 0, 3)], on=["gloo", "mpi"], order=1)


def test_no_row_with_a_positive():
    x = data(3, 4).requires_grad_()
    losses = rules(lambda x, labels: supcon_loss(x, labels, only_rows_with_positives=True), x.split([2, 1]), [
        torch.tensor([-1, 0]),
        torch.tensor([1]),
    ])  # fmt: skip
    assert losses == [0, 0]
    torch.testing.assert_close(
        supcon_loss(x, torch.tensor([0, 0, 1]), only_rows_with_positives=True),
        supcon_loss(x, torch.tensor([0, 0, 1])) * 3 / 2,
    )


# ── wrong ────────────────────────────────────────────────────────────────────────────────────────────────

X, Y, T = torch.ones(2, 4), torch.ones(2, 3, 4), torch.ones(2, 2)
WRONG = [
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing: got 1.5, expected a number from 0 to 1"),
    ({"label_smoothing": -0.1}, ValueError, "label_smoothing: got -0.1, expected a finite non-negative number"),
    ({"label_smoothing": True}, TypeError, "label_smoothing: got bool, expected a number"),
    ({"label_smoothing": 0.1, "decoupled": True}, ValueError, "label_smoothing: got 0.1, expected 0 with decoupled"),
    ({"symmetric": 1}, TypeError, "symmetric: got int, expected True or False"),
    ({"positive": Y, "symmetric": True}, ValueError, "positive: got shape (2, 3, 4), expected shape (2, 4) with symm"),
    ({"targets": [1.0]}, TypeError, "targets: got list, expected a tensor of shape (b, number of all ranks' columns)"),
    ({"targets": T.long()}, TypeError, "targets: got torch.int64, expected float16, bfloat16, float32 or float64"),
    ({"targets": T[:1]}, ValueError, "targets: got shape (1, 2), expected shape (2, number of all ranks' columns)"),
    ({"targets": T[0]}, ValueError, "targets: got shape (2,), expected shape (2, number of all ranks' columns)"),
    ({"targets": T.to("meta")}, ValueError, "targets: got a tensor on meta, expected cpu, as the features"),
    ({"targets": torch.ones(2, 5)}, ValueError, "targets: got 5 columns, expected (b, 2), a target for each column of"),
    ({"targets": T, "labels": T[0].long()}, ValueError, "labels: got given together with targets, expected one of"),
    ({"targets": T, "ids": T[0].long()}, ValueError, "ids: got given together with targets, expected one of the two"),
    ({"targets": T, "decoupled": True}, ValueError, "decoupled: got given together with targets, expected one of"),
    ({"targets": T, "symmetric": True}, ValueError, "symmetric: got given together with targets, expected one of"),
    ({"targets": T, "label_smoothing": 0.1}, ValueError, "label_smoothing: got given together with targets, expected"),
    ({"targets": T.clone().requires_grad_()}, ValueError, "targets: got a tensor that requires a gradient, expected"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG, ids=str)
def test_invalid_arguments(options, error, text):
    more = {"positive": X, **options}
    assert refusal(error, lambda: info_nce_loss(X, **more)).startswith(f"info_nce_loss: {text}")


@runs_on("truth", "gloo")
def test_ranks_that_differ_get_an_error(run):
    """In an option, in whether there are targets, in their columns; or all are wrong in them."""
    labels = torch.arange(2)

    def body(r):
        losses = [
            lambda: info_nce_loss(X, X, label_smoothing=0.1 * r),
            lambda: info_nce_loss(X, X, symmetric=r == 1),
            lambda: clip_loss(X, X, 1.0, label_smoothing=0.1 * r),
            lambda: supcon_loss(X, labels, only_rows_with_positives=r == 1),
            lambda: info_nce_loss(X, X, targets=torch.ones(2, 4) if r else None),
            lambda: info_nce_loss(X, X, targets=torch.ones(2, 4 + r)),
        ]
        texts = [refusal(dc.CollectiveMismatchError, loss) for loss in losses]
        return texts, refusal(ValueError, lambda: info_nce_loss(X, X, targets=torch.ones(2, 3)))

    for texts, of_all in run(body, range(2)):
        assert all("_loss: the ranks differ in labels, ids, negatives or numbers of pos" in text for text in texts)
        assert of_all.startswith("info_nce_loss: targets: got 3 columns, expected (b, 4), a target for each column")


def test_the_modules():
    x, y, labels, _, targets = batch_and_targets(4)
    targets = targets.double()
    loss = InfoNCELoss(symmetric=True, label_smoothing=0.2)
    assert loss(x, y) == info_nce_loss(x, y, symmetric=True, label_smoothing=0.2)
    assert InfoNCELoss()(x, y, targets=targets) == info_nce_loss(x, y, targets=targets)
    only = SupConLoss(only_rows_with_positives=True)
    assert only(x, labels) == supcon_loss(x, labels, only_rows_with_positives=True)
