"""skip_step: a step that fails on one rank is skipped on all, without a hang, and training goes on as without it."""

import threading

import pytest
import torch
from runs import rules
from torch import nn
from training import LEFT, RUNS, SMALL, attach, equal, on_two, refused

import diffcoll as dc
from diffcoll.averaging.buckets import Bucket
from diffcoll.testing import spawn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
        self.norm, self.out = nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.double()

    def forward(self, x, fails="nowhere"):
        if fails == "forward":
            raise torch.OutOfMemoryError("in forward")
        x = self.norm(self.first(x).tanh())
        x = self.second(x)
        if fails == "backward":
            x.register_hook(raise_out_of_memory)
        return self.out(x.tanh())


def raise_out_of_memory(*_):
    raise torch.OutOfMemoryError("in backward")


def batch(r, k):
    g = torch.Generator().manual_seed(100 * r + k)
    return torch.randn(3 + (r + k) % 3, 4, generator=g, dtype=torch.double)


def train(r, failures, steps=6, check=False, skipped=(), **arguments):
    """Train; `failures[k]` says on which ranks and where step k fails. Returns what must be equal on all ranks."""
    net = Net()
    averager, backward = attach(net, bucket_mb=SMALL, **arguments)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    found = []
    for k in range(steps):
        if k in skipped:
            continue
        x, fails = batch(r, k), failures.get(k, {}).get(r, "nowhere")
        failed = False
        with dc.check_mode(check):
            try:
                first, second = ("nowhere", "forward") if fails == "second micro-batch" else (fails, fails)
                backward(lambda x=x, fails=first: net(x[:2], fails).square().sum(), len(x), reduces=False)
                net(x, second).square().mean().backward()
                if fails == "after backward":
                    raise torch.OutOfMemoryError
            except torch.OutOfMemoryError:
                failed = True
            skips = averager.skip_step(failed)
        found.append(skips)
        if skips:
            assert all(p.grad is None for p in net.parameters())
            continue
        optimizer.step()
        optimizer.zero_grad()
    state = [optimizer.state[p][name] for p in net.parameters() for name in ("step", "exp_avg", "exp_avg_sq")]
    return found, [p.detach().clone() for p in net.parameters()], state


FAILURES = {
    0: {1: "forward"},
    1: {2: "backward"},
    2: {0: "second micro-batch", 1: "backward"},
    4: {0: "after backward", 2: "after backward"},
    5: {0: "forward", 1: "forward", 2: "backward"},
}
MODES = {
    "mean": {},
    "weighted": {"reduction": "weighted"},
    "sum, deterministic": {"reduction": "sum", "deterministic": True},
    "half": {"comm_dtype": torch.float16},
    "hook": {"comm_hook": lambda bucket: bucket.all_reduce(bucket.row)},
    "buffers, unused": {"broadcast_buffers": "each forward", "unused": "error"},
}


@pytest.mark.parametrize(
    ("where", "mode", "check"),
    [
        *(("rules", mode, check) for mode in MODES for check in (False, True)),
        *(("gloo", mode, False) for mode in MODES),
        ("gloo", "mean", True),
        ("mpi", "weighted", False),
    ],
)
def test_steps_that_fail_on_some_ranks(where, mode, check):
    """Parameters and the optimizer's state are those of a run without these steps."""
    arguments = MODES[mode]
    found = RUNS[where](lambda r: train(r, FAILURES, 7, check, **arguments), range(3))
    for skips, parameters, state in found:
        assert skips == [k in FAILURES for k in range(7)]
        equal(parameters, found[0][1])
        equal(state, found[0][2])
    if where == "rules" and mode != "buffers, unused":  # buffers have seen the skipped batches
        without = RUNS[where](lambda r: train(r, {}, 7, False, FAILURES, **arguments), range(3))
        equal(found[0][1], without[0][1])
        equal(found[0][2], without[0][2])
    assert not torch.equal(found[0][1][0], Net().first.weight)


@on_two
def test_two_averagers_and_earlier_gradients(where):
    """A failure before the second of two models in one pass; a reduced gradient that was added to is dropped too."""

    def body(r):
        first, second = Net(), Net()
        averagers = [dc.GradientAverager(net, reduction="sum", bucket_mb=SMALL) for net in (first, second)]
        found = []
        for k in range(3):
            failed = False
            try:
                x = second.first(first(batch(r, k))[:, [0, 1, 0, 1]])
                if k == 1 and r == 2:
                    x.register_hook(raise_out_of_memory)
                x.square().sum().backward()
            except torch.OutOfMemoryError:
                failed = True
            found.append([averager.skip_step(failed) for averager in averagers])
            found.append([p.grad for net in (first, second) for p in net.parameters()])
        return found

    found = RUNS[where](body, range(3))
    for skips0, _, skips1, dropped, skips2, last in found:
        assert skips0 == skips2 == [False, False]
        assert skips1 == [True, True]
        assert dropped == [None] * 16
        equal([g for g in last if g is not None], [g for g in found[0][-1] if g is not None])
    assert found[0][-1][0] is not None


def test_join_and_a_loss_that_is_not_finite():
    def body(r):
        net, skips = Net(), []
        averager = dc.GradientAverager(net)
        for k, x in enumerate(averager.join([batch(r, k) for k in range(1 + 2 * r)])):
            loss = net(x).sum() * (float("nan") if (r, k) == (1, 2) else 1)
            loss.backward()
            skips.append(averager.skip_step(~loss.detach().isfinite()))
        return skips, net.out.weight.grad

    found = rules(body, range(3))
    assert [skips for skips, _ in found] == [[False, False, True, False, False]] * 3
    equal([g for _, g in found], [found[0][1]] * 3)


def test_without_hooks():
    def body(r):
        net = Net()
        averager = dc.GradientAverager(net, hooks=False)
        for k in range(3):
            failed = (r, k) == (2, 1)
            if not failed:
                net(batch(r, k)).sum().backward()
                averager.synchronize()
            assert averager.skip_step(failed) == (k == 1)
        return net.out.bias.grad.tolist()

    assert rules(body, range(3))[0] == [4.0, 4.0]  # of batches of 5, 3 and 4


def failing_allocation():
    """Return which allocation of a rank's thread fails, by thread, and the function that allocates."""
    allocate, fails = Bucket.allocate, {}

    def fail_once(bucket):
        rank = threading.get_ident()
        fails[rank] = fails.get(rank, 0) - 1
        if fails[rank] == 0:
            raise torch.OutOfMemoryError("for a bucket")
        allocate(bucket)

    return fails, fail_once


def test_no_memory_for_a_bucket(monkeypatch):
    """The error is raised while the buckets are prepared, before anything was sent."""
    fails, fail_once = failing_allocation()
    monkeypatch.setattr(Bucket, "allocate", fail_once)

    def body(r):
        net, skips = Net(), []
        averager = dc.GradientAverager(net, bucket_mb=SMALL)
        for k in range(4):
            kept = [p.grad for p in net.parameters()]  # so the bucket allocates new memory
            net.zero_grad()
            if (r, k) == (1, 2):
                fails[threading.get_ident()] = 1
            failed = False
            try:
                net(batch(r, k)).sum().backward()
            except torch.OutOfMemoryError:
                failed = True
            skips.append(averager.skip_step(failed))
        assert fails.get(threading.get_ident(), 0) <= 0
        del kept
        return skips, net.out.weight.grad

    found = rules(body, range(3))
    assert [skips for skips, _ in found] == [[False, False, True, False]] * 3
    equal([g for _, g in found], [found[0][1]] * 3)


@pytest.mark.parametrize(
    ("where", "way", "check", "step"),
    [
        *(("rules", way, check, step) for way in ("backward", "synchronize") for check in (0, 1) for step in (0, 1, 3)),
        *(("gloo", way, False, 3) for way in ("backward", "synchronize")),
    ],
)
@pytest.mark.parametrize("then", ["again", "detach"])
def test_no_memory_for_a_bucket_and_no_skip_step(monkeypatch, where, way, check, step, then):
    """The other ranks wait until the rank's next call, and raise; the reductions after it are right."""
    fails, fail_once = failing_allocation()
    if where == "rules":
        monkeypatch.setattr(Bucket, "allocate", fail_once)

    def body(r):
        Bucket.allocate = fail_once
        net, found = Net(), []
        averager = dc.GradientAverager(net, bucket_mb=SMALL, hooks=way == "backward")

        def reduce(k):
            net(batch(r, k)).sum().backward()
            if way == "synchronize":
                averager.synchronize()

        for k in range(step + 2):
            kept = [p.grad for p in net.parameters()]  # so all buckets allocate new memory
            net.zero_grad()
            if (r, k) == (1, step):
                fails[threading.get_ident()] = 2  # at the second bucket
                with dc.check_mode(bool(check)), pytest.raises(torch.OutOfMemoryError, match="for a bucket"):
                    reduce(k)
                assert all(p.grad is None for p in net.parameters())
                net.zero_grad()
                if then == "detach":
                    averager.detach()
                    return None
                continue
            with dc.check_mode(bool(check) and k == step):
                if k == step:
                    found.append(refused(lambda: reduce(k)))  # noqa: B023
                    net.zero_grad()
                    if then == "detach":
                        return found
                else:
                    reduce(k)
            del kept
        return found, [p.grad for p in net.parameters()]

    found = (spawn if where == "gloo" else rules)(body, range(3))  # not on processes whose class stays patched
    if then == "detach":
        found = [(texts, []) for texts in found]
    for texts, last in (found[0], found[2]):
        assert len(texts) == 1
        whole = f"GradientAverager: {LEFT}, and its gradients are missing; look at the other ranks"
        assert texts[0] == whole or (check and "which has left this backward by an error" in texts[0])
        equal(last, found[1][1])


PLACES = ["nowhere", "forward", "backward", "after backward"]


@pytest.mark.parametrize(
    ("where", "mode", "warm_up", "fails", "check"),
    [
        *(("rules", mode, 1, fails, False) for mode in MODES for fails in PLACES),
        *(("rules", "mean", 2, fails, True) for fails in PLACES),
        *(("gloo", "mean", 1, fails, False) for fails in PLACES[:2]),
        ("gloo", "hook", 2, "forward", True),
    ],
)
def test_reductions_before_the_first_call(where, mode, warm_up, fails, check):
    """The rank that fails has not called it before, nor has any other."""
    arguments = MODES[mode]

    def body(r):
        net = Net()
        averager, backward = attach(net, bucket_mb=SMALL, **arguments)
        found = []
        for k in range(warm_up + 3):
            x, failed = batch(r, k), False
            with dc.check_mode(check):
                try:
                    at = fails if (r, k) == (1, warm_up) else "nowhere"
                    backward(lambda x=x, at=at: net(x, at).square().mean(), len(x))
                    if at == "after backward":
                        raise torch.OutOfMemoryError
                except torch.OutOfMemoryError:
                    failed = True
                before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
                if k >= warm_up:
                    found.append(averager.skip_step(failed))
            if k >= warm_up and not found[-1]:
                equal([p.grad for p in net.parameters()], before)
            net.zero_grad()
        return found, before

    found = RUNS[where](body, range(3))
    for skips, last in found:
        assert skips == [fails != "nowhere", False, False]
        equal(last, found[0][1])


@on_two
def test_a_rank_that_does_not_call_it(where):
    """Not a step without gradients: its next backward raises."""

    def body(r):
        net = Net()
        averager = dc.GradientAverager(net)
        net(batch(r, 0)).sum().backward()
        averager.skip_step(False)
        if r == 1:
            assert averager.skip_step()
            return None
        net(batch(r, 1)).sum().backward()
        assert net.out.weight.grad is None
        if r == 2:
            assert averager.skip_step(False)
            return None
        text = refused(net(batch(r, 1)).sum().backward)
        assert averager.skip_step(False)  # it has not missed it
        return text

    text = RUNS[where](body, range(3))[0]
    assert text == (
        "GradientAverager: another rank has called skip_step() in the last step, and this one has not, and has no "
        "gradients of it; call skip_step(failed) on all ranks after backward, and step if it returns False"
    )


def test_a_rank_that_fails_before_a_collective_of_the_loss():
    """The others wait in that collective, not in backward: an error with both calls."""

    def body(r):
        net = Net()
        averager = dc.GradientAverager(net)
        net(batch(r, 0)).sum().backward()
        if r == 1:
            return refused(lambda: averager.skip_step(True))
        return refused(lambda: dc.all_gather(net(batch(r, 1)), sizes="auto"))

    for text in rules(body, range(3)):
        assert "rank 0 waits in all_gather at " in text
        assert "rank 1 waits in GradientAverager, bucket 0 of 1 at " in text


@pytest.mark.parametrize("n", [1, 2])
def test_misuse(n):
    def body(r):
        net = Net()
        averager = dc.GradientAverager(net)
        texts = [refused(lambda: averager.skip_step(False))]
        for _ in range(3):  # before the loop in which steps are skipped
            net(batch(r, 0)).sum().backward()
        assert averager.skip_step(False) is False
        for _ in range(2):
            net(batch(r, 0)).sum().backward()
        texts.append(refused(lambda: averager.skip_step(False)))
        inside = Net()
        other = dc.GradientAverager(inside)
        loss = inside(batch(r, 0)).sum()
        inside.out.weight.register_hook(lambda g: other.skip_step())
        texts.append(refused(loss.backward))
        assert other.skip_step(True)
        other.detach()
        texts.append(refused(other.skip_step))
        return texts

    none, two, within, detached = rules(body, range(n))[0]
    for count, text in ((0, none), (2, two)):
        assert text == (
            f"GradientAverager.skip_step: got {count} reductions since it was last called, expected one; "
            "call it on all ranks once per step after the first call, after the only backward outside of no_sync()"
        )
    assert within == (
        "GradientAverager.skip_step: called within backward; call it after backward has returned or raised"
    )
    assert detached.startswith("GradientAverager.skip_step: this averager was detached")
