import pytest
import torch

import diffcoll as dc

XS = [[1.0], [2.0], [3.0]]
WS = [5.0, 7.0, 11.0]


@pytest.mark.parametrize(
    ("offset", "wrap", "received", "returned"),
    [
        (1, True, [3, 1, 2], [7, 11, 5]),
        (-1, False, [2, 3, 0], [0, 5, 7]),
        (0, False, [1, 2, 3], [5, 7, 11]),
        (5, True, [2, 3, 1], [11, 5, 7]),
        (5, False, [0, 0, 0], [0, 0, 0]),
    ],
)
def test_ring_and_line(run, gradients, offset, wrap, received, returned):
    got = run(lambda x: dc.shift(torch.tensor(x), offset, wrap=wrap), XS)
    assert [y.item() for y in got] == received
    assert gradients(lambda x, w: w * dc.shift(x, offset, wrap=wrap).sum(), XS, WS) == [[g] for g in returned]


def test_there_and_back_is_the_identity(run):
    got = run(lambda x: dc.shift(dc.shift(torch.tensor(x), 2), -2), XS)
    assert [y.tolist() for y in got] == XS


@pytest.mark.parametrize("wrap", [True, False])
def test_uneven_rings_and_lines(run, gradients, wrap):
    xs = [[1.0, 2.0], [], [3.0]]
    got = run(lambda x: dc.shift(torch.tensor(x), wrap=wrap, sizes=[2, 0, 1]), xs)
    assert [y.tolist() for y in got] == [[3] if wrap else [0, 0], [1, 2], []]

    def loss(x, w):
        y = dc.shift(x, wrap=wrap, sizes="auto", async_op=True).wait()
        return w * (y * torch.arange(1, 1 + len(y))).sum()

    assert gradients(loss, xs, WS) == [[7, 14], [], [5 if wrap else 0]]


def test_all_numbers_of_a_tree_go_round(run):
    def body(r):
        y = x = {"x": torch.full((r, 2), float(r)), "label": torch.full((r,), r), "n": torch.tensor([r])}
        for i in range(3):
            sizes = [(s - i) % 3 for s in range(3)]
            y = {**dc.shift({"x": y["x"], "label": y["label"]}, sizes=sizes), "n": dc.shift(y["n"])}
            assert y["label"].tolist() == [(r - i - 1) % 3] * ((r - i - 1) % 3)
        return all(torch.equal(y[key], x[key]) for key in x)

    assert run(body, range(3)) == [True] * 3
