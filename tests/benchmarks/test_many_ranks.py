"""`python -m benchmarks ranks` with few ranks; times are not asserted, but how work grows with N is counted."""

import sys

import pytest
import torch

from benchmarks import main, many_ranks


def test_table(capsys, monkeypatch):
    monkeypatch.setattr(many_ranks, "SIZES", (2, 3))
    assert main(["ranks", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "one rank's host, no messages" in printed and "3 ranks" in printed
    for name in many_ranks.CALLS:
        assert name in printed


def statements(name, n):
    """Return how many lines of Python a call runs on one of n ranks."""
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return trace

    x, z = torch.ones(4), torch.ones(n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many_ranks.groups, "_solo", many_ranks._Mute(n))
        many_ranks.CALLS[name](x, z)
        sys.settrace(trace)
        try:
            many_ranks.CALLS[name](x, z)
        finally:
            sys.settrace(None)
    return lines


@pytest.mark.parametrize("name", ["all_reduce, sum", "broadcast", "split"])
def test_statements_do_not_grow_with_the_ranks(name):
    assert 5 < statements(name, 64) == statements(name, 2048)


@pytest.mark.parametrize(("name", "per_rank"), [("all_gather", 2), ("reduce_scatter", 2), ("all_to_all", 10)])
def test_statements_per_rank(name, per_rank):
    """Sizes are a list; all_to_all has a message for each rank, and its counts differ from 0."""
    grown = (statements(name, 2048) - statements(name, 64)) / (2048 - 64)
    assert (name == "all_to_all") <= grown <= per_rank
