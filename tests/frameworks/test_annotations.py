"""Annotations at run time: those of the public functions by beartype, users' shapes by jaxtyping."""

import doctest
import inspect

import pytest
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import Float, Int, jaxtyped
from runs import rules
from torch import Tensor

import diffcoll as dc
from diffcoll import testing
from diffcoll.nn import functional

#: What beartype 0.23.1 cannot check: a generic named tuple as a result, a recursive alias in the bound of a variable.
NOT_BY_BEARTYPE = {"gather_batch", "scatter"}
#: As type checkers do, it takes an int where a float is expected.
by_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))
PUBLIC = [
    pytest.param(module, name, id=f"{module.__name__}.{name}")
    for module in (dc, functional, testing)
    for name in sorted(module.__all__)
    if inspect.isfunction(getattr(module, name)) and name not in NOT_BY_BEARTYPE
]


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_annotations_hold(module, name, monkeypatch):
    """The example of the docstring, with the function checked: arguments and results are of the types that it says."""
    function = getattr(module, name)
    monkeypatch.setattr(module, name, by_beartype(function))
    (example,) = (found for found in doctest.DocTestFinder(recurse=False).find(function, name, globs={}))
    assert example.examples
    failed, tried = doctest.DocTestRunner(verbose=False).run(example)
    assert tried and not failed


@jaxtyped(typechecker=beartype)
def gathered(x: Float[Tensor, "b d"]) -> Float[Tensor, "all d"]:
    return dc.all_gather(x, sizes="auto")


@jaxtyped(typechecker=beartype)
def supervised(x: Float[Tensor, "b d"], labels: Int[Tensor, " b"]) -> Float[Tensor, ""]:
    return dc.nn.functional.supcon_loss(x, labels)


def on_rank(x, labels):
    def loss(x):
        return supervised(x, labels) + gathered(x).sin().sum()

    gradient = torch.func.grad(loss)(x)
    value, tangent = torch.func.jvp(loss, (x,), (x.cos(),))
    torch.func.vmap(gathered)(torch.stack([x, x]))  # in vmap the function sees one example
    return gradient.shape == x.shape and value.shape == tangent.shape == ()


def test_shapes_of_users_hold_in_transforms():
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    assert rules(on_rank, x.split([4, 0, 3]), (torch.arange(7) % 3).split([4, 0, 3])) == [True] * 3
