"""Transforms of torch.func within one another, to depth 3, over losses and layers of the batch of all ranks.

Truth is one process with the batch of all ranks in PyTorch's operations, and its derivatives by reverse mode alone.
Each rank differentiates with respect to two numbers of its own, from which its features are computed.
"""

import random
from functools import partial

import nests
import pytest
import torch
from references import IN_CHUNKS, LOSSES, Loss, data, of_products
from runs import gloo, rules

from diffcoll import nn
from diffcoll.nn.functional import clip_loss, nt_xent_loss

SIZES = {1: (3,), 2: (3, 2), 3: (2, 0, 3)}


def given(x, r, rows):
    """Features of two views, (rows, 2) each, of x of shape (2,); and labels."""
    base = (1.9 * torch.arange(4 * rows, dtype=torch.float64) + 0.7 * r + 0.3).view(rows, 4).sin()
    z = (1.3 * base * x[0] + base.cos() * x[1] + base).sin()
    return z[:, :2], z[:, 2:], (torch.arange(rows) + r) % 3


def normalized(z):
    return (z - z.mean(0)) / (z.var(0, correction=0) + 1e-3).sqrt()


def used(y):
    """Two numbers from the rows of a rank."""
    w = (1.1 * torch.arange(y.numel(), dtype=y.dtype) + 0.2).sin().view(y.shape)
    return torch.stack([(w * y).sum(), (w * y.sin()).sum()])


#: Of features x and y and labels: the value of the whole batch, the same on each rank; of batch norm, each rank's rows.
PROGRAMS = {
    **LOSSES,
    **{f"{name} 2": Loss(partial(LOSSES[name].ours, chunk_size=2), LOSSES[name].whole) for name in IN_CHUNKS},
    "batch norm": of_products(nn.SyncBatchNorm(2, eps=1e-3, affine=False, track_running_stats=False), normalized),
}


def x_of(r):
    return torch.tensor([0.4 + 0.5 * r, -0.7 + 0.8 * r], dtype=torch.float64)


def check(pairs, n, run):
    """Compare programs, each in its nest, with one process."""
    sizes = SIZES[n]

    def body(r):
        def on_rank(x, program):
            y = program(*given(x, r, sizes[r]))
            return used(y) if y.dim() > 1 else y

        return [
            nests.by_transforms(nest, partial(on_rank, program=PROGRAMS[name].ours), r)(x_of(r)) for name, nest in pairs
        ]

    of_ranks = run(body, range(n))
    for i, (name, nest) in enumerate(pairs):

        def on_one(xs, program=PROGRAMS[name].whole):
            y = program(*map(torch.cat, zip(*(given(x, r, sizes[r]) for r, x in enumerate(xs)), strict=True)))
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


@pytest.mark.parametrize("loss", [partial(clip_loss, logit_scale=2.0), nt_xent_loss])
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_backward_within_vmap(loss, chunk):
    """The gradients of the loss are a batch of torch.func's, those of its inputs are outside: nothing is in place."""
    x, y = (data(6, 4, seed=seed).requires_grad_() for seed in (0, 1))
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
