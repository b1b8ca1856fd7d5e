"""Collectives, async results and the averager on a device where missing synchronization is a wrong number."""

import device_programs as programs
import pytest
from device_programs import CALLS, WHERE, differing

pytestmark = pytest.mark.usefixtures("two_ranks")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", CALLS)
def test_collectives(name, where, order):
    assert differing(programs.collective(CALLS[name], where)) == []


@pytest.mark.parametrize("name", CALLS)
def test_awaited_on_another_stream(name, order):
    assert differing(programs.awaited_elsewhere(CALLS[name])) == []


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"bucket_mb": 1e-4}, {"bucket_mb": 8e-3}, {"bucket_mb": 12e-3}], ids=str)
@pytest.mark.parametrize("size", [30, 150])  # small gradients are copied when a bucket is sent, others at once
def test_averager(size, settings, sides, order):
    settings = {name: mb * (size / 30) ** 2 for name, mb in settings.items()}
    assert differing(programs.averaged(size, sides, **settings)) == []


def test_memory_that_becomes_a_buckets(order):
    assert differing(programs.reused_for_a_bucket()) == []
