"""What goes wrong in a block is an error on every rank, leaves no half-reduced gradient, and the next step works."""

import itertools
import os
import signal
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
from diffcoll.testing import RanksFailedError, spawn


def step(model, averager, r, count=None):
    model.zero_grad()
    averager.backward(loss(model, r), count)


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
@pytest.mark.parametrize(("reduction", "count"), [("sum", None), ("mean", 1)])
def test_sums_and_counts_into_what_was_reduced(run, reduction, count):
    """An error on all ranks; zeroing in either way, before the block or in it, is allowed, and so is freezing."""

    def body(r):
        model = made()
        averager = dc.GradientAverager(model, bucket_mb=SMALL, reduction=reduction)

        def reduced():
            step(model, averager, r, count)
            return gradients(model)

        right = reduced()
        refusal(RuntimeError, averager.backward, loss(model, r), count)
        assert all(p.grad is None for p in model.parameters())
        reduced()
        loss(model, r).backward()  # outside of a block, without zero_grad() before
        with pytest.raises(RuntimeError), averager.reduce(count):
            pass
        reduced()
        frozen, *others = model.parameters()
        frozen.requires_grad_(False)  # which keeps its gradient
        for p in others:
            p.grad = None
        averager.backward(loss(model, r), count)
        same(gradients(model), right)
        frozen.requires_grad_(True)
        for within, set_to_none in itertools.product((False, True), (False, True)):
            if not within:
                model.zero_grad(set_to_none=set_to_none)
            with averager.reduce(count):
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


def test_sparse_gradients():
    embedding = nn.Embedding(3, 2, sparse=True)
    refusal(RuntimeError, dc.GradientAverager(embedding).backward, embedding(torch.tensor([1])).sum())


def test_an_averager_wraps_nothing():
    averager = dc.GradientAverager(made())
    refusal(TypeError, averager, torch.ones(1, 5))
    refusal(AttributeError, getattr, averager, "state_dict")


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
    ("GradientAverager.reduce: count", ValueError, lambda: dc.GradientAverager(mlp()).reduce(-1)),
    ("GradientAverager.reduce: count", ValueError, lambda: dc.GradientAverager(mlp()).reduce(float("nan"))),
    ("GradientAverager.reduce: count", TypeError, lambda: dc.GradientAverager(mlp()).reduce("3")),
    ("GradientAverager.reduce: count", ValueError, lambda: dc.GradientAverager(mlp()).reduce(torch.ones(2))),
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
        refusal(RuntimeError, averager.reduce(count).__enter__)
    with averager.reduce():
        pass


def test_with_distributed_data_parallel():
    """On the module that it wraps, in any order of construction: an error in the first block."""

    def body(r):
        ddp = nn.parallel.DistributedDataParallel
        x = torch.full((2, 5), r + 1.0)
        for as_view, bucket_mb, first in itertools.product((False, True), (25, 1e-5), (True, False)):
            model = mlp()
            wrapped = ddp(model, gradient_as_bucket_view=as_view) if first else None
            averager = dc.GradientAverager(model, bucket_mb=bucket_mb)
            wrapped = wrapped or ddp(model, gradient_as_bucket_view=as_view)
            refusal(RuntimeError, averager.backward, wrapped(x).sum())
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
