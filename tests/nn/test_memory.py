"""chunk_size bounds the memory of the logits, as notes/contrastive.md says."""

import importlib.util
import sys
from pathlib import Path

import pytest

import diffcoll
from diffcoll.testing import spawn


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_peak_of_a_step():
    path = Path(diffcoll.__file__).parent.parent / "examples" / "contrastive_cost.py"
    spec = importlib.util.spec_from_file_location("contrastive_cost", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    b, dims, chunk, mega = 2048, 16, 64, 1 << 20

    def peaks(r):
        return [example.memory(name, b, dims, chunk) for name in ("clip_loss", f"chunk_size={chunk}")]

    whole, chunked = spawn(peaks, range(2))[0]
    assert 2 * b * 2 * b * 4 / mega < whole < 6 * b * 2 * b * 4 / mega
    assert chunked < whole / 5
