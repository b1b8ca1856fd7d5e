"""Fixtures that all tests share."""

import gc
import os
from functools import partial
from pathlib import Path

import pytest
import runs
import torch

import diffcoll
from diffcoll.core.torch_private.release import COMPILES, RELEASE
from diffcoll.testing.spawn import PRELOADED

torch.set_num_threads(1)
# What ranks import to find a test's functions, and to compile: once in the server that forks them, not in each.
# Inductor's import asks for a device on some releases with CUDA, after which forked ranks cannot use it.
INDUCTOR = COMPILES and not torch.backends.cuda.is_built()
PRELOADED += ["hypothesis", "numpy", "pytest", *(["torch._inductor.compile_fx"] if INDUCTOR else [])]
if "PYTEST_XDIST_WORKER" in os.environ:  # ranks of another test wait for a core
    os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"


def pytest_collection_finish():
    """Keep what has been imported out of garbage collections, which take an eighth of the time otherwise."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    if not COMPILES:  # compiled.py raises on import then
        file = Path(diffcoll.__file__).parent / "core" / "compiled.py"
        config.option.ignore = [*(config.option.ignore or ()), str(file)]
    if RELEASE < (2, 13):  # an aborted checkpoint is collected in another thread and cannot remove its hooks
        ignored = "ignore:Exception ignored in. <generator object _checkpoint_without_reentrant_generator"
        config.addinivalue_line("filterwarnings", f"{ignored}:pytest.PytestUnraisableExceptionWarning")


def pytest_unconfigure():
    runs.end()


@pytest.fixture(params=["truth", "rules", "gloo"])
def run(request):
    """Runs a function on ranks as `simulate` does; the mark `runs_on` says where."""
    return runs.RUNS[request.param]


@pytest.fixture
def gradients(run):
    """(loss, xs, …) → each rank's gradient of the sum of all ranks' losses, as lists of numbers."""

    def on_rank(loss, x, *more):
        x = None if x is None else x.detach().clone().requires_grad_()
        loss(x, *more).backward()
        return x if x is None else x.grad

    def numbers(loss, xs, *more):
        xs = [None if x is None else torch.as_tensor(x, dtype=torch.double).requires_grad_() for x in xs]
        if run is runs.truth:
            torch.autograd.backward(run(loss, xs, *more))
            found = [None if x is None else x.grad for x in xs]
        else:
            found = run(partial(on_rank, loss), xs, *more)
        return [x if x is None else x.tolist() for x in found]

    return numbers
