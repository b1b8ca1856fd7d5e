"""Chunks bound the memory of logits and of a model, as contrastive.md and vocab-parallel.md in notes/training say."""

import sys

import pytest
from runs import ROOT

from diffcoll.testing import spawn

sys.path.append(str(ROOT / "examples"))
import contrastive_cost
import cost
import grad_cache_cost
import vocab_parallel_cost

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
MEGA = 1 << 20


def peaks(rank, steps, names, sizes):
    return [cost.memory(steps, name, sizes) for name in names]


def on_ranks(script, names, *sizes):
    """Return the peaks of these variants of a script on rank 0."""
    return spawn(peaks, range(2), [script.steps] * 2, [names] * 2, [sizes] * 2)[0]


def test_the_peak_of_a_step():
    b, dims, chunk = 2048, 16, 64
    whole, chunked = on_ranks(contrastive_cost, ("clip_loss", f"chunk_size={chunk}"), b, dims, chunk)
    assert 2 * b * 2 * b * 4 / MEGA < whole < 6 * b * 2 * b * 4 / MEGA
    assert chunked < whole / 5


def test_the_peak_of_a_sharded_vocabulary():
    """Two matrices of logits, and the gradients."""
    b, words, dims, chunk = 2048, 8192, 16, 64
    whole, chunked = on_ranks(vocab_parallel_cost, ("all logits", f"chunk_size={chunk}"), b, words, dims, chunk)
    assert 2 * b * words / 2 * 4 / MEGA < whole < 3 * b * words / 2 * 4 / MEGA
    assert chunked < whole / 10


def test_the_peak_of_grad_cache():
    """Without most activations of the batch, of both parts of the pairs after each of the modules.

    The peak of the step without chunks is in its backward, where some have been freed.
    """
    b, dims, layers, chunk = 1024, 64, 16, 32
    whole, cached = on_ranks(grad_cache_cost, ("GradientAverager", "GradCache"), b, dims, layers, chunk)
    activations = 2 * 2 * layers * b * dims * 4 / MEGA
    assert 0.6 * activations < whole - cached < 1.3 * activations


def counted(rank):
    steps = grad_cache_cost.steps(8, 512, 2, 2).values()
    for step in [*steps, *steps]:  # the averager compares arguments in the first, DistributedDataParallel in the second
        step()
    return [cost.collectives(step) for step in steps]


def test_the_collectives_of_a_step():
    """Five of the loss; the averager's note and one bucket, two buckets of DistributedDataParallel."""
    for found in spawn(counted, range(2)):
        assert found == [7, 7, 7, 7]
