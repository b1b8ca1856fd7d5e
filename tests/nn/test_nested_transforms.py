"""Transforms of torch.func within one another, to depth 3, over losses and layers of the batch of all ranks.

Truth is one process with the batch of all ranks in PyTorch's operations, and its derivatives by reverse mode alone.
Each rank differentiates with respect to two numbers of its own, from which its features are computed.
"""

import random
from functools import partial

import nests
import pytest
import torch
import torch.nn.functional as F
from references import CONTRASTIVE, barlow_twins, ratio, sigreg, vicreg, vocabulary_cross_entropy
from runs import gloo, rules

from diffcoll import all_reduce, get_world_size, nn, sum_gradients
from diffcoll.nn import functional
from diffcoll.nn.functional import moments, weighted_mean

SIZES = {1: (3,), 2: (3, 2), 3: (2, 0, 3)}


def features(x, r, rows):
    """(rows, 4), of x of shape (2,)."""
    base = (1.9 * torch.arange(4 * rows, dtype=torch.float64) + 0.7 * r + 0.3).view(rows, 4).sin()
    return (1.3 * base * x[0] + base.cos() * x[1] + base).sin()


def halves(z):
    return z[:, :2], z[:, 2:]


def labels_of(r, rows):
    return (torch.arange(rows) + r) % 3


# ── on one process: the value that each rank returns, from the features of all ranks ─────────────────────


def contrastive_on_one(kind, scale, bias, z, sizes):
    labels = torch.cat([labels_of(r, rows) for r, rows in enumerate(sizes)])
    loss = CONTRASTIVE[kind]
    xs = map(F.normalize, halves(z)) if loss.normalize else halves(z)
    terms = loss.terms(*xs, scale, bias, **({"labels": labels} if "supcon" in kind else {}))
    return [terms.mean()] * len(sizes)


def barlow_on_one(z, sizes):
    return [barlow_twins(*halves(z), lambda_param=0.3)] * len(sizes)


def vicreg_on_one(z, sizes):
    return [vicreg(*halves(z))] * len(sizes)


def koleo_on_one(z, sizes):
    terms = []
    for i, row in enumerate(z):
        distances = (row - torch.cat([z[:i], z[i + 1 :]]) + 1e-8).square().sum(1).sqrt()
        terms.append(-torch.log(distances.min() + 1e-8))
    return [torch.stack(terms).mean()] * len(sizes)


def sigreg_on_one(z, sizes):
    return [sigreg(z, 3, num_slices=4)] * len(sizes)


#: Tokens, whose hidden states depend on the rows of all ranks.
TARGET = torch.tensor([1, -100, 2, 0])


def hidden(total):
    return (1.3 * torch.arange(16, dtype=torch.float64)).view(4, 4).sin() + total.cos()


def vocabulary_on_one(z, sizes):
    loss = vocabulary_cross_entropy(hidden(z.sum(0)), z, TARGET, z[:, 0], label_smoothing=0.1, z_loss=0.1)
    return [loss / len(sizes)] * len(sizes)


def dice_on_one(z, sizes):
    p, t = ((v + 1) / 2 for v in halves(z))
    return [ratio("dice", p, t, dims=0)] * len(sizes)


def moments_on_one(z, sizes):
    return [torch.stack([z.mean(), z.var(correction=0)])] * len(sizes)


def moments_of_weighted_on_one(z, sizes):
    w = z[:, :1].square()
    mean = (w * z).sum() / (4 * w.sum())
    return [torch.stack([mean, (w * (z - mean).square()).sum() / (4 * w.sum())])] * len(sizes)


def weighted_mean_on_one(z, sizes):
    w = z[:, 0].square()
    return [(w * z[:, 1]).sum() / w.sum()] * len(sizes)


def token_mean_on_one(z, sizes):
    w = torch.cat([labels_of(r, rows) for r, rows in enumerate(sizes)])[:, None]
    return [(w * z).sum() / (4 * w.sum())] * len(sizes)


def batch_norm_on_one(z, sizes):
    y = (z - z.mean(0)) / (z.var(0, correction=0) + 1e-3).sqrt()
    return [used(part) for part in y.split(sizes)]


def used(y):
    """Two numbers from the rows of a rank."""
    w = (1.1 * torch.arange(y.numel(), dtype=y.dtype) + 0.2).sin().view(y.shape)
    return torch.stack([(w * y).sum(), (w * y.sin()).sum()])


# ── on ranks ─────────────────────────────────────────────────────────────────────────────────────────────


def weighted_moments(z, r):
    return torch.stack([y.view(()) for y in moments(z, (0, 1), weight=z[:, :1].square())[1:]])


def normalized(z, r):
    return used(nn.SyncBatchNorm(4, eps=1e-3, affine=False, track_running_stats=False)(z))


def vocabulary(z, r, **options):
    states = hidden(all_reduce(z.sum(0), grad_placement="replicate"))
    more = {"bias_shard": z[:, 0], "label_smoothing": 0.1, "z_loss": 0.1, **options}
    return sum_gradients(functional.vocab_parallel_cross_entropy(states, z, TARGET, **more)) / get_world_size()


def contrastive(kind, scale, bias, z, r, **options):
    marks = {"labels": labels_of(r, len(z))} if "supcon" in kind else {}
    return CONTRASTIVE[kind].ours(*halves(z), scale, bias, **marks, **options)


SCALES = {"clip": (2.0, 0.0), "info_nce": (2.0, 0.0), "nt_xent": (2.0, 0.0), "supcon_of_one_view": (2.0, 0.0)}
SCALES |= {"siglip": (3.0, -1.0), "info_nce_of_hard_negatives": (2.0, 0.0), "info_nce_of_passages": (2.0, 0.0)}
OPTIONS = ({}, {"chunk_size": 2})  # ranks have 3 rows
#: name → on a rank, from its features; on one process, from all features.
PROGRAMS = {
    **{
        " ".join([kind, *map(str, options.values())]): (
            partial(contrastive, kind, *scale, **options),
            partial(contrastive_on_one, kind, *scale),
        )
        for kind, scale in SCALES.items()
        for options in OPTIONS
    },
    "barlow twins": (lambda z, r: functional.barlow_twins_loss(*halves(z), lambda_param=0.3), barlow_on_one),
    "vicreg": (lambda z, r: functional.vicreg_loss(*halves(z)), vicreg_on_one),
    "koleo": (lambda z, r: functional.koleo_loss(z, normalize=False), koleo_on_one),
    "sigreg": (lambda z, r: functional.sigreg_loss(z, seed=3, num_slices=4), sigreg_on_one),
    "vocabulary": (vocabulary, vocabulary_on_one),
    "vocabulary 2": (partial(vocabulary, chunk_size=2), vocabulary_on_one),
    "dice": (lambda z, r: functional.dice_loss(*((v + 1) / 2 for v in halves(z)), dims="per class"), dice_on_one),
    "moments": (lambda z, r: torch.stack(moments(z, (0, 1))[1:]), moments_on_one),
    "moments of weighted": (weighted_moments, moments_of_weighted_on_one),
    "weighted mean": (lambda z, r: weighted_mean(z[:, 1], weight=z[:, 0].square()), weighted_mean_on_one),
    "token mean": (lambda z, r: functional.token_mean(z, labels_of(r, len(z))[:, None]), token_mean_on_one),
    "batch norm": (normalized, batch_norm_on_one),
}


def x_of(r):
    return torch.tensor([0.4 + 0.5 * r, -0.7 + 0.8 * r], dtype=torch.float64)


def check(pairs, n, run):
    """Compare programs, each in its nest, with one process."""
    sizes = SIZES[n]

    def body(r):
        found = []
        for name, nest in pairs:
            f = nests.by_transforms(nest, lambda x, f=PROGRAMS[name][0]: f(features(x, r, sizes[r]), r), r)
            found.append(f(x_of(r)))
        return found

    of_ranks = run(body, range(n))
    for i, (name, nest) in enumerate(pairs):

        def on_one(xs, one=PROGRAMS[name][1]):
            return one(torch.cat([features(x, r, sizes[r]) for r, x in enumerate(xs)]), sizes)

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
    ],
    ids=str,
)
def test_an_empty_rank_and_normalized_features(pair):
    """The tangent of log Σ exp of no terms; that of a norm, for which PyTorch's raises; a count in a batch of vmap."""
    check([pair], 3, rules)


@pytest.mark.parametrize("loss", ["clip_loss", "nt_xent_loss"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_backward_within_vmap(loss, chunk):
    """The gradients of the loss are a batch of torch.func's, those of its inputs are outside: nothing is in place."""
    x, y = (torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    x.requires_grad_()
    more = (2.0,) if loss == "clip_loss" else ()
    value = getattr(functional, loss)(x, y, *more, chunk_size=chunk)
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
