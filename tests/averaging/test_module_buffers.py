"""broadcast_buffers: rank 0's buffers on all ranks, once or before forward passes, without a hang."""

import contextlib
import copy
import pickle
from itertools import chain

import pytest
import torch
from runs import gloo
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import LEFT, RUNS, everywhere, on_two, refused

import diffcoll as dc
from diffcoll.testing import spawn


class Net(nn.Module):
    """Batch norm, and buffers of other dtypes and shapes that change in every forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)
        self.register_buffer("steps", torch.tensor([0, 0], dtype=torch.int32))
        self.register_buffer("phase", torch.tensor(1j))
        self.register_buffer("seen", torch.zeros(2, 3, dtype=torch.bool), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("brief", torch.zeros(3, dtype=torch.bfloat16).as_strided((2,), (2,)))

    def forward(self, x):
        if self.training:
            self.steps += len(x)
            self.phase *= 1j * len(x)
            self.seen |= x[:2] > 0
            self.brief += x[0, 0]
        return self.out(self.norm(x))


def made(r):
    torch.manual_seed(r)
    net = Net()
    net.norm.running_mean += r
    net.steps += r
    return net


def batch(r, k):
    return torch.randn(4 + r, 3, generator=torch.Generator().manual_seed(10 * r + k))


def state(net):
    return [b.clone() for b in net.buffers()]


def equal(found):
    return [all(torch.equal(a, b) for a, b in zip(of_rank, found[0], strict=True)) for of_rank in found]


def test_as_torchs_own(n=3):
    """Running statistics of every rank equal those of DistributedDataParallel, before and after each of 3 steps."""

    def body(r, ours):
        net, before = made(r), []
        net.forward = lambda x: net.out(net.norm(x))
        for name in ("phase", "seen", "brief"):
            delattr(net, name)
        model = averager = net if ours else DistributedDataParallel(net)
        if ours:
            averager = dc.GradientAverager(net, broadcast_buffers="each forward")
        net.norm.register_forward_pre_hook(lambda *_: before.append([b.clone() for b in net.norm.buffers()]))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for k in range(6):
            with averager.no_sync() if k % 2 == 0 else contextlib.nullcontext():
                model(batch(r, k)).square().sum().backward()
            if k % 2:
                optimizer.step()
                optimizer.zero_grad()
        return before, state(net)

    ours, theirs = (gloo(body, range(n), [which] * n) for which in (True, False))
    for (mine, after), (torchs, expected) in zip(ours, theirs, strict=True):
        assert len(mine) == len(torchs) == 6
        for a, b in zip(chain(*mine, after), chain(*torchs, expected), strict=True):
            torch.testing.assert_close(a, b)
    for k in (0, 2, 4):
        assert equal([before[k] for before, _ in ours]) == [True] * n
    assert equal([before[1] for before, _ in ours]) == [True] + [False] * (n - 1)


@everywhere
def test_ranks_with_different_forward_passes(where):
    """Micro-batches, evaluation, checkpoints, a rank without a forward: one exchange for each reduction."""

    def body(r):
        net, before = made(r), []
        averager = dc.GradientAverager(net, broadcast_buffers="each forward")
        net.norm.register_forward_pre_hook(lambda *_: before.append(state(net)))
        for k in range(4):
            for micro in range(r):  # none on rank 0, which has the values
                with averager.no_sync():
                    net(batch(r, micro)).sum().backward()
            if r == k % 3:
                net.eval()
                net(batch(r, k))  # on one rank alone
                with torch.no_grad():
                    net.train()(batch(r, k))
            del before[:]
            if r == 1 and k == 2:
                sum(p.sum() for p in net.parameters()).backward()
            elif r == 2 and k == 1:
                checkpoint(net, batch(r, k), use_reentrant=False).sum().backward()
            else:
                net(batch(r, k)).sum().backward()
        averager.detach()
        values = state(net)
        net(batch(r, 9)).sum().backward()  # sends nothing
        return before[0] if r == 0 else None, values, [p.grad.clone() for p in net.parameters()]

    found = RUNS[where](body, range(3))
    assert not any(torch.equal(found[0][1][0], values[0]) for _, values, _ in found[1:])


@on_two
def test_two_forward_passes_and_two_backward_passes(where):
    def body(r):
        net = made(r)
        averager = dc.GradientAverager(net, broadcast_buffers="each forward")
        one, two = net(batch(r, 0)).sum(), net(batch(r, 1)).sum()
        one.backward(retain_graph=True)
        two.backward()
        net(batch(r, 2)).sum().backward()
        start = state(net)
        net.zero_grad()
        averager.synchronize()
        return start, state(net)

    found = RUNS[where](body, range(2))
    assert equal([start for start, _ in found]) == [True, False]
    assert equal([end for _, end in found]) == [True, True]  # without a forward: at the end of the reduction


@on_two
def test_a_graph_that_needs_old_values_raises_on_all_ranks(where):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x):
            return (self.weight * self.scale * x).sum()

    def body(r):
        net = Scale()
        dc.GradientAverager(net, broadcast_buffers="each forward")
        one = net(torch.ones(2) * r)
        one.backward(retain_graph=True)
        net(torch.ones(2))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            one.backward()
        return True

    assert RUNS[where](body, range(2)) == [True, True]


def test_compiled_copied_and_pickled():
    """A compiled forward runs no hook: the values are written at the end of backward."""

    def body(r):
        net = made(r)
        averager = dc.GradientAverager(net, broadcast_buffers="each forward")
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        for k in range(2):
            compiled(torch.ones(4, 3) * (r + 1 + k)).sum().backward()
        found = state(net)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            if r == 0:
                other(batch(r, 0))
        del averager
        return found

    assert equal(spawn(body, range(2))) == [True, True]


@on_two
@pytest.mark.parametrize("how", ["another shape", "registered later", "lost", "registered later on rank 0"])
def test_buffers_that_change_on_one_rank(where, how):
    def body(r):
        net = made(r)
        dc.GradientAverager(net, broadcast_buffers="each forward")
        net(batch(r, 0)).sum().backward()
        if r == ("rank 0" not in how):
            if how == "another shape":
                net.steps = torch.zeros(3, dtype=torch.int32)[:2].repeat(2)
                net.forward = lambda x: net.out(net.norm(x))
            elif how == "lost":
                del net.empty
            else:
                net.register_buffer("later", torch.ones(2))
        return refused(net(batch(r, 1)).sum().backward)

    texts = RUNS[where](body, range(2))
    changed = int("rank 0" not in how)
    was = "when GradientAverager was attached"
    words = {
        "another shape": f"steps: was buffer steps (2,) torch.int32 on cpu {was}, and is buffer steps (4,) torch.int32",
        "lost": "buffer empty (0, 2) torch.float32 on cpu: the module has lost it since GradientAverager was attached",
    }
    later = "buffer later (2,) torch.float32 on cpu: the module got it after GradientAverager was attached; make a new"
    assert texts[changed].startswith(f"GradientAverager: broadcast_buffers: {words.get(how, later)}")
    assert LEFT in texts[1 - changed]


def test_a_first_buffer_on_one_rank():
    def body(r):
        net = nn.Linear(2, 2)
        dc.GradientAverager(net, broadcast_buffers="each forward")
        if r == 1:
            net.register_buffer("later", torch.ones(2))
        text = refused(net(torch.ones(1, 2) * r).sum().backward)
        assert ("buffer later " in text and ": the module got it after" in text) if r else LEFT in text
        return True

    assert gloo(body, range(2)) == [True, True]


@everywhere
def test_buffers_that_differ_from_the_start(where):
    def body(r, mode):
        net = made(r)
        if r == 1:
            net.register_buffer("more", torch.ones(2))
        return _mismatch(net, broadcast_buffers=mode)

    for mode in ("once", "each forward"):
        text = RUNS[where](body, range(2), [mode] * 2)[0]
        assert "GradientAverager: the ranks' arguments differ; the first difference is at index" in text
        assert text.endswith("rank 1: buffer more (2,) torch.float32 on cpu")
    found = RUNS[where](lambda r: _mismatch(made(r), broadcast_buffers=["never", "once"][r]), range(2))
    assert "rank 0: broadcast_buffers='never'\n  rank 1: broadcast_buffers='once'" in found[0]


def _mismatch(net, **arguments):
    return refused(lambda: dc.GradientAverager(net, **arguments), dc.CollectiveMismatchError)


@everywhere
def test_after_join_the_values_are_those_of_rank_0_again(where):
    def body(r):
        net = nn.BatchNorm1d(2, momentum=0.0)
        averager = dc.GradientAverager(net, broadcast_buffers="each forward")
        for x in averager.join([torch.randn(3, 2)] * (1 + r)):
            net(x).sum().backward()
        net.running_mean.fill_(r + 5)
        net(torch.randn(3, 2))
        return net.running_mean.tolist()

    assert RUNS[where](body, range(3)) == [[5.0, 5.0]] * 3


@everywhere
def test_a_forward_within_a_transform_sends_nothing(where):
    """On one rank: the others do not answer, and torch.func refuses the writes."""

    def body(r):
        net = made(r)
        dc.GradientAverager(net, broadcast_buffers="each forward")
        net.forward = lambda x: net.out(net.norm(x))
        state = {name: x.detach().clone() for name, x in (*net.named_buffers(), *net.named_parameters())}

        def loss(p):
            given = {name: x.clone() for name, x in state.items()} | {"out.weight": p}
            return torch.func.functional_call(net, given, (batch(r, 0),)).square().sum()

        if r == 1:
            assert torch.func.grad(loss)(state["out.weight"]).any()
        net(batch(r, 1)).sum().backward()
        return [p.grad for p in net.parameters()]

    assert equal(RUNS[where](body, range(2))) == [True, True]


@on_two
def test_ignored_and_reassigned_buffers(where):
    def body(r):
        net = made(r)
        dc.GradientAverager(net, broadcast_buffers="each forward", ignore=["steps", "norm.running_var"])
        net.norm.running_mean = torch.full((3,), float(r))
        start = net.steps.tolist()
        net(torch.zeros(2, 3)).sum().backward()
        return start, net.norm.running_mean.tolist()

    found = RUNS[where](body, range(2))
    assert found == [([0, 0], [0.0] * 3), ([1, 1], [0.0] * 3)]


@on_two
def test_a_forward_after_a_backward_left_by_an_error(where):
    def body(r):
        net = made(r)
        dc.GradientAverager(net, broadcast_buffers="each forward", bucket_mb=1e-5)
        handle = net.norm.weight.register_hook(lambda _: 1 / 0) if r == 1 else None
        loss = net(batch(r, 0)).sum()
        with pytest.raises(ZeroDivisionError if r else RuntimeError):
            loss.backward()
        if handle:
            handle.remove()
        net.zero_grad()
        net(batch(r, 1)).sum().backward()
        return [p.grad for p in net.parameters()]

    assert equal(RUNS[where](body, range(2))) == [True, True]


def test_after_the_group_was_destroyed_and_alone():
    net = made(0)
    before = state(net)
    dc.GradientAverager(net, broadcast_buffers="each forward")
    assert equal([before, state(net)]) == [True, True]
    net(batch(0, 0)).sum().backward()
    assert net.norm.num_batches_tracked == 1


WRONG = [
    ("every step", ValueError, 'broadcast_buffers: got \'every step\', expected "never", "once" or "each forward"'),
    ("bare", TypeError, "broadcast_buffers: got 'each forward', expected a module, which has buffers"),
    *(
        (
            value,
            ValueError,
            f'broadcast_buffers: got {value}, expected "never", "once" or "each forward"; '
            'True of DistributedDataParallel is "each forward", its False is "never"',
        )
        for value in (True, False)
    ),
]


@pytest.mark.parametrize(("value", "error", "text"), WRONG)
def test_wrong_arguments(value, error, text):
    given, value = ([torch.ones(2)], "each forward") if value == "bare" else (Net(), value)
    assert refused(lambda: dc.GradientAverager(given, broadcast_buffers=value), error) == f"GradientAverager: {text}"
