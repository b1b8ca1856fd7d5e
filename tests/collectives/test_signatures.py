"""Arguments in the order of torch.distributed, whose functions take outputs: an error, and nothing is sent."""

import pytest
import torch
from runs import gloo, refusal

import diffcoll as dc
from diffcoll.testing import RanksFailedError, simulate

X, INTEGER = torch.ones(2), torch.tensor([0])

# (call in the order of torch.distributed, argument that receives a tensor, correct call)
CALLS = [
    (lambda: dc.all_gather([torch.zeros(2)], X), "dim", "dc.all_gather(x)"),
    (lambda: dc.all_gather((), X), "dim", "dc.all_gather(x)"),
    (lambda: dc.all_gather([torch.zeros(())], torch.tensor(0)), "dim", "dc.all_gather(x)"),  # an index, too
    (lambda: dc.all_gather([[torch.zeros(2)]], [X]), "dim", "dc.all_gather(x)"),
    (lambda: dc.all_gather([torch.zeros(2)], X, async_op=True), "dim", "dc.all_gather(x)"),
    (lambda: dc.all_gather(torch.zeros(2), X), "dim", "dc.all_gather(x)"),  # all_gather_into_tensor
    (lambda: dc.all_gather(torch.zeros_like(INTEGER), INTEGER), "dim", "dc.all_gather(x)"),
    (lambda: dc.reduce_scatter(torch.zeros(2), [X]), "op", "dc.reduce_scatter(torch.cat(xs))"),
    (lambda: dc.reduce_scatter(torch.zeros(2), X), "op", "dc.reduce_scatter(x)"),  # reduce_scatter_tensor
    (lambda: dc.all_to_all([torch.zeros(2)], [X]), "split_dim", "dc.all_to_all(torch.cat(xs))"),
    (lambda: dc.all_to_all(torch.zeros(2), X), "split_dim", "dc.all_to_all(x)"),  # all_to_all_single
    (lambda: dc.all_to_all(torch.zeros_like(INTEGER), INTEGER), "split_dim", "dc.all_to_all(x)"),
    (lambda: dc.scatter(torch.zeros(2), [X]), "src", "dc.scatter(torch.cat(xs))"),
    (lambda: dc.gather(X, [torch.zeros(2)]), "dst", "dc.gather(x)"),
    (lambda: dc.gather(INTEGER, (torch.zeros_like(INTEGER),)), "dst", "dc.gather(x)"),
]


@pytest.mark.parametrize(("call", "argument", "instead"), CALLS)
@pytest.mark.parametrize("world", ["one", "truth", "rules"])
def test_outputs_are_refused(call, argument, instead, world):
    name = instead[3 : instead.index("(")]
    with pytest.raises((TypeError, RanksFailedError)) as caught:
        call() if world == "one" else simulate(lambda r: call(), range(2), rules=world == "rules")
    text = str(caught.value)
    assert f"{name}: {argument}: got " in text
    assert f"{name} takes no output list: y = {instead}" in text


def test_outputs_are_refused_on_every_rank_of_gloo():
    def body(r):
        said = []
        for call, *_ in CALLS:
            said.append("takes no output list" in refusal(TypeError, call))
        return said, dc.all_reduce(torch.tensor(r))  # no message is left that this call could receive

    assert gloo(body, range(3)) == [([True] * len(CALLS), torch.tensor(3))] * 3


@pytest.mark.parametrize("sizes", [[2], (torch.tensor(2),), [torch.tensor(2)]])
def test_sizes_may_be_tensors(sizes):
    assert dc.all_gather([X], sizes=sizes)[0].tolist() == [1, 1]
    assert dc.all_gather(X, sizes=sizes).tolist() == [1, 1]
