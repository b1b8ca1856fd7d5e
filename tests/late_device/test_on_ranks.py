"""Two processes whose tensors are on the test device: what `make test-gpu` judges of an accelerator."""

import tempfile

import late
import pytest
from device_ranks import BACKENDS, N, let_mpi_reach_the_device, on_two
from gpu import accelerator
from gpu.host_waits import every_call
from gpu.rank import Rank


class Judged(Rank):
    """Keeps what is wrong in this process."""

    def __init__(self, r):
        super().__init__(r, N, tempfile.gettempdir(), "late")
        self.parts, self.wrong = 0, []

    def write(self, **found):
        self.parts += "name" in found
        self.wrong += [(found["name"], text) for text in found.get("wrong", ())]


def judge(r):
    rank = Judged(r)
    accelerator.judge(rank)
    assert rank.parts > 40
    return rank.wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_accelerator(backend, order):
    assert on_two(backend, order, judge) == [[], []]


def test_an_mpi_that_reaches_the_device(order):
    """It uses no streams: what a rank sends must have been computed before."""

    def body(r):
        let_mpi_reach_the_device()
        rank = Judged(r)
        accelerator.table(rank)
        return rank.wrong

    assert on_two("mpi", order, body) == [[], []]


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
