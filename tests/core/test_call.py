"""A plan that a group keeps of a call is used for later calls with the same arguments, and for no others."""

import pytest
import torch
import torch.distributed as dist
from runs import rules, runs_on
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.core import call
from diffcoll.core.groups import resolve
from diffcoll.testing import new_group, simulate

N = 2
#: A valid call for each collective, and arguments that compare equal to valid ones but are of a wrong type or invalid.
CALLS = {
    "all_reduce": (
        lambda x: dc.all_reduce(x),
        {"ties": ["none"], "op": [["sum"]], "grad_placement": [["partial"]], "async_op": [0], "group": [7]},
    ),
    "all_gather": (lambda x: dc.all_gather(x), {"dim": [False, 0.0, None, "0"], "stack": [0, None], "async_op": [0]}),
    "all_gather, dim 1": (lambda x: dc.all_gather(x, 1), {"dim": [True, 1.0]}),
    "all_gather, stack": (lambda x: dc.all_gather(x, stack=True), {"stack": [1]}),
    "reduce_scatter": (lambda x: dc.reduce_scatter(x), {"dim": [False, 0.0], "op": [None, 0], "ties": ["none"]}),
    "all_to_all": (lambda x: dc.all_to_all(x), {"split_dim": [False], "concat_dim": [0.0]}),
    "broadcast": (lambda x: dc.broadcast(x), {"src": [False, 0.0], "grad_placement": [None]}),
    "reduce": (lambda x: dc.reduce(x), {"dst": [False, 0.0], "op": [None]}),
    "gather": (lambda x: dc.gather(x), {"dst": [False, 0.0], "dim": [False]}),
    "shift": (lambda x: dc.shift(x), {"offset": [True, 1.0], "wrap": [1]}),
    "scan": (lambda x: dc.scan(x), {"reverse": [0], "exclusive": [0, None]}),
    "split": (lambda x: dc.split(x), {"dim": [False, 0.0]}),
}
#: Invalid x with the dtype and shape of a valid one.
IMPOSTORS = {
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@runs_on("rules", "gloo", "mpi")
def test_equal_arguments_are_not_the_same(run):
    def body(r):
        plans = resolve(None, "test").plans
        for name, (right, wrong) in CALLS.items():
            x = torch.arange(8.0).view(4, 2) + r
            collective = getattr(dc, name.split(",")[0])
            for _ in range(2):
                expected = right(x)
            assert len(plans) > 0
            for argument, values in wrong.items():
                for value in values:
                    with pytest.raises((TypeError, ValueError), match=f"{name.split(',')[0]}: {argument}: got "):
                        collective(x, **{argument: value})
            for impostor in IMPOSTORS.values():
                with pytest.raises((TypeError, ValueError), match=f"{name.split(',')[0]}: x: got "):
                    collective(impostor(x))
            assert torch.equal(right(x), expected)
        return True

    assert run(body, range(N)) == [True] * N


def test_every_dtype_shape_argument_and_group_by_itself():
    def body(r):
        found = []
        for _ in range(2):
            for dtype in (torch.float32, torch.float64, torch.int64, torch.complex64):
                for shape in ((2,), (2, 3), (4, 3)):
                    x = torch.full(shape, r + 1, dtype=dtype)
                    y, z = dc.all_gather(x), dc.all_gather(x, len(shape) - 1, async_op=True).wait()
                    assert (y.dtype, y.shape[0], z.shape[-1]) == (dtype, N * shape[0], N * shape[-1])
                    alone = dc.all_gather(x, group=groups[r])
                    assert torch.equal(alone, x)
                    found.append(dc.reduce_scatter(x, "sum").sum().item())
        return found

    groups = {}

    def with_groups(r):
        of_one_rank = [new_group([s]) for s in range(N)]
        groups[r] = of_one_rank[r]
        return body(r)

    first, second = rules(with_groups, range(N))
    assert first == second  # 3 on both ranks
    assert first[: len(first) // 2] == first[len(first) // 2 :] == [3.0, 9.0, 18.0] * 4


def test_a_plan_is_kept_only_where_it_depends_on_this_rank_alone():
    """Exchanged sizes, factors, functions and lists are read in every call: they may differ next time."""

    def body(r):
        plans = resolve(None, "test").plans
        first = dc.all_gather(torch.ones(1 + r), sizes="auto")
        second = dc.all_gather(torch.ones(2 - r), sizes="auto")  # the same size on neither rank
        sizes = [1, 2]
        dc.all_gather(torch.ones(1 + r), sizes=sizes)
        sizes.reverse()
        third = dc.all_gather(torch.ones(2 - r), sizes=sizes)
        dc.all_reduce(torch.ones(2), lambda s: s.sum(0))
        dc.all_reduce(torch.ones(2), "max")
        scaled = dc.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0 + r))
        assert scaled.tolist() == [5, 5]
        dc.permute(torch.ones(2), [(0, 1)])
        dc.scatter(torch.ones(2), 0)
        return len(first), len(second), len(third), [key[0] for key in plans]

    assert rules(body, range(N)) == [(3, 3, 3, [])] * N


def test_a_group_keeps_a_bounded_number_of_plans(monkeypatch):
    monkeypatch.setattr(call, "_PLANS", 8)

    def body(r):
        for n in range(30):
            dc.all_reduce(torch.ones(n))
        return len(resolve(None, "test").plans)

    assert all(kept <= 8 for kept in rules(body, range(N)))


def test_a_plan_is_not_used_in_check_mode():
    def body(r):
        x = torch.ones(2, 2)
        dc.all_gather(x)
        with dc.check_mode(), pytest.raises(dc.CollectiveMismatchError):
            dc.all_gather(x, 0) if r else dc.all_gather(x, 1)
        return True

    assert rules(body, range(N)) == [True] * N


#: What is made of a collective in another context than the one in which its plan was made.
CONTEXTS = {
    "plain": lambda f, x: f(x),
    "again": lambda f, x: f(x),
    "Parameter": lambda f, x: f(torch.nn.Parameter(x)).detach(),
    "no_grad": lambda f, x: torch.no_grad()(f)(x),
    "inference_mode": lambda f, x: torch.inference_mode()(f)(x).clone(),
    "transposed in memory": lambda f, x: f(x.t().contiguous().t()),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x]))[1] / 2,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "vjp": lambda f, x: torch.func.vjp(f, x)[0],
    "checkpoint": lambda f, x: checkpoint(f, x.clone().requires_grad_(), use_reentrant=False).detach(),
    "pending": lambda f, x: f(x, async_op=True).wait(),
    "joint_backward": lambda f, x: in_a_region(f, x),
}
MAPS = {
    "sum": dc.all_reduce,
    "mean": lambda x, **more: dc.all_reduce(x, "mean", **more),
    "mean, bfloat16": lambda x, **more: (
        dc.all_reduce(x.bfloat16(), "mean", **more).double()
        if not more
        else Widened(dc.all_reduce(x.bfloat16(), "mean", **more))
    ),
    "all_gather": dc.all_gather,
    "stack": lambda x, **more: dc.all_gather(x, 1, stack=True, **more),
    "reduce_scatter": lambda x, **more: dc.reduce_scatter(x, "mean", 1, **more),
    "broadcast": lambda x, **more: dc.broadcast(x, 1, **more),
}


class Widened:
    def __init__(self, pending):
        self.pending = pending

    def wait(self):
        return self.pending.wait().double()


def in_a_region(f, x):
    with dc.joint_backward():
        return f(x).detach()


@runs_on("rules", "mpi")
@pytest.mark.parametrize("first", CONTEXTS)
def test_a_plan_made_in_one_context_serves_in_all(run, first):
    """The result is that of truth, whichever context makes the plan, on 3 ranks with data of their own."""

    def x_of(r):
        return torch.arange(6.0, dtype=torch.double).view(2, 3) * (r + 1) + r

    def body(r):
        found = {}
        for name, f in MAPS.items():
            found[name] = [CONTEXTS[context](f, x_of(r)).tolist() for context in (first, *CONTEXTS)]
            assert len(resolve(None, "test").plans) > 0
        return found

    expected = simulate(lambda r: {name: f(x_of(r)) for name, f in MAPS.items()}, range(3))
    for of_rank, right in zip(run(body, range(3)), expected, strict=True):
        for name, found in of_rank.items():
            assert found == [right[name].tolist()] * len(found), name
