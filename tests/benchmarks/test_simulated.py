"""`python -m benchmarks simulate` with few ranks; times are not asserted."""

import pytest
import torch

from benchmarks import main, simulated
from diffcoll.testing import simulate


def test_table(capsys, monkeypatch):
    monkeypatch.setattr(simulated, "PROGRAMS", [program._replace(sizes=(2, 3)) for program in simulated.PROGRAMS])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert main(["simulate", "--rounds", "1"]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "simulate: median seconds of 1 runs" in printed
    assert printed.count("InfoNCE of 4 rows of 16") == printed.count("10 all_reduces of 128 numbers") == 4
    assert printed.count("truth") == printed.count("rules") == 4


@pytest.mark.parametrize("program", simulated.PROGRAMS, ids=lambda p: p.name)
def test_both_modes_measure_the_same_gradients(program):
    n = 3
    xs = [torch.randn(program.shape, generator=torch.Generator().manual_seed(r), requires_grad=True) for r in range(n)]
    right = torch.autograd.grad(simulate(program.loss, xs), xs)

    def gradient(x):
        return torch.autograd.grad(program.loss(x), x)[0]

    for got, expected in zip(simulate(gradient, xs, rules=True), right, strict=True):
        torch.testing.assert_close(got, expected)
        assert expected.any()


def test_the_loss_is_that_of_the_whole_batch():
    info_nce = next(program for program in simulated.PROGRAMS if program.name.startswith("InfoNCE"))
    xs = [torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    query, key = torch.cat(xs, 1)
    whole = torch.nn.functional.cross_entropy(query @ key.T, torch.arange(6))
    torch.testing.assert_close(sum(simulate(info_nce.loss, xs)), whole)
