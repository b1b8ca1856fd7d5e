"""Random programs: gradients in one graph of all ranks = the rules = real processes.

Ranks make a call in ways of their own, which change no gradient: memory layouts, and the order of keys.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import calls
import nests
import pytest
import torch
from hypothesis import Phase
from hypothesis import strategies as st
from properties import LAYOUTS
from releases import compiles
from runs import new_group, rules, runs_on, spawned, truth
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.collectives import COLLECTIVES
from diffcoll.core.arguments import TAKE_TREES
from diffcoll.core.maps import Scan
from diffcoll.testing.cases import Case

# Collectives that need a replicated input cannot take an arbitrary result.
DRAWN = [name for name in COLLECTIVES if name not in ("sum_gradients", "split")]
SEED = 3
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@dataclass(frozen=True)
class Way:
    """How one rank makes a call: the input's layout, whether it needs a gradient, the order of a tree's keys.

    And where it waits for what is in flight.
    """

    layout: str = "contiguous"
    requires_grad: bool = True
    reverse: bool = False
    place: str = ""

    def waited(self, y):
        """The result, as `finished` returns it, of what is in flight or not."""
        if self.place in MODES and isinstance(y, dc.Pending):
            with MODES[self.place]():
                y.wait()
        if self.place != "checkpoint":
            return finished(y)
        one = torch.ones((), dtype=torch.float64, requires_grad=True)
        return checkpoint(lambda one: one * finished(y), one, use_reentrant=False)


@dataclass(frozen=True)
class Step:
    """One call of some ranks, whose input depends on an earlier result; plain, of a tree, or in a checkpoint."""

    case: Case
    source: int
    ranks: tuple[int, ...]
    ways: tuple[Way, ...] = ()
    form: str = ""

    def given(self, r):
        """Rank r's own input."""
        return self.case.x(self.ranks.index(r), SEED) if r in self.ranks else None

    def start(self, x, r, group):
        me = self.ranks.index(r)
        own = {key: value[me] for key, value in self.case.per_rank.items()}
        return getattr(dc, self.case.name)(x, group=group, **self.case.arguments, **own)

    def start_in_its_way(self, x, r, group, checkpoints):
        """As `start`, in rank r's way; in one graph of all ranks no checkpoint computes anything again."""
        way = self.ways[self.ranks.index(r)]
        x = LAYOUTS[way.layout](x if way.requires_grad else x.detach())
        if self.form == "tree":
            leaves = [("b", x), ("a", [x.sin()])]
            y = self.start(dict(leaves[:: -1 if way.reverse else 1]), r, group)
            return partial(way.waited, y) if checkpoints else y
        if self.form != "checkpoint":
            y = self.start(x, r, group)
            return partial(way.waited, y) if checkpoints else y

        def part(x):
            return finished(self.start(x.sin(), r, group)).sin()

        return checkpoint(part, x, use_reentrant=False) if checkpoints else part(x)


def finished(y):
    """The result, as one tensor, of a call that may be in flight and may be of a tree."""
    if callable(y):
        return y()
    y = y.wait() if isinstance(y, dc.Pending) else y
    return torch.cat([y["b"].reshape(-1), y["a"][0].reshape(-1)]) if isinstance(y, dict) else y


@dataclass(frozen=True)
class Program:
    """A program of N ranks, the results that each rank's loss uses, and the layouts of the gradients it sends back."""

    n: int
    steps: tuple[Step, ...]
    uses: tuple[tuple[int, ...], ...]
    layouts: tuple[str, ...]

    def groups(self):
        """All ranks make all groups, in the same order."""
        return {ranks: new_group(ranks) for ranks in dict.fromkeys(step.ranks for step in self.steps)}

    def given(self, r):
        return [step.given(r) for step in self.steps]

    def results(self, r, given, groups, x0, start=Step.start):
        """Every step's result; one in flight is waited for when a step uses it, or at the end, on all ranks alike."""
        pool = [x0]

        def waited(i):
            pool[i] = finished(pool[i])
            return pool[i]

        for step, x in zip(self.steps, given, strict=True):
            earlier = waited(step.source).sin().sum().tanh()
            y = earlier
            if r in step.ranks:
                y = start(step, x * (1.5 + earlier), r, groups[step.ranks])
            pool.append(y)
        return [waited(i) for i in range(len(pool))]

    def loss(self, r, x0, checkpoints=True):
        """Rank r's loss; a result may be used several times, by some ranks only, or not at all."""
        given, groups = self.given(r), self.groups()
        with dc.joint_backward() as joint:
            pool = self.results(r, given, groups, x0, partial(Step.start_in_its_way, checkpoints=checkpoints))
            terms = [(i + 1 + r) * LAYOUTS[self.layouts[r]](pool[i]).sin().sum() for i in self.uses[r]]
            return joint(sum(terms, x0.sum() * 0))

    def value(self, r, given, groups, x0):
        """A number that uses every result; as `loss`, where nothing is recorded: in torch.func and in a graph."""
        return sum((i + 1 + r) * y.sin().sum() for i, y in enumerate(self.results(r, given, groups, x0)))

    def inputs(self):
        return [torch.linspace(-1, 1 + r, 3, dtype=torch.float64).requires_grad_() for r in range(self.n)]

    def truth(self):
        xs = self.inputs()
        losses = truth(partial(self.loss, checkpoints=False), range(self.n), xs)
        return torch.autograd.grad(sum(losses), xs)

    def gradient(self, r):
        x0 = self.inputs()[r]
        self.loss(r, x0).backward()
        return x0.grad

    def __str__(self):
        """Return code that runs this program."""
        return f"from test_programs import *\ncheck({self!r})"


def check(program, run=None):
    """Compare a program's gradients with truth on every rank; `run` runs one function on all ranks."""
    run = run or (lambda body: rules(body, range(program.n)))
    for r, (got, right) in enumerate(zip(run(program.gradient), program.truth(), strict=True)):
        torch.testing.assert_close(got, right, rtol=1e-8, atol=1e-10, equal_nan=True, msg=f"rank {r}\n{program}")


def check_nest(program, nest):
    """Compare transforms of a program within one another with truth."""

    def of_rank(r):
        return partial(program.value, r, program.given(r), program.groups())

    def of_all(xs):
        return truth(lambda r, x: of_rank(r)(x), range(program.n), xs)

    nests.check(rules, [nest], of_rank, of_all, [x.detach() for x in program.inputs()], what=program)


ways = st.builds(
    Way,
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from([True, True, False]),
    st.booleans(),
    st.sampled_from(["", *MODES, "checkpoint"]),
)


@st.composite
def programs(draw, n=None, most=20):
    n = n or draw(st.integers(1, 4))
    steps = []
    for i in range(draw(st.integers(1, most))):
        ranks = tuple(range(n))
        if draw(st.integers(0, 3)) == 0:
            ranks = tuple(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1))))
        case = draw(calls.cases(DRAWN, size=len(ranks)))
        arguments = {k: v for k, v in case.arguments.items() if k != "grad_placement" and not callable(v)}
        case = replace(case, arguments=arguments, dtype=torch.float64)
        form = draw(st.sampled_from(["", "", "", "checkpoint", "tree" if case.name in TAKE_TREES else ""]))
        steps.append(Step(case, draw(st.integers(0, i)), ranks, tuple(draw(ways) for _ in ranks), form))
    used = st.lists(st.integers(0, len(steps)), max_size=4).map(tuple)
    layouts = tuple(draw(st.sampled_from(list(LAYOUTS))) for _ in range(n))
    return Program(n, tuple(steps), tuple(draw(used) for _ in range(n)), layouts)


def at_length(few, many, seconds):
    """Run a test on a few examples, always the same, and on many in the slow suite."""
    marks = [pytest.mark.slow, pytest.mark.timeout(seconds)]
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=marks)])


@at_length(12, 400, 1200)
def test_programs_in_nests(count):
    nested = st.lists(st.sampled_from(nests.NAMES), min_size=1, max_size=2)
    pairs = st.tuples(programs(most=3), nested)
    calls.each(pairs, count, lambda pair: check_nest(*pair), derandomize=count == 12)


@at_length(50, 10_000, 3600)
def test_programs(count):
    calls.each(programs(), count, check, derandomize=count == 50)


def test_a_planted_mistake_is_found(monkeypatch):
    """The scan itself instead of its adjoint."""
    monkeypatch.setattr(Scan, "adjoint", property(lambda f: Scan(f.engine, f.reverse, f.exclusive)))
    with pytest.raises(AssertionError, match=r"check\(Program\(.*'scan'"):
        calls.each(programs(), 200, check, derandomize=True, phases=[Phase.generate])


@runs_on("gloo", "mpi")
def test_programs_on_processes(run):
    n, drawn = 3, calls.drawn(programs(n=3, most=8), 15, derandomize=True)
    got = run(lambda r: [program.gradient(r) for program in drawn], range(n), timeout=100)
    for i, program in enumerate(drawn):
        check(program, lambda gradient: [of_rank[i] for of_rank in got])  # noqa: B023


@pytest.mark.slow
@compiles
@pytest.mark.timeout(1600)  # hundreds of graphs on each rank: more than 300 s on a machine with other work
@pytest.mark.parametrize(("backend", "compiler"), [("gloo", "aot_eager"), ("gloo", "inductor"), ("mpi", "aot_eager")])
def test_programs_on_ranks_that_are_compiled_or_not(backend, compiler):
    """With `async_op` all ranks are, or none is."""
    n, count = 3, 40 if compiler == "aot_eager" else 8
    drawn = calls.drawn(programs(n=n, most=6), count, derandomize=True)

    def body(r):
        found = []
        for program in drawn:
            torch.compiler.reset()
            x = program.inputs()[r]
            eager = partial(program.value, r, program.given(r), program.groups())
            compiled = torch.compile(eager, fullgraph=True, backend=compiler)
            later = any("async_op" in step.case.arguments for step in program.steps)
            ways = [(True,) * n, (False,) * n] if later else product((True, False), repeat=n)
            found.append([torch.autograd.grad((compiled if which[r] else eager)(x), x)[0] for which in ways])
        return found

    for of_rank in spawned(body, range(n), backend=backend, timeout=1500):
        for program, (*mixed, eager) in zip(drawn, of_rank, strict=True):
            torch.testing.assert_close(
                mixed, [eager] * len(mixed), rtol=1e-6, atol=1e-6, equal_nan=True, msg=str(program)
            )
