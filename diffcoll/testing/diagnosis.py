"""Names the causes of a wrong gradient.

A gradient that is a multiple of the wanted one is scaled. Any other is compared with what common mistakes would give,
see `harness.evidence`. Every cause is tested on the numbers before it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from diffcoll.testing.harness.causes import Kind, cause_of
from diffcoll.testing.harness.comparison import Quantity, Run, is_near, multiple
from diffcoll.testing.harness.cuts import Cuts
from diffcoll.testing.harness.evidence import Evidence
from diffcoll.testing.harness.report import Cause, ratio_in_words

#: A quantity is nearly right if its relative error is below this.
_LITTLE = 5e-3


@dataclass(frozen=True)
class Witness:
    """Measurements of the run that is examined, made when they are asked for."""

    #: Finite differences.
    evidence: Callable[[], Evidence]
    #: Whether this run takes statistics of local rows, in words.
    local: Callable[[], str | None]
    #: The names of what is rounding error.
    rounding: Callable[[], set[str]]
    #: The names of the gradients that are right without detach().
    restored: Callable[[], set[str]]
    is_random: Callable[[], bool]


def diagnose(
    runs: Sequence[Run],
    rank_reduction: str,
    tolerance: float,
    run: Run | None = None,
    witness: Witness | None = None,
    *,
    cuts: Cuts | None = None,
) -> list[Cause]:
    """Return the causes of what is wrong in these runs.

    Args:
        runs: all runs, right and wrong.
        rank_reduction: "mean" or "sum".
        tolerance: the largest error that is right.
        run: the run to be examined, see `subject_of`; None: all wrong runs raised errors.
        witness: makes measurements of this run.
        cuts: lines at which tensors leave the graph.
    """
    scope = list(_scope(runs, rank_reduction, tolerance))
    if run is None or witness is None:
        return scope
    wrong = [q for q in run.quantities if not run.is_right(q, rank_reduction, tolerance)]
    finite = [q for q in wrong if q.got.isfinite().all()]
    if any(q.group in ("value", "output") for q in wrong) and witness.is_random():
        return [cause_of(Kind.RANDOM, "one process gets other results with another seed"), *scope]
    if noisy := [name for name in dict.fromkeys(q.what for q in finite) if name in witness.rounding()]:
        seen = f"{', '.join(noisy)}: changes as much on one process, if the last digits of the batch change"
        scope.insert(0, cause_of(Kind.ROUNDING, seen))
        finite = [q for q in finite if q.what not in noisy]
    causes = list(_not_finite(run, wrong))
    if nearly := _near(run, finite, rank_reduction):
        off = max(run.error(q, rank_reduction) for q in finite if q.what in nearly)
        causes.append(cause_of(Kind.NEARLY_RIGHT, f"{', '.join(nearly)}: off by {off:.1e}, {tolerance:.1e} is allowed"))
        finite = [q for q in finite if q.what not in nearly]
    causes += _value(
        run, [q for q in finite if q.group in ("value", "output", "buffer")], rank_reduction, tolerance, witness.local
    )
    first = [q for q in finite if q.group == "gradient"]
    explained = any(c.name in (Kind.LOCAL_STATISTICS, Kind.ANOTHER_LOSS) for c in causes)
    for cause in _gradients(run, first, rank_reduction, tolerance, witness.evidence):
        if cause.name in (Kind.WRONG_IN_DIRECTION, Kind.ANOTHER_LOSS) and explained:
            continue  # says no more than that the value is another one
        if cause.name in (Kind.WRONG_IN_DIRECTION, Kind.NO_CONTRIBUTION) and cuts is not None and cuts.lines:
            # Many a detach() is for logging alone.
            if cuts.collectives or witness.restored() & {q.what for q in first}:
                cause = cause_of(Kind.GRAPH_CUT, cause.seen)
        causes.append(cause)
    if any(c.name == Kind.MEAN_OF_LOCAL_MEANS for c in causes):
        causes = [
            c for c in causes if c.name != Kind.LOCAL_STATISTICS
        ]  # a mean of a rank's rows is one of their statistics
    if any(c.name == Kind.NOT_FINITE for c in causes):
        scope = [c for c in scope if c.name != Kind.EMPTY]
    if not causes and any(q.group == "second order" for q in finite):
        names = ", ".join(dict.fromkeys(q.what.removeprefix("second order of ") for q in finite))
        causes.append(
            cause_of(Kind.SECOND_ORDER, f"the first order is right, and the second order is wrong for {names}")
        )
    return causes + scope


def subject_of(runs: Sequence[Run], rank_reduction: str, tolerance: float) -> Run | None:
    """Return the wrong run that is examined: the first one with equal sizes, or else the first one."""
    wrong = [r for r in runs if r.quantities and not r.table(rank_reduction, tolerance).ok]
    return next((r for r in wrong if len(set(r.sizes)) == 1), wrong[0] if wrong else None)


def _scope(runs: Sequence[Run], rank_reduction: str, tolerance: float) -> Iterator[Cause]:
    """Say which runs raised errors, and in which runs alone something is wrong."""
    done = [r for r in runs if not r.skipped]
    wrong = [r for r in done if not r.table(rank_reduction, tolerance).ok]
    right = [r for r in done if r not in wrong]
    raised = [r for r in wrong if r.raised]
    if raised and all(len(set(r.sizes)) > 1 for r in raised):
        yield cause_of(Kind.RAISED, f"raised an error with rows {_sizes_of(raised)}, and none with equal ranks")
    elif raised:
        yield Cause(Kind.RAISED.value, f"raised an error with rows {_sizes_of(raised)}")
    even = any(len(set(r.sizes)) == 1 < len(r.sizes) for r in right) and all(len(set(r.sizes)) > 1 for r in wrong)
    if even and len(raised) < len(wrong):
        if all(0 in r.sizes for r in wrong):
            yield cause_of(Kind.EMPTY, f"wrong only with empty ranks: rows {_sizes_of(wrong)}")
        else:
            yield cause_of(Kind.UNEVEN, f"right with equal ranks, wrong with rows {_sizes_of(wrong)}")
    if any(r.on == "simulated" for r in right) and not any(r.on == "simulated" for r in wrong):
        kinds = ", ".join(dict.fromkeys(r.on for r in wrong))
        yield cause_of(Kind.ON_PROCESSES, f"right on simulated ranks, wrong on {kinds}")


def _sizes_of(runs: Sequence[Run]) -> str:
    return ", ".join(dict.fromkeys(str(r.sizes) for r in runs))


def _not_finite(run: Run, wrong: Sequence[Quantity]) -> Iterator[Cause]:
    bad = [q for q in wrong if q.wanted.isfinite().all() and not q.got.isfinite().all()]
    if bad:
        ranks = sorted(r for r, m in enumerate(run.measured) if not all(y.isfinite().all() for y in m.outputs))
        of = f"; the value is not finite on {_ranks(ranks)}" if ranks else ""
        empty = [r for r, rows in enumerate(run.sizes) if rows == 0]
        rows = f"; {_ranks(empty)} {'has' if len(empty) == 1 else 'have'} no rows" if empty else ""
        yield cause_of(Kind.NOT_FINITE, f"{', '.join(dict.fromkeys(q.what for q in bad))}: NaN or infinite{of}{rows}")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {' and '.join(map(str, ranks))}"


def _near(run: Run, wrong: Sequence[Quantity], rank_reduction: str) -> list[str]:
    """Return the names of what is off by little."""
    names = dict.fromkeys(q.what for q in wrong)
    return [name for name in names if all(run.error(q, rank_reduction) < _LITTLE for q in wrong if q.what == name)]


def _value(
    run: Run, wrong: Sequence[Quantity], rank_reduction: str, tolerance: float, local: Callable[[], str | None]
) -> list[Cause]:
    """Say what is wrong with the values, the outputs and the buffers."""
    if not wrong:
        return []
    n, found = len(run.sizes), []
    names = ", ".join(dict.fromkeys(q.what for q in wrong))
    for q in wrong:
        ratio = multiple(q.got, q.wanted, tolerance) if q.group == "value" else None
        if any(is_near(ratio, float(n) ** p, tolerance) for p in (-2, -1, 0, 1, 2, 3)):
            words = _times_the_right(ratio or 0.0, run, q, rank_reduction, tolerance)
            found.append(
                cause_of(Kind.VALUE_SCALED, f"{q.what}: {words} the loss of one process{_exact(ratio, n, tolerance)}")
            )
    if found:
        return found
    if (statistics := local()) is not None:
        return [cause_of(Kind.LOCAL_STATISTICS, statistics)]
    if all(q.group == "buffer" for q in wrong):
        return [cause_of(Kind.LOCAL_STATISTICS, f"{names}: not updated with the rows of the whole batch")]
    return [
        cause_of(Kind.ANOTHER_LOSS, f"{names}: not what one process computes on the whole batch, under any reduction")
    ]


def _times_the_right(ratio: float, run: Run, q: Quantity, rank_reduction: str, tolerance: float) -> str:
    factor = ratio_in_words(ratio * run.factor(q, rank_reduction), len(run.sizes), max(tolerance, 1e-3))
    return f'under "{rank_reduction}" {factor} times'


def _exact(ratio: float | None, n: int, tolerance: float) -> str:
    """Say under which reduction a sum with this ratio is exact."""
    if is_near(ratio, 1, tolerance):
        return ', exact under "sum"'
    return ', exact under "mean"' if is_near(ratio, n, tolerance) else ""


def _gradients(
    run: Run, wrong: Sequence[Quantity], rank_reduction: str, tolerance: float, evidence: Callable[[], Evidence]
) -> Iterator[Cause]:
    """Say what is wrong with the gradients of first order."""
    n = len(run.sizes)
    of_all = [q for q in run.quantities if q.group == "gradient"]
    ratios = {name: _ratios([q for q in of_all if q.what == name], tolerance) for name in (q.what for q in of_all)}
    common = {name: _common(r, tolerance) for name, r in ratios.items()}
    left = dict.fromkeys(q.what for q in wrong)
    under = {
        what: [name for name in ratios if is_near(common[name], ratio, tolerance)]
        for what, ratio in (("sum", 1.0), ("mean", 1.0 * n))
    }
    if n > 1 and under["sum"] and under["mean"] and left:
        exact = [f'{_list(names)} exact under "{what}"' for what, names in under.items()]
        yield cause_of(Kind.NO_REDUCTION, f"{', '.join(exact)}: no reduction is right for both")
        left = {name: None for name in left if name not in under["sum"] + under["mean"]}
    for ratio, names in _grouped({name: common[name] for name in left}, tolerance):
        words = _times_the_right(ratio, run, of_all[0], rank_reduction, tolerance)
        twice = is_near(ratio * run.factor(of_all[0], rank_reduction), n, tolerance) and len(under[rank_reduction]) > 0
        seen = f"{_list(names)}: {words} the right gradient{_exact(ratio, n, tolerance)}"
        yield cause_of(Kind.REDUCED_TWICE if twice else Kind.SCALED, f"{seen}; right in direction")
    others: dict[tuple[Kind, str], list[str]] = {}
    for name in left:
        if not common[name]:
            others.setdefault(_of_one(run, name, ratios[name], rank_reduction, evidence), []).append(name)
    for (cause, seen), names in others.items():
        yield cause_of(cause, f"{_list(names)}: {seen}")


def _grouped(ratios: dict[str, float | None], tolerance: float) -> list[tuple[float, list[str]]]:
    """Return the names that have a ratio, by ratio."""
    found: list[tuple[float, list[str]]] = []
    for name, ratio in ratios.items():
        if ratio:
            names = next((names for other, names in found if is_near(ratio, other, tolerance)), None)
            if names is None:
                found.append((ratio, [name]))
            else:
                names.append(name)
    return found


def _of_one(
    run: Run, name: str, ratios: dict[int | None, float | None], rank_reduction: str, evidence: Callable[[], Evidence]
) -> tuple[Kind, str]:
    """Return the cause for a gradient that is no common multiple of the right one, and words for what was seen."""
    n = len(run.sizes)
    none = [r for r, ratio in ratios.items() if ratio == 0]
    others = [ratio for ratio in ratios.values() if ratio != 0]
    if none and (not others or (None not in others and len(set(map(_rounded, others))) == 1)):
        where = "on every rank" if not others else f"on rank {', '.join(map(str, none))}"
        return Kind.NO_CONTRIBUTION, f"the gradient is zero {where}"
    known = {r: ratio for r, ratio in ratios.items() if ratio is not None and r is not None}
    if known and len(known) == len(ratios):
        total, f = sum(run.sizes), 1 / n if rank_reduction == "mean" else 1.0
        if any(all(is_near(ratio * c, total / run.sizes[r] / n) for r, ratio in known.items()) for c in (1.0, f)):
            return Kind.MEAN_OF_LOCAL_MEANS, "off by (rows of all ranks) / (N · rows of the rank) on each rank"
        each = ", ".join(f"{ratio_in_words(ratio * f, n)} on rank {r}" for r, ratio in known.items())
        return Kind.SCALED_DIFFERENTLY, f"right in direction on each rank, off by {each}"
    found = evidence().cause(_short(name))
    if found is None:
        return Kind.WRONG_IN_DIRECTION, "no multiple of the right gradient"
    if found[0] == Kind.CONSISTENT:
        return Kind.ANOTHER_LOSS, f"not the gradient of one process; {found[1]}, so the forward is what differs"
    return found


def _ratios(each: Sequence[Quantity], tolerance: float) -> dict[int | None, float | None]:
    """Return got / wanted by rank; ranks whose wanted gradient is zero or empty are left out if theirs is right."""
    found: dict[int | None, float | None] = {}
    for q in each:
        if q.got.shape == q.wanted.shape and not (q.wanted.abs() > tolerance * q.unit).any() and q.error() <= tolerance:
            continue
        zero = q.got.shape == q.wanted.shape and not q.got.any()
        found[q.rank] = 0.0 if zero else multiple(q.got, q.wanted, tolerance)
    return found


def _common(ratios: dict[int | None, float | None], tolerance: float) -> float | None:
    """Return the ratio that all ranks have; None: they have none in common."""
    values = list(ratios.values())
    if not values or any(v is None for v in values):
        return None
    first = values[0]
    assert first is not None
    return first if all(is_near(v, first, tolerance) for v in values) else None


def _rounded(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.3g}")


def _short(what: str) -> str:
    return what.removeprefix("gradient of ")


def _list(names: Sequence[str]) -> str:
    """Return names of gradients in words."""
    short = [_short(name) for name in names]
    return short[0] if len(short) == 1 else f"{', '.join(short[:-1])} and {short[-1]}"
