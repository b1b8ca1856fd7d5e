"""The host does not wait for the device in a loss and its backward, on one rank."""

import late
import pytest
from gpu.host_waits import losses


@pytest.mark.parametrize("name", losses("cpu"))
def test_numbers_are_filled_in_on_the_device(name):
    """A number that is copied there from the host's ordinary memory would make the host wait."""
    loss = losses("late")[name]
    before = late.host_waits()
    loss().sum().backward()
    assert late.host_waits() == before
