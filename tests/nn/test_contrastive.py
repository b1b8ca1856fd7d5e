"""Contrastive losses of the batch of all ranks: value, gradients and second order are those of one process."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from references import (
    CONTRASTIVE,
    DECOUPLED,
    ROWS,
    batch,
    data,
    decoupled,
    hard,
    holds,
    info_nce,
    masks,
    pair,
    parameters_of,
    program,
    softmax,
    views,
)
from runs import gloo, profiled, rules
from torch.utils._python_dispatch import TorchDispatchMode

from diffcoll.nn.functional import clip_loss, info_nce_loss, nt_xent_loss

each_row = pytest.mark.parametrize(("kind", "marks"), ROWS, ids=[" ".join([kind, *marks]) for kind, marks in ROWS])
in_chunks = pytest.mark.parametrize("options", [{}, {"chunk_size": 3}], ids=str)


class Largest(TorchDispatchMode):
    """Records the size of the largest result of an operation."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.numel = max(self.numel, found.numel())
        return found


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


def simclr(z1, z2, scale, bias):
    """As a cross-entropy of 2B rows, the diagonal excluded."""
    z = F.normalize(torch.cat([z1, z2]))
    return F.cross_entropy((z @ z.T * scale).fill_diagonal_(-torch.inf), torch.arange(len(z)).roll(len(z1)))


def khosla(features, labels, scale):
    """As `SupConLoss` of HobbitLong/SupContrast, contrast_mode "all", base_temperature = temperature; features
    normalized first, as its model does."""
    features = F.normalize(features, dim=-1)
    features = features[:, None] if features.ndim == 2 else features
    n = features.shape[1]
    mask = (labels[:, None] == labels).double().repeat(n, n)
    contrast = torch.cat(torch.unbind(features, dim=1))
    logits = contrast @ contrast.T * scale
    logits = logits - logits.max(1, keepdim=True).values.detach()
    logits_mask = 1 - torch.eye(len(contrast), dtype=torch.double)
    mask = mask * logits_mask
    log_prob = logits - (logits.exp() * logits_mask).sum(1, keepdim=True).log()
    pairs = mask.sum(1)
    return -((mask * log_prob).sum(1) / torch.where(pairs < 1e-6, 1, pairs)).mean()


PUBLISHED = {
    "clip": open_clip,
    "siglip": open_clips_siglip,
    "info_nce": cross_entropy,
    "nt_xent": simclr,
    "supcon": lambda x, y, scale, bias, labels: khosla(torch.stack([x, y], 1), labels, scale),
    "supcon_of_one_view": lambda x, y, scale, bias, labels: khosla(torch.cat([x, y], 1), labels, scale),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_reference_is_published_code(kind):
    """Value and gradients, for any number of rows."""
    for rows in (2, 5, 8):
        x, y, labels, *_ = batch(rows)
        marks = {"labels": labels} if "supcon" in kind else {}
        xs = [t.requires_grad_() for t in (x, y, torch.tensor(1.7).double(), torch.tensor(-1.2).double())]
        found = [f(*xs, **marks) for f in (CONTRASTIVE[kind].whole, PUBLISHED[kind])]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*(torch.autograd.grad(y, xs, materialize_grads=True) for y in found))


# ── laws of all losses ───────────────────────────────────────────────────────────────────────────────────


@each_row
@in_chunks
def test_it_is_the_loss_of_one_process(kind, marks, options):
    """To second order, for 1 to 4 ranks, uneven and empty."""
    module = parameters_of(kind)
    holds(*pair(kind, marks, module, **options), module=module)


def test_on_processes():
    """All of them, in chunks, each with another weight."""

    def weighted(losses):
        return lambda *x: sum(weight * loss(*x) for weight, loss in enumerate(losses, 1))

    module = parameters_of("siglip")
    ours, references = zip(*(pair(kind, marks, module, chunk_size=3) for kind, marks in ROWS), strict=True)
    holds(weighted(ours), weighted(references), module=module, on=["gloo"], sizes=[(5, 3), (5, 0, 3)])


@pytest.mark.parametrize("kind", [kind for kind in CONTRASTIVE if "_of_" not in kind])  # `terms` normalizes those
def test_numbers_and_the_other_normalization(kind):
    loss, marks = CONTRASTIVE[kind], ["labels"] * ("supcon" in kind)
    numbers = SimpleNamespace(scale=0.5 if loss.normalize else 10.0, bias=-10.0)
    ours, whole = (program(f, marks, numbers, normalize=not loss.normalize) for f in (loss.ours, loss.whole))
    holds(ours, whole, sizes=[(5, 3), (5, 0, 3)])


@in_chunks
def test_autocast_does_not_reach_the_logits(options):
    """Nor those that backward computes again."""
    x, y = (F.normalize(torch.randn(8, 16)).requires_grad_() for _ in range(2))
    found = []
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            loss = clip_loss(x, y, 100.0, normalize=True, **options)
        found.append([loss, *torch.autograd.grad(loss, (x, y))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_large_loss_keeps_the_digits_of_float64():
    """Where torch's softplus would return its argument."""
    x = torch.eye(2).double().requires_grad_()
    scale = torch.tensor(21.5).double()
    y = x.detach().flip(0)
    found, right = (f(x, y, s) for f, s in ((clip_loss, scale), (lambda x, y, s: open_clip(x, y, s, 0.0), scale)))
    torch.testing.assert_close(found, right, rtol=1e-14, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(v, x)[0] for v in (found, right)), rtol=1e-13, atol=1e-13)


# ── one loss for all ─────────────────────────────────────────────────────────────────────────────────────


@in_chunks
@pytest.mark.parametrize("kind", ["info_nce", "info_nce_of_passages", "supcon"])
def test_samples_without_a_label(kind, options):
    """They are their own positives only, and in supcon_loss nobody's; also with labels in one byte."""
    module = parameters_of(kind)

    def ours(x, y, labels, ids, exclude):
        labels = labels.masked_fill(ids < 2, -1).to(torch.int8 if kind == "info_nce" else torch.long)
        return CONTRASTIVE[kind].ours(x, y, module.scale, 0.0, labels=labels, **options)

    def whole(x, y, labels, ids, exclude):
        apart = torch.where(ids < 2, 10 + torch.arange(len(ids)), labels)
        if kind != "supcon":
            return CONTRASTIVE[kind].whole(x, y, module.scale, 0.0, labels=apart)
        terms = views([F.normalize(x), F.normalize(y)], module.scale, apart)
        return terms[labels == apart].sum() / len(terms)

    holds(ours, whole, module=module, sizes=[(8,), (5, 0, 3)], order=1)


@in_chunks
@pytest.mark.parametrize("marks", [{}, {"ids": torch.tensor([0, 1, 0])}], ids=str)
def test_a_positive_that_overflows_is_nan(marks, options):
    """As in PyTorch's cross-entropy, and in the gradient: a loss of 0 would hide it from a GradScaler."""
    x, y = (torch.eye(3) * torch.tensor([[1e20], [1.0], [1.0]]) for _ in range(2))

    def body(x, y, *ids):
        x = x.clone().requires_grad_()
        found = clip_loss(x, y, 1.0, **dict(zip(marks, ids, strict=True)), **options)
        found.backward()
        return found.isnan() and x.grad.isnan().any()

    assert rules(body, *(t.split([2, 1]) for t in (x, y, *marks.values()))) == [True, True]
    assert body(x, y, *marks.values())


@in_chunks
@pytest.mark.parametrize(
    ("kind", "marks"),
    [("nt_xent", ()), ("nt_xent", ("ids",)), ("info_nce", ("exclude",)), ("info_nce", ("labels", "ids"))],
)
def test_decoupled(kind, marks, options):
    module = parameters_of(kind)
    ours, _ = pair(kind, marks, module, decoupled=True, **options)
    holds(ours, program(DECOUPLED[kind], marks, module), module=module, sizes=[(8,), (5, 0, 3)])


def test_a_row_without_negatives_contributes_nothing():
    """The only sample of the batch, and one whose other columns are all left out."""
    x, y, *_ = batch(3)
    ids = torch.tensor([4, 4, 4])
    for loss in (nt_xent_loss, info_nce_loss):
        assert loss(x[:1], y[:1], decoupled=True) == 0
        x.requires_grad_()
        value = loss(x, y, ids=ids, decoupled=True)
        assert value == 0
        assert torch.autograd.grad(value, x)[0].abs().max() == 0
        assert loss(x * torch.nan, y, decoupled=True).isnan()


def test_pairs_to_leave_out_of_own_negatives():
    """One mask of keys, one of negatives, of which there may be as many, or none; positives stay."""
    x, y, _, _, exclude = batch(8)

    def loss(x, y, exclude, out, of_keys, of_negatives, **options):
        marks = {"exclude": exclude} if of_keys else {}
        marks |= {"exclude_negatives": out} if of_negatives else {}
        return info_nce_loss(x, y, hard(x, y).repeat(1, 4, 1)[:, : out.shape[1]], **marks, **options).item()

    for number in (0, 2, 8):
        out = data(8, number) > 0.3
        q, k, n = (F.normalize(t, dim=-1) for t in (x, y, hard(x, y).repeat(1, 4, 1)[:, :number]))
        for each in itertools.product((False, True), repeat=2):
            more = (q[:, None] * n).sum(2).masked_fill(out & each[1], -torch.inf)
            right = info_nce(q, k, 10.0, 0.0, more=more, exclude=exclude if each[0] else None).mean().item()
            parts = (t.split([5, 0, 3]) for t in (x, y, exclude, out))
            found = rules(loss, *parts, *([mark] * 3 for mark in each))
            assert found == [pytest.approx(right, rel=1e-12)] * 3
    assert clip_loss(x, y, 3.0, exclude=torch.ones(8, 8, dtype=torch.bool)) == 0  # of each row its positive is left


def info_nce_without_false_negatives(x, y, scale, margin, own, labels=None, **marks):
    """Zhang et al. 2025 (Qwen3 Embedding), equation 2: a cosine above that of the own key by a margin is none."""
    q, k, n = (F.normalize(z, dim=-1) for z in (x, y, hard(x, y)))
    more = (q[:, None] * n).sum(2) if own else q @ n.flatten(0, 1).T
    cosines = torch.cat([q @ k.T, more], 1)
    positive, excluded = (
        torch.cat([mask, torch.zeros_like(more).bool()], 1) for mask in masks(len(x), labels, **marks)
    )
    near = cosines > cosines.diagonal()[:, None] + margin
    assert near.any() and not near.all()
    return softmax(scale * cosines, positive, excluded | near & ~positive).mean()


@in_chunks
@pytest.mark.parametrize(
    ("negatives", "marks"), [("hard", ("ids",)), ("shared", ()), ("shared", ("labels", "exclude"))]
)
def test_false_negatives_by_a_margin(negatives, marks, options):
    """Compared before the temperature, which is trained; of several passages the nearest counts."""
    module = parameters_of("info_nce")
    loss = CONTRASTIVE[f"info_nce_of_{negatives}_negatives"].ours
    for margin in (0.1, -0.2):
        more = {"false_negative_margin": margin, **options}
        right = partial(info_nce_without_false_negatives, margin=margin, own=negatives == "hard")
        holds(
            program(loss, marks, module, **more),
            program(lambda x, y, scale, bias, right=right, **chosen: right(x, y, scale, **chosen), marks, module),
            module=module,
            sizes=[(8,), (5, 0, 3)],
        )


def test_the_margin_of_several_keys():
    """It is of the nearest that is not left out; a query without any, whose label has others, keeps its negatives."""
    x, y, labels, *_ = batch(8)
    keys = torch.stack([x + y, y, x], 1)
    near = torch.tensor([False, False, True]).repeat(8, 1)
    found, right = (
        info_nce_loss(x, k, exclude_positives=m, false_negative_margin=0.0)
        for k, m in ((keys, near), (keys[:, :2], None))
    )
    torch.testing.assert_close(found, right)
    out = torch.arange(8)[:, None] < 1
    none, all_ = (
        info_nce_loss(x, y[:, None], labels=labels, exclude_positives=out, false_negative_margin=m) for m in (None, 9.0)
    )
    assert none == all_


@in_chunks
@pytest.mark.parametrize("decouple", [False, True])
def test_negatives_of_all_queries_of_a_rank(options, decouple):
    """They are no other rank's; of different numbers, some left out; no tensor has b · K rows, nor b · K · D numbers."""
    x, y, *_ = batch(8)
    sizes, numbers = (3, 0, 4, 1), (0, 3, 20, 2)
    pools, masks = zip(
        *((data(k, 6, seed=k), data(b, k) > 0.4) for b, k in zip(sizes, numbers, strict=True)), strict=True
    )

    def loss(x, y, pool, out):
        with Largest() as largest:
            x, pool = x.clone().requires_grad_(), pool.clone().requires_grad_()
            value = info_nce_loss(x, y, pool, exclude_negatives=out, decoupled=decouple, **options)
            gradients = torch.autograd.grad(value / 4, (x, pool), materialize_grads=True)
        assert largest.numel <= max(options.get("chunk_size", len(x)) * len(pool), 8 * 8, 20 * 6)
        return value.item(), *gradients

    xs, ps = x.clone().requires_grad_(), [pool.clone().requires_grad_() for pool in pools]
    q, k, terms = F.normalize(xs), F.normalize(y), decoupled if decouple else softmax
    more = (q @ F.normalize(torch.cat(ps)).T).masked_fill(torch.block_diag(*(~mask for mask in masks)) == 0, -torch.inf)
    right = info_nce(q, k, 10.0, 0.0, more=more, terms=terms).mean()
    right.backward()
    values, of_x, of_pools = zip(*rules(loss, *(t.split(sizes) for t in (x, y)), pools, masks), strict=True)
    assert values == (pytest.approx(right.item(), rel=1e-12),) * 4
    torch.testing.assert_close([torch.cat(of_x), *of_pools], [xs.grad, *(pool.grad for pool in ps)])


@in_chunks
def test_ranks_with_different_numbers_of_hard_negatives(options):
    """None on a rank; a query's negatives are in no other query's sum."""
    x, y, *_ = batch(8)
    ours = rules(
        lambda x, y, k: info_nce_loss(x, y, hard(x, y)[:, :k], normalize=False, **options).item(),
        *(t.split([3, 0, 4, 1]) for t in (x, y)),
        [2, 1, 0, 1],
    )
    more = (x[:, None] * hard(x, y)).sum(2)
    without = torch.tensor([[0, 0]] * 3 + [[1, 1]] * 4 + [[0, 1]]).bool()
    right = info_nce(x, y, 10.0, 0.0, more=more.masked_fill(without, -torch.inf)).mean().item()
    assert ours == [pytest.approx(right, rel=1e-12)] * 4


# ── sizes and messages ───────────────────────────────────────────────────────────────────────────


def test_the_messages():
    """One modality is gathered, in its dtype, its gradient in float32; one number per column is reduced, and the loss."""

    def sent(rows, sizes):
        x, y = (torch.full((rows, 5), float(rows), dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        return profiled(lambda: clip_loss(x, y, 1.0, sizes=sizes).backward())

    for sizes in ("auto", [7, 4]):
        for rows, found in zip((7, 4), gloo(sent, [7, 4], [sizes] * 2), strict=True):
            assert found == [
                *([("all_gather", 32)] if sizes == "auto" else []),  # rows, D, columns to leave out, needed gradients
                ("all_gather", rows * 5 * 2),
                ("reduce_scatter", 11 * 4),  # of logsumexp
                ("all_reduce", 4),
                ("sum_gradients", 4),  # which sends nothing
                ("sum_gradients backward", 4),
                ("all_reduce backward", 4),  # nor does this
                ("reduce_scatter backward", rows * 2 * 4),
                ("all_gather backward", 11 * 5 * 4),
            ]
    assert next(name for name, _ in gloo(sent, [4, 4], [None] * 2)[0]) == "all_gather"
    assert sent(7, "auto") == []  # one rank


@pytest.mark.parametrize(("rows", "sizes"), [([4, 4], [4, 4]), ([5, 3], [5, 3]), ([4, 4], None)])
def test_sizes_that_are_known(rows, sizes):
    x, y, *_ = batch(8)
    losses = rules(lambda x, y: clip_loss(x, y, 3.0, sizes=sizes).item(), x.split(rows), y.split(rows))
    assert losses == [pytest.approx(clip_loss(x, y, 3.0).item())] * 2
