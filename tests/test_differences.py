"""Ranks that differ in layout, order of keys, kind of wait or gradient; and ranks that disagree.

Local differences change nothing: values and gradients equal those of truth. A disagreement is an error on every rank in
check mode, and the group works afterwards.
"""

import random
from dataclasses import dataclass, replace
from functools import partial

import calls
import pytest
import torch
from hypothesis import strategies as st
from releases import compiles, one_graph
from runs import rules, spawned
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import diffcoll as dc
from diffcoll.collectives import COLLECTIVES
from diffcoll.core.arguments import TAKE_TREES
from diffcoll.engines import c10d, mpi
from diffcoll.testing import cases, spawn
from diffcoll.testing.cases import Case, with_layout

SEED = 5
RUNS = {"rules": rules, "gloo": partial(spawn, timeout=500), "mpi": partial(spawn, backend="mpi", timeout=500)}
TREES = TAKE_TREES  # 0-d leaves, and leaves that are not divisible by N
ASYNC = tuple(name for name in COLLECTIVES if name not in ("scan", "sum_gradients", "split"))


# ── local differences, which are allowed ─────────────────────────────────────────────────────────────────


#: The same values, in other memory layouts.
LAYOUTS = {
    **{name: partial(with_layout, layout=name) for name in ("contiguous", "transposed", "strided", "offset")},
    "conjugated": lambda x: x.conj().resolve_conj().conj() if x.is_complex() else x,
}

#: A rank's loss; the layout of its gradient with respect to y: like y, expanded, transposed or strided.
LOSSES = {
    "plain": lambda w, y: (w * y.sin()).sum(),
    "expanded": lambda w, y: w.sum() * y.sum(),
    "transposed": lambda w, y: (with_layout(w, "transposed") * y).sum(),
    "strided": lambda w, y: (with_layout(w, "strided") * y).sum(),
    "unused": lambda w, y: 0 * w.sum(),
}


def _selective(saves):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if saves(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


#: What a rank's checkpoint keeps.
POLICIES = {
    "": {},
    "nothing": _selective(lambda op: False),
    "communication": _selective(lambda op: op.namespace in ("c10d", "_c10d_functional", "diffcoll")),
    "writes": _selective(lambda op: op._schema.is_mutable),
    "all": _selective(lambda op: True),
}


@dataclass(frozen=True)
class Way:
    """How one rank makes one call."""

    layout: str = "contiguous"
    loss: str = "plain"
    order: int = 0  # of the keys of a tree
    async_op: bool = False
    requires_grad: bool = True
    policy: str = ""  # of the checkpoint, if there is one
    changed: str = ""  # how this rank disagrees with the others, see CHANGES


@dataclass(frozen=True)
class Step:
    """One call; x is one tensor, or a tree of several."""

    case: Case
    leaves: int
    ways: tuple[Way, ...]
    checkpointed: bool = False


@dataclass(frozen=True)
class Program:
    """Consecutive calls of n ranks; the engines' thresholds in bytes."""

    n: int
    steps: tuple[Step, ...]
    checked: bool = False
    thresholds: tuple[int, int] = (16, 48)


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    """The engines' thresholds, which simulated ranks change in this process."""
    monkeypatch.setitem(c10d.SMALL, "gloo", c10d.SMALL["gloo"])
    for name in ("TOGETHER", "SMALL", "ADDED"):
        monkeypatch.setattr(mpi, name, getattr(mpi, name))


def inputs(step, r, way=None):
    way = way or step.ways[r]
    xs = [step.case.x(r, SEED + i) for i in range(step.leaves)]
    return [LAYOUTS[way.layout](x).detach().requires_grad_(way.requires_grad) for x in xs]


def tree_of(xs, order):
    """A dict of the leaves with a nested list; the key order depends on `order`."""
    if len(xs) == 1:
        return xs[0]
    pairs = [("b", xs[0]), ("a", list(xs[1:-1])), ("c", xs[-1])]
    random.Random(order).shuffle(pairs)
    return dict(pairs)


def leaves_of(y, n):
    return [y] if n == 1 else [y["b"], *y["a"], y["c"]]


def weighted(step, r, way, ys):
    total = 0
    for i, y in enumerate(ys):
        loss = LOSSES[way.loss](step.case.w(y, r, SEED + i), y)
        total = total + (loss.real if loss.is_complex() else loss)
    return total


def collective(step, r, way, xs):
    case = CHANGES[way.changed](step.case, r) if way.changed in CHANGES else step.case
    if way.async_op:
        case = replace(case, arguments={**case.arguments, "async_op": True})
    own = {key: value[r] for key, value in case.per_rank.items()}
    y = getattr(dc, case.name)(tree_of(xs, way.order), **case.arguments, **own)
    return leaves_of(y.wait() if isinstance(y, dc.Pending) else y, step.leaves)


def on_rank(step, r, joint):
    """Return one rank's gradients, from one backward."""
    way = step.ways[r]
    xs = inputs(step, r)
    if way.changed == "dtype":
        xs = [x.detach().to(torch.complex64 if x.is_complex() else torch.float32).requires_grad_() for x in xs]
    if way.changed == "shape":
        xs = [torch.cat([x.detach()] * 2, -1).requires_grad_() if x.dim() else x.detach()[None] for x in xs]
    if way.changed == "absent":
        return None

    def loss():
        return weighted(step, r, way, collective(step, r, way, xs))

    if step.checkpointed ^ (way.changed == "checkpointed"):
        value = checkpoint(loss, use_reentrant=False, **POLICIES[way.policy])
    else:
        value = loss()
    value = joint(value) + sum(x.sum().real * 0 for x in xs if x.requires_grad)
    if value.requires_grad:
        value.backward()
    return [None if x.grad is None else x.grad.resolve_conj() for x in xs]


def program_on_rank(program, r):
    """Return the result of each step on this rank: gradients, or an error."""
    c10d.SMALL["gloo"] = mpi.TOGETHER = program.n * program.thresholds[0]
    mpi.SMALL, mpi.ADDED = program.thresholds
    found = []

    def one(step):
        try:
            with dc.check_mode(program.checked), dc.joint_backward() as joint:
                dc.all_reduce(torch.ones(2))  # at the end of a block check mode compares in the groups used in it
                outcome = on_rank(step, r, joint)
        except Exception as error:  # storing the error would keep a checkpoint's hooks before torch 2.13
            outcome = f"{type(error).__name__}: {error}"
        found.append(outcome)

    for step in program.steps:
        one(step)
    return found


def truth_of(step):
    """Return the gradients of all ranks, from one graph."""
    ways = [replace(way, requires_grad=True, layout="contiguous") for way in step.ways]
    of_ranks = [inputs(step, r, way) for r, way in enumerate(ways)]
    total = 0
    by_leaf = [step.case.truth([xs[i] for xs in of_ranks]) for i in range(step.leaves)]
    for r, way in enumerate(ways):
        total = total + weighted(step, r, way, [ys[r] for ys in by_leaf])
        total = total + sum(0 * x.abs().sum() for x in of_ranks[r])
    flat = [x for xs in of_ranks for x in xs]
    grads = iter(torch.autograd.grad(total, flat, allow_unused=True))
    return [[torch.zeros_like(x) if (g := next(grads)) is None else g for x in xs] for xs in of_ranks]


def check(program, of_ranks):
    for i, step in enumerate(program.steps):
        outcomes = [found[i] for found in of_ranks]
        errors = [o for o in outcomes if isinstance(o, str)]
        changed = {way.changed for way in step.ways if way.changed}
        if changed and errors:
            assert len(errors) == program.n, f"step {i}: {outcomes}\n{program!r}"
            continue
        assert changed <= {"checkpointed"}, f"step {i}: {outcomes}\n{program!r}"
        assert not errors, f"step {i}: {errors}\n{program!r}"
        for r, (got, right) in enumerate(zip(outcomes, truth_of(step), strict=True)):
            for a, b, x in zip(got, right, inputs(step, r), strict=True):
                if not x.requires_grad:
                    continue
                a = torch.zeros_like(b) if a is None else a
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, equal_nan=True, msg=f"{i}, {r}\n{program!r}")


# ── disagreements, which are errors ──────────────────────────────────────────────────────────────────────


def _other_op(case, r):
    op = "max" if case.arguments.get("op", "sum") != "max" else "min"
    return replace(case, arguments={**case.arguments, "op": op})


def _other_rank(case, r):
    name = next(key for key in ("src", "dst") if key in case.arguments)
    return replace(case, arguments={**case.arguments, name: (case.arguments[name] + 1) % case.size})


def _other_collective(case, r):
    name = "scan" if case.name != "scan" else "shift"
    return Case(name, case.shapes, {}, dtype=case.dtype)


#: The call that one rank makes instead.
CHANGES = {"op": _other_op, "rank": _other_rank, "collective": _other_collective}


def changes_of(case, leaves):
    found = ["absent", "checkpointed", "dtype"]
    if case.name in ("all_reduce", "reduce", "reduce_scatter") and not case.dtype.is_complex:
        found.append("op")
    if any(key in case.arguments for key in ("src", "dst")):
        found.append("rank")
    if leaves == 1:
        found.append("collective")
    asks = case.arguments.get("sizes") == "auto"  # then another size is no difference
    if case.name in ("all_reduce", "broadcast", "permute", "shift", "scan") and case.x(0, 0).numel() and not asks:
        found.append("shape")
    return found


# ── strategies ───────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def steps(draw, n, where, disagree):
    case = draw(calls.cases(size=n))
    arguments = {k: v for k, v in case.arguments.items() if k not in ("grad_placement", "async_op")}
    case = replace(case, arguments=arguments, layout="contiguous")
    if draw(st.booleans()) and "op" in case.arguments:
        case = replace(case, arguments={**case.arguments, "op": "sum"})
    leaves = draw(st.sampled_from([1, 3])) if case.name in TREES else 1
    alike = case.name in ASYNC and draw(st.booleans())

    def way():
        return Way(
            draw(st.sampled_from(list(LAYOUTS))),
            draw(st.sampled_from(list(LOSSES))),
            draw(st.integers(0, 5)),
            alike if where == "mpi" or disagree else case.name in ASYNC and draw(st.booleans()),
            draw(st.integers(0, 3)) > 0,
            policy=draw(st.sampled_from(list(POLICIES))),
        )

    ways = [way() for _ in range(n)]
    if disagree and draw(st.booleans()):
        odd = draw(st.integers(0, n - 1))
        ways[odd] = replace(ways[odd], changed=draw(st.sampled_from(changes_of(case, leaves))), requires_grad=True)
    return Step(case, leaves, tuple(ways), draw(st.integers(0, 3)) == 0)


@st.composite
def programs(draw, where, disagree, n=None):
    n = n or draw(st.integers(2, 4))
    drawn = [draw(steps(n, where, disagree)) for _ in range(draw(st.integers(1, 3)))]
    return Program(n, tuple(drawn), disagree, draw(st.sampled_from([(0, 16), (16, 48), (1 << 14, 1 << 20)])))


def one_by_one(count, disagree, **more):
    """On simulated ranks, so that hypothesis can shrink a failure."""

    def hold(program):
        check(program, rules(partial(program_on_rank, program), range(program.n)))

    calls.each(programs("rules", disagree), count, hold, **more)


def together(where, count, disagree, n, **more):
    """On processes, all programs in one run."""
    drawn = calls.drawn(programs(where, disagree, n), count, **more)
    of_ranks = spawned(
        lambda r: [program_on_rank(program, r) for program in drawn], range(n), backend=where, timeout=500
    )
    for i, program in enumerate(drawn):
        check(program, [found[i] for found in of_ranks])


@pytest.mark.parametrize("disagree", [False, True])
def test_simulated(disagree):
    one_by_one(60, disagree, derandomize=True)


@pytest.mark.parametrize("disagree", [False, True])
@pytest.mark.parametrize("where", ["gloo", "mpi"])
def test_on_processes(where, disagree):
    together(where, 30, disagree, 3, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("disagree", [False, True])
def test_simulated_at_length(disagree):
    one_by_one(1500, disagree)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("disagree", [False, True])
@pytest.mark.parametrize("where", ["gloo", "mpi"])
def test_on_processes_at_length(where, disagree, seed):
    together(where, 100, disagree, 2 + seed % 2)


@pytest.mark.slow
@compiles
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["gloo", "mpi"])
def test_compiled_on_one_rank_only(where):
    """Compiled and eager ranks send the same messages."""
    n = 2
    table = [case for case in cases.table(n) if "async_op" not in case.arguments]

    def body(r):
        found = []
        for case in table:
            torch.compiler.reset()

            def call(x, case=case):
                return case.call(x, r)

            if r == 1:
                call = one_graph(call)
            found.append(cases.on_rank(case, r, SEED, call, orders=1))
        return [(m.output, m.gradient) for m in found]

    of_ranks = spawned(body, range(n), backend=where, timeout=500)
    for i, case in enumerate(table):
        for r, right in enumerate(cases.in_truth(case, SEED, orders=1)):
            torch.testing.assert_close(of_ranks[r][i], (right.output, right.gradient), msg=str(case))
