import pytest
import torch
from runs import gloo, runs_on

import diffcoll as dc
from diffcoll.testing import new_group

XS = [[1.0], [2.0, 3.0], []]
WS = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0]]


def paired(w, y):
    return (torch.tensor(w, dtype=y.dtype) * y).sum()


def test_uneven_and_empty_blocks(gradients):
    # the sum of the ranks' weights is (111, 222, 333)
    expected = [[111], [222, 333], []]
    assert gradients(lambda x, w: paired(w, dc.all_gather(x, sizes=[1, 2, 0])), XS, WS) == expected
    assert gradients(lambda x, w: paired(w, dc.all_gather(x, sizes="auto")), XS, WS) == expected


def test_0d_gives_a_row(gradients, run):
    assert [y.tolist() for y in run(lambda r: dc.all_gather(torch.tensor(r * r)), range(3))] == [[0, 1, 4]] * 3
    assert gradients(lambda x, w: paired(w, dc.all_gather(x)), [5.0, 6.0, 7.0], WS) == [111, 222, 333]


def test_stack_at_any_place(run):
    def body(r):
        x = torch.arange(2) + 10 * r
        return torch.stack([dc.all_gather(x, stack=True).T, dc.all_gather(x, dim=-1, stack=True)])

    for y in run(body, range(3)):
        assert y.tolist() == [[[0, 10, 20], [1, 11, 21]]] * 2


def test_replicated_takes_the_slice(gradients):
    def loss(x):
        return paired(WS[1], dc.all_gather(x, sizes=[1, 2, 0], grad_placement="replicate"))

    assert gradients(loss, XS) == [[10], [20, 30], []]


def test_gradients_that_are_views(gradients):
    """pytorch#120386: transposed, expanded or sliced cotangents."""

    def loss(x, w):
        y = dc.all_gather(x, dim=1)
        return w * (y.t()[1:].sum() + y.sum().expand(2, 2).sum())

    # y has 3 columns: weight 4 for the first, 5 for the others
    assert gradients(loss, [[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]], [1.0, 10.0, 100.0]) == [
        [[444], [444]],
        [[555], [555]],
        [[555], [555]],
    ]


def test_backward_on_a_subgroup():
    """torch.distributed.nn.functional.all_gather raises here."""

    def body(r):
        pair = new_group([1, 2])
        if r == 0:
            return None
        x = torch.tensor(float(r), requires_grad=True)
        (dc.all_gather(x, group=pair) * torch.tensor([1.0, 2.0]) * r).sum().backward()
        return x.grad.item()

    assert gloo(body, range(3)) == [None, 3, 6]  # (1 + 2)·1, (1 + 2)·2


def test_channels_last_and_negative_dim(run):
    def body(r):
        x = torch.arange(16.0).reshape(1, 2, 2, 4).contiguous(memory_format=torch.channels_last) + 100 * r
        return dc.all_gather(x, dim=-3)

    for y in run(body, range(3)):
        assert y.shape == (1, 6, 2, 4)
        assert torch.equal(y[0, 2:4], torch.arange(16.0).reshape(2, 2, 4) + 100)


@runs_on("rules", "gloo", "mpi")
@pytest.mark.parametrize("collective", [dc.all_gather, dc.gather], ids=lambda collective: collective.__name__)
def test_auto_sizes_and_another_trailing_shape(run, collective):
    """Documents padded to another length on one rank are an error on every rank, also with as many elements.

    Seen in illuin-tech/colpali#278.
    """
    others = [torch.zeros(1, 4, 3), torch.zeros(1, 5, 4), torch.zeros(1, 3, 4).half()]

    def body(r):
        refused = []
        for other in others:
            with pytest.raises(dc.CollectiveMismatchError, match=f"^{collective.__name__}: x: "):
                collective(torch.arange(12.0).view(1, 3, 4) if r == 0 else other, sizes="auto")
            refused.append(dc.all_reduce(torch.tensor(r)).item())  # the group works
        return refused

    assert run(body, range(3)) == [[3] * len(others)] * 3
