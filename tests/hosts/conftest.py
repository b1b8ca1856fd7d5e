"""The tests here make hosts of network namespaces, which needs root: `make test-hosts`."""

import os

import namespaces
import pytest

ON = os.environ.get("DIFFCOLL_TEST_HOSTS") == "1"
collect_ignore_glob = [] if ON else ["*.py"]

if ON:

    @pytest.fixture(autouse=True)
    def _possible():
        if (what := namespaces.missing()) is not None:
            pytest.skip(what)

    @pytest.fixture
    def network():
        """Three hosts, a cable each."""
        with namespaces.network() as made:
            yield made
