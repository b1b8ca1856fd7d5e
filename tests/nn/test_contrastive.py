"""Contrastive losses of the batch of all ranks: value, gradients and second order are those of one process."""

import copy
import random
import time

import pytest
import torch
import torch.nn.functional as F
from references import (
    CONTRASTIVE,
    OPTIONS,
    SIZES,
    batch,
    each_way,
    hard,
    holds,
    info_nce,
    masks,
    pair,
    parameters_of,
    passages,
    program,
    softmax,
)
from runs import gloo, profiled, refusal, rules, runs_on

import diffcoll as dc
from diffcoll.nn import CLIPLoss, InfoNCELoss, NTXentLoss, SigLIPLoss, SupConLoss
from diffcoll.nn.functional import clip_loss, info_nce_loss, nt_xent_loss, siglip_loss, supcon_loss
from diffcoll.testing import simulate

ROWS = [(kind, marks) for kind, loss in CONTRASTIVE.items() for marks in loss.marks]
each_row = pytest.mark.parametrize(("kind", "marks"), ROWS, ids=[" ".join([kind, *marks]) for kind, marks in ROWS])
each_kind = pytest.mark.parametrize("kind", CONTRASTIVE)


def weighted_sum(losses):
    """The sum of losses, each with another weight."""
    losses = list(losses)
    return lambda *x: sum((k + 1) * loss(*x) for k, loss in enumerate(losses))


# ── the references are published code ────────────────────────────────────────────────────────────────────


def open_clip(image, text, scale, bias):
    """As open_clip.loss.ClipLoss on one process."""
    logits_per_image, logits_per_text = scale * image @ text.T, scale * text @ image.T
    labels = torch.arange(len(image))
    return (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_text, labels)) / 2


def open_clips_siglip(image, text, scale, bias):
    """As open_clip.loss.SigLipLoss on one process."""
    logits = scale * image @ text.T + bias
    labels = 2 * torch.eye(len(image), dtype=logits.dtype) - torch.ones_like(logits)
    return -F.logsigmoid(labels * logits).sum() / len(image)


def cross_entropy(query, key, scale, bias):
    return F.cross_entropy(F.normalize(query) @ F.normalize(key).T * scale, torch.arange(len(query)))


def one_cross_entropy_for_each_query(query, key, scale, bias):
    """Of all keys and the query's own negatives."""
    q, k, n = (F.normalize(x, dim=-1) for x in (query, key, hard(query, key)))
    terms = [F.cross_entropy(torch.cat([k, n[i]]) @ q[i] * scale, torch.tensor(i)) for i in range(len(q))]
    return torch.stack(terms).mean()


def one_cross_entropy_for_each_positive(query, key, scale, bias):
    """Of all positives and all negatives, averaged over the two positives of each query."""
    q, p, n = (F.normalize(x, dim=-1) for x in (query, *passages(query, key)))
    columns = torch.cat([p[:, 0], p[:, 1], n])
    targets = torch.arange(len(q)), torch.arange(len(q)) + len(q)
    return sum(F.cross_entropy(q @ columns.T * scale, target) for target in targets) / 2


def simclr(z1, z2, scale, bias):
    """As a cross-entropy of 2B rows, the diagonal excluded."""
    z = F.normalize(torch.cat([z1, z2]))
    return F.cross_entropy((z @ z.T * scale).fill_diagonal_(-torch.inf), torch.arange(len(z)).roll(len(z1)))


def khosla(features, labels, scale, ids=None):
    """As `SupConLoss` of HobbitLong/SupContrast, contrast_mode "all", base_temperature = temperature; features
    normalized first, as its model does."""
    features = F.normalize(features, dim=-1)
    features = features[:, None] if features.ndim == 2 else features
    views = features.shape[1]
    mask = (labels[:, None] == labels).double().repeat(views, views)
    contrast = torch.cat(torch.unbind(features, dim=1))
    logits = contrast @ contrast.T * scale
    logits = logits - logits.max(1, keepdim=True).values.detach()
    logits_mask = 1 - torch.eye(len(contrast), dtype=torch.double)
    mask = mask * logits_mask
    if ids is not None:
        logits_mask = logits_mask * (1 - (ids[:, None] == ids).double().repeat(views, views) * (1 - mask))
    log_prob = logits - (logits.exp() * logits_mask).sum(1, keepdim=True).log()
    pairs = mask.sum(1)
    pairs = torch.where(pairs < 1e-6, 1, pairs)
    return -((mask * log_prob).sum(1) / pairs).mean()


PUBLISHED = {
    "clip": open_clip,
    "siglip": open_clips_siglip,
    "info_nce": cross_entropy,
    "nt_xent": simclr,
    "supcon": lambda x, y, scale, bias, labels, ids=None: khosla(torch.stack([x, y], 1), labels, scale, ids),
    "supcon_of_one_view": lambda x, y, scale, bias, labels, ids=None: khosla(torch.cat([x, y], 1), labels, scale, ids),
    "info_nce_of_hard_negatives": one_cross_entropy_for_each_query,
    "info_nce_of_passages": one_cross_entropy_for_each_positive,
}


OF_PUBLISHED = [(kind, marks) for kind, marks in ROWS if not marks or "supcon" in kind]


@pytest.mark.parametrize(("kind", "marks"), OF_PUBLISHED)
def test_the_reference_is_published_code(kind, marks):
    """Value and gradients, for any number of rows; published code of pairs knows no labels and ids."""
    for rows in (2, 5, 8):
        *xs, labels, ids = batch(rows)
        chosen = {name: value for name, value in (("labels", labels), ("ids", ids)) if name in marks}
        xs = [x.requires_grad_() for x in (*xs, torch.tensor(1.7).double(), torch.tensor(-1.2).double())]
        found = [f(*xs, **chosen) for f in (CONTRASTIVE[kind].whole, PUBLISHED[kind])]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*(torch.autograd.grad(y, xs, materialize_grads=True) for y in found))


@pytest.mark.parametrize(("kind", "marks"), OF_PUBLISHED)
def test_it_is_published_code(kind, marks):
    module = parameters_of(kind)
    holds(pair(kind, marks, module)[0], program(PUBLISHED[kind], marks, module), module=module)


def test_it_is_published_code_on_processes():
    module = parameters_of("siglip")
    ours = weighted_sum(pair(kind, marks, module)[0] for kind, marks in OF_PUBLISHED)
    published = weighted_sum(program(PUBLISHED[kind], marks, module) for kind, marks in OF_PUBLISHED)
    holds(ours, published, module=module, on=["gloo"], sizes=[(5, 0, 3)], order=1)


# ── laws of all losses ───────────────────────────────────────────────────────────────────────────────────


@each_row
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_loss_of_one_process(kind, marks, options):
    module = parameters_of(kind)
    holds(
        *pair(kind, marks, module, **options),
        module=module,
        sizes=SIZES if marks == CONTRASTIVE[kind].marks[0] else SIZES[1:4],
    )


@each_row
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}], ids=str)
def test_first_order_of_a_ring(kind, marks, options):
    """It has rules of its own; the second order is differentiated step by step."""
    module = parameters_of(kind)
    holds(*pair(kind, marks, module, exchange="ring", **options), module=module, order=1)


@each_kind
def test_its_sum(kind):
    module, marks = parameters_of(kind), CONTRASTIVE[kind].marks[0]
    holds(*pair(kind, marks, module, rank_reduction="sum"), module=module, rank_reduction="sum")


@pytest.mark.parametrize("on", ["gloo", "mpi"])
@pytest.mark.parametrize(
    ("options", "order"), [({}, 2), ({"chunk_size": 3}, 2), ({"exchange": "ring", "chunk_size": 2}, 1)], ids=str
)
def test_on_processes(on, options, order):
    module = parameters_of("siglip")
    ours, references = zip(*(pair(kind, marks, module, **options) for kind, marks in ROWS), strict=True)
    holds(weighted_sum(ours), weighted_sum(references), module=module, on=[on], sizes=[(5, 3), (5, 0, 3)], order=order)


@pytest.mark.parametrize("kind", [kind for kind in CONTRASTIVE if "_of_" not in kind])  # `terms` normalizes those
def test_numbers_and_the_other_normalization(kind):
    loss, chosen = CONTRASTIVE[kind], "supcon" in kind

    def of(function):
        def call(x, y, labels, ids):
            marks = {"labels": labels} if chosen else {}
            return function(x, y, 0.5 if loss.normalize else 10.0, -10, normalize=not loss.normalize, **marks)

        return call

    holds(of(loss.ours), of(loss.whole), sizes=SIZES[2:4])


@each_kind
@pytest.mark.parametrize("options", [{}, {"chunk_size": 5}], ids=str)
def test_precision_at_scale_100(kind, options):
    """Value and gradients, with the reference in float64 of the same numbers."""
    loss, g = CONTRASTIVE[kind], torch.Generator().manual_seed(0)
    features = [F.normalize(torch.randn(16, 32, generator=g)) for _ in range(2)]
    marks = {"labels": torch.arange(16) % 5} if "supcon" in kind else {}
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        xs = [x.to(dtype).requires_grad_() for x in features]
        exact = [x.detach().double().requires_grad_() for x in xs]
        value, right = loss.ours(*xs, 100.0, -10.0, **marks, **options), loss.whole(*exact, 100.0, -10.0, **marks)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)
        for found, want in zip(torch.autograd.grad(value, xs), torch.autograd.grad(right, exact), strict=True):
            assert found.dtype == dtype
            assert (found.double() - want).abs().max() <= tolerance * want.abs().max()


@each_row
@pytest.mark.parametrize("options", [{"chunk_size": 2}, {"exchange": "ring"}], ids=str)
def test_the_ranks_in_one_graph_have_these_gradients(kind, marks, options):
    module = parameters_of(kind)
    ours, reference = pair(kind, marks, module, **options)
    x, y, labels, ids = (t.requires_grad_() if t.is_floating_point() else t for t in batch(8))
    right = torch.autograd.grad(reference(x, y, labels, ids), (x, y))
    losses = simulate(ours, *(t.split([5, 0, 3]) for t in (x, y, labels, ids)))
    torch.testing.assert_close(torch.autograd.grad(sum(losses) / 3, (x, y)), right)


# ── one loss for all ─────────────────────────────────────────────────────────────────────────────────────


def test_a_row_without_a_positive_contributes_0_and_counts():
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    loss, alone = supcon_loss(x, torch.tensor([0, 0, 1])), supcon_loss(x[:2], torch.tensor([0, 0]))
    torch.testing.assert_close(loss, khosla(x, torch.tensor([0, 0, 1]), 10))
    assert loss > 0 == alone  # the only other row is the positive
    one = supcon_loss(x[:1], torch.tensor([0]))
    assert one == 0
    assert torch.autograd.grad(one, x)[0].tolist() == [[0.0] * 4] * 3


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
            lambda *x, normalize=normalize: clip_loss(*x, 20.0, normalize=normalize), *(x.split([5, 0, 3]) for x in xs)
        )
        torch.testing.assert_close(sum(losses) / 3, clip_loss(*(x.float() for x in xs), 20.0, normalize=normalize))


def test_it_is_deterministic_whatever_the_ranks_delays():
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 16, generator=g) for _ in range(2))

    def gradients(x, y, seed):
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        found = []
        delays = random.Random(seed)
        for _ in range(5):
            time.sleep(delays.random() / 50)
            loss = clip_loss(x, y, 20.0)
            time.sleep(delays.random() / 50)
            found.append((loss.detach(), *torch.autograd.grad(loss, (x, y))))
        return found

    for first, *others in gloo(gradients, x.split([40, 24]), y.split([40, 24]), [1, 2]):
        torch.testing.assert_close(others, [first] * 4, rtol=0, atol=0)


NONE = torch.ones(0, 4)
EMPTY = {
    "clip_loss: image": lambda: clip_loss(NONE, NONE, 1.0),
    "siglip_loss: image": lambda: siglip_loss(NONE, NONE, 1.0, 0.0),
    "info_nce_loss: query": lambda: info_nce_loss(NONE, NONE),
    "nt_xent_loss: z1": lambda: nt_xent_loss(NONE, NONE),
    "supcon_loss: features": lambda: supcon_loss(NONE, NONE[:, 0].long()),
}


@pytest.mark.parametrize("argument", EMPTY)
def test_an_empty_batch_is_an_error_on_all_ranks(argument):
    text = f"{argument}: got an empty batch on every rank, expected a row; one rank at least must have rows"
    assert rules(lambda r: refusal(ValueError, EMPTY[argument]), range(2)) == [text] * 2


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@pytest.mark.parametrize("kind", ["clip", "siglip", "info_nce_of_passages", "supcon"])
def test_samples_without_a_label(kind, options):
    """They are their own positives only, and in supcon_loss nobody's; also with labels in one byte."""
    module = parameters_of(kind)

    def ours(x, y, labels, ids):
        labels = labels.masked_fill(ids < 2, -1).to(torch.int8 if kind == "clip" else torch.long)
        return program(CONTRASTIVE[kind].ours, ["labels"], module, **options)(x, y, labels, ids)

    def whole(x, y, labels, ids):
        apart = torch.where(ids < 2, 10 + torch.arange(len(ids)), labels)
        if kind != "supcon":
            return program(CONTRASTIVE[kind].whole, ["labels"], module)(x, y, apart, ids)
        z, labels = F.normalize(torch.cat([x, y])), apart.repeat(2)
        itself = torch.eye(len(z), dtype=torch.bool)
        positive = (labels[:, None] == labels) & ~itself & (labels < 10)
        return softmax(module.scale * z @ z.T, positive, itself).mean()

    holds(ours, whole, module=module, sizes=[(8,), (5, 0, 3)], order=1)


@pytest.mark.parametrize("options", [*OPTIONS, {"labels": torch.tensor([0, 1, 0])}], ids=str)
def test_a_positive_that_overflows_is_nan(options):
    """As in PyTorch's cross-entropy; a loss of 0 would hide it from a GradScaler."""
    x, y = (torch.eye(3) * torch.tensor([[1e20], [1.0], [1.0]]) for _ in range(2))

    def body(x, y, *labels):
        x.requires_grad_()
        loss = clip_loss(x, y, 1.0, **{**options, **dict(zip(["labels"], labels, strict=False))})
        loss.backward()
        return loss.detach(), x.grad

    marks = [options["labels"].split([2, 1])] if "labels" in options else []
    (loss, g), _ = rules(body, x.split([2, 1]), y.split([2, 1]), *marks)
    assert loss.isnan() and g.isnan().any()
    assert body(x.clone(), y, *([options["labels"]] if marks else []))[0].isnan()


def decoupled(logits, positive, excluded):
    """Yeh et al. 2022, equation 6: −s of the positive + log Σ exp s of the negatives; 0 for a row without one of them."""
    terms = []
    for s, p, e in zip(logits, positive, excluded, strict=True):
        negatives = s[~p & ~e]
        terms.append(torch.logsumexp(negatives, 0) - s[p].mean() if len(negatives) and p.any() else 0 * s.sum())
    return torch.stack(terms)


def info_nce_decoupled(x, y, scale, bias, labels=None, ids=None):
    return decoupled(scale * F.normalize(x) @ F.normalize(y).T, *masks(len(x), labels, ids)).mean()


def nt_xent_decoupled(x, y, scale, bias, labels=None, ids=None):
    z, itself = F.normalize(torch.cat([x, y])), torch.eye(2 * len(x), dtype=torch.bool)
    positive, excluded = masks(2 * len(x), torch.arange(len(x)).repeat(2), None if ids is None else ids.repeat(2))
    return decoupled(scale * z @ z.T, positive & ~itself, excluded | itself).mean()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("kind", "marks", "reference"),
    [
        ("info_nce", (), info_nce_decoupled),
        ("info_nce", ("labels", "ids"), info_nce_decoupled),
        ("nt_xent", ("ids",), nt_xent_decoupled),
    ],
)
def test_decoupled(kind, marks, reference, options):
    module = parameters_of(kind)
    ours = program(CONTRASTIVE[kind].ours, marks, module, decoupled=True, **options)
    order = 1 if options.get("exchange") == "ring" else 2
    holds(ours, program(reference, marks, module), module=module, sizes=[(8,), (5, 0, 3)], order=order)


@each_way
def test_a_row_without_negatives_contributes_nothing(options):
    """The only row, rows that are all of one label, and a NaN, which stays one."""
    x, y, *_ = batch(3)
    for rows, labels in ((1, None), (3, torch.zeros(3).long())):
        q, k = (t[:rows].clone().requires_grad_() for t in (x, y))
        loss = info_nce_loss(q, k, labels=labels, decoupled=True, **options)
        loss.backward()
        assert loss == 0 and not q.grad.any() and not k.grad.any()
    assert info_nce_loss(x, y * torch.nan, decoupled=True, **options).isnan()


def test_decoupled_on_processes():
    module = parameters_of("info_nce")
    ours = program(CONTRASTIVE["info_nce"].ours, ["labels"], module, decoupled=True, chunk_size=2)
    reference = program(info_nce_decoupled, ["labels"], module)
    holds(ours, reference, module=module, on=["gloo", "mpi"], sizes=[(5, 0, 3)], order=1)


@runs_on("truth", "gloo")
def test_ranks_that_differ_in_their_negatives_get_an_error(run):
    """Of all queries or of their own, or in numbers of positives, or in decoupled; an empty rank is no exception."""
    x = torch.ones(2, 4)
    own, several = x[:, None], torch.stack([x, x], 1)

    def body(r):
        texts = []
        for positive, negatives in ((x, (None, own)), (x, (None, x)), (x, (own[:0], x)), (several, (None, None))):
            rows = len(negatives[r]) if negatives[r] is not None and negatives[r].ndim == 3 else 2
            one = (several if r else x) if positive is several else x
            texts.append(
                refusal(
                    dc.CollectiveMismatchError,
                    lambda: info_nce_loss(x[:rows], one[:rows], negatives=negatives[r]),  # noqa: B023
                )
            )
        texts.append(refusal(dc.CollectiveMismatchError, lambda: info_nce_loss(x, x, decoupled=r == 1)))
        return texts

    for texts in run(body, range(2)):
        for text in texts:
            assert text.startswith(
                "info_nce_loss: the ranks differ in labels, ids, negatives or numbers of positives ("
            )
            assert "rank 1 differs from rank 0" in text


@runs_on("truth", "gloo")
def test_ranks_that_differ_get_an_error(run):
    """Labels on one rank, labels of two dtypes, another option, and features of another dtype."""
    x, marks = torch.ones(2, 4), torch.arange(2)

    def body(r):
        texts = []
        options = [{"exchange": "ring"}, {"normalize": True}, {"rank_reduction": "sum"}]
        for odd in ({"labels": marks}, {"labels": marks, "ids": marks.int()}, *options, {"x": x.double()}):
            usual = {"labels": marks, "ids": marks} if "ids" in odd else {}
            options = {"x": x, **usual, **(odd if r == 1 else {})}
            features = options.pop("x")
            texts.append(refusal(dc.CollectiveMismatchError, lambda: clip_loss(features, features, 1.0, **options)))  # noqa: B023
        return texts

    for texts in run(body, range(2)):
        assert all(
            text.startswith("clip_loss: the ranks differ in labels, ids, negatives or numbers of positives (")
            for text in texts
        )
        assert all("rank 1 differs from rank 0" in text for text in texts)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ranks_with_different_numbers_of_hard_negatives(options):
    """None on a rank; a query's negatives are in no other query's sum."""
    x, y, *_ = (t.requires_grad_() if t.is_floating_point() else t for t in batch(8))
    ours = rules(
        lambda x, y, k: info_nce_loss(x, y, negatives=hard(x, y)[:, :k], normalize=False, **options),
        *(t.split([3, 0, 4, 1]) for t in (x, y)),
        [2, 1, 0, 1],
    )
    more = (x[:, None] * hard(x, y)).sum(2)
    without = torch.tensor([[0, 0]] * 3 + [[1, 1]] * 4 + [[0, 1]]).bool()
    right = info_nce(x, y, 10.0, 0.0, more=more.masked_fill(without, -torch.inf)).mean()
    torch.testing.assert_close(sum(ours) / 4, right)


@each_way
@pytest.mark.parametrize("own", [True, False])
def test_a_rank_that_asks_for_the_gradient_of_its_negatives_alone(own, options):
    """On the other rank the keys train; all messages of backward are sent."""

    def gradient(x, y, n, r):
        xs = [t.clone().requires_grad_(trained) for t, trained in zip((x, y, n), (False, r == 1, r == 0), strict=True)]
        loss = info_nce_loss(*xs[:2], negatives=xs[2] if own else xs[2].flatten(0, 1), **options)
        return torch.autograd.grad(loss, xs[1] if r else xs[2])[0]

    x, y, _, _ = batch(8)
    xs = [t.clone().requires_grad_() for t in (x, y, hard(x, y))]
    right = torch.autograd.grad(info_nce_loss(*xs[:2], negatives=xs[2] if own else xs[2].flatten(0, 1)), xs)
    ranks = [t.split([5, 3]) for t in (x, y, hard(x, y))]
    found = rules(gradient, *ranks, [0, 1])
    torch.testing.assert_close([g / 2 for g in found], [right[2][:5], right[1][5:]])


@each_way
def test_ranks_with_different_numbers_of_negatives(options):
    """None on a rank, and a rank that has negatives alone; without any the loss is that of no negatives."""
    x, y, *_ = batch(8)
    negatives, sizes = hard(x, y).flatten(0, 1)[:6], [3, 0, 4, 1]
    for rows in ([2, 4, 0, 0], [0, 0, 0, 0]):
        ours = rules(
            lambda *xs: info_nce_loss(*xs[:2], negatives=xs[2], **options),
            *(t.split(sizes) for t in (x, y)),
            negatives[: sum(rows)].split(rows),
        )
        more = F.normalize(x) @ F.normalize(negatives[: sum(rows)]).T
        right = info_nce(F.normalize(x), F.normalize(y), 10.0, 0.0, more=more).mean()
        torch.testing.assert_close(sum(ours) / 4, right)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("options", [{}, {"decoupled": True, "chunk_size": 2}, {"exchange": "ring"}], ids=str)
def test_tensors_of_inference_mode(own, options):
    """Queries, negatives or a temperature that were made in it, on one rank, where other tensors train."""
    numbers = torch.Generator().manual_seed(5)
    xs = [*(torch.randn(4, 3, generator=numbers).double() for _ in range(3)), torch.tensor(0.5).double()]

    def body(r, frozen):
        with torch.inference_mode():
            made = [x.clone() for x in xs]
        q, k, n, t = (
            y if i in frozen and r == 0 else x.clone().requires_grad_()
            for i, (x, y) in enumerate(zip(xs, made, strict=True))
        )
        loss = info_nce_loss(q, k, negatives=n[:, None] if own else n, temperature=t, normalize=False, **options)
        trained = [x for x in (q, k, n, t) if x.requires_grad]
        return dict(zip([x for x in range(4) if r or x not in frozen], torch.autograd.grad(loss, trained), strict=True))

    for ranks in (1, 2):
        every = rules(body, range(ranks), [()] * ranks)
        for frozen in ((0,), (1,), (2,), (3,), (0, 1, 2)):
            for found, right in zip(rules(body, range(ranks), [frozen] * ranks), every, strict=True):
                torch.testing.assert_close(found, {i: right[i] for i in found})


def test_messages_of_negatives():
    """Their numbers, and a gather, whose backward is one more message; also from a rank that has none or trains nothing."""
    x, y, *_ = batch(4)

    def body(r):
        found = []
        for count in (None, 3 * r):
            q, k, n = (t.clone().requires_grad_(r == 1) for t in (x, y, hard(x, y).flatten(0, 1)[:count]))
            losses = []
            forward = profiled(lambda: losses.append(info_nce_loss(q, k, negatives=None if count is None else n)))  # noqa: B023
            found.append(([name for name, _ in forward], [name for name, _ in profiled(losses[0].backward)]))
        return found

    for plain, more in gloo(body, range(2)):
        assert more[0] == [*plain[0], "all_gather", "all_gather"]
        assert more[1] == [*plain[1], "all_gather backward"]


X, Y, IDS = torch.ones(2, 4), torch.randn(5, 2, 4), torch.tensor([0, 1, 1, 2, 0])
WRONG = [
    (clip_loss, (X, [1.0], 1.0), {}, TypeError, "text: got list, expected a tensor of shape (b, D); torch.as_tensor(x)"),
    (clip_loss, (X.int(), X, 1.0), {}, TypeError, "image: got torch.int32, expected float16, bfloat16, float32 or float64"),
    (clip_loss, (X, X[0], 1.0), {}, ValueError, "text: got shape (4,), expected shape (b, D); flatten the features"),
    (clip_loss, (X, X[:1], 1.0), {}, ValueError, "text: got shape (1, 4), expected shape (2, 4), as image has; row i of"),
    (clip_loss, (X, X.double(), 1.0), {}, TypeError, "text: got torch.float64, expected torch.float32, as image has"),
    (clip_loss, (X, X, torch.ones(2)), {}, ValueError, "logit_scale: got a torch.float32 tensor of shape (2,), expected a n"),
    (clip_loss, (X, X, "1"), {}, TypeError, "logit_scale: got str, expected a number, or"),
    (clip_loss, (X, X, 1.0), {"labels": torch.ones(3)}, ValueError, "labels: got shape (3,), expected a tensor of shape (2,)"),
    (clip_loss, (X, X, 1.0), {"labels": X[:, 0]}, TypeError, "labels: got torch.float32, expected integers or bool; number the"),
    (clip_loss, (X, X, 1.0), {"ids": X[:, 0].half()}, TypeError, "ids: got torch.float16, expected integers or bool"),
    (clip_loss, (X, X, 1.0), {"ids": [1, 2]}, TypeError, "ids: got list, expected a tensor of shape (2,), one number per"),
    (clip_loss, (X, X, 1.0), {"rank_reduction": "none"}, ValueError, 'rank_reduction: got \'none\', expected "mean" or "sum"'),
    (clip_loss, (X, X, 1.0), {"chunk_size": 0}, ValueError, "chunk_size: got 0, expected None or a positive integer"),
    (clip_loss, (X, X, 1.0), {"exchange": "all"}, ValueError, 'exchange: got \'all\', expected "gather" or "ring"'),
    (siglip_loss, (X, X, 1.0, torch.ones(2)), {}, ValueError, "logit_bias: got a torch.float32 tensor of shape (2,), expect"),
    (info_nce_loss, (X, X), {"temperature": 0}, ValueError, "temperature: got 0, expected a number above 0; logits are divided"),
    (info_nce_loss, (X, X), {"temperature": torch.tensor([-0.5])}, ValueError, "temperature: got a tensor with -0.5, expected a number above 0"),
    (info_nce_loss, (X, X[:1]), {}, ValueError, "positive: got shape (1, 4), expected shape (2, 4), as query has, or (2, P, 4) with P"),
    (info_nce_loss, (X, X[0]), {}, ValueError, "positive: got shape (4,), expected shape (2, 4), as query has"),
    (info_nce_loss, (X, Y), {}, ValueError, "positive: got shape (5, 2, 4), expected shape (2, 4), as query has, or (2, P, 4)"),
    (info_nce_loss, (X, Y[:2, :0]), {}, ValueError, "positive: got shape (2, 0, 4), expected"),
    (info_nce_loss, (X, Y[:2, :, None]), {}, ValueError, "positive: got shape (2, 2, 1, 4), expected"),
    (info_nce_loss, (X, Y[:2].double()), {}, TypeError, "positive: got torch.float64, expected torch.float32, as query has"),
    (info_nce_loss, (Y, Y), {}, ValueError, "query: got shape (5, 2, 4), expected shape (b, D)"),
    (info_nce_loss, (X, X), {"negatives": [X]}, TypeError, "negatives: got list, expected a tensor of shape (m, D) or (b, K, D); torch"),
    (info_nce_loss, (X, X), {"negatives": Y}, ValueError, "negatives: got shape (5, 2, 4), expected shape (m, 4), for all queries, or (2, K, 4), K for each row of query; (m"),
    (info_nce_loss, (X, X), {"negatives": Y[:2, :, :3]}, ValueError, "negatives: got shape (2, 2, 3), expected shape (m, 4)"),
    (info_nce_loss, (X, X), {"negatives": X[:, :3]}, ValueError, "negatives: got shape (2, 3), expected shape (m, 4)"),
    (info_nce_loss, (X, X), {"negatives": X[0]}, ValueError, "negatives: got shape (4,), expected shape (m, 4)"),
    (info_nce_loss, (X, X), {"negatives": Y[:2].double()}, TypeError, "negatives: got torch.float64, expected torch.float32, as query"),
    (info_nce_loss, (X, X), {"negatives": Y[:2].long()}, TypeError, "negatives: got torch.int64, expected float16, bfloat16, f"),
    (info_nce_loss, (X, X), {"negatives": Y[:2].to("meta")}, ValueError, "negatives: got a tensor on meta, expected cpu, as query; move"),
    (nt_xent_loss, (X, X), {"decoupled": 1}, TypeError, "decoupled: got int, expected True or False"),
    (nt_xent_loss, (Y[:, 0], Y[1:, 0]), {}, ValueError, "z2: got shape (4, 4), expected shape (5, 4), as z1 has"),
    (supcon_loss, (Y, None), {}, TypeError, "labels: got None, expected a tensor of shape (5,); pass the"),
    (supcon_loss, (Y[0, 0], IDS), {}, ValueError, "features: got shape (4,), expected shape (b, D) or (b, v"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "arguments", "options", "error", "text"), WRONG)
def test_invalid_arguments(loss, arguments, options, error, text):
    assert refusal(error, lambda: loss(*arguments, **options)).startswith(f"{loss.__name__}: {text}")


def test_a_temperature_that_is_no_number():
    text = refusal(ValueError, lambda: info_nce_loss(X, X, temperature=torch.tensor([-0.5], requires_grad=True)))
    assert "temperature: got a tensor with -0.5, expected a number above 0" in text
    assert info_nce_loss(X, X, temperature=torch.tensor(float("nan"))).isnan()
    gradient = torch.func.grad(lambda t: info_nce_loss(X, X, temperature=t))(torch.tensor(0.5))
    assert gradient.isfinite()  # a number that is differentiated so is not read


def test_the_modules():
    x, y = Y.unbind(1)
    negatives = torch.stack([x, y], 1).cos()
    assert InfoNCELoss()(x, y, negatives=negatives) == info_nce_loss(x, y, negatives=negatives)
    assert NTXentLoss(temperature=0.2)(x, y, IDS) == nt_xent_loss(x, y, ids=IDS, temperature=0.2)
    assert SigLIPLoss()(x, y, 2.0, torch.tensor([-1.0]), ids=IDS) == siglip_loss(x, y, 2.0, -1.0, ids=IDS)
    assert SupConLoss(temperature=0.2)(Y, IDS) == supcon_loss(Y, IDS, temperature=0.2)
    clip = CLIPLoss(rank_reduction="sum", chunk_size=2)
    assert (
        repr(clip)
        == "CLIPLoss(normalize=False, label_smoothing=0.0, rank_reduction='sum', chunk_size=2, exchange='gather')"
    )
    options = {"rank_reduction": "sum", "chunk_size": 2}
    assert clip(x, y, 3.0) == clip_loss(x, y, 3.0, **options)
    assert clip(x, y, 3.0, labels=IDS, ids=IDS) == clip_loss(x, y, 3.0, labels=IDS, ids=IDS, **options)
    assert "clip_loss" in dc.nn.functional.__all__ and not list(clip.parameters())
    info_nce = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.5)), chunk_size=2)
    assert [name for name, _ in info_nce.named_parameters()] == ["temperature"]
    options = (
        "(temperature=0.5, normalize=True, decoupled=False, label_smoothing=0.0, symmetric=False, "
        "rank_reduction='mean', chunk_size=2, exchange='gather')"
    )
    assert repr(info_nce) == f"InfoNCELoss{options}"
    torch.testing.assert_close(info_nce(x, y, ids=IDS), info_nce_loss(x, y, ids=IDS, temperature=0.5))
    with torch.device("meta"):
        assert "temperature=tensor(..., device='meta'" in repr(InfoNCELoss(temperature=torch.tensor(0.5)))


def test_a_copy_of_the_module_has_its_own_temperature_and_the_same_group():
    def body(r):
        group = torch.distributed.group.WORLD
        loss = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.5)), group=group)
        copied = copy.deepcopy(torch.nn.Sequential(loss))[0]
        copied.temperature.data.fill_(0.25)
        return copied.group is group, loss.temperature.item(), [p.item() for p in copied.parameters()]

    assert gloo(body, range(2)) == [(True, 0.5, [0.25])] * 2


def test_the_messages():
    """One modality is gathered, in its dtype, its gradient in float32; one number per column is reduced."""

    def sent(rows):
        x, y = (torch.full((rows, 5), float(rows), dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        return profiled(lambda: clip_loss(x, y, 1.0).backward())

    for rows, found in zip((7, 4), gloo(sent, [7, 4]), strict=True):
        assert found == [
            ("all_gather", 16),  # a digest of what ranks agree on, and the number of rows
            ("all_gather", rows * 5 * 2),
            ("reduce_scatter", 11 * 4),  # of logsumexp
            ("reduce_scatter backward", rows * 2 * 4),
            ("all_gather backward", 11 * 5 * 4),
        ]
    assert sent(7) == []  # one rank
