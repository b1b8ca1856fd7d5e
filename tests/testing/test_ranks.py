"""The decorator `ranks`: which tests pytest finds, and what it says of those that fail on a rank."""

import os

import pytest
import torch

import diffcoll as dc
from diffcoll.testing import ranks

pytest_plugins = ["pytester"]


@ranks(1, 2, 3)
def test_each_number_of_ranks(request_of_pytest):
    x = torch.tensor(float(dc.get_rank()), requires_grad=True)
    ((dc.get_rank() + 1) * dc.all_reduce(x)).backward()
    n = dc.get_world_size()
    assert x.grad == n * (n + 1) / 2
    assert request_of_pytest == n


@pytest.fixture
def request_of_pytest(request):
    """Evaluated once, before the ranks."""
    return request.getfixturevalue("number_of_ranks")


@pytest.fixture
def values():
    return [torch.zeros(2)]


@pytest.mark.parametrize("more", [[1.0], [2.0]])
@ranks(2)
def test_each_rank_has_copies(values, more):
    values[0] += dc.get_rank() + more[0]
    more.append(3.0)
    assert len(more) == 2
    assert dc.all_reduce(values[0]).tolist() == [1 + 2 * more[0]] * 2


@ranks(2, on="gloo")
def test_on_processes(values, tmp_path):
    assert torch.distributed.get_backend() == "gloo"
    (tmp_path / str(os.getpid())).touch()
    dc.all_reduce(values[0])
    assert len(list(tmp_path.iterdir())) == 2


class TestMethods:
    @ranks(2)
    def test_of_a_class(self, values):
        assert dc.all_gather(values[0]).shape == (4,) and isinstance(self, TestMethods)


FAILING = """
import diffcoll as dc, pytest, torch
from diffcoll.testing import ranks

pytest_plugins = ["pytester"]

@ranks(1, 2, on="{on}")
def test_it():
    assert dc.get_rank() < 1, "seen on a rank"

@ranks(3, on="{on}")
def test_raises_alone():
    if dc.get_rank() == 2:
        raise KeyError("planted")
    dc.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("on", ["simulated", "gloo"])
def test_a_test_fails_if_it_fails_on_a_rank(pytester, on):
    pytester.makepyfile(FAILING.replace("{on}", on))
    result = pytester.inline_run("-p", "no:cacheprovider")
    result.assertoutcome(passed=1, failed=2)
    one, other = (str(report.longrepr) for report in result.getreports("pytest_runtest_logreport") if report.failed)
    assert "seen on a rank" in one and "planted" in other


@pytest.mark.parametrize(("sizes", "more"), [((), {}), ((0,), {}), (("2",), {}), ((2,), {"on": "mpi"})])
def test_wrong_arguments(sizes, more):
    with pytest.raises((TypeError, ValueError), match=r"^ranks: "):
        ranks(*sizes, **more)
