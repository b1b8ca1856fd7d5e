"""What a GradientAverager keeps alive, and what is left of one that was freed."""

import gc
import os
import weakref

import pytest
import torch
from runs import rules
from torch import nn
from training import RUNS, on_two

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.testing import new_group, spawn


def refer(to):
    """Return a hook that refers to an object."""
    return lambda *_: to and None


def plain(model, r):
    model(torch.full((2, 3), r + 1.0)).sum().backward()


def hooked(model, r):
    model[0].weight.register_hook(refer(model))
    model.register_forward_hook(refer(model))
    plain(model, r)


def raised(model, r):
    """A backward that raises on all ranks, before the first gradient and after some."""
    for p in (model[2].bias, model[0].weight):
        handle = p.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            plain(model, r)
        handle.remove()


@on_two
@pytest.mark.parametrize("how", ["mean", "sum", "weighted", "join"])
def test_a_model_is_freed_although_hooks_of_its_parameters_refer_to_it(how, where):
    """As with DistributedDataParallel, without detach(): hooks that were registered before and after the averager's."""

    def body(r):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        model[0].weight.register_hook(refer(model))
        averager = dc.GradientAverager(model, reduction="mean" if how == "join" else how)
        model[0].bias.register_hook(refer(model))
        left = weakref.ref(model), weakref.ref(averager)
        for k in averager.join(range(1 + r)) if how == "join" else range(2):
            if how == "weighted":
                averager.set_weight(1 + r)
            loss = model(torch.full((2, 3), r + 1.0)).sum()
            torch.autograd.grad(loss, model[0].weight, retain_graph=True)
            loss.backward()
            if k:
                model.zero_grad()
            del loss
        del model, averager
        gc.collect()
        assert [ref() for ref in left] == [None] * 2

    RUNS[where](body, range(2))


@on_two
@pytest.mark.parametrize("use", [plain, hooked, raised])
def test_a_model_is_freed_with_its_averager(use, where):
    """Also if a hook refers to it or a backward has raised; a new model with new averager works."""

    def body(r):
        for _ in range(2):
            model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
            averager = dc.GradientAverager(model)
            use(model, r)
            left = weakref.ref(model), weakref.ref(averager), weakref.ref(averager._reducer)
            del model, averager
            gc.collect()
            assert [ref() for ref in left] == [None] * 3

    RUNS[where](body, range(2))


def test_an_averager_lives_as_long_as_its_module():
    """No variable refers to it; averagers of bare parameters live until `detach`."""

    def body(r):
        model = nn.Linear(2, 1, bias=False)
        dc.GradientAverager(model)
        bare = nn.Parameter(torch.ones(1))
        dc.GradientAverager([bare])
        gc.collect()
        (model(torch.full((1, 2), r + 1.0)).sum() + bare.sum() * r).backward()
        return model.weight.grad.tolist(), bare.grad.item()

    assert rules(body, range(3)) == [([[2.0, 2.0]], 1.0)] * 3


def handles():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", [0, 1, 2]), ("gloo", [0, 2]), ("mpi", [0, 1])])
def test_sockets_and_threads_of_averagers_that_were_freed(backend, ranks):
    """Freed in another order on every rank, or detached: the next averagers of the group close them."""

    def body(r):
        group = new_group(ranks)
        if r not in ranks:
            return 0, 0
        kept, before = [], (0, 0)
        for k in range(6):
            model = nn.Linear(2, 1, bias=False)
            when = "each forward" if k % 3 == 0 else "never"
            averager = dc.GradientAverager(model, group=group, broadcast_buffers=when)
            (model(torch.full((1, 2), r + 1.0)).sum()).backward()
            assert model.weight.grad.tolist() == [[sum(ranks) / len(ranks) + 1] * 2]
            if k % 3 == 1:
                averager.detach()
            kept.append(model)
            del model, averager
            if k % 3 == 2:
                before = before if k > 2 else handles()
                while kept:
                    kept.pop(-(r % 2))
                    gc.collect()
        after = handles()
        return after[0] - before[0], after[1] - before[1]

    for files, threads in spawn(body, range(3), backend=backend):
        assert files <= 2
        assert threads <= 2


def test_an_averager_that_lives_longer_on_one_rank():
    """It is closed once it is freed on all ranks, and works until then."""

    def body(r):
        models = [nn.Linear(2, 1, bias=False) for _ in range(3)]
        for k in range(3):
            dc.GradientAverager(models[k])
        engine = resolve(None, "test")
        numbers, open_twins = {}, []
        for k in range(3):
            if r == k:
                models.clear()
            gc.collect()
            last = nn.Linear(2, 1, bias=False)
            dc.GradientAverager(last)
            open_twins.append([numbers.setdefault(twin, len(numbers)) for _, twin in engine.twins])
        last(torch.full((1, 2), r + 1.0)).sum().backward()
        return open_twins, last.weight.grad.tolist()

    found = rules(body, range(3))
    assert found == [([[0, 1, 2, 3], [0, 1, 2, 3, 4], [4, 5]], [[2.0, 2.0]])] * 3
