"""Fixtures that all tests share."""

import gc
import os
from pathlib import Path

import pytest
import torch

import diffcoll
from diffcoll.core.torch_private.release import COMPILES, RELEASE
from diffcoll.testing import processes, simulate, spawn

torch.set_num_threads(1)
# What ranks import to find a test's functions, and to compile: once in the server that forks them, not in each.
processes.preload("hypothesis", "numpy", "pytest", *(["torch._inductor.compile_fx"] if COMPILES else []))
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


def _in_truth(loss, xs, *more):
    leaves = [None if x is None else x.clone().requires_grad_() for x in xs]
    losses = simulate(loss, leaves, *more)
    torch.autograd.backward(losses)
    return [x if x is None else x.grad for x in leaves]


def _on_ranks(run):
    def gradients(loss, xs, *more):
        def body(x, *more):
            x = None if x is None else x.clone().requires_grad_()
            loss(x, *more).backward()
            return x if x is None else x.grad

        return run(body, xs, *more)

    return gradients


WORLDS = {
    "truth": _in_truth,
    "rules": _on_ranks(lambda *call: simulate(*call, rules=True)),
    "gloo": _on_ranks(spawn),
}


@pytest.fixture(params=WORLDS)
def gradients(request):
    """(loss, xs, …) → each rank's gradient of the sum of all ranks' losses, as lists of numbers."""

    def numbers(loss, xs, *more):
        found = WORLDS[request.param](
            loss, [x if x is None else torch.as_tensor(x, dtype=torch.double) for x in xs], *more
        )
        return [x if x is None else x.tolist() for x in found]

    return numbers


@pytest.fixture(params=["truth", "rules", "gloo"])
def run(request):
    """Runs a function in truth, under the rules, and on processes: for tests of values."""
    return {"truth": simulate, "rules": lambda *call: simulate(*call, rules=True), "gloo": spawn}[request.param]
