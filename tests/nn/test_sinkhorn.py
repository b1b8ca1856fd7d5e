"""Sinkhorn's assignment on ranks against one process with all rows, as published and in the log domain."""

import pytest
import torch
from references import data
from runs import rules, runs_on

from diffcoll.nn.functional import sinkhorn

SIZES = ((6,), (4, 4), (5, 0, 3), (0, 1, 0))


def published(scores, epsilon=0.05, iterations=3):
    """Caron et al. 2020, algorithm 1 of the supplement, on one process: prototypes in rows."""
    q = torch.exp(scores / epsilon).T
    k, b = q.shape
    q = q / q.sum()
    for _ in range(iterations):
        q = q / q.sum(1, keepdim=True) / k
        q = q / q.sum(0, keepdim=True) / b
    return (q * b).T


def in_log_domain(scores, epsilon, iterations=3):
    """The same, in float64, without an exponential until the end."""
    x = scores.double() / epsilon
    for _ in range(iterations):
        x = x - x.logsumexp(0, keepdim=True)
        x = x - x.logsumexp(1, keepdim=True)
    return x.exp()


def on_ranks(run, scores, sizes, **options):
    return torch.cat(run(lambda x: sinkhorn(x, **options), scores.split(list(sizes))))


@runs_on("rules", "gloo", "mpi")
@pytest.mark.parametrize("options", [{}, {"epsilon": 0.3, "iterations": 1}, {"iterations": 7}], ids=str)
def test_equals_one_process(run, options):
    for sizes in SIZES if run is rules else [(5, 0, 3)]:
        scores = data(sum(sizes), 5, seed=len(sizes))
        found = on_ranks(run, scores, sizes, **options)
        torch.testing.assert_close(found, published(scores, **options), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(found.sum(1), torch.ones(len(scores)).double())
    torch.testing.assert_close(sinkhorn(scores, **options), published(scores, **options), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("largest", [1e-3, 1.0, 200.0, 1e4])
def test_large_scores_in_float32(largest):
    """The published code overflows in float32 where scores/epsilon > 88. Here: as exact as rounded scores."""
    scores = data(64, 16, seed=3, dtype=torch.float32).clamp(-1, 1) * largest
    found = on_ranks(rules, scores, (4, 0, 60), epsilon=1.0)
    bound = 10 * max(largest, 1) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.double(), in_log_domain(scores, 1.0), rtol=bound, atol=1e-37)
    assert published(scores, 1.0).isnan().all() == (largest >= 200)


def test_a_prototype_far_from_all_samples_and_pairs_that_are_not_assigned():
    """Its exponentials are all 0 in float64, and a row of which all are 0: each has its share all the same."""
    scores = data(8, 4)
    scores[:, 1] -= 5000
    scores[2] -= 9000
    scores[1, 2] = -torch.inf
    found = on_ranks(rules, scores, (5, 3), epsilon=1.0)
    torch.testing.assert_close(found, in_log_domain(scores, 1.0), rtol=1e-10, atol=1e-300)
    assert found.sum(0).min() > 0.5 and found[1, 2] == 0


def test_dtypes_and_gradients():
    for dtype in (torch.bfloat16, torch.float16):
        scores = data(8, 4).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = on_ranks(rules, scores, (5, 3), epsilon=0.5)
        assert found.dtype == torch.float32
        assert not found.requires_grad
        torch.testing.assert_close(found.double(), published(scores.detach().double(), 0.5), rtol=1e-4, atol=1e-6)
