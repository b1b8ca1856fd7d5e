"""After an error in a backward whose gradients are reduced, every `.grad` is as before, on all ranks.

None, zeros in memory of the user's, or under "sum" and "weighted" the gradient that was reduced before. Never a sum
over some ranks, this rank's own part, or the NaN that tells the other ranks of the error. The next reduction is right.
"""

import time
from functools import partial

import pytest
import torch
from runs import rules
from torch import nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint
from training import LEFT, RUNS, SMALL, attach, by_each_reduction, equal, gradients, same, shares

import diffcoll as dc

STATES = ["zeroed", "reduced before", "views"]
on_ranks = pytest.mark.parametrize(("where", "n"), [("rules", 3), ("gloo", 2), ("gloo", 3)])


class Net(nn.Module):
    """With large and small weights, in buckets of their own; those of the last layers are sent while backward runs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.sparse, self.is_repeated = nn.Embedding(5, 3), False, False
        self.layers = nn.Sequential(nn.Linear(3, 4000), nn.Tanh(), nn.Linear(4000, 4), nn.Tanh(), nn.Linear(4, 2))
        self.double()

    def forward(self, rows):
        x = embedding(rows, self.table.weight, sparse=self.sparse)
        if self.is_repeated:
            x, w = checkpoint(self.layers[:3], x, use_reentrant=True), self.layers[2].weight
            return self.layers[3:](x @ w @ w.T)
        return self.layers(x)


def loss_of(net, r, k):
    return (net(torch.tensor([r, k % 5, 4])) + r).square().sum() * (r + 1)


def reduced(n, k, reduction):
    """Return what the ranks' gradients of step k are reduced to, computed in one process."""
    net = Net()
    for r, share in enumerate(shares(reduction, [(r, r + 1.0) for r in range(n)])):
        (loss_of(net, r, k) * share).backward()
    return gradients(net)


def plus(xs, ys):
    return [x + y for x, y in zip(xs, ys, strict=True)]


# ── one rank raises ──────────────────────────────────────────────────────────────────────────────────────


def change_a_gradient(net):
    def change(p):
        p.grad.mul_(2)

    return net.layers[0].weight.register_post_accumulate_grad_hook(change)


def raise_in_a_hook(net, error=ValueError):
    def hook(_):
        raise error("of the user's")

    return net.table.weight.register_hook(hook)


def accumulate_twice(net):
    """The averager's hook raises."""
    net.is_repeated = True


def get_a_sparse_gradient(net):
    net.sparse = True


def get_a_new_parameter(net):
    net.extra = nn.Parameter(torch.ones(1))


#: What one rank does, and what it raises, with a text.
ERRORS = {
    "at the end: changed": (change_a_gradient, RuntimeError, "0.weight: its gradient was changed in backward"),
    "at the end: sparse": (get_a_sparse_gradient, TypeError, "table.weight: got sparse gradients"),
    "at the end: new parameter": (get_a_new_parameter, RuntimeError, "extra: the module got this parameter after"),
    "in a hook": (accumulate_twice, RuntimeError, "GradientAverager: layers.2.weight: "),
    "in a hook of the user's": (raise_in_a_hook, ValueError, "of the user's"),
    "interrupted": (partial(raise_in_a_hook, error=KeyboardInterrupt), KeyboardInterrupt, "of the user's"),
}
RUNS_OF_ERRORS = [
    ("mean", "gloo", 2),
    ("mean", "gloo", 3),
    ("sum", "rules", 3),
    ("sum", "gloo", 3),
    ("weighted", "gloo", 3),
]
CASES = [
    (where, n, error, reduction, state)
    for error in ERRORS
    for reduction, where, n in RUNS_OF_ERRORS
    for state in STATES
    if state == "zeroed" or not error.endswith("sparse")  # it is added to a dense one
    if state != "views" or error not in ("at the end: changed", "in a hook")  # they may change, and are read at the end
]


def error_of(backward, *arguments):
    """Return the type and the text of what backward raises, of Ctrl-C too."""
    with pytest.raises(BaseException) as caught:
        backward(*arguments)
    return type(caught.value), str(caught.value)


def of(parameters):
    return [None if p.grad is None else p.grad.to_dense().clone() for p in parameters]


def fail_in_the_third_step(r, error, reduction, state):
    """Return the error, `.grad` before and after it and a little later, and of the two next steps."""
    plant, *_ = ERRORS[error]
    net, zeros = Net(), state != "views"
    parameters = [*net.parameters()]
    if state == "views":
        for p in parameters:
            p.grad = torch.zeros(2, p.numel(), dtype=torch.double)[1].view_as(p)
    views = [p.grad for p in parameters]
    averager, backward = attach(net, reduction, bucket_mb=SMALL)

    def step(k):
        backward(lambda: loss_of(net, r, k), r + 1.0)

    for k in range(2):
        net.zero_grad(set_to_none=zeros)
        step(k)
    if state == "zeroed":
        net.zero_grad()
    found, sent = [of(parameters)], []
    handles = [net.table.weight.register_hook(lambda g: sent.append(len(averager._reducer.now.waits)))]
    if r == 1:
        handles.append(plant(net))
    raised = error_of(step, 2)
    if averager._reducer.now is not None:
        sent.append(len(averager._reducer.now.waits))
    found.append(of(parameters))
    time.sleep(0.03)  # until messages that were under way have arrived
    found.append(of(parameters))
    for handle in filter(None, handles):
        handle.remove()
    net.sparse = net.is_repeated = False
    net._parameters.pop("extra", None)
    step(3)
    found.append(of(parameters))
    net.zero_grad(set_to_none=zeros)
    step(4)
    found.append(of(parameters))
    return raised, sent, found, state != "views" or all(p.grad is v for p, v in zip(parameters, views, strict=True))


@pytest.mark.parametrize(("where", "n", "error", "reduction", "state"), CASES)
def test_one_rank_raises(where, n, error, reduction, state):
    _, kind, text = ERRORS[error]
    of_ranks = RUNS[where](partial(fail_in_the_third_step, error=error, reduction=reduction, state=state), range(n))
    for r, (raised, sent, found, are_views) in enumerate(of_ranks):
        before, after, later, third, fourth = found
        assert raised[0] is (kind if r == 1 else RuntimeError)
        assert (text if r == 1 else LEFT) in raised[1]
        assert where != "gloo" or state == "views" or sent[0]  # so many buckets were sent before
        if reduction == "mean":  # a mean that was added to cannot be told from what was added
            before = [None if state != "views" else torch.zeros_like(g) for g in Net().parameters()]
        equal(after, before)
        equal(later, before)
        expected = reduced(n, 3, reduction)
        same(third, expected if before[0] is None else plus(expected, before), 1e-9)
        same(fourth, reduced(n, 4, reduction), 1e-9)
        assert are_views


# ── other ways in which a reduction ends early ───────────────────────────────────────────────────────────


def two_steps(r, reduction, **arguments):
    """Return a net after one reduction, and a function that makes a step that adds to it."""
    net = Net()
    averager, backward = attach(net, reduction, bucket_mb=SMALL, **arguments)

    def step(k, **more):
        backward(lambda: loss_of(net, r, k), r + 1.0, **more)

    step(0)
    return net, averager, step


def before_of(net, reduction):
    return gradients(net) if reduction != "mean" else [None] * len(gradients(net))


@by_each_reduction
@on_ranks
def test_frozen_on_one_rank(where, n, reduction):
    """All ranks raise the mismatch; a frozen parameter keeps what it has."""

    def body(r):
        net, averager, step = two_steps(r, reduction)
        before, frozen = gradients(net), net.layers[2].bias
        frozen.requires_grad_(r != 1)
        with dc.check_mode():
            raised = error_of(step, 1)
        after = gradients(net)
        frozen.requires_grad_()
        averager.detach()
        return raised, before, after

    for r, (raised, before, after) in enumerate(RUNS[where](body, range(n))):
        assert raised[0] is dc.CollectiveMismatchError
        for i, (was, now) in enumerate(zip(before, after, strict=True)):
            if reduction == "mean" and (r, i) != (1, 4):
                assert now is None
            else:
                assert torch.equal(was, now)


@by_each_reduction
def test_another_collective_in_the_place_of_a_bucket(reduction):
    """Simulated ranks notice it at once, within `backward`, after buckets that were reduced."""

    def body(r):
        net, averager, step = two_steps(r, reduction)
        before = before_of(net, reduction)
        start = averager._reducer._sender.start
        calls = []

        def other(bucket, now):
            calls.append(bucket)
            if len(calls) == 4 and r == 1:
                dc.all_gather(torch.ones(3))
            start(bucket, now)

        averager._reducer._sender.start = other
        raised = error_of(step, 1)
        return raised, len(calls), before, gradients(net)

    for raised, calls, before, after in rules(body, range(3)):
        assert raised[0] is dc.CollectiveMismatchError
        assert calls >= 4
        equal(after, before)


@by_each_reduction
@on_ranks
def test_an_interrupt_while_one_of_two_averagers_receives(where, n, reduction):
    """The gradients of the other one, whose messages are not waited for, are as before as well."""

    def interrupt(bucket):
        if interrupts:
            raise KeyboardInterrupt
        return bucket.all_reduce(bucket.row)

    interrupts = []

    def body(r):
        del interrupts[:]
        first = nn.Linear(2, 3, dtype=torch.double)
        dc.GradientAverager(first, comm_hook=interrupt)
        net = Net()
        _, backward = attach(net, reduction, bucket_mb=SMALL)

        def step(k):
            backward(lambda: loss_of(net, r, k) + first(torch.ones(2).double()).sum(), r + 1.0)

        step(0)
        before = before_of(net, reduction)
        dc.all_reduce(torch.ones(1))  # simulated ranks share the list
        interrupts.append(True)
        raised = error_of(step, 1)
        after = gradients(net)
        time.sleep(0.03)
        later = gradients(net)
        dc.all_reduce(torch.ones(1))
        del interrupts[:]
        dc.all_reduce(torch.ones(1))
        first.zero_grad()
        step(2)
        return raised, before, after, later, gradients(net)

    for raised, before, after, later, last in RUNS[where](body, range(n)):
        assert raised[0] is KeyboardInterrupt
        equal(after, before)
        equal(later, before)
        expected = reduced(n, 2, reduction)
        same(last, expected if before[0] is None else plus(expected, before), 1e-9)


@by_each_reduction
@on_ranks
def test_a_micro_batch_before_the_error(where, n, reduction):
    """It is dropped, and so is its weight."""

    def body(r):
        net, _, step = two_steps(r, reduction)
        before = before_of(net, reduction)
        step(1, reduces=False)
        handle = raise_in_a_hook(net) if r == 1 else None
        error_of(step, 2)
        after = gradients(net)
        if handle:
            handle.remove()
        step(3)
        return before, after, gradients(net)

    for before, after, last in RUNS[where](body, range(n)):
        equal(after, before)
        expected = reduced(n, 3, reduction)
        same(last, expected if before[0] is None else plus(expected, before), 1e-9)


@by_each_reduction
@on_ranks
def test_gradients_that_are_held(where, n, reduction):
    """Those from before the error, and those from after it, are never written again."""

    def body(r):
        net, _, step = two_steps(r, reduction)
        held = [(p.grad, p.grad.clone()) for p in net.parameters()]
        net.zero_grad()
        handle = raise_in_a_hook(net) if r == 1 else None
        error_of(step, 1)
        if handle:
            handle.remove()
        step(2)
        held += [(p.grad, p.grad.clone()) for p in net.parameters()]
        net.zero_grad()
        step(3)
        return [(g, was) for g, was in held]

    for held in RUNS[where](body, range(n)):
        for g, was in held:
            assert torch.equal(g, was)


@pytest.mark.parametrize("ends", ["detach", "next step"])
@on_ranks
def test_an_error_after_a_backward_within_a_hook(where, n, ends):
    """Nothing was sent, and autograd does not tell of the end: `.grad` keeps what was added to the mean before."""

    def body(r):
        w = nn.Parameter(torch.ones(2, dtype=torch.double))
        averager = dc.GradientAverager([w])
        (w.sum() * (r + 1)).backward()
        leaf = torch.ones(2, dtype=torch.double, requires_grad=True)

        def nested(_):
            with torch.enable_grad():
                (w.sum() * 10 * (r + 1)).backward()
            raise ValueError("of the user's")

        leaf.register_hook(nested)
        with pytest.raises(ValueError, match="of the user's"):
            leaf.sum().backward()
        found = [w.grad.tolist()]
        if ends == "detach":
            averager.detach()
            found.append(w.grad.tolist())
        else:
            w.grad = None
            (w.sum() * (r + 1)).backward()
            found.append(w.grad.tolist())
        return found

    mean = (n + 1) / 2
    for r, (after, last) in enumerate(RUNS[where](body, range(n))):
        assert after == [mean + 10 * (r + 1)] * 2
        assert last == pytest.approx(after if ends == "detach" else [mean] * 2)


def test_the_backward_after_one_that_an_error_ended_uses_other_parameters():
    def body(r):
        first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
        dc.GradientAverager([first, second])
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (x * x * first).sum().backward()
        (second * r).sum().backward()
        return first.grad, second.grad.tolist()

    assert rules(body, range(3)) == [(None, [1.0, 1.0])] * 3
