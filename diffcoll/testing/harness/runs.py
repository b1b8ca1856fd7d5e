"""The runs of distributed code beside the same on one process, whatever it is that each rank has of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor
from typing_extensions import Self, override

from diffcoll.core.errors import message
from diffcoll.testing.harness.causes import OBSERVED, Kind, cause_of
from diffcoll.testing.harness.comparison import (
    Quantity,
    all_near,
    in_doubt,
    largest_errors,
    tolerance_of,
    with_noise,
)
from diffcoll.testing.harness.measure import Measurement, MeasurementPlan, outputs_on_rank, run_on
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.report import Cause, Table, title_of
from diffcoll.testing.harness.wrong_run import WrongRun
from diffcoll.testing.processes import in_words

R = TypeVar("R")
#: The groups of quantities.
GROUPS = ("value", "output", "gradient", "second order", "state")


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """The results of one run."""

    on: str
    #: The arguments of `Against.run` after the kind of ranks: rows and steps before, or a mesh.
    setting: tuple[Any, ...]
    #: N.
    size: int
    #: The setting in words.
    what: str
    #: Under a sum over ranks.
    quantities: Sequence[Quantity] = ()
    #: What each rank measured.
    measured: Sequence[Any] = ()
    reference: Measurement | None = None
    #: What is compared: groups of quantities.
    groups: Sequence[str] = GROUPS
    #: Whether the value may be right under another reduction than the gradients.
    any_value: bool = False
    raised: str = ""
    skipped: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each rank."""
        sizes: tuple[int, ...] = self.setting[0]
        return sizes

    @property
    def step(self) -> int:
        """How many steps come before."""
        return int(self.setting[1])

    @property
    def even(self) -> bool:
        """Whether all ranks have equally many rows."""
        return len(set(self.sizes)) == 1

    def under(self, rank_reduction: str) -> list[Quantity]:
        """Return what is compared under this reduction; it applies neither to outputs with rows nor to the state."""
        factor, found = 1 / self.size if rank_reduction == "mean" else 1.0, []
        for q in self.quantities:
            if q.group not in self.groups:
                continue
            reduced = q if q.group in ("output", "state") else q.times(factor)
            if self.any_value and q.group == "value":
                reduced = next((each for each in (q, q.times(1 / self.size)) if each.ok), reduced)
            found.append(reduced)
        return found

    def ok(self, rank_reduction: str = "") -> bool:
        """Whether nothing was raised, and every quantity is right under this reduction."""
        return self.table(rank_reduction).ok

    def table(self, rank_reduction: str = "") -> Table:
        """Return the table of the report."""
        rows = tuple(q.row for q in self.under(rank_reduction))
        return Table(title_of(self.on, self.size, self.what), self.size, rows, self.raised, self.skipped)

    def values_differ(self, rank_reduction: str = "") -> bool:
        """Whether the values or outputs are not those of one process, compared or not."""
        return any(not q.ok for q in replace(self, groups=("value", "output")).under(rank_reduction))


class Runs(Generic[R]):
    """Runs on several kinds of ranks, each of which has a setting, such as the rows of each rank."""

    #: (on, *setting) → the run.
    run: ClassVar[Callable[..., Any]]
    #: (on, *setting, **results) → a run with these results.
    of_results: ClassVar[Callable[..., Any]]

    def is_right(self, run: R) -> bool:
        """Whether a run is right under a reduction that was asked for."""
        raise NotImplementedError

    def attempt(self, on: str, *setting: Any) -> R:
        """Run, and keep the error if one is raised."""
        found: R
        try:
            found = self.run(on, *setting)
        except Exception as error:
            found = self.of_results(on, *setting, raised=in_words(error))
        return found

    def runs(self, settings: Iterable[tuple[Any, ...]], on: Sequence[str]) -> list[R]:
        """Run on each kind of ranks; only the first run may raise.

        What is wrong already is skipped: after a run that is wrong, those whose setting begins with the same.
        """
        found: list[R] = []
        wrong: list[tuple[Any, str]] = []
        each = list(settings)
        for kind, setting in itertools.product(on, each):
            if first := next((before for what, before in wrong if what == setting[0]), None):
                where = "in the step before" if first == kind else f"on {first} ranks"
                found.append(self.of_results(kind, *setting, skipped=f"wrong already {where}"))
                continue
            found.append((self.attempt if found else self.run)(kind, *setting))
            if not self.is_right(found[-1]):
                wrong.append((setting[0], kind))
        return found


@dataclass(frozen=True)
class Against(Runs[ComparedRun]):
    """Distributed code, the same on one process, and how they are compared."""

    name: str
    distributed: Packed
    single: Packed
    batch: Any
    #: "mean", "sum" or "any"; with a mesh "mean" or "sum" by axis.
    rank_reduction: Any
    plan: MeasurementPlan
    timeout: float
    #: Names of arguments without gradients.
    constant: Sequence[str] = ()
    #: What is compared: groups of quantities.
    groups: Sequence[str] = GROUPS
    #: The largest relative error that is right.
    tolerance: float = 0.0

    def noise(self, run: ComparedRun) -> dict[str, float]:
        """Return by how much each quantity changes on one process with the last digits of inputs and parameters."""
        raise NotImplementedError

    @override
    def is_right(self, run: ComparedRun) -> bool:
        return run.ok()

    def shared_state(
        self, runs: list[ComparedRun], wrong: ComparedRun, causes: Sequence[Cause], rank_reduction: str = ""
    ) -> Cause | None:
        """Return a cause if what is wrong on simulated ranks is right on the next kind, which is run if need be.

        The run takes the place of the skipped one.
        """
        skipped = [i for i, run in enumerate(runs) if run.skipped and run.setting == wrong.setting]
        if not skipped or wrong.on != "simulated" or not OBSERVED.issuperset(cause.name for cause in causes):
            return None
        (i, *_), kind = skipped, runs[skipped[0]].on
        runs[i] = self.attempt(kind, *wrong.setting)
        right = runs[i].ok(rank_reduction)
        return cause_of(Kind.SHARED_STATE, f"wrong on simulated ranks, right on {kind}") if right else None

    def on(self, kind: str, fn: Callable[..., Any], *per_rank: Sequence[Any], seed: int | None = None) -> list[Any]:
        """Run fn once per rank on one kind of ranks."""
        return run_on(kind, fn, *per_rank, seed=self.plan.seed if seed is None else seed, timeout=self.timeout)

    def on_parts(
        self, kind: str, fn: Callable[..., Any], distributed: Sequence[Packed], parts: Sequence[Any], *same: Any
    ) -> list[Any]:
        """Run fn(packed, *same, rank, part) on each rank."""
        n = len(parts)
        return self.on(kind, fn, distributed, *([each] * n for each in same), range(n), parts)

    def on_one(self, fn: Callable[..., Any], *arguments: Any, seed: int | None = None) -> Any:
        """Run fn on one process."""
        return self.on("simulated", fn, *([each] for each in arguments), seed=seed)[0]

    def with_tolerance(self, tolerance: float | None, tensors: Iterable[Tensor]) -> Self:
        """Take this tolerance, or that of the dtypes of the tensors and of the module's."""
        if tolerance is None:
            tolerance = tolerance_of([*tensors, *self.single.unpack().tensors])
        return replace(self, tolerance=tolerance)

    def with_losses(self, outputs: Sequence[Tensor]) -> Self:
        """Take results of shape (1,) as losses."""
        losses = tuple(i for i, y in enumerate(outputs) if y.shape == (1,))
        distributed, single = (replace(packed, losses=losses) for packed in (self.distributed, self.single))
        return replace(self, distributed=distributed, single=single)

    def refuse_nothing(self, gradients: Iterable[Tensor], named: Iterable[tuple[str, Tensor]]) -> None:
        """Raise if there is no gradient, or no number, to compare with."""
        if not any(g.any() for g in gradients):
            got, remedy = "gradients that are all zero", "remove detach() and no_grad, or choose other data"
            raise ValueError(message(self.name, "single", got, "a result with a gradient to compare with", remedy))
        if bad := [name for name, x in named if not x.isfinite().all()]:
            got = f"NaN or infinity in {', '.join(bad)}"
            raise ValueError(message(self.name, "single", got, "finite numbers to compare with", "choose other data"))

    def judged(self, run: ComparedRun) -> ComparedRun:
        """Return the run, where what is in doubt may be off by the rounding of one process."""
        if not any(q.group in self.groups for q in run.quantities):
            got, remedy = f"only {', '.join(self.groups)}, of which there is nothing", "compare gradients too"
            raise ValueError(message(self.name, "compare", got, "something to compare", remedy))
        if self.rank_reduction != "any" and (doubtful := in_doubt(run.under(self.rank_reduction))):
            noise = self.noise(run)
            each = [with_noise(q, noise.get(q.what, 0.0)) if q.what in doubtful else q for q in run.quantities]
            run = replace(run, quantities=each)
        return run


def changed_attributes(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Say which attributes of modules are not compared."""
    for name in dict.fromkeys(name for run in runs for m in run.measured for name in m.attributes):
        yield f"{name}: an attribute that the call changed is not compared: register it as a buffer"


class WrongMatch(WrongRun):
    """A run that differs from one process."""

    def __init__(
        self,
        check: Against,
        run: ComparedRun,
        rank_reduction: str,
        at: tuple[Sequence[Packed], Packed, Sequence[Any], Any],
    ) -> None:
        self.check, self.run, self.rank_reduction = check, run, rank_reduction
        self.quantities, self.values_differ = run.under(rank_reduction), run.values_differ(rank_reduction)
        self.sizes, self.tolerance = (1,) * run.size, check.tolerance
        #: The function and the part of the batch of each rank, and those of one process.
        self.distributed, self.single, self.parts, self.whole = at

    def on_ranks(self, fn: Callable[..., Any], *same: Any) -> list[Any]:
        """Run fn(packed, *same, rank, part) on the ranks."""
        return self.check.on_parts(self.run.on, fn, self.distributed, self.parts, *same)

    @cached_property
    def rounding(self) -> set[str]:
        """The names of what changes as much on one process with the last digits of inputs and parameters."""
        errors = largest_errors(self.quantities)
        least = {name: max(self.tolerance, 0.1 * error) for name, error in errors.items()}
        return {name for name, k in self.check.noise(self.run).items() if k > least.get(name, self.tolerance)}

    @cached_property
    def is_random(self) -> bool:
        """Whether one process gets other results with another seed."""
        check, seed = self.check, self.check.plan.seed
        a, b = (check.on_one(outputs_on_rank, self.single, self.whole, seed=each) for each in (seed, seed + 1))
        return not all_near(a, b)
