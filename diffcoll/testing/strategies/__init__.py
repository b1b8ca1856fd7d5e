"""Hypothesis strategies for property tests of distributed losses and layers.

`per_rank_tensors` draws a list with one tensor per rank: uneven and empty batches, ties, zeros, memory layouts, and
values that differ from rank to rank. With equal data on all ranks most wrong gradients cannot be seen.

>>> import torch, diffcoll as dc
>>> from hypothesis import given, settings
>>> from diffcoll.testing import simulate, strategies
>>> @settings(max_examples=20, deadline=None)
... @given(strategies.per_rank_tensors(shape=(2,)))
... def test_gather(xs):
...     for y in simulate(lambda x: dc.all_gather(x, sizes="auto"), xs):
...         assert torch.equal(y, torch.cat(xs))
>>> test_gather()

Hypothesis prints the tensors of a failure as code that makes them again. Needs the `test` extra.
"""

from __future__ import annotations

from diffcoll.testing._calls import missing

try:
    import hypothesis as _  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("diffcoll.testing.strategies", "hypothesis", "test") from error

from diffcoll.testing.layouts import LAYOUTS, with_layout
from diffcoll.testing.strategies.sizes import pairs, sizes, worlds
from diffcoll.testing.strategies.tensors import per_rank_tensors

__all__ = ["LAYOUTS", "pairs", "per_rank_tensors", "sizes", "with_layout", "worlds"]
