"""A collective is one unit for dispatch modes, function modes and selective checkpoints: they see nothing inside it."""

from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch
from runs import gloo, rules, runs_on
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import diffcoll as dc
from diffcoll.core.torch_private.tracing import is_observed, unobserved
from diffcoll.testing import cases
from diffcoll.testing.cases import real_inner

COMMUNICATION = ("c10d", "_c10d_functional", "diffcoll")


def _policy(saves):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if saves(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


POLICIES = {
    "save all": _policy(lambda op: True),
    "recompute all": _policy(lambda op: False),
    "save communication": _policy(lambda op: op.namespace in COMMUNICATION),
    "save the rest": _policy(lambda op: op.namespace not in COMMUNICATION),
    "save memory": _policy(lambda op: "empty" in str(op)),
    "save writes": _policy(lambda op: op._schema.is_mutable),
}


class Ops(TorchDispatchMode):
    """Records the operations that write, make memory without values, or communicate."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        # `new_empty(0)` is the result of a start
        memory = "empty" in str(op) and list(args[-1]) != [0]
        if op._schema.is_mutable or memory or op.namespace in COMMUNICATION:
            self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Records the functions that write."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, f, types, args=(), kwargs=None):
        if getattr(f, "__name__", "") in ("copy_", "empty", "send", "recv", "record_function", "requires_grad_"):
            self.seen.append(f.__name__)
        return f(*args, **(kwargs or {}))


def _cases():
    return [case for case in cases.table(3) if case.dtype == torch.float64]


def _gradient(case, x, rank, **options):
    def layer(x):
        return case.call(x.sin(), rank).sin() * 2

    x = x.detach().requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False, **options) if options else layer(x)
    loss = real_inner(case.w(y.detach(), rank, 1), y.exp())
    return torch.autograd.grad(loss, x)[0]


def test_gradients_under_selective_checkpoints():
    def body(rank):
        for case in _cases():
            x = case.x(rank, 0)
            expected = _gradient(case, x, rank)
            for policy in ("save all", "save the rest"):
                found = _gradient(case, x, rank, **POLICIES[policy])
                torch.testing.assert_close(found, expected, msg=f"{case.name} {case.label} {policy}")

    rules(body, range(3))


def _program(x):
    """Collectives of each kind, of the size that gloo sends in parts."""
    pending = dc.all_gather(x.sin(), sizes="auto", async_op=True)
    tree = dc.all_reduce({"a": x.cos(), "b": [x.sin().sum()]}, "mean")
    largest = dc.all_reduce(x.square(), "logsumexp")
    sums = sum((source + 1) * block.sin().sum() for source, block in dc.ring(x))
    return (
        pending.wait().square().sum() * tree["b"][0] + (tree["a"] * largest).sum() + sums + dc.scan(x).square().mean()
    )


def _program_gradient(x, **options):
    x = x.detach().requires_grad_()
    with dc.joint_backward() as joint:
        y = checkpoint(_program, x, use_reentrant=False, **options) if options else _program(x)
    return torch.autograd.grad(joint(y.sin()), x)[0]


def test_selective_checkpoints_on_processes():
    """20,000 numbers: with gloo, c10d operations inside the collective, whose results a policy would keep."""

    def body(r):
        x = torch.arange(20_000, dtype=torch.float64).add(r).sin() / 100 + r
        expected = _program_gradient(x)
        for policy in ("save all", "save communication"):
            torch.testing.assert_close(_program_gradient(x, **POLICIES[policy]), expected, msg=policy)

    gloo(body, range(3), timeout=100)


def test_losses_that_checkpoint_their_chunks_within_a_selective_checkpoint():
    """Backward repeats a chunk within the mode of the outer checkpoint, outside of any, and in another one."""

    def gradient(r, mode, **options):
        x = torch.arange(12, dtype=torch.float64).view(4, 3).add(r).sin().requires_grad_()

        def loss(x):
            return dc.nn.functional.clip_loss(x.sin(), x.cos(), 3.0, chunk_size=2)

        y = checkpoint(loss, x, use_reentrant=False, **options) if options else loss(x)
        with mode:
            return torch.autograd.grad(y.sin(), x)[0]

    def body(r):
        expected = gradient(r, nullcontext())
        torch.testing.assert_close(gradient(r, FlopCounterMode(display=False)), expected)
        for policy, options in POLICIES.items():
            torch.testing.assert_close(gradient(r, nullcontext(), **options), expected, msg=policy)

    rules(body, range(3))


@pytest.mark.parametrize("checked", [False, True])
def test_a_policy_that_differs_between_ranks_decides_nothing(checked):
    """Which ranks repeat a collective depends on no policy: every rank repeats it with its checkpoint."""

    def body(r):
        x = torch.tensor([0.3 + r, -1.2, 0.4 * r], dtype=torch.float64)
        expected = _program_gradient(x)
        with dc.check_mode() if checked else nullcontext():
            for at in range(len(POLICIES)):
                options = [*POLICIES.values()][(r + at) % len(POLICIES)]
                torch.testing.assert_close(_program_gradient(x, **options), expected)

    rules(body, range(3))


@pytest.mark.parametrize("op", ["product", "logsumexp", "max"])
def test_third_order_under_selective_checkpoints(op):
    """Policies that keep what an operation inside a reduction writes, or everything but communication."""

    def penalty(x, **options):
        x = x.detach().requires_grad_()
        layer = lambda x: dc.all_reduce(x.sin(), op) * dc.all_gather(x.exp()).square()[0]  # noqa: E731
        y = checkpoint(layer, x, use_reentrant=False, **options) if options else layer(x)
        g = y.square().sum()
        for order in (2, 3):
            (g,) = torch.autograd.grad(g, x, create_graph=True)
            g = (g.sin() * (dc.get_rank() + order)).sum()
        return torch.autograd.grad(g, x)[0]

    def body(r):
        x = torch.tensor([0.3 + r, -1.2, 0.4 * r], dtype=torch.float64)
        expected = penalty(x)
        for policy in ("save writes", "save communication", "save memory", "recompute all"):
            torch.testing.assert_close(penalty(x, **POLICIES[policy]), expected, msg=policy)

    rules(body, range(3))


def test_modes_see_nothing_inside_a_collective():
    """Also on some ranks only: they send the same messages as the others."""
    on = (0, 2)

    def body(rank):
        for case in _cases():
            x = case.x(rank, 0)
            expected = _gradient(case, x, rank)
            ops, functions = Ops(), Functions()
            with ExitStack() as modes:
                for mode in (ops, functions, FlopCounterMode(display=False)) if rank in on else ():
                    modes.enter_context(mode)
                found = case.call(x, rank)
                inside = ops.seen, functions.seen
                ops.seen, functions.seen = [], []
                assert _get_current_dispatch_mode_stack()[:1] == ([ops] if rank in on else [])
                gradient = _gradient(case, x, rank)
            assert inside == ([], []), (case.name, case.label)
            assert torch.equal(found, case.call(x, rank)) and torch.equal(gradient, expected), (case.name, case.label)

    rules(body, range(3))


class Replaces(TorchDispatchMode):
    """Writes nothing: returns the first argument of an operation in place as it is."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return args[0] if op._schema.is_mutable else op(*args, **(kwargs or {}))


@pytest.mark.parametrize("checked", [False, True])
def test_a_mode_cannot_change_what_a_collective_computes(checked):
    def body(r):
        xs = [torch.tensor([1.5 - r, r, -2.0 * r]), torch.arange(700_000.0).sub(r).sin()]
        calls = [partial(dc.all_reduce, op=op) for op in ("sum", "mean", "max", "product", "logsumexp")]
        calls += [dc.all_gather, dc.scan, dc.shift, partial(dc.all_gather, sizes="auto"), partial(dc.broadcast, src=1)]
        for call in calls:
            for x in xs:
                expected = call(x)
                with Replaces(), dc.check_mode() if checked else nullcontext():
                    assert torch.equal(call(x), expected), call

    rules(body, range(3))


def test_modes_are_restored_after_an_error():
    with Ops() as ops, Functions() as functions:
        with pytest.raises(KeyError), unobserved():
            assert not is_observed()
            torch.ones(2).add_(1)
            raise KeyError
        assert is_observed()
        torch.ones(2).copy_(torch.ones(2))
    assert ops.seen == ["aten.copy_.default"] and functions.seen == ["copy_"]
    assert not is_observed()


class Nothing(TorchDispatchMode):
    """Sees no message between ranks."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "c10d" not in function.namespace and "gather" not in str(function), function
        return function(*args, **(kwargs or {}))


@runs_on("rules", "gloo", "mpi")
def test_modes_and_autograd_do_not_see_sizes_and_comparisons(run):
    def body(r):
        x = torch.ones(r, 2, requires_grad=True)
        torch.autograd.set_detect_anomaly(True, check_nan=True)  # of the process, which simulated ranks share
        with dc.check_mode(), Nothing():
            y = dc.all_gather(x, sizes="auto")
            (y.sum() * (r + 1)).backward()
            with torch.inference_mode():
                dc.all_gather(x, sizes="auto")
        torch.autograd.set_detect_anomaly(False)
        return y.shape[0], x.grad.tolist()

    assert run(body, range(3)) == [(3, [[6, 6]] * r) for r in range(3)]
