"""Chunks bound the memory of logits and of a model, as contrastive.md and vocab-parallel.md in notes/training say."""

import sys
from functools import partial

import pytest

from benchmarks import losses
from benchmarks.measuring import Bench

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
MEGA = 1 << 20


def peaks(make, *names):
    """Return the peak of each variant in MB, in processes of its own."""
    return [max(Bench("torch", 2, 1).peaks(make, name)) / MEGA for name in names]


def test_the_peak_of_a_step():
    b, chunk = 2048, 64
    make = partial(losses.clip, rows=b, dims=16, chunk=chunk)
    whole, chunked = peaks(make, "diffcoll", f"diffcoll, chunk_size={chunk}")
    assert 2 * b * 2 * b * 4 / MEGA < whole < 6 * b * 2 * b * 4 / MEGA
    assert chunked < whole / 5


def test_the_peak_of_a_sharded_vocabulary():
    """Two matrices of logits, and the gradients."""
    b, words, chunk = 2048, 8192, 64
    make = partial(losses.vocabulary, tokens=b, words=words, dims=16, chunk=chunk)
    whole, chunked = peaks(make, "diffcoll", f"diffcoll, chunk_size={chunk}")
    assert 2 * b * words / 2 * 4 / MEGA < whole < 3 * b * words / 2 * 4 / MEGA
    assert chunked < whole / 10


def test_the_peak_of_grad_cache():
    """Without most activations, of both parts of the pairs; the peak without chunks is where some have been freed."""
    b, dims, layers, chunk = 1024, 64, 16, 32
    make = partial(losses.grad_cache, rows=b, dims=dims, layers=layers, chunk=chunk)
    whole, cached = peaks(make, "diffcoll.GradientAverager", "diffcoll, GradCache")
    activations = 2 * 2 * layers * b * dims * 4 / MEGA
    assert 0.6 * activations < whole - cached < 1.3 * activations
