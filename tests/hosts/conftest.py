"""The tests here make hosts of network namespaces, which needs root: `make test-hosts`."""

import os
import signal

import namespaces
import pytest

ON = os.environ.get("DIFFCOLL_TEST_HOSTS") == "1"
collect_ignore_glob = ["elastic.py"] if ON else ["*.py"]  # a program, which pytest would run when it looks for doctests

if ON:

    def pytest_sessionstart():
        """A run that is ended by SIGTERM ends its hosts, too; those of one that was killed end here."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if namespaces.missing() is None:
            namespaces.end_those_left()

    @pytest.fixture(autouse=True)
    def _possible():
        if (what := namespaces.missing()) is not None:
            pytest.skip(what)

    @pytest.fixture
    def network():
        """Three hosts, a cable each."""
        with namespaces.network() as made:
            yield made
