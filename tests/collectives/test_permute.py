import pytest
import torch
from runs import rules, runs_on

import diffcoll as dc

XS = [[1.0], [2.0], [3.0]]


def test_some_send_some_receive_some_keep(run, gradients):
    pairs = [(0, 2), (1, 1)]
    assert [y.tolist() for y in run(lambda x: dc.permute(torch.tensor(x), pairs), XS)] == [[0], [2], [1]]
    assert gradients(lambda x, w: w * dc.permute(x, pairs).sum(), XS, [5.0, 7.0, 11.0]) == [[11], [7], [0]]


def test_nobody_sends(run, gradients):
    assert [y.tolist() for y in run(lambda x: dc.permute(torch.tensor(x), []), XS)] == [[0]] * 3
    assert gradients(lambda x: dc.permute(x, []).sum(), XS) == [[0]] * 3


def test_what_only_moves_may_be_anything(run):
    got = run(lambda r: dc.permute(torch.tensor([r == 0, True]), [(0, 1), (1, 0)]), range(3))
    assert [y.tolist() for y in got] == [[False, True], [True, True], [False, False]]


SIZES = [2, 0, 3]
UNEVEN = [[[1.0, 2.0]], [[]], [[3.0, 4.0, 5.0]]]  # of shape (1, SIZES[r])


@pytest.mark.parametrize("how", ["list", "auto"])
@pytest.mark.parametrize("later", [False, True], ids=["now", "async"])
def test_uneven_sizes(run, gradients, how, later):
    """Rank 0 receives nothing and has zeros of its own shape; so has rank 1 as the gradient of what it did not send."""
    pairs, sizes = [(0, 2), (2, 1)], SIZES if how == "list" else "auto"

    def call(x):
        y = dc.permute(x, pairs, dim=-1, sizes=sizes, async_op=later)
        return y.wait() if later else y

    got = run(lambda x: call(torch.tensor(x)), UNEVEN)
    assert [y.tolist() for y in got] == [[[0, 0]], [[3, 4, 5]], [[1, 2]]]
    weights = [[5.0, 6.0], [7.0, 8.0, 9.0], [10.0, 11.0]]
    found = gradients(lambda x, w: (torch.tensor([w]) * call(x)).sum(), UNEVEN, weights)
    assert found == [[[10, 11]], [[]], [[7, 8, 9]]]


def test_uneven_trees(run, gradients):
    """The leaves have different shapes, and one dtype is an integer."""
    sizes = [1, 0, 2]

    def tree(r):
        rows = torch.arange(1.0, 1 + sizes[r]).double()
        return {"x": 10 * r + rows, "labels": [torch.full((sizes[r], 2), r), (rows.view(-1, 1, 1) + r)]}

    def body(r):
        y = dc.permute(tree(r), [(0, 1), (2, 0)], sizes="auto", async_op=r >= 0).wait()
        return y["x"].tolist(), y["labels"][0].tolist(), y["labels"][1].flatten().tolist()

    assert run(body, range(3)) == [
        ([21, 22], [[2, 2], [2, 2]], [3, 4]),
        ([1], [[0, 0]], [1]),
        ([0, 0], [[0, 0], [0, 0]], [0, 0]),
    ]

    def loss(x, w):
        y = dc.permute([x, x.square().view(-1, 1)], [(0, 1), (2, 0)], sizes=sizes)
        return w * (y[0].sum() + y[1].sum())

    assert gradients(loss, [[3.0], [], [5.0, 7.0]], [1.0, 10.0, 100.0]) == [[10 + 10 * 6], [], [1 + 10, 1 + 14]]


def test_a_wrong_size_is_an_error():
    def body(r):
        with pytest.raises(ValueError, match=r"permute: sizes: got ") as caught:
            dc.permute(torch.ones(SIZES[r], 2), [(0, 1)], sizes=[size + 1 for size in SIZES])
        return str(caught.value)

    text = rules(body, range(3))[2]
    expected = "permute: sizes: got [3, 1, 4], expected 3 at position 2, the size of this rank's x along dim 0"
    assert text == f'{expected}; sizes="auto" asks every rank for its size'
    with pytest.raises(ValueError, match=r"permute: x: got a 0-d tensor, expected at least one dimension"):
        dc.permute(torch.tensor(1.0), [(0, 0)], sizes="auto")


@runs_on("rules", "gloo")
@pytest.mark.parametrize("call", [dc.permute, dc.shift], ids=["permute", "shift"])
def test_check_mode_refuses_another_shape_and_other_sizes(run, call):
    """Uneven sizes are no disagreement, in forward and backward, in tensors and trees."""
    pairs = {"pairs": [(0, 1), (1, 2), (2, 0)]} if call is dc.permute else {}

    def body(r):
        x = torch.ones(SIZES[r], 2, requires_grad=True)
        with dc.check_mode():
            for sizes in (SIZES, "auto"):
                call(x, **pairs, sizes=sizes).sum().backward()
                call({"x": x, "y": [x]}, **pairs, sizes=sizes)["x"].sum().backward()
            assert x.grad.tolist() == [[4, 4]] * SIZES[r]
            with pytest.raises(dc.CollectiveMismatchError, match=r"rank 1: (permute|shift)\(torch.float32 \(0, 3\)"):
                call(torch.ones(SIZES[r], 2 + (r == 1)), **pairs, sizes=SIZES)
            with pytest.raises(dc.CollectiveMismatchError, match=r"rank 1: .*sizes=\[2, 0, 4\]"):
                call(torch.ones(SIZES[r], 2), **pairs, sizes=[2, 0, 3 + (r == 1)])
            with pytest.raises(dc.CollectiveMismatchError, match=r"rank 1: (permute|shift)\(torch.float32 \(0, 2\)"):
                call(torch.ones(SIZES[r], 2), **pairs)
        return dc.all_reduce(torch.tensor(r)).item()

    assert run(body, range(3)) == [3] * 3
