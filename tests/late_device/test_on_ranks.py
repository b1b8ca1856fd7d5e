"""Rows of `make test-gpu` on the test device: on two processes, and on simulated ranks.

Of simulated ranks autograd would run the backward in a thread of its own, and the rank that comes last copies what
others have queued.
"""

import tempfile

import late
import pytest
import torch
from device_ranks import BACKENDS, N, let_mpi_reach_the_device, on_two
from gpu import accelerator
from gpu.host_waits import every_call
from gpu.losses import simulated_losses
from gpu.rank import Rank
from gpu.streams import CALLS, right_of

import diffcoll as dc
from diffcoll.testing import assert_matches_single_process, simulate


class Judged(Rank):
    """Keeps what is wrong in this process."""

    def __init__(self, r):
        super().__init__(r, N, tempfile.gettempdir(), "late")
        self.parts, self.wrong = 0, []

    def write(self, **found):
        self.parts += "name" in found
        self.wrong += [(found["name"], text) for text in found.get("wrong", ())]


def judged(*rows):
    """Return a function of a rank's number that returns what is wrong there."""

    def body(r):
        rank = Judged(r)
        for row in rows:
            row(rank)
        assert rank.parts > 7
        return rank.wrong

    return body


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_accelerator(backend, order):
    assert on_two(backend, order, judged(accelerator.judge)) == [[], []]


def test_an_mpi_that_reaches_the_device(order):
    """It uses no streams: what a rank sends must have been computed before."""
    assert on_two("mpi", order, judged(let_mpi_reach_the_device, accelerator.table)) == [[], []]


def test_the_host_does_not_wait(order):
    """Forward and backward after two of them."""

    def body(r):
        waiting = []
        for name, step in every_call(Judged(r)).items():
            for _ in range(2):
                step()
            before = late.host_waits()
            step()
            if late.host_waits() > before:
                waiting.append(name)
        return waiting

    assert on_two("gloo", order, body) == [[], []]


def test_streams_of_simulated_ranks(order):
    for call in CALLS.values():  # which simulates ranks itself
        right_of(call, 0, N)
        right_of(call, 1, N)
    assert simulate(judged(accelerator.streams), range(N)) == [[], []]


@pytest.mark.parametrize("row", [accelerator.simulated_table, simulated_losses])
def test_simulated_ranks(row):
    assert judged(row)(0) == []


def test_a_program_against_one_process():
    def on_ranks(x):
        return dc.all_reduce(x.square().sum())

    x = torch.randn(8, 4, dtype=torch.double).to("late")
    assert_matches_single_process(on_ranks, lambda x: x.square().sum(), x, on=["simulated"])
