"""`grad_placement` in the words of torch.distributed.tensor."""

from functools import partial

import pytest
import torch
from runs import rules
from torch.distributed.tensor import Partial, Replicate, Shard

import diffcoll as dc
from diffcoll.testing import simulate

XS = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5]), torch.tensor([-7.0, 4.0])]
COLLECTIVES = [dc.all_reduce, dc.all_gather, dc.broadcast]
SAME = [("partial", Partial), ("replicate", Replicate)]


def gradient(collective, placement, x, w):
    x = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(w * collective(x, grad_placement=placement).square().sum(), x)
    return g


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("word", "placement"), SAME)
def test_placements_are_other_spellings(collective, word, placement):
    ws = [1.0, 1.0, 1.0] if word == "replicate" else [1.0, 10.0, 100.0]
    for run in (rules, simulate_with_check_mode):
        mixed = run(lambda x, w: gradient(collective, placement() if w < 50 else word, x, w), XS, ws)
        words = run(partial(gradient, collective, word), XS, ws)
        assert all(map(torch.equal, mixed, words))


def simulate_with_check_mode(f, *per_rank):
    def checked(*args):
        with dc.check_mode():
            return f(*args)

    return rules(checked, *per_rank)


@pytest.mark.parametrize("placement", [Partial, Replicate])
def test_truth_understands_placements(placement):
    xs = [x.clone().requires_grad_() for x in XS]
    losses = simulate(lambda x: dc.all_reduce(x, grad_placement=placement()).square().sum(), xs)
    once = torch.tensor([-6.0, 5.0])  # the gradient of y_0² + y_1², y = (-3, 2.5)
    for g in torch.autograd.grad(sum(losses), xs):
        assert g.equal(once if placement is Replicate else 3 * once)


@pytest.mark.parametrize("placement", [Shard(0), Partial("avg"), Partial("max"), Replicate, ["partial"]])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_other_placements_are_refused(collective, placement):
    with pytest.raises(
        ValueError, match=r'grad_placement: got .*, expected "partial" or "replicate"; "partial" if each'
    ):
        collective(torch.ones(2), grad_placement=placement)


@pytest.mark.ranks(2, on="gloo")
def test_on_processes():
    r = dc.get_rank()
    x = torch.tensor([1.0 + r], requires_grad=True)
    (2 * dc.all_reduce(x, grad_placement=Replicate())).sum().backward()
    assert x.grad.tolist() == [2.0]
    (dc.all_gather(x, grad_placement=Partial()) * (r + 1.0)).sum().backward()
    assert x.grad.tolist() == [2.0 + 3.0]


def test_in_a_graph():
    placement = Replicate()
    x = torch.tensor([2.0], requires_grad=True)
    compiled = torch.compile(
        lambda x: dc.all_reduce(x, grad_placement=placement).square().sum(), fullgraph=True, backend="aot_eager"
    )
    compiled(x).backward()
    assert x.grad.tolist() == [4.0]


@pytest.mark.parametrize("placement", [Partial("avg"), Shard(0)])
def test_other_placements_are_refused_in_a_graph(placement):
    compiled = torch.compile(lambda x: dc.all_reduce(x, grad_placement=placement), backend="aot_eager")
    with pytest.raises(Exception, match=r'all_reduce: grad_placement: got .*, expected "partial" or "replicate"'):
        compiled(torch.ones(2))
