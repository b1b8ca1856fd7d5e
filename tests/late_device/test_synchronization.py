"""Collectives, async results, losses and the averager where missing synchronization is a wrong number.

On a group of this rank and its mirror image; and the host does not wait for the device.
"""

import device_programs as programs
import late
import pytest
from gpu.streams import CALLS, WHERE, awaited_elsewhere, collective, differing

pytestmark = pytest.mark.usefixtures("two_ranks")


def right(program, *arguments):
    """Whether all pairs are equal, and the host has not waited."""
    before = late.host_waits()
    pairs = program(*arguments)
    return late.host_waits() == before and differing(pairs) == []


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", CALLS)
def test_collectives(name, where, order):
    assert right(collective, CALLS[name], where, "late")


@pytest.mark.parametrize("name", CALLS)
def test_awaited_on_another_stream(name, order):
    assert right(awaited_elsewhere, CALLS[name], "late")


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"bucket_mb": 1e-4}, {"bucket_mb": 8e-3}, {"bucket_mb": 12e-3}], ids=str)
@pytest.mark.parametrize("size", [30, 150])  # small gradients are copied when a bucket is sent, others at once
def test_averager(size, settings, sides, order):
    settings = {name: mb * (size / 30) ** 2 for name, mb in settings.items()}
    assert differing(programs.averaged(size, sides, **settings)) == []


def test_memory_that_becomes_a_buckets(order):
    assert differing(programs.reused_for_a_bucket()) == []
