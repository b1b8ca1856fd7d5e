"""What the tests of the command `diffcoll check` share."""

import sys

import pytest

from diffcoll.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, for modules that the command imports."""
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    assert sys.path == path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def run(capsys):
    def run(words, *more):
        """Return the exit status and the output, on simulated ranks unless the words say otherwise."""
        where = [] if "--on" in words else ["--on", "simulated"]
        try:
            status = main(["check", *words.split(), *where, *map(str, more)])
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run
