"""Collectives that run in backward: while the simulated ranks run, and after they have ended."""

import gc
import threading
from functools import partial

import pytest
import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from verdicts import ruled

import diffcoll as dc
from diffcoll.engines import guards
from diffcoll.testing import simulate, spawn

#: Megatron's f: identity forward, all-reduce backward.
identity = ruled(torch.clone, dc.all_reduce)
#: Its first derivative has no collective, its second derivative has one.
twice = ruled(torch.clone, identity)


def reduced(x):
    return dc.all_reduce(x).square().sum()


def of_a_constant(x):
    """The collective is not in the graph, but runs when the checkpoint is recomputed."""
    return (x.square() * dc.all_reduce(torch.full((2,), dc.get_rank() + 1.0))).sum()


def with_a_hook(x):
    y = x * 3
    if y.requires_grad:
        y.register_hook(lambda g: dc.all_reduce(g))
    return y.square().sum()


reentrant = partial(partial, checkpoint, use_reentrant=True)
recorded = partial(partial, checkpoint, use_reentrant=False)

PROGRAMS = {
    "reentrant": reentrant(reduced),
    "non-reentrant": recorded(reduced),
    "reentrant, a constant": reentrant(of_a_constant),
    "non-reentrant, a constant": recorded(of_a_constant),
    "nested": reentrant(reentrant(reduced)),
    "non-reentrant in reentrant": reentrant(recorded(reduced)),
    "non-reentrant in non-reentrant": recorded(recorded(reduced)),
    "Function": lambda x: identity(x).square().sum(),
    "Function in reentrant": reentrant(lambda x: identity(x).square().sum()),
    "hook": with_a_hook,
    "hook in reentrant": reentrant(with_a_hook),
    "hook in non-reentrant": recorded(lambda x: with_a_hook(x) + reduced(x)),
}
programs = pytest.mark.parametrize("name", PROGRAMS)
both = pytest.mark.parametrize("rules", [False, True], ids=["truth", "rules"])


def leaves(n=3):
    return [torch.tensor([1.0 + r, -2.0 * r], requires_grad=True) for r in range(n)]


def error(rules):
    if rules:
        return r"(called in a backward of simulated ranks that have ended|world had ended).*simulate\(rules=True\)"
    return r"\w+: called in the backward of a joint graph .*use simulate\(rules=True\)"


@both
@programs
def test_after_the_ranks_are_gone(name, rules):
    """They raise instead of running on one rank; later calls, and calls without simulated ranks, are not affected."""
    program = PROGRAMS[name]
    kept = {}

    def body(x):
        loss = program(x)
        kept[dc.get_rank()] = loss  # some results are returned, others kept elsewhere
        return loss if dc.get_rank() == 2 else None

    xs = leaves()
    simulate(body, xs, rules=rules)
    for r in (0, 2):
        with pytest.raises(RuntimeError, match=error(rules)):
            kept[r].backward(retain_graph=True)
        if " in reentrant" in name or name.startswith(("reentrant", "nested")):
            continue  # reentrant checkpoints support backward() only
        with pytest.raises(RuntimeError, match=error(rules)):
            torch.autograd.grad(kept[r], xs[r], torch.tensor(2.0), create_graph=True)
    assert all(x.grad is None for x in xs)
    thread_says = []

    def in_a_thread():
        with pytest.raises(RuntimeError, match=error(rules)):
            kept[1].backward()
        thread_says.append(dc.get_world_size())

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert thread_says == [1]

    assert dc.get_world_size() == 1
    x = leaves(1)[0]
    program(x).backward()  # on one rank, while the graph of the others exists
    alone = leaves(1)
    assert torch.equal(x.grad, simulate(gradient(program), alone, rules=True)[0])


def gradient(program):
    def body(x):
        program(x).backward()
        return x.grad

    return body


@programs
def test_while_the_ranks_are_there(name):
    """With rules=True they meet in backward, as on processes; in a joint graph they raise."""
    program = PROGRAMS[name]
    simulated = simulate(gradient(program), leaves(), rules=True)
    with pytest.raises(RuntimeError, match=r"(: called in|ran through all_reduce inside).*rules=True"):
        simulate(gradient(program), leaves())
    expected = EXPECTED[name](leaves())
    for got, want in zip(simulated, expected, strict=True):
        torch.testing.assert_close(got, want)


def _of_reduced(xs):
    total = sum(x.detach() for x in xs)
    return [2 * len(xs) * total] * len(xs)


def _of_a_constant(xs):
    n = len(xs)
    return [2 * x.detach() * (n * (n + 1) / 2) for x in xs]


def _of_identity(xs):
    return [2 * sum(x.detach() for x in xs)] * len(xs)


def _of_hook(xs):
    return [9 * g for g in _of_identity(xs)]


EXPECTED = {
    name: _of_a_constant
    if "constant" in name
    else _of_identity
    if "Function" in name
    else (lambda xs: [a + b for a, b in zip(_of_hook(xs), _of_reduced(xs), strict=True)])
    if name == "hook in non-reentrant"
    else _of_hook
    if "hook" in name
    else _of_reduced
    for name in PROGRAMS
}


def test_processes_agree():
    """The expected values above are those of real processes."""

    def body(x):
        found = []
        for program in PROGRAMS.values():
            x.grad = None
            found.append(gradient(program)(x).clone())
        return found

    found = spawn(body, [x.detach().requires_grad_() for x in leaves()])
    for i, name in enumerate(PROGRAMS):
        for r, want in enumerate(EXPECTED[name](leaves())):
            torch.testing.assert_close(found[r][i], want, msg=name)


@both
def test_derivatives_of_higher_order(rules):
    """Nodes created by a backward belong to the simulated ranks too."""
    kept = []
    xs = leaves()
    simulate(lambda x: kept.append(twice(x**2).square().sum()), xs, rules=rules)
    gx = torch.autograd.grad(kept[0], xs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"all_reduce: called in .*rules=True"):
        gx.sum().backward()


def test_hooks_of_the_caller():
    """Registered on a leaf, before and outside of simulate."""
    x = torch.tensor(2.0, requires_grad=True)
    x.register_hook(lambda g: dc.all_reduce(g))
    losses = simulate(lambda r: (r + 1) * x, range(2))
    with pytest.raises(RuntimeError, match=r"joint graph .*rules=True"):
        torch.autograd.backward(losses)
    (3 * x).backward()
    assert x.grad == 3


def test_losses_may_be_combined_outside():
    """The caller's own Function and checkpoint run on one rank."""
    xs = leaves(2)
    losses = simulate(lambda x: dc.all_reduce(x).square().sum(), xs)
    total = checkpoint(lambda a, b: dc.all_reduce(identity(a + b)), *losses, use_reentrant=True)
    total.backward()
    for x, gx in zip(xs, _of_reduced(xs), strict=True):
        torch.testing.assert_close(x.grad, gx)


def test_a_thread_that_a_rank_starts():
    """Such a thread is not a rank, so `group=None` raises in it, instead of meaning one rank."""
    said = []

    def other():
        with pytest.raises(RuntimeError, match="all_reduce: called while simulated ranks run, from a thread"):
            dc.all_reduce(torch.ones(1))
        said.append(True)

    def body(r):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    simulate(body, range(2), rules=True)
    assert said == [True, True]


def test_torch_is_left_as_it_was():
    """The patched private API, through which Python code enters a graph, is restored."""
    before = [vars(BackwardCFunction).get("__init__"), saved_tensors_hooks.__init__, torch.Tensor.register_hook]
    noted = set(guards._backwards)
    losses = simulate(lambda x: identity(x).sum(), leaves(2))
    assert before == [vars(BackwardCFunction).get("__init__"), saved_tensors_hooks.__init__, torch.Tensor.register_hook]
    with pytest.raises(RuntimeError, match="joint graph"):
        losses[0].backward()
    assert set(guards._backwards) > noted
    del losses
    gc.collect()  # exceptions create reference cycles
    assert set(guards._backwards) <= noted
    assert before == [vars(BackwardCFunction).get("__init__"), saved_tensors_hooks.__init__, torch.Tensor.register_hook]
