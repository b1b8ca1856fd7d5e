"""comm_hook: what it receives and returns, compression, and ranks whose hooks raise or differ."""

import sys
from pathlib import Path

import pytest
import torch
from runs import gloo, rules
from torch import nn
from training import RUNS, SMALL, attach, equal_on_all_ranks, everywhere, gradients, on_two, refused

import diffcoll as dc

sys.path.append(str(Path(dc.__file__).parent.parent / "examples"))
from powersgd import PowerSGD, train


def exact(bucket):
    return bucket.all_reduce(bucket.row).wait()


def pending(bucket):
    return bucket.all_reduce(bucket.row)


def future(bucket):
    made = torch.futures.Future()
    made.set_result([bucket.all_reduce(bucket.row).wait()])
    return made


def in_place(bucket):
    bucket.row.copy_(bucket.all_reduce(bucket.row.to(torch.float64)).wait())
    return bucket.row


def own_messages(bucket):
    return dc.all_reduce(bucket.row, group=bucket.group, async_op=True)


def half(bucket):
    return bucket.all_reduce(bucket.row.half()).wait().to(bucket.row.dtype)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 3)).double()


def steps(r, hook, reduction="mean", **arguments):
    """Gradients of a step with micro-batches and unused parameters, of one without, and of three in join."""
    net, found = model(), []
    averager, of = attach(net, reduction, bucket_mb=SMALL, comm_hook=hook, **arguments)

    def backward(k, reduces=True):
        x = torch.randn(k + 1, 4, generator=torch.Generator().manual_seed(10 * r + k), dtype=torch.double)
        of(lambda: (net[:3] if r == k % 2 else net[:1])(x).square().sum(), r + k, reduces)

    for k in range(3):
        if k == 0:
            backward(3, reduces=False)
        backward(k)
        found += gradients(net)
        if k != 1:  # a second backward adds to the first
            net.zero_grad()
    for k in averager.join(range(r), spare=0):
        backward(k)
        found += gradients(net)
    return found


def same(found, expected, **tolerances):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerances)


@pytest.mark.parametrize(
    ("where", "reduction"),
    [*(("rules", how) for how in ("mean", "sum", "weighted")), ("gloo", "mean"), ("gloo", "weighted"), ("mpi", "mean")],
)
def test_hooks_that_return_the_exact_sum(where, reduction):
    def body(r):
        hooks = [None, exact, in_place, future, pending, own_messages]
        return [steps(r, hook, reduction) for hook in (hooks[:4] if where == "mpi" else hooks)]

    ranks = RUNS[where](body, range(3))
    for expected, *others in ranks:
        for found in others:
            same(found, expected)
    equal_on_all_ranks([of_rank[1] for of_rank in ranks])


def test_alone():
    same(steps(1, exact), steps(1, None))


@on_two
def test_half_precision(where):
    def body(r):
        return steps(r, half), steps(r, None), steps(r, exact, comm_dtype=torch.float32)

    for found, expected, narrow in RUNS[where](body, range(2)):
        same(found, expected, rtol=1e-2, atol=1e-2)
        same(narrow, expected, rtol=1e-5, atol=1e-5)


@on_two
def test_what_a_hook_receives(where):
    def body(r):
        net, seen = model(), []

        def hook(bucket):
            of_bucket = {n: g.clone() for n, g in bucket.gradients.items()}
            seen.append((bucket.index, bucket.is_last, bucket.row.clone(), of_bucket))
            assert bucket.group is None
            return exact(bucket)

        averager = dc.GradientAverager(net, reduction="weighted", bucket_mb=SMALL, comm_hook=hook, ignore=["0.bias"])
        averager.set_weight(r + 1)
        net[:3](torch.ones(2, 4).double()).sum().backward()
        own = model()
        own[:3](torch.ones(2, 4).double()).sum().backward()
        own = dict(own.named_parameters())
        assert [(i, last) for i, last, *_ in seen] == [(i, i == len(seen) - 1) for i in range(len(seen))]
        assert len(seen) > 2
        views = {name: g for *_, of_bucket in seen for name, g in of_bucket.items()}
        assert set(views) == set(own) - {"0.bias"}
        for name, g in views.items():
            expected = own[name].grad
            torch.testing.assert_close(g, torch.zeros_like(g) if expected is None else expected * (r + 1))
        for *_, row, of_bucket in seen:
            assert row.numel() == sum(g.numel() for g in of_bucket.values())
        return net[3].weight.grad is None

    assert RUNS[where](body, range(2)) == [True, True]


# ── ranks that differ ────────────────────────────────────────────────────────────────────────────────────


def raises(bucket):
    if bucket.index == 1:
        raise ZeroDivisionError("in the hook")
    return exact(bucket)


def swallows(bucket):
    try:
        return exact(bucket)
    except RuntimeError:
        return bucket.row


MISTAKES = {
    "raises": (raises, "raised ZeroDivisionError: in the hook"),
    "raises after a message": (lambda b: [exact(b), 1 / 0], "raised ZeroDivisionError: division by zero"),
    "another shape": (lambda b: b.all_reduce(b.row[1:]), "all_reduce of ("),
    "another dtype": (lambda b: b.all_reduce(b.row.float()), "torch.float32"),
    "one message more": (lambda b: [exact(b), exact(b)][1], "all_reduce of"),
    "none": (lambda b: b.row, "has returned for all"),
    "wrong shape": (lambda b: exact(b)[1:], "raised ValueError: it returned a tensor ("),
    "wrong dtype": (lambda b: exact(b).float(), "torch.float32 on cpu, expected the sum over ranks of bucket.row, ("),
    "nothing": (
        lambda b: [exact(b), None][1],
        "raised TypeError: it returned NoneType, expected a tensor or an object",
    ),
}


@everywhere
def test_a_hook_that_differs_on_one_rank(where):
    """The same error on all ranks, with the hook's name and what each rank's has done; the next backward works."""

    def body(r):
        texts = []
        for mistake, _ in MISTAKES.values():
            net, wrong = model(), [True]

            def hook(bucket, wrong=wrong, mistake=mistake):
                return (mistake if r == 1 and wrong[0] else swallows if r == 2 else exact)(bucket)

            averager = dc.GradientAverager(net, bucket_mb=SMALL, comm_hook=hook)
            texts.append(refused(net(torch.ones(2, 4).double() * r).sum().backward, dc.CollectiveMismatchError))
            wrong[0] = False
            net.zero_grad()
            net(torch.ones(2, 4).double() * r).sum().backward()
            averager.detach()
        return texts

    for texts in zip(*RUNS[where](body, range(3)), strict=True):
        assert len(set(texts)) == 1
    for text, (_, words) in zip(rules(body, range(3))[0], MISTAKES.values(), strict=True):
        assert "GradientAverager, comm_hook test_a_hook_that_differs_on_one_rank" in text
        assert words in text.split("rank 1: ")[1].split("rank 2: ")[0], text


@everywhere
def test_what_a_hook_keeps_is_never_written_again(where):
    def body(r):
        w = nn.Parameter(torch.ones(3))
        kept = []

        def keeping(bucket):
            kept.append((bucket.row, bucket.gradients["0"])[len(kept) % 2])
            return exact(bucket)

        dc.GradientAverager([w], comm_hook=keeping)
        found = []
        for step in range(4):
            w.grad = None
            (w * (r + 1.0) * 10**step).sum().backward()
            found.append(kept[-1].clone())
        return all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))

    assert RUNS[where](body, range(2)) == [True, True]


def test_a_hook_that_raises_on_all_ranks():
    def body(r):
        dc.GradientAverager(net := model(), bucket_mb=SMALL, comm_hook=raises)
        with pytest.raises(RuntimeError) as caught:
            net(torch.ones(2, 4).double() * r).sum().backward()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert [p.grad for p in net.parameters()] == [None] * len([*net.parameters()])  # some buckets were reduced
        return str(caught.value)

    for text in rules(body, range(2)):
        assert text.startswith("GradientAverager, comm_hook raises, bucket 1 of ")
        assert text.endswith(": raised ZeroDivisionError: in the hook")


@on_two
def test_hooks_on_some_ranks_and_a_backward_left_by_an_error(where):
    def body(r):
        hook = exact if r else None
        text = refused(lambda: dc.GradientAverager(model(), comm_hook=hook), dc.CollectiveMismatchError)
        net = model()
        dc.GradientAverager(net, comm_hook=exact)
        handle = net[0].weight.register_hook(lambda _: 1 / 0) if r else None
        with pytest.raises(ZeroDivisionError if r else RuntimeError, match="zero" if r else "has left this backward"):
            net(torch.ones(2, 4).double()).sum().backward()
        if handle:
            handle.remove()
        net.zero_grad()
        net(torch.ones(2, 4).double() * (r + 1)).sum().backward()
        return text, net[0].weight.grad

    (text, first), (_, second) = RUNS[where](body, range(2))
    assert text.endswith("\n  rank 0: comm_hook=None\n  rank 1: comm_hook='exact'")
    assert torch.equal(first, second)


def test_wrong_arguments():
    text = refused(lambda: dc.GradientAverager(model(), comm_hook="fp16"), TypeError)
    assert text == "GradientAverager: comm_hook: got str, expected a function of a bucket, or None"
    dc.GradientAverager(net := model(), comm_hook=lambda b: b.all_reduce(b.row > 0))
    with pytest.raises(RuntimeError, match=r"x: got torch.bool, torch.strided, expected a strided tensor of a dtype"):
        net(torch.ones(2, 4).double()).sum().backward()


# ── PowerSGD ─────────────────────────────────────────────────────────────────────────────────────────────


class All(PowerSGD):
    """Also for matrices that the rank does not compress."""

    def _is_compressed(self, g):
        return g.dim() > 1


def test_powersgd_in_full_rank_is_exact():
    def body(r):
        return steps(r, All(rank=6)), steps(r, PowerSGD(rank=6)), steps(r, None)

    for one, other, expected in rules(body, range(3)):
        same(one, expected, rtol=1e-9, atol=1e-9)
        same(other, expected)


@on_two
def test_powersgd_sends_later_what_it_has_not_sent(where):
    """Σ over steps of what was used, plus the last residuals = Σ of exact gradients."""

    def body(r):
        net, hook = model(), PowerSGD(rank=1)
        dc.GradientAverager(net, reduction="sum", comm_hook=hook)
        used, exact = {}, {}
        for k in range(5):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * r + k), dtype=torch.double)
            own = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
            net.zero_grad()
            net(x).square().sum().backward()
            for (name, p), g in zip(net.named_parameters(), dc.all_reduce(own), strict=True):
                used[name] = used.get(name, 0) + p.grad
                exact[name] = exact.get(name, 0) + g
        return used, exact, hook.residuals

    ranks = RUNS[where](body, range(3))
    used, exact, residuals = ranks[0]
    assert set(residuals) == {"0.weight", "2.weight", "3.weight"}
    for name, g in used.items():
        rest = sum(of_rank[2][name] for of_rank in ranks) if name in residuals else 0
        torch.testing.assert_close(g + rest, exact[name], rtol=1e-10, atol=1e-10)
        assert name not in residuals or (g - exact[name]).abs().max() > 1e-3


def test_the_example_converges():
    """The numbers in notes/training/gradient-averager.md."""
    sent = []

    def counted(bucket):
        return PowerSGD(rank=1)(Counted(bucket, sent))

    exact, compressed = (gloo(train, range(2), [how] * 2)[0] for how in (False, True))
    assert abs(exact[-1] - 0.170) < 0.003
    assert abs(compressed[-1] - 0.172) < 0.003
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    dc.GradientAverager(net, comm_hook=counted)
    net(torch.ones(1, 8)).sum().backward()
    assert sum(p.numel() for p in net.parameters()) == 321
    assert sum(sent) == 105


class Counted:
    """A bucket that records how many numbers are sent."""

    def __init__(self, bucket, sent):
        self.row, self.gradients = bucket.row, bucket.gradients
        self.all_reduce = lambda x: [sent.append(x.numel()), bucket.all_reduce(x)][1]
