"""What the tests of the checks of gradients share: rules for gradients, and one way to run a check.

A program is (distributed, single, batch, further arguments) of `assert_matches_single_process`. Checks run on simulated
ranks, unless the arguments say otherwise.
"""

from functools import lru_cache

import pytest
import torch
from torch.distributed.tensor import Shard

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, assert_matches_single_process, check_gradients

SIMULATED = {"on": ["simulated"]}


class _Ruled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call, rule):
        ctx.rule = rule
        return call(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.rule(g), None, None


def ruled(call, rule):
    """Return `call` with a backward of its own: the gradient of x is `rule` of that of the result."""
    return lambda x: _Ruled.apply(x, call, rule)


def numbers(*shape, seed=0, dtype=torch.double):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rows(n, width=3, seed=0, dtype=torch.double):
    return numbers(n, width, seed=seed + n, dtype=dtype)


def per_rank(*shape, n=3, seed=0, dtype=torch.double):
    return [numbers(*shape, seed=seed + r, dtype=dtype) for r in range(n)]


@lru_cache
def cached_rank():
    """The rank that came first, as packages keep it that are written for one rank in a process."""
    return dc.get_rank()


def several():
    return dc.get_world_size() > 1


def loss(module, x):
    return module(x).sin().mean()


def value(x):
    return x.sin().sum()


def summed(distributed, single=None, batch=rows, **more):
    """A program whose ranks' losses are summed; without `single`, it is the same on one process."""
    return distributed, single or distributed, batch, {"losses": "sum", **more}


def sharded(shard, ranks, module, batch, fn=loss, single=None, **more):
    """A program on a mesh; rows of x are divided along the axes that are no `tp` or `pp`."""
    split = {axis: Shard(0) for axis in (ranks if isinstance(ranks, dict) else {}) if axis not in ("tp", "pp")}
    placed = {"placements": {"x": split}} if split else {}
    return fn, single or fn, batch, {"module": module, "shard": shard, "ranks": ranks, **placed, **more}


def with_more(make, **more):
    """A function that makes the program of `make` with more arguments."""

    def made():
        *functions, given = make()
        return *functions, {**given, **more}

    return made


def observed(report):
    return " ".join(" ".join(report.observed).split())


def _passes(check, *given, **more):
    report = check(*given, **{**SIMULATED, **more})
    assert report.ok and not report.observed
    return report


def _fails(check, *given, **more):
    with pytest.raises(GradientMismatchError) as error:
        check(*given, **{**SIMULATED, **more})
    assert str(error.value) == str(error.value.report) and not error.value.report.ok
    return error.value.report


def matches(program, **more):
    """Check that a program passes, and return the report."""
    *functions, given = program
    return _passes(assert_matches_single_process, *functions, **{**given, **more})


def differs(program, **more):
    """Check that a program fails, and return the report."""
    *functions, given = program
    return _fails(assert_matches_single_process, *functions, **{**given, **more})


def is_right(fn, *of_ranks, **more):
    """Check that `check_gradients` passes, and return the report."""
    return _passes(check_gradients, fn, *of_ranks, **more)


def is_wrong(fn, *of_ranks, **more):
    """Check that `check_gradients` fails, and return the report."""
    return _fails(check_gradients, fn, *of_ranks, **more)
