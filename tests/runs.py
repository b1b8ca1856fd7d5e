"""Where the ranks of a test run: in one autograd graph, simulated by the rules, on gloo, on MPI."""

from functools import partial

import pytest

from diffcoll.testing import simulate
from diffcoll.testing.pool import Pool

_pool = Pool()


def kept(fn, *per_rank, backend="gloo", timeout=60):
    """As `spawn`, on processes that are kept: a test that changes a class or a module on its ranks uses `spawn`."""
    return _pool.call(fn, list(zip(*per_rank, strict=True)), backend, timeout)


truth, rules, gloo, mpi = simulate, partial(simulate, rules=True), kept, partial(kept, backend="mpi")
RUNS = {"truth": truth, "rules": rules, "gloo": gloo, "mpi": mpi}


def runs_on(*names):
    """What the fixture `run` is: one test for each name."""
    return pytest.mark.parametrize("run", names, indirect=True)


def end():
    _pool.end()


def refusal(error, call, *arguments):
    """Return the text of the error that a call raises, of this type."""
    with pytest.raises(error) as caught:
        call(*arguments)
    return str(caught.value)
