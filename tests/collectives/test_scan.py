import pytest
import torch

import diffcoll as dc
from diffcoll.testing import simulate

XS = [[1.0], [20.0], [300.0]]
WS = [5.0, 70.0, 1100.0]


@pytest.mark.parametrize(
    ("arguments", "sums", "back"),
    [
        ({}, [1, 21, 321], [1175, 1170, 1100]),
        ({"exclusive": True}, [0, 1, 21], [1170, 1100, 0]),
        ({"reverse": True}, [321, 320, 300], [5, 75, 1175]),
        ({"reverse": True, "exclusive": True}, [320, 300, 0], [0, 5, 75]),
    ],
)
def test_running_sums(run, gradients, arguments, sums, back):
    assert [y.item() for y in run(lambda x: dc.scan(torch.tensor(x), **arguments), XS)] == sums
    assert gradients(lambda x, w: w * dc.scan(x, **arguments).sum(), XS, WS) == [[g] for g in back]


@pytest.mark.parametrize("n", [1, 2, 4, 5, 7, 8, 9])
def test_any_number_of_ranks(n):
    got = simulate(lambda r: dc.scan(torch.tensor(r * r)), range(n), rules=True)
    assert [y.item() for y in got] == [sum(s * s for s in range(r + 1)) for r in range(n)]


def test_half_precision_is_added_up_in_single():
    xs = [torch.tensor(v, dtype=torch.float16) for v in (60000.0, 60000.0, -60000.0, 0.0)]
    for rules in (False, True):
        assert [y.item() for y in simulate(dc.scan, xs, rules=rules)] == [60000.0, torch.inf, 60000.0, 60000.0]
