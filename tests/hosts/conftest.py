"""Hosts made of network namespaces need root and iproute2: the tests run if they are named, `pytest tests/hosts`."""

import namespaces
import pytest

collect_ignore = ["rank_of_a_host.py"]


def pytest_ignore_collect(config):
    return None if any("tests/hosts" in argument for argument in config.args) else True


@pytest.fixture
def network():
    """Three hosts, a cable each."""
    with namespaces.Network(3) as network:
        yield network
