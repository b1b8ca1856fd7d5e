"""Transforms of torch.func within one another, to depth 3, over losses and layers of the batch of all ranks.

Truth is one process with the batch of all ranks in PyTorch's operations, and its derivatives by reverse mode alone.
Each rank differentiates with respect to two numbers of its own, from which its features are computed.
"""

import random
from functools import partial

import nests
import pytest
import references
import torch
from runs import gloo, rules

from diffcoll import all_reduce, nn, sum_gradients
from diffcoll.nn import functional
from diffcoll.nn.functional import moments, weighted_mean

SIZES = {1: (3,), 2: (3, 2), 3: (2, 0, 3)}


def features(x, r, rows):
    """(rows, 4), of x of shape (2,)."""
    base = (1.9 * torch.arange(4 * rows, dtype=torch.float64) + 0.7 * r + 0.3).view(rows, 4).sin()
    return (1.3 * base * x[0] + base.cos() * x[1] + base).sin()


def labels_of(r, rows):
    return (torch.arange(rows) + r) % 3


# ── programs: from the features and labels of a rank, and from those of all ranks ────────────────────────


def contrastive(kind, scale=2.0, bias=0.0, **options):
    def of(loss, **options):
        def of_rows(z, labels):
            marks = {"labels": labels} if "supcon" in kind else {}
            return loss(z[:, :2], z[:, 2:], scale, bias, **marks, **options)

        return of_rows

    return of(references.CONTRASTIVE[kind].ours, **options), of(references.CONTRASTIVE[kind].whole)


def of_views(ours, whole, **options):
    return tuple(lambda z, labels, f=f: f(z[:, :2], z[:, 2:], **options) for f in (ours, whole))


def of_features(ours, whole):
    return tuple(lambda z, labels, f=f: f(z) for f in (ours, whole))


#: Tokens, whose hidden states depend on the rows of all ranks.
TARGET = torch.tensor([1, -100, 2, 0])
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.1}


def hidden(total):
    return (1.3 * torch.arange(16, dtype=torch.float64)).view(4, 4).sin() + total.cos()


def vocabulary(**options):
    def on_rank(z, labels):
        states, more = hidden(all_reduce(z.sum(0), grad_placement="replicate")), {"bias_shard": z[:, 0], **OPTIONS}
        return sum_gradients(functional.vocab_parallel_cross_entropy(states, z, TARGET, **more, **options))

    return on_rank, lambda z, labels: references.vocabulary_cross_entropy(
        hidden(z.sum(0)), z, TARGET, z[:, 0], **OPTIONS
    )


def both_moments(z, w):
    """Mean and variance, as those of `moments`."""
    mean = (w * z).sum() / w.expand_as(z).sum()
    return torch.stack([mean, (w * (z - mean).square()).sum() / w.expand_as(z).sum()])


def normalized(z):
    return (z - z.mean(0)) / (z.var(0, correction=0) + 1e-3).sqrt()


def used(y):
    """Two numbers from the rows of a rank."""
    w = (1.1 * torch.arange(y.numel(), dtype=y.dtype) + 0.2).sin().view(y.shape)
    return torch.stack([(w * y).sum(), (w * y.sin()).sum()])


def of_weights(z):
    """Positive functions of the features, one for each row."""
    return z[:, :1].square()


KINDS = ["clip", "info_nce", "nt_xent", "supcon_of_one_view", "info_nce_of_hard_negatives", "info_nce_of_passages"]
#: The value of the whole batch, the same on each rank; of batch norm, each rank's rows.
PROGRAMS = {
    **{kind: contrastive(kind) for kind in KINDS},
    **{f"{kind} 2": contrastive(kind, chunk_size=2) for kind in KINDS},  # ranks have 3 rows
    "siglip": contrastive("siglip", 3.0, -1.0),
    "siglip 2": contrastive("siglip", 3.0, -1.0, chunk_size=2),
    "barlow twins": of_views(functional.barlow_twins_loss, references.barlow_twins, lambda_param=0.3),
    "vicreg": of_views(functional.vicreg_loss, references.vicreg),
    "koleo": of_features(partial(functional.koleo_loss, normalize=False), partial(references.koleo, normalize=False)),
    "sigreg": of_features(*(partial(f, seed=3, num_slices=4) for f in (functional.sigreg_loss, references.sigreg))),
    "vocabulary": vocabulary(),
    "vocabulary 2": vocabulary(chunk_size=2),
    "dice": of_features(
        lambda z: functional.dice_loss(z[:, :2].cos(), z[:, 2:].cos(), dims="per class"),
        lambda z: references.ratio("dice", z[:, :2].cos(), z[:, 2:].cos(), dims=0),
    ),
    "moments": of_features(
        lambda z: torch.stack(moments(z, (0, 1))[1:]), lambda z: both_moments(z, torch.ones_like(z))
    ),
    "moments of weighted": of_features(
        lambda z: torch.stack([y.view(()) for y in moments(z, (0, 1), weight=of_weights(z))[1:]]),
        lambda z: both_moments(z, of_weights(z)),
    ),
    "weighted mean": of_features(
        lambda z: weighted_mean(z[:, 1:2], weight=of_weights(z)),
        lambda z: references.mean_of_tokens(z[:, 1:2], of_weights(z))[None],
    ),
    "token mean": (
        lambda z, labels: functional.token_mean(z, labels[:, None]),
        lambda z, labels: references.mean_of_tokens(z, labels[:, None]),
    ),
    "batch norm": of_features(nn.SyncBatchNorm(4, eps=1e-3, affine=False, track_running_stats=False), normalized),
}


def x_of(r):
    return torch.tensor([0.4 + 0.5 * r, -0.7 + 0.8 * r], dtype=torch.float64)


def check(pairs, n, run):
    """Compare programs, each in its nest, with one process."""
    sizes = SIZES[n]

    def body(r):
        def on_rank(x, program):
            y = program(features(x, r, sizes[r]), labels_of(r, sizes[r]))
            return used(y) if y.dim() > 1 else y

        return [
            nests.by_transforms(nest, partial(on_rank, program=PROGRAMS[name][0]), r)(x_of(r)) for name, nest in pairs
        ]

    of_ranks = run(body, range(n))
    for i, (name, nest) in enumerate(pairs):

        def on_one(xs, program=PROGRAMS[name][1]):
            rows = [features(x, r, sizes[r]) for r, x in enumerate(xs)]
            y = program(torch.cat(rows), torch.cat([labels_of(r, size) for r, size in enumerate(sizes)]))
            return [used(part) for part in y.split(sizes)] if y.dim() > 1 else [y] * n

        for r, y in enumerate(nests.by_definition(nest, on_one)([x_of(r) for r in range(n)])):
            text = f"{name}, rank {r} of {n}, {' of '.join(nest)}: {of_ranks[r][i]} for {y}"
            torch.testing.assert_close(of_ranks[r][i], y.detach(), rtol=1e-7, atol=1e-7, msg=text)


def drawn(seed, depth):
    """Every program in one nest."""
    of = random.Random(10 * seed + depth)
    return [(name, tuple(of.choices(nests.NAMES, k=depth))) for name in PROGRAMS]


# torch's own, of the gradient of F.logsigmoid within vmap
pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")


def test_programs_in_nests_of_each_depth():
    check([pair for depth in (1, 2, 3) for pair in drawn(0, depth)[depth::5]], 3, rules)


@pytest.mark.parametrize(
    "pair",
    [
        ("clip 2", ("jvp",)),
        ("supcon_of_one_view", ("vmap", "jacfwd")),
        ("info_nce", ("grad", "jacfwd", "jacfwd")),
        ("nt_xent", ("jacrev", "jvp", "grad")),
        ("batch norm", ("jacfwd",)),
        ("batch norm", ("grad", "grad")),
        ("moments", ("jvp", "grad")),
        ("vocabulary 2", ("jvp", "grad")),
    ],
    ids=str,
)
def test_an_empty_rank_and_normalized_features(pair):
    """The tangent of log Σ exp of no terms; that of a norm, for which PyTorch's raises; a count in a batch of vmap."""
    check([pair], 3, rules)


@pytest.mark.parametrize("loss", [partial(functional.clip_loss, logit_scale=2.0), functional.nt_xent_loss])
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_backward_within_vmap(loss, chunk):
    """The gradients of the loss are a batch of torch.func's, those of its inputs are outside: nothing is in place."""
    x, y = (references.data(6, 4, seed=seed).requires_grad_() for seed in (0, 1))
    value = loss(x, y, chunk_size=chunk)
    (expected,) = torch.autograd.grad(value, x, retain_graph=True)
    factors = torch.tensor([1.0, -2.0], dtype=torch.float64)
    found = torch.func.vmap(lambda g: torch.autograd.grad(value, x, g, retain_graph=True)[0])(factors)
    torch.testing.assert_close(found, torch.stack([expected, -2 * expected]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", range(1, 5))
def test_each_program_in_nests_of_each_depth(n, seed):
    check([pair for depth in (1, 2, 3) for pair in drawn(seed, depth)], n, rules)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_on_processes(backend):
    check(drawn(5, 2) + drawn(5, 3), 3, partial(gloo, backend=backend, timeout=500))
