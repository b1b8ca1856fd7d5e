"""Collectives on two processes whose tensors are on the test device."""

import dataclasses

import pytest
import torch
from device_ranks import BACKENDS, N, let_mpi_reach_the_device, moved, on_two

from diffcoll.engines import mpi
from diffcoll.testing import cases

SEED = 1
FIELDS = [f.name for f in dataclasses.fields(cases.Case)]


class OnDevice(cases.Case):
    """A call whose tensors are on the device, and arrive there late."""

    def x(self, rank, seed):
        return moved(super().x(rank, seed))

    def w(self, y, rank, seed):
        return moved(super().w(y, rank, seed))

    def v(self, g, rank, seed):
        return moved(super().v(g, rank, seed))


def measured(r):
    """Run the table on a rank; returns values and gradients."""
    found = []
    for case in cases.table(N):
        measured = cases.on_rank(OnDevice(*(getattr(case, name) for name in FIELDS)), r, SEED)
        values = vars(measured)
        assert {t.device.type for t in values.values() if t is not None} == {"late"}
        found.append(cases.Measured(*(t if t is None else t.cpu() for t in values.values())))
        torch.accelerator.synchronize()  # a rank may have no result to wait for, and messages to send
    return found


def wrong(of_ranks):
    """Return (rank, call, what is wrong, error) of what differs from truth."""
    differing = []
    for r, found in enumerate(of_ranks):
        assert len(found) == len(cases.table(N)) > 60
        for case, measured in zip(cases.table(N), found, strict=True):
            errors = cases.errors(measured, cases.in_truth(case, SEED), r)
            assert len(errors) == 3
            differing += [(r, str(case), name, error) for name, error in errors.items() if not error < 1e-12]
    return differing


@pytest.mark.parametrize("backend", BACKENDS)
def test_value_and_gradients_to_second_order_are_those_of_truth(backend, order):
    """The whole table: uneven and empty blocks, async_op, ties."""
    assert wrong(on_two(backend, order, measured)) == []


@pytest.mark.parametrize("settles", [True, False])
def test_an_mpi_that_reaches_the_device(settles, order):
    """It uses no streams: what a rank sends must have been computed before."""

    def body(r):
        let_mpi_reach_the_device()
        if not settles:
            mpi._settle = lambda x: None
        return measured(r)

    assert bool(wrong(on_two("mpi", order, body))) is not settles
