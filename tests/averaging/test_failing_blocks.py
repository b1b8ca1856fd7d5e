"""What goes wrong in a block is an error on every rank, leaves no half-reduced gradient, and the next step works."""

import itertools
import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from runs import gloo, refusal, rules
from torch import nn
from training import SMALL, averaged, each, everywhere, gradients, loss, made, mlp, on_two, same

import diffcoll as dc
from diffcoll.averaging import reducer
from diffcoll.engines.simulated.engine import LocalEngine
from diffcoll.testing import RanksFailedError, spawn


def step(model, averager, r, count=None):
    model.zero_grad()
    averager.backward(loss(model, r), count=count)


def raising(error, model, averager, r):
    """After some gradients, before others."""

    def hook(_):
        raise error

    model[2].weight.register_hook(hook)
    loss(model, r).backward()


def steps_in_backward(model, averager, r):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p], lr=0.1).step())
    loss(model, r).backward()


def clips(model, averager, r):
    loss(model, r).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def zeroes(model, averager, r):
    loss(model, r).backward()
    model.zero_grad()


def zeroes_between(model, averager, r):
    loss(model, r).backward()
    model.zero_grad(set_to_none=False)
    loss(model, r).backward()


def enters_twice(model, averager, r):
    with averager.reduce():
        loss(model, r).backward()


WRONG = {
    partial(raising, ZeroDivisionError()): ZeroDivisionError,
    partial(raising, KeyboardInterrupt()): KeyboardInterrupt,
    **dict.fromkeys((steps_in_backward, clips, zeroes, zeroes_between, enters_twice), RuntimeError),
    lambda model, averager, r: loss(model, r).backward(create_graph=True): RuntimeError,
    lambda model, averager, r: loss(model.float(), r).backward(): RuntimeError,
}


@everywhere
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("bucket_mb", [SMALL, 25])
def test_one_rank_fails(run, bucket_mb):
    """It raises its own error, the other one that names it; nothing is stepped, and the next step is right."""

    def body(r):
        for wrong, error in WRONG.items():
            model = made()
            averager = dc.GradientAverager(model, bucket_mb=bucket_mb)
            before = [p.detach().clone() for p in model.parameters()]
            step(model, averager, r)
            model.zero_grad()
            with pytest.raises(error if r == 1 else RuntimeError) as caught, averager.reduce():
                if r == 1:
                    wrong(model, averager, r)
                else:
                    loss(model, r).backward()
            assert r == 1 or "error on rank 1" in str(caught.value), (wrong, caught.value)
            assert all(p.grad is None for p in model.parameters()), wrong
            model.double()
            same([p.detach() for p in model.parameters()], before, 1e-7)  # through float32, where it was converted
            for p in model.parameters():  # the hooks of the wrong step
                p._backward_hooks = None
            model.load_state_dict(made().state_dict())
            if wrong is not steps_in_backward:
                step(model, averager, r)
                same(gradients(model), averaged(2))

    run(body, range(2))


@on_two
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("reduction", "count"), [("sum", None), ("mean", 1)])
def test_sums_and_counts_into_what_was_reduced(run, reduction, count, is_shared):
    """An error on all ranks; zeroing in either way, before the block or in it, is allowed, and so is freezing.

    Whichever averager has reduced it, if two share parameters.
    """

    def body(r):
        model = made()
        averager = other = dc.GradientAverager(model, bucket_mb=SMALL, reduction=reduction)
        if is_shared:
            other = dc.GradientAverager([*model.parameters()][1:], reduction=reduction)

        def reduced():
            step(model, averager, r, count)
            return gradients(model)

        right = reduced()
        refusal(RuntimeError, partial(other.backward, count=count), loss(model, r))
        assert all(p.grad is None for p in [*model.parameters()][is_shared:])
        reduced()
        loss(model, r).backward()  # outside of a block, without zero_grad() before
        with pytest.raises(RuntimeError), other.reduce(count=count):
            pass
        reduced()
        frozen, *others = model.parameters()
        frozen.requires_grad_(False)  # which keeps its gradient
        for p in others:
            p.grad = None
        averager.backward(loss(model, r), count=count)
        same(gradients(model), right)
        frozen.requires_grad_(True)
        for within, set_to_none in itertools.product((False, True), (False, True)):
            if not within:
                model.zero_grad(set_to_none=set_to_none)
            with averager.reduce(count=count):
                if within:
                    model.zero_grad(set_to_none=set_to_none)
                loss(model, r).backward()
            same(gradients(model), right)
        return right

    each(body, 2, run)


@on_two
def test_counts_on_some_ranks_only(run):
    def body(r):
        model = made()
        averager = dc.GradientAverager(model)
        refusal(dc.CollectiveMismatchError, step, model, averager, r, 1 if r else None)
        assert all(p.grad is None for p in model.parameters())
        step(model, averager, r)
        return gradients(model)

    same(each(body, 2, run), averaged(2))


def take(p):
    p.grad = None


@on_two
@pytest.mark.parametrize("is_first", [True, False])
def test_a_hook_that_takes_gradients(run, is_first):
    """On one rank, whether registered before the averager's hooks or after them; without it the next step is right."""

    def body(r):
        model, handles = made(), []

        def register():
            handles.extend(p.register_post_accumulate_grad_hook(take) for p in [*model.parameters()] * (r == 1))

        for bucket_mb, k in itertools.product((SMALL, 25), range(3)):
            if is_first:
                register()
            averager = dc.GradientAverager(model, bucket_mb=bucket_mb)
            for _ in range(0 if is_first else k):
                step(model, averager, r)
            if not is_first:
                register()
            for _ in range(2):
                model.zero_grad()
                refusal(RuntimeError, averager.backward, loss(model, r))
                assert all(p.grad is None for p in model.parameters())
            while handles:
                handles.pop().remove()
            step(model, averager, r)
            same(gradients(model), averaged(2))

    run(body, range(2))


def test_two_threads_of_backward(monkeypatch):
    """Autograd has one for each device; a bucket is sent once, and buckets in order."""
    sent, parts = [], [nn.Parameter(torch.ones(2)) for _ in range(5)]

    class Slow(reducer.Message):
        def __init__(self, engine, row, at, what):
            sent.append(at)
            time.sleep(0.05)
            super().__init__(engine, row, at, what)

    def body(r):
        averager = dc.GradientAverager(parts, bucket_mb=16 / 2**20)
        with averager.reduce():
            threads = [threading.Thread(target=(p.sum() * i).backward) for i, p in enumerate(parts)]
            for thread in reversed(threads):
                thread.start()
            for thread in threads:
                thread.join()
        return [p.grad.tolist() for p in parts]

    monkeypatch.setattr(LocalEngine, "overlaps", lambda self, x: True)
    monkeypatch.setattr(reducer, "Message", Slow)
    assert rules(body, range(1)) == [[[float(i)] * 2 for i in range(5)]]
    assert sent == [f"bucket {i} of 5" for i in range(5)]


# ── a forgotten block ────────────────────────────────────────────────────────────────────────────────────


def test_a_step_on_gradients_that_no_block_has_reduced():
    """Also one with a closure, which is judged after it; not of another model, nor after close()."""
    model, other = made(), made()
    averager = dc.GradientAverager(model)
    optimizer, of_other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    before = [p.detach().clone() for p in model.parameters()]

    def local(model=model):
        loss(model, 0).backward()

    def reduced():
        step(model, averager, 0)
        return 1.0

    local()
    assert "averager.backward" in refusal(RuntimeError, optimizer.step)
    refusal(RuntimeError, optimizer.step, local)
    same([p.detach() for p in model.parameters()], before, 0)
    local(other)
    of_other.step()
    optimizer.step(reduced)
    torch.compile(optimizer.step, backend="eager")()
    local()
    model.zero_grad()
    optimizer.step()  # nothing
    second = dc.GradientAverager(model[0])
    local()
    with averager.reduce():  # of another averager, which has reduced the second one's gradients
        pass
    optimizer.step()
    local()
    second.close()
    refusal(RuntimeError, optimizer.step)
    averager.close()
    optimizer.step()
    refusal(RuntimeError, averager.reduce)
    dc.GradientAverager(model)  # dropped at once
    local()
    optimizer.step()


@pytest.mark.parametrize("before", ["", "0", "1", "2", "000", "111", "222", "011", "210", "0120"])
@pytest.mark.parametrize("bucket_mb", [SMALL, 25])
def test_a_forgotten_block_of_a_model_with_branches(before, bucket_mb):
    """Each rank notices it by what its last block has used; in the first step by any parameter. So clipping in one."""

    def body(r):
        branches = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(2, 30), nn.Linear(150, 150)])
        averager = dc.GradientAverager(branches, bucket_mb=bucket_mb)
        optimizer = torch.optim.SGD(branches.parameters(), lr=0.1)

        def loss(digit):
            branches.zero_grad()
            branch = branches[(int(digit) + r) % 3]
            return branch(torch.ones(1, branch.in_features)).sum()

        for digit in before:
            averager.backward(loss(digit))
            optimizer.step()
            with averager.reduce():
                pass
            optimizer.step()
        for digit in before[-1:] or "012":
            averager.reduce()  # and never entered
            loss(digit).backward()
            refusal(RuntimeError, optimizer.step)
        with pytest.raises(RuntimeError), averager.reduce():
            loss(digit).backward()
            if r == 0:
                nn.utils.clip_grad_norm_(branches.parameters(), 1e-3)
        branches.zero_grad()
        optimizer.step()

    rules(body, range(2))


def test_closures_with_arguments():
    """Of optimizers that call theirs with some, in any process that has imported the module."""

    class Searching(torch.optim.SGD):
        def step(self, closure):
            return closure(1, backward=False), super().step()

    model = made()
    optimizer = Searching(model.parameters(), lr=0.1)

    def closure(factor, *, backward):
        if backward:
            loss(model, 0).backward()
        return factor, backward

    for _ in range(2):
        assert optimizer.step(closure)[0] == optimizer.step(closure=closure)[0] == (1, False)
        averager = dc.GradientAverager(model)
    averager.close()


def test_sparse_gradients():
    embedding = nn.Embedding(3, 2, sparse=True)
    refusal(RuntimeError, dc.GradientAverager(embedding).backward, embedding(torch.tensor([1])).sum())


def test_an_averager_wraps_nothing():
    averager = dc.GradientAverager(made())
    refusal(TypeError, averager, torch.ones(1, 5))
    refusal(AttributeError, getattr, averager, "state_dict")
    with pytest.raises(TypeError), averager:
        pass


def test_an_averager_made_after_the_forward():
    """PyTorch's error has the remedy, and no other error of the block has."""

    def body(r, is_late):
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        late = loss(model, r)
        averager = dc.GradientAverager(model)
        with pytest.raises(RuntimeError) as caught, averager.reduce():
            (late if is_late else loss(model, r)).backward()
            optimizer.step()
        return " ".join(getattr(caught.value, "__notes__", ()))

    for is_late in (True, False):
        assert ["before the forward" in notes for notes in rules(body, range(2), [is_late] * 2)] == [is_late] * 2


# ── peers that do not come ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["in construction", "in in_step", "in backward", "no block", "in the model"])
def test_a_peer_that_does_not_come(how):
    """Rank 1 dies, does something else, or has left a collective of the model: the others raise within the timeout."""

    def body(r):
        group = dist.new_group(timeout=timedelta(seconds=2))
        model, x = mlp(), torch.ones(2, 5)
        if r == 1 and how == "in construction":
            os._exit(5)
        averager = dc.GradientAverager(model, group=group)
        averager.backward(model(x).sum())
        if how == "in in_step":
            for _ in dc.in_step([x] * (r + 1), group=group):
                assert r != 1 or os._exit(5)
        if r == 1 and how == "no block":
            time.sleep(6)  # until the others have failed
            return
        if r == 1 and how == "in backward":
            model[0].weight.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
        with averager.reduce():
            if r == 1 and how == "in the model":
                raise ZeroDivisionError
            y = dc.all_reduce(model(x), group=group) if how == "in the model" else model(x)
            y.sum().backward()

    with pytest.raises(RanksFailedError) as caught:
        spawn(body, range(3), timeout=40)
    for r in (0, 2):
        text = caught.value.failures[r].text
        text = text[text.rindex("CollectiveFailedError") :]
        assert f"failed on rank {r} of a gloo group of 3 ranks" in text
        assert how in ("in the model", "in in_step") or "GradientAverager" in text
    if how == "in the model":
        assert "ZeroDivisionError" in caught.value.failures[1].text


def test_an_error_is_printed_if_the_others_do_not_come(monkeypatch, capsys):
    """The rank raises it after the others have reached the end of their block."""
    monkeypatch.setattr(reducer, "PATIENCE", 0.05)

    def body(r):
        averager = dc.GradientAverager(made())
        if r == 1:
            time.sleep(0.5)
        with pytest.raises(RuntimeError), averager.reduce():
            if r == 0:
                raise RuntimeError("of rank 0")

    rules(body, range(2))
    assert "RuntimeError: of rank 0" in capsys.readouterr().err


# ── arguments, and who else averages ─────────────────────────────────────────────────────────────────────


def summed():
    return mlp()(torch.ones(4, 5)).sum()


MISTAKES = [
    ("GradientAverager: reduction", ValueError, lambda: dc.GradientAverager(mlp(), reduction="max")),
    ("GradientAverager: bucket_mb", ValueError, lambda: dc.GradientAverager(mlp(), bucket_mb=0)),
    ("GradientAverager: bucket_mb", ValueError, lambda: dc.GradientAverager(mlp(), bucket_mb="1")),
    ("GradientAverager: comm_dtype", TypeError, lambda: dc.GradientAverager(mlp(), comm_dtype=torch.int32)),
    ("GradientAverager: broadcast", TypeError, lambda: dc.GradientAverager(mlp(), broadcast=1)),
    ("GradientAverager: group", TypeError, lambda: dc.GradientAverager(mlp(), group="gloo")),
    ("GradientAverager: module_or_params", ValueError, lambda: dc.GradientAverager([])),
    ("GradientAverager: module_or_params", TypeError, lambda: dc.GradientAverager(3)),
    ("GradientAverager: module_or_params", TypeError, lambda: dc.GradientAverager(torch.ones(2))),
    ("GradientAverager: module_or_params", TypeError, lambda: dc.GradientAverager([("a", 3)])),
    ("GradientAverager: module_or_params", ValueError, lambda: dc.GradientAverager([torch.ones(2).int()])),
    ("GradientAverager: module_or_params", ValueError, lambda: dc.GradientAverager([nn.Linear(1, 1).weight * 2])),
    ("GradientAverager: module_or_params", ValueError, lambda: dc.GradientAverager(nn.LazyLinear(2))),
    ("GradientAverager.reduce: count", ValueError, lambda: dc.GradientAverager(mlp()).reduce(count=-1)),
    ("GradientAverager.reduce: count", ValueError, lambda: dc.GradientAverager(mlp()).reduce(count=float("nan"))),
    ("GradientAverager.reduce: count", TypeError, lambda: dc.GradientAverager(mlp()).reduce(count="3")),
    ("GradientAverager.reduce: count", ValueError, lambda: dc.GradientAverager(mlp()).reduce(count=torch.ones(2))),
    ("GradientAverager.reduce: count", TypeError, lambda: dc.GradientAverager(mlp()).reduce(count=summed())),
    ("GradientAverager.reduce: count", TypeError, lambda: dc.GradientAverager(mlp()).reduce(summed())),
    ("GradientAverager.backward: loss", TypeError, lambda: dc.GradientAverager(mlp()).backward(4, summed())),
    ("global_mean: weight", ValueError, lambda: dc.global_mean(1.0, torch.ones(2))),
    ("global_mean: weight", ValueError, lambda: dc.global_mean(1.0, float("inf"))),
    ("global_mean: weight", TypeError, lambda: dc.global_mean(1.0, "2")),
    ("global_mean: value", TypeError, lambda: dc.global_mean("x")),
]


@pytest.mark.parametrize(("text", "error", "call"), MISTAKES)
def test_mistakes(text, error, call):
    assert refusal(error, call).startswith(f"{text}: ")


def test_a_count_of_the_host_in_a_capture(monkeypatch):
    """Every replay of a CUDA graph would repeat it."""
    monkeypatch.setattr(reducer, "is_capturing", lambda: True)
    averager = dc.GradientAverager(mlp())
    for count in (3, torch.tensor(3)):
        refusal(RuntimeError, averager.reduce(count=count).__enter__)
    with averager.reduce():
        pass


def test_with_distributed_data_parallel():
    """On the module that it wraps, in any order of construction: an error in the first block, or in a step."""

    def body(r):
        ddp = nn.parallel.DistributedDataParallel
        x = torch.full((2, 5), r + 1.0)
        for as_view, bucket_mb, first in itertools.product((False, True), (25, 1e-5), (True, False)):
            model = mlp()
            wrapped = ddp(model, gradient_as_bucket_view=as_view) if first else None
            averager = dc.GradientAverager(model, bucket_mb=bucket_mb)
            wrapped = wrapped or ddp(model, gradient_as_bucket_view=as_view)
            refusal(RuntimeError, averager.backward, wrapped(x).sum())
            wrapped(x).sum().backward()
            refusal(RuntimeError, torch.optim.SGD(model.parameters(), lr=0.1).step)
            averager.close()

    gloo(body, range(2))


def test_what_others_reduce():
    def body(r):
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.distributed.tensor import distribute_tensor

        mesh = dist.init_device_mesh("cpu", (2,))
        fsdp = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
        ddp = nn.parallel.DistributedDataParallel(mlp())
        for wrapped in (
            ddp,
            nn.Sequential(ddp),
            fully_shard(mlp(), mesh=mesh),
            fsdp(mlp(), use_orig_params=False),
            fsdp(mlp(), use_orig_params=True),
            [nn.Parameter(distribute_tensor(torch.ones(2), mesh))],
        ):
            refusal(TypeError, dc.GradientAverager, wrapped)

    spawn(body, range(2))


@everywhere
def test_parameters_buffers_and_arguments_that_differ(run):
    def body(r):
        ones, differs = partial(torch.ones, requires_grad=True), r == 1
        image = torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last if differs else torch.contiguous_format)
        with_buffer = mlp()
        with_buffer.register_buffer("b", torch.ones(r + 1))
        for given, options in (
            ([("b" if differs else "a", ones(3))], {}),
            ([("z", ones(1)), ("a", ones(4 if differs else 3)), ("b", ones(r + 1))], {}),
            ([("a", ones(3, dtype=torch.float64 if differs else torch.float32))], {}),
            ([("a", image.requires_grad_())], {}),
            ([("a", ones(3)), ("b", ones(3))][: 2 - differs], {}),
            (mlp(), {"bucket_mb": r + 1}),
            (with_buffer, {}),
        ):
            refusal(dc.CollectiveMismatchError, dc.GradientAverager, given, **options)
        dc.GradientAverager(with_buffer, broadcast=False)
        return dc.all_reduce(torch.tensor(1)).item()

    assert run(body, range(3)) == [3] * 3
