"""chunk_size bounds the memory of the logits, as notes/contrastive.md and notes/vocab-parallel.md say."""

import importlib.util
import sys
from pathlib import Path

import pytest

import diffcoll
from diffcoll.testing import spawn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
MEGA = 1 << 20


def example(name):
    path = Path(diffcoll.__file__).parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_peak_of_a_step():
    cost, b, dims, chunk = example("contrastive_cost"), 2048, 16, 64

    def peaks(r):
        return [cost.memory(name, b, dims, chunk) for name in ("clip_loss", f"chunk_size={chunk}")]

    whole, chunked = spawn(peaks, range(2))[0]
    assert 2 * b * 2 * b * 4 / MEGA < whole < 6 * b * 2 * b * 4 / MEGA
    assert chunked < whole / 5


def test_the_peak_of_a_sharded_vocabulary():
    """Two matrices of logits, and the gradients."""
    cost, b, words, dims, chunk = example("vocab_parallel_cost"), 2048, 8192, 16, 64

    def peaks(r):
        return [cost.memory(name, b, words, dims, chunk) for name in ("all logits", f"chunk_size={chunk}")]

    whole, chunked = spawn(peaks, range(2))[0]
    assert 2 * b * words / 2 * 4 / MEGA < whole < 3 * b * words / 2 * 4 / MEGA
    assert chunked < whole / 10
