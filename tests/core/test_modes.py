"""A collective is one unit for dispatch modes, function modes and selective checkpoints: they see nothing inside it."""

from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch
from runs import MPI_TOO, refusal, rules, runs_on
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import diffcoll as dc
from diffcoll.testing import cases

N = 3
COMMUNICATION = ("c10d", "_c10d_functional", "diffcoll")
CASES = [case for case in cases.table(N) if not any(case.shared)]


def of_case(case):
    """A program, in which the numbers of a call depend on x."""
    return lambda r, x: case.call(case.x(r, 0) * x.sum(), r).sin()


# ── selective checkpoints ────────────────────────────────────────────────────────────────────────────────


def _policy(saves):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if saves(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


#: The operations whose results a checkpoint saves.
POLICIES = [
    _policy(lambda op: True),
    _policy(lambda op: op.namespace not in COMMUNICATION),
    _policy(lambda op: False),
    _policy(lambda op: op.namespace in COMMUNICATION),
    _policy(lambda op: "empty" in str(op)),  # memory without values
    _policy(lambda op: op._schema.is_mutable),
]


def collectives_of_each_kind(r, x):
    """Of the size that gloo sends in parts: c10d operations, whose results a policy would keep."""
    pending = dc.all_gather(x.sin(), sizes="auto", async_op=True)
    tree = dc.all_reduce({"a": x.cos(), "b": [x.sin().sum()]}, "mean")
    largest = dc.all_reduce(x.square(), "logsumexp")
    sums = sum((source + 1) * block.sin().sum() for source, block in dc.ring(x))
    later = pending.wait().square().sum() * tree["b"][0]
    return later + (tree["a"] * largest).sum() + sums + dc.scan(x).square().mean()


def chunks_in_checkpoints_of_their_own(r, x):
    return dc.nn.functional.clip_loss(x.sin(), x.cos(), 3.0, chunk_size=2)


def not_linear(r, x, op):
    return dc.all_reduce(x.sin(), op) * dc.all_gather(x.exp()).square()[0]


#: Programs, policies (what is saved can be read once), the shape of x, and the order of the derivative.
PROGRAMS = [
    (collectives_of_each_kind, POLICIES, (20_000,), 1),
    (chunks_in_checkpoints_of_their_own, POLICIES, (4, 3), 1),
    *((partial(not_linear, op=op), POLICIES[2:], (3,), 3) for op in ("product", "logsumexp", "max")),
]


def derivative(program, r, shape, orders=1, region=nullcontext, **options):
    """Of a program in a checkpoint with these options, or without one."""
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape).add(r).sin() / 3 + r
    x.requires_grad_()
    with region() as joint:
        y = checkpoint(partial(program, r), x, use_reentrant=False, **options) if options else program(r, x)
        g = y.sin()
        for order in range(orders):
            g = (g * (r + order + 1)).sum()
            (g,) = torch.autograd.grad(joint(g) if joint else g, x, create_graph=True)
            g = g.sin()
    return g.detach()


@runs_on("rules", "gloo")
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("region", [nullcontext, dc.joint_backward])
def test_no_policy_changes_a_derivative(run, checked, region):
    """Policies that differ between ranks, too: a collective is repeated with its checkpoint, whatever they say."""

    def body(r):
        for program, policies, *more in PROGRAMS:
            expected = derivative(program, r, *more, region)
            with dc.check_mode(checked):
                for at in range(len(policies)):
                    found = derivative(program, r, *more, region, **policies[(r + at) % len(policies)])
                    torch.testing.assert_close(found, expected, msg=f"{program} {at}")

    run(body, range(N))


# ── modes ────────────────────────────────────────────────────────────────────────────────────────────────


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


@runs_on("rules", "gloo", MPI_TOO)
@pytest.mark.parametrize("checked", [False, True])
def test_modes_see_nothing_inside_a_collective(run, checked):
    """Also on some ranks only: they send the same messages as the others."""
    on = (0, 2)

    def body(r):
        torch.autograd.set_detect_anomaly(True, check_nan=True)  # of the process, which simulated ranks share
        for case in CASES:
            x, expected = case.x(r, 0), derivative(of_case(case), r, (3,))
            ops, functions = Ops(), Functions()
            with ExitStack() as modes, dc.check_mode(checked):
                for mode in (ops, functions, FlopCounterMode(display=False)) if r in on else ():
                    modes.enter_context(mode)
                found = case.call(x, r)
                inside = ops.seen, functions.seen
                ops.seen, functions.seen = [], []
                assert _get_current_dispatch_mode_stack()[:1] == ([ops] if r in on else [])
                gradient = derivative(of_case(case), r, (3,))
            assert inside == ([], []), case
            assert torch.equal(found, case.call(x, r)) and torch.equal(gradient, expected), case
        torch.autograd.set_detect_anomaly(False)

    run(body, range(N))


def test_modes_are_restored_after_an_error():
    def body(r):
        with Ops() as ops, Functions() as functions:
            refusal(dc.CollectiveMismatchError, dc.all_reduce, torch.ones(2 + r))
            torch.ones(2).copy_(torch.ones(2))
        return ops.seen[-1:], functions.seen[-1:]

    assert rules(body, range(2)) == [(["aten.copy_.default"], ["copy_"])] * 2
