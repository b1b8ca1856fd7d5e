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
from runs import gloo, rules
from torch import nn
from training import RUNS, SMALL, data, each, everywhere, gradients, made, mlp, on_two, refused, same, summed_loss

import diffcoll as dc
from diffcoll.averaging import reducer
from diffcoll.testing import RanksFailedError, spawn


def step(model, averager, r, **options):
    model.zero_grad()
    x, t = data(2)[r]
    averager.backward(summed_loss(model(x), t), **options)


def averaged():
    model = made()
    for x, t in data(2):
        (summed_loss(model(x), t) / 2).backward()
    return gradients(model)


def raising(error):
    def hook(*_):
        raise error

    return hook


def fails_before(model, averager, backward):
    raise ZeroDivisionError


def fails_in_backward(model, averager, backward):
    model[2].weight.register_hook(raising(ZeroDivisionError()))  # after some gradients, before others
    backward()


def is_interrupted(model, averager, backward):
    model[2].weight.register_hook(raising(KeyboardInterrupt()))
    backward()


def fails_after(model, averager, backward):
    backward()
    raise ZeroDivisionError


def steps_in_backward(model, averager, backward):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p], lr=0.1).step())
    backward()


def clips(model, averager, backward):
    backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def zeroes(model, averager, backward):
    backward()
    model.zero_grad()


def zeroes_between(model, averager, backward):
    backward()
    model.zero_grad(set_to_none=False)
    backward()


def makes_a_graph(model, averager, backward):
    backward(create_graph=True)


def enters_twice(model, averager, backward):
    with averager.reduce():
        backward()


def converts(model, averager, backward):
    model.float()
    backward()


WRONG = {
    fails_before: ZeroDivisionError,
    fails_in_backward: ZeroDivisionError,
    fails_after: ZeroDivisionError,
    is_interrupted: KeyboardInterrupt,
    **dict.fromkeys((steps_in_backward, clips, zeroes, zeroes_between), RuntimeError),
    **dict.fromkeys((makes_a_graph, enters_twice, converts), RuntimeError),
}


@everywhere
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("bucket_mb", [SMALL, 25])
def test_one_rank_fails(where, bucket_mb):
    """It raises its own error, the other one that names it; nothing is stepped, and the next step is right."""

    def body(r):
        for wrong, error in WRONG.items():
            model = made()
            averager = dc.GradientAverager(model, bucket_mb=bucket_mb)
            step(model, averager, r)
            model.zero_grad()
            before = [p.detach().clone() for p in model.parameters()]

            def backward(model=model, **options):
                x, t = data(2)[r]
                summed_loss(model(x.to(model[0].weight.dtype)), t).backward(**options)

            with pytest.raises(error if r == 1 else RuntimeError) as caught, averager.reduce():
                if r == 1:
                    wrong(model, averager, backward)
                else:
                    backward()
            assert r == 1 or "error on rank 1" in str(caught.value), (wrong, caught.value)
            assert all(p.grad is None for p in model.parameters()), wrong
            model.double()
            same([p.detach() for p in model.parameters()], before, 1e-7 if wrong is converts else 0)
            for p in model.parameters():  # the hooks of the wrong step
                p._backward_hooks = None
            model.load_state_dict(made().state_dict())
            if wrong is not steps_in_backward:
                step(model, averager, r)
                same(gradients(model), averaged())

    RUNS[where](body, range(2))


@on_two
def test_sums_and_counts_into_what_was_reduced(where):
    """An error on all ranks; a mean is idempotent; zeroing by any of three ways is allowed."""

    def body(r):
        for reduction, count in (("sum", None), ("mean", 1), ("mean", None)):
            model = made()
            averager = dc.GradientAverager(model, bucket_mb=SMALL, reduction=reduction)
            step(model, averager, r, count=count)
            right = gradients(model)
            again = partial(averager.backward, summed_loss(model(data(2)[r][0]), data(2)[r][1]), count=count)
            if (reduction, count) == ("mean", None):
                again()
                same(gradients(model), [2 * g for g in right])
                continue
            refused(again)
            assert all(p.grad is None for p in model.parameters())
            step(model, averager, r, count=count)
            model(data(2)[r][0]).sum().backward()  # outside of a block, without zero_grad() before
            with pytest.raises(RuntimeError), averager.reduce(count):
                pass
            step(model, averager, r, count=count)
            for zero in (True, False):
                model.zero_grad(set_to_none=zero)
                with averager.reduce(count):
                    summed_loss(model(data(2)[r][0]), data(2)[r][1]).backward()
                same(gradients(model), right)
                with averager.reduce(count):
                    model.zero_grad(set_to_none=zero)
                    summed_loss(model(data(2)[r][0]), data(2)[r][1]).backward()
                same(gradients(model), right)
        return right

    each(body, 2, where)


@on_two
def test_a_frozen_parameter_keeps_its_gradient(where):
    """Also one that differs between ranks: what is frozen on all ranks is not reduced."""

    def body(r):
        model = made()
        averager = dc.GradientAverager(model)
        model(data(2)[r][0]).sum().backward()
        model[0].bias.requires_grad_(False)
        own = model[0].bias.grad.clone()
        with averager.reduce():
            pass
        assert torch.equal(model[0].bias.grad, own)
        return [model[0].weight.grad]

    each(body, 2, where)


@on_two
def test_counts_on_some_ranks_only(where):
    def body(r):
        model = made()
        averager = dc.GradientAverager(model)
        refused(lambda: step(model, averager, r, count=1 if r else None), dc.CollectiveMismatchError)
        assert all(p.grad is None for p in model.parameters())
        step(model, averager, r)
        return gradients(model)

    same(each(body, 2, where), averaged())


# ── a forgotten block ────────────────────────────────────────────────────────────────────────────────────


def test_a_step_on_gradients_that_no_block_has_reduced():
    """Also one with a closure, which is judged after it; not of another model, nor after close()."""
    model, other = made(), made()
    averager = dc.GradientAverager(model)
    optimizer, of_other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    x = torch.ones(1, 5, dtype=torch.double)
    before = [p.detach().clone() for p in model.parameters()]

    def local():
        model(x).sum().backward()

    def reduced():
        model.zero_grad()
        averager.backward(model(x).sum())
        return 1.0

    local()
    assert "averager.backward" in refused(optimizer.step)
    refused(lambda: optimizer.step(local))
    same([p.detach() for p in model.parameters()], before, 0)
    other(x).sum().backward()
    of_other.step()
    optimizer.step(reduced)
    torch.compile(optimizer.step, backend="eager")()
    local()
    model.zero_grad()
    optimizer.step()  # nothing
    local()
    with averager.reduce():
        pass
    optimizer.step()
    second = dc.GradientAverager(model[0])
    reduced()
    optimizer.step()  # a block of another averager has reduced the second one's
    local()
    second.close()
    refused(optimizer.step)
    averager.close()
    optimizer.step()
    refused(averager.reduce)
    dc.GradientAverager(model)  # dropped at once
    local()
    optimizer.step()


def test_an_averager_wraps_nothing():
    averager = dc.GradientAverager(made())
    refused(lambda: averager(torch.ones(1, 5)), TypeError)
    for name in ("parameters", "state_dict", "module"):
        assert "wraps nothing" in refused(lambda name=name: getattr(averager, name), AttributeError)


# ── peers that do not come ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["in construction", "in in_step", "in backward", "no block", "in the model"])
def test_a_peer_that_does_not_come(how, tmp_path):
    """Rank 1 dies, has ended, or has left a collective of the model: the others raise within the group's timeout."""

    def body(r):
        try:
            train(r)
        finally:
            (tmp_path / str(r)).touch()

    def train(r):
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
            while not all((tmp_path / str(s)).exists() for s in (0, 2)):  # until the others have failed
                time.sleep(0.05)
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


def test_a_simulated_peer_that_does_not_come():
    def body(r):
        model = mlp()
        averager = dc.GradientAverager(model)
        if r != 1:
            averager.backward(model(torch.ones(2, 5)).sum())

    assert "rank 0 waits in GradientAverager" in refused(lambda: rules(body, range(3)))


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

WRONG_ARGUMENTS = [
    (mlp(), {"reduction": "max"}, ValueError, "reduction"),
    (mlp(), {"bucket_mb": 0}, ValueError, "bucket_mb"),
    (mlp(), {"bucket_mb": "1"}, ValueError, "bucket_mb"),
    (mlp(), {"comm_dtype": torch.int32}, TypeError, "comm_dtype"),
    (mlp(), {"broadcast": 1}, TypeError, "broadcast"),
    (mlp(), {"group": "gloo"}, TypeError, "group"),
    ([], {}, ValueError, "module_or_params"),
    (3, {}, TypeError, "module_or_params"),
    (torch.ones(2), {}, TypeError, "module_or_params"),
    ([("a", 3)], {}, TypeError, "module_or_params"),
    ([torch.ones(2).int()], {}, ValueError, "module_or_params"),
    ([torch.ones(2, requires_grad=True) * 2], {}, ValueError, "module_or_params"),
    (nn.LazyLinear(2), {}, ValueError, "module_or_params"),
]


@pytest.mark.parametrize(("given", "arguments", "error", "argument"), WRONG_ARGUMENTS)
def test_wrong_arguments(given, arguments, error, argument):
    text = refused(lambda: dc.GradientAverager(given, **arguments), error)
    assert text.startswith(f"GradientAverager: {argument}: ")


@pytest.mark.parametrize(
    ("count", "error"), [(-1, ValueError), (float("nan"), ValueError), ("3", TypeError), (torch.ones(2), ValueError)]
)
def test_wrong_counts(count, error):
    assert "count: " in refused(lambda: dc.GradientAverager(mlp()).reduce(count), error)


def test_a_count_of_the_host_in_a_capture(monkeypatch):
    """Every replay of a CUDA graph would repeat it."""
    monkeypatch.setattr(reducer, "is_capturing", lambda: True)
    averager = dc.GradientAverager(mlp())
    for count in (3, torch.tensor(3)):
        assert "CUDA graph" in refused(averager.reduce(count).__enter__)
    with averager.reduce():
        pass


def test_sparse_gradients():
    embedding = nn.Embedding(3, 2, sparse=True)
    averager = dc.GradientAverager(embedding)
    refused(lambda: averager.backward(embedding(torch.tensor([1])).sum()))


def test_with_distributed_data_parallel():
    """On the module that it wraps, in any order of construction: an error in the first block at the latest."""

    def body(r):
        ddp = nn.parallel.DistributedDataParallel
        for wrapped in ddp(mlp()), nn.Sequential(ddp(mlp())):
            refused(lambda wrapped=wrapped: dc.GradientAverager(wrapped), TypeError)
        x = torch.full((2, 5), r + 1.0)
        for as_view, bucket_mb, first in itertools.product((False, True), (25, 1e-5), (True, False)):
            model = mlp()
            wrapped = ddp(model, gradient_as_bucket_view=as_view) if first else None
            averager = dc.GradientAverager(model, bucket_mb=bucket_mb)
            wrapped = wrapped or ddp(model, gradient_as_bucket_view=as_view)
            refused(lambda wrapped=wrapped, averager=averager: averager.backward(wrapped(x).sum()))
            averager.close()
        model, other = made(), made()
        averager = dc.GradientAverager(model)  # DDP on another module is no conflict
        wrapped = ddp(other)
        wrapped(x.double()).sum().backward()
        averager.backward(model(x.double()).sum())
        same(gradients(model), gradients(other))

    gloo(body, range(2))


def test_with_fsdp_and_tensor_parallelism():
    def body(r):
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.distributed.tensor import distribute_tensor

        mesh = dist.init_device_mesh("cpu", (2,))
        cpu = torch.device("cpu")
        for shard in (
            partial(fully_shard, mesh=mesh),
            partial(FullyShardedDataParallel, device_id=cpu, use_orig_params=False),
            partial(FullyShardedDataParallel, device_id=cpu, use_orig_params=True),
        ):
            sharded = shard(mlp())
            refused(lambda sharded=sharded: dc.GradientAverager(sharded), TypeError)
        refused(lambda: dc.GradientAverager([nn.Parameter(distribute_tensor(torch.ones(2), mesh))]), TypeError)

    spawn(body, range(2))


FORMATS = [torch.contiguous_format, torch.channels_last]
DIFFERENT = [
    lambda p, r: [("b" if r == 1 else "a", p(3))],
    lambda p, r: [("z", p(1)), ("a", p(4 if r == 1 else 3)), ("b", p(r + 1))],
    lambda p, r: [("a", p(3, dtype=torch.float64 if r == 1 else torch.float32))],
    lambda p, r: [("a", p(2, 3, 2, 2).to(memory_format=FORMATS[r == 1]).detach().requires_grad_())],
    lambda p, r: [("a", p(3)), ("b", p(3))][: 2 - (r == 1)],
]


@everywhere
def test_parameters_buffers_and_arguments_that_differ(where):
    def body(r):
        for named in DIFFERENT:
            of_rank = named(partial(torch.ones, requires_grad=True), r)
            refused(partial(dc.GradientAverager, of_rank), dc.CollectiveMismatchError)
        model = mlp()
        refused(partial(dc.GradientAverager, model, bucket_mb=r + 1), dc.CollectiveMismatchError)
        model.register_buffer("b", torch.ones(r + 1))
        refused(partial(dc.GradientAverager, model), dc.CollectiveMismatchError)
        dc.GradientAverager(model, broadcast=False)
        return dc.all_reduce(torch.tensor(1)).item()

    assert RUNS[where](body, range(3)) == [3] * 3
