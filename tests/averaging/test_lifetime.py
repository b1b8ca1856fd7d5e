"""What a GradientAverager keeps alive, and what is left of one that was freed."""

import gc
import weakref

import pytest
import torch
from torch import nn

import diffcoll as dc
from diffcoll.testing import simulate, spawn

RUNS = {"rules": lambda body, ranks: simulate(body, ranks, rules=True), "gloo": spawn}


def refer(to):
    """Return a hook that refers to an object."""
    return lambda *_: to and None


def hooked(model, r):
    model[0].weight.register_hook(refer(model))
    model.register_forward_hook(refer(model))
    model(torch.full((2, 3), r + 1.0)).sum().backward()


def raised(model, r):
    """A backward that raises on all ranks, before the first gradient and after some."""
    for p in (model[2].bias, model[0].weight):
        handle = p.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.full((2, 3), r + 1.0)).sum().backward()
        handle.remove()


@pytest.mark.parametrize("where", RUNS)
@pytest.mark.parametrize("use", [hooked, raised])
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

    assert simulate(body, range(3), rules=True) == [([[2.0, 2.0]], 1.0)] * 3
