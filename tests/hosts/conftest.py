"""The tests here make hosts of network namespaces, which needs root and iproute2: `make test-hosts`."""

import os

import namespaces
import pytest

ON = os.environ.get("DIFFCOLL_TEST_HOSTS") == "1"
collect_ignore_glob = ["rank_of_a_host.py"] if ON else ["*.py"]


@pytest.fixture
def network():
    """Three hosts, a cable each."""
    if (what := namespaces.missing()) is not None:
        pytest.skip(what)
    with namespaces.Network(3) as network:
        yield network
