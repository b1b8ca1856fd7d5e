"""Names the causes of what is wrong.

`HYPOTHESES` are tried in their order. Each is tested on the numbers of a run, finds what it explains, and is followed
by those that explain the rest; so the strict ones stand first. What nothing explains is "wrong in direction".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from diffcoll.testing.harness.causes import Kind, cause_of
from diffcoll.testing.harness.comparison import Quantity, busy, is_near, multiple
from diffcoll.testing.harness.report import Cause, ratio_in_words
from diffcoll.testing.harness.wrong_run import LITTLE, Finding, WrongRun, in_list, ranks_in_words, short

W = TypeVar("W", bound=WrongRun)


def diagnose(run: W, hypotheses: Sequence[Callable[[W], Iterator[Finding]]]) -> list[Cause]:
    """Return the causes of what is wrong in this run."""
    for hypothesis in hypotheses:
        for finding in hypothesis(run):
            run.found.append(_or_graph_cut(run, finding))
    return list(dict.fromkeys(cause_of(finding.kind, finding.seen) for finding in run.found))


def _or_graph_cut(run: WrongRun, finding: Finding) -> Finding:
    """Blame the lines that take tensors out of the graph for a lost gradient; many a detach() is for logging alone."""
    lost = finding.kind in (Kind.WRONG_IN_DIRECTION, Kind.NO_CONTRIBUTION)
    if lost and run.cuts.lines and (run.cuts.collectives or run.restored & set(finding.names)):
        return finding._replace(kind=Kind.GRAPH_CUT)
    return finding


# ── the whole run ────────────────────────────────────────────────────────────────────────────────────────


def _kinks(run: WrongRun) -> Iterator[Finding]:
    if names := [name for name in run.left() if any(q.most_allowed is None for q in run.of(name))]:
        yield Finding(Kind.KINK, names, f"{in_list(names)}: the sum of the losses is not differentiable here")


def _detached(run: WrongRun) -> Iterator[Finding]:
    if run.cuts.detached and run.left("gradient") and (seen := run.detached):
        yield Finding(Kind.DETACHED, run.left(), seen)


def random(run: WrongRun) -> Iterator[Finding]:
    """One process gets other results with another seed."""
    if run.left("value", "output") and run.is_random:
        yield Finding(Kind.RANDOM, run.left(), "one process gets other results with another seed")


def not_finite(run: WrongRun) -> Iterator[Finding]:
    """NaN or infinity where one process has numbers."""

    def lost(q: Quantity) -> bool:
        return bool(q.wanted.isfinite().all() and not q.got.isfinite().all())

    if names := [name for name in run.left() if any(map(lost, run.of(name)))]:
        empty = [r for r, rows in enumerate(run.sizes) if rows == 0]
        of = f"; the value is not finite on {ranks_in_words(run.not_finite)}" if run.not_finite else ""
        rows = f"; {ranks_in_words(empty)} {'has' if len(empty) == 1 else 'have'} no rows" if empty else ""
        yield Finding(Kind.NOT_FINITE, names, f"{in_list(names)}: NaN or infinite{of}{rows}")


def rounding(run: WrongRun) -> Iterator[Finding]:
    """One process has errors of this size."""
    if run.left() and (names := [name for name in run.left() if name in run.rounding]):
        words = "changes as much on one process, if the last digits of the batch and the parameters change"
        yield Finding(Kind.ROUNDING, names, f"{in_list(names)}: {words}")


# ── what the ranks share ─────────────────────────────────────────────────────────────────────────────────


def not_replicated(run: WrongRun) -> Iterator[Finding]:
    """The ranks return other outputs, which should be the same."""
    if names := run.left("output"):
        where = sorted({q.rank for name in names for q in run.of(name) if not q.ok and q.rank is not None})
        words = f"other numbers on {ranks_in_words(where)} than on rank 0"
        yield Finding(Kind.NOT_REPLICATED, [*names, *run.left("gradient")], f"{in_list(names)}: {words}")


def part_of_sum(run: WrongRun) -> Iterator[Finding]:
    """The gradient of a variable that all ranks have is right once it is summed over them."""
    names = []
    for name in run.left("gradient"):
        if name not in run.replicated:
            continue
        each = run.of(name)
        got, wanted = torch.stack([q.got for q in each]), each[0].wanted
        summed = replace(each[0], got=got.sum(0), allowed=10 * torch.as_tensor(each[0].allowed))
        if wanted.any() and summed.ok and not all(is_near(r, 1 / run.size) for r in run.ratios(name).values()):
            names.append(name)
    if names:
        seen = f"{in_list(names)}: one rank's part of a sum over the ranks; the sum is right"
        yield Finding(Kind.PART_OF_A_SUM, names, seen)


# ── factors ──────────────────────────────────────────────────────────────────────────────────────────────


def _no_reduction(run: WrongRun) -> Iterator[Finding]:
    """One gradient is exact under a sum and another one under a mean."""
    if run.size == 1 or not run.rank_reduction or not run.left("gradient"):
        return
    names = dict.fromkeys(q.what for q in run.quantities if q.group == "gradient")
    ratios = {name: (run.ratio(name) or 0.0) / run.factor for name in names}
    exact = {
        what: [name for name, ratio in ratios.items() if is_near(ratio, right, run.tolerance)]
        for what, right in (("sum", 1.0), ("mean", float(run.size)))
    }
    if exact["sum"] and exact["mean"]:
        words = ", ".join(f'{in_list(names)} exact under "{what}"' for what, names in exact.items())
        yield Finding(Kind.NO_REDUCTION, exact["sum"] + exact["mean"], f"{words}: no reduction is right for both")


def _scaled(run: WrongRun) -> Iterator[Finding]:
    """A gradient is the right one times a number, the same on all ranks; a single number must be a power of N."""

    def is_scaled(name: str) -> bool:
        ratio = run.ratio(name) or 0.0
        # A single number is a multiple of any other, and the gradient of another loss may be one.
        single = sum(int(((q.got != 0) | (q.wanted != 0)).sum()) for q in run.of(name) if not q.mismatched) == 1
        exact = run.is_power(ratio / run.factor)
        return exact if single or run.values_differ else not is_near(ratio, 1.0, LITTLE)

    # A gradient that is zero but for rounding is right whatever it is multiplied by.
    right = any(q.ok and not q.times(run.size).ok for q in run.quantities if q.group == "gradient")
    for ratio, names in run.by_ratio(list(filter(is_scaled, run.left("gradient")))).items():
        twice = bool(run.rank_reduction) and right and is_near(ratio, run.size, run.tolerance)
        words = f"{in_list(names)}: {run.scaled(ratio, run.reference)}; right in direction"
        of_ranks = run.one_loss and run.is_power(ratio)
        kind = Kind.SCALED_OVER_AN_AXIS if of_ranks else Kind.REDUCED_TWICE if twice else Kind.SCALED
        kind = kind if run.is_power(ratio / run.factor) else Kind.MULTIPLIED
        yield Finding(kind, names, words)


def _value_scaled(run: WrongRun) -> Iterator[Finding]:
    for name in run.left("value"):
        (q,) = run.of(name)
        if q.ratio and not is_near(q.ratio, 1.0) and run.is_power(q.ratio / run.factor):
            yield Finding(Kind.VALUE_SCALED, [name], f"{name}: {run.scaled(q.ratio, 'the loss of one process')}")


def nearly_right(run: WrongRun) -> Iterator[Finding]:
    """All errors are small; beside a large one, a small one has the same cause."""
    names = run.left()
    little = all(q.ok or q.error < LITTLE for name in names for q in run.of(name))
    if names and little and not (run.left("value", "output") and run.local_statistics):
        most = max((q for name in names for q in run.of(name) if not q.ok), key=lambda q: q.error)
        words = f"{in_list(names)}: off by {most.error:.1e}, {most.most_allowed or 0.0:.1e} is allowed"
        yield Finding(Kind.NEARLY_RIGHT, names, words)


def zero(run: WrongRun) -> Iterator[Finding]:
    """A gradient is zero on some ranks, and on the others right but for a common factor."""
    groups: dict[str, list[str]] = {}
    for name in run.left("gradient"):
        ratios = run.ratios(name)
        others = [ratio for ratio in ratios.values() if ratio != 0]
        none = [str(r) for r, ratio in ratios.items() if ratio == 0]
        if none and all(is_near(ratio, others[0] or 0.0, run.tolerance) for ratio in others):
            groups.setdefault("every rank" if not others else f"rank {', '.join(none)}", []).append(name)
    for where, names in groups.items():
        yield Finding(Kind.NO_CONTRIBUTION, names, f"{in_list(names)}: the gradient is zero on {where}")


def _mean_of_local_means(run: WrongRun) -> Iterator[Finding]:
    """Rank r's gradient is off by (rows of all ranks) / (N · rows of rank r)."""

    def is_off(name: str) -> bool:
        ratios, total = run.ratios(name), sum(run.sizes) / run.size
        return None not in ratios and any(
            all(is_near((ratio or 0.0) * c * run.sizes[r or 0], total) for r, ratio in ratios.items())
            for c in (1.0, 1 / run.factor)
        )

    names = [name for name in run.left("gradient") if len(set(run.sizes)) > 1 and is_off(name)]
    if names:  # such a mean is a value of the rank's rows
        words = f"{in_list(names)}: off by (rows of all ranks) / (N · rows of the rank) on each rank"
        yield Finding(Kind.MEAN_OF_LOCAL_MEANS, names + run.left("value", "output"), words)


def restored(run: WrongRun) -> Iterator[Finding]:
    """Right if the user's calls of detach() keep the graph."""
    if run.cuts.detached and (names := [name for name in run.left("gradient") if name in run.restored]):
        yield Finding(Kind.GRAPH_CUT, names, f"{in_list(names)}: right if the calls of detach() keep the graph")


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────


def some_rows(run: WrongRun) -> Iterator[Finding]:
    """Some rows of a gradient are wrong, all by the same factor or not, and those that are large are right."""
    groups: dict[float | None, list[str]] = {}
    of_names: dict[str, str] = {}
    for name in run.left("gradient"):
        wrong = [q for q in run.of(name) if not q.ok]
        if not all(isinstance(q.rows, torch.Tensor) and is_near(q.ratio, 1.0, run.tolerance) for q in wrong):
            continue
        each = [
            (q, row) for q in wrong for row in (q.errors > q.allowed).flatten(1).any(1).nonzero().flatten().tolist()
        ]
        ratios = [multiple(q.got[row], q.wanted[row], 30 * run.tolerance) for q, row in each]
        same = all(is_near(ratio, ratios[0] or 0.0, 30 * run.tolerance) for ratio in ratios)
        ratio = ratios[0] if same else None
        if all(q.error < LITTLE for q in wrong) and (ratio is None or is_near(ratio, 1.0, LITTLE)):
            continue
        groups.setdefault(ratio, []).append(name)
        where = [f"{row}" if q.rank is None else f"{row} on rank {q.rank}" for q, row in each]
        of_names[name] = f"{short(name)}: row{'s' * (len(where) > 1)} {', '.join(where[:5])}{', …' * (len(where) > 5)}"
    for ratio, names in groups.items():
        words = "; ".join(of_names[name] for name in names)
        factor = "" if ratio is None else f", {ratio_in_words(ratio, run.size)} times the right one"
        yield Finding(Kind.SOME_ROWS, names, f"{words}: wrong{factor}; the larger rows are right")


def _left_out(run: WrongRun) -> Iterator[Finding]:
    """Rows that count on one process have no effect on the losses of the ranks."""
    names: list[str] = []
    where: list[str] = []
    for name in run.left("gradient") if run.values_differ else []:
        lost = [
            f"row {row} on rank {q.rank}"
            for q in run.of(name)
            if q.rank is not None and not q.mismatched
            for row in (busy(q.wanted) & ~busy(q.got)).nonzero().flatten().tolist()
        ]
        if lost and (found := run.evidence.cause(short(name))) and found[0] == Kind.CONSISTENT:
            names.append(name)
            where = where or [*lost[:5], *["…"] * (len(lost) > 5)]
    if names and run.local_statistics is None:
        seen = f"{in_list(names)}: no effect on the losses of the ranks: {', '.join(where)}"
        yield Finding(Kind.LEFT_OUT, names + run.left("value", "output"), seen)


# ── another computation ──────────────────────────────────────────────────────────────────────────────────


def _other_values(run: WrongRun) -> Iterator[Finding]:
    """Values, outputs, buffers or the values of parameters are not those of one process."""
    names = run.left("value", "output", "state")
    if not names:
        return
    if (statistics := run.local_statistics) is not None:
        yield Finding(Kind.LOCAL_STATISTICS, names, f"{in_list(names)}: {statistics}")
        return
    if state := run.left("state"):
        ranks = {q.rank for name in state for q in run.of(name) if not q.ok}
        where = "every rank" if len(ranks) == run.size else ranks_in_words(sorted(r for r in ranks if r is not None))
        yield Finding(Kind.ANOTHER_STATE, state, f"{in_list(state)}: not as after the whole batch on {where}")
    if values := run.left("value", "output"):
        words = (
            "not what one process computes on the whole batch, under any reduction (if all ranks compute the same loss "
            "of the same rows, as in tensor parallelism, state it with mesh=)"
        )
        shapes = [
            f"{name}: shape {tuple(q.got.shape)}, expected {tuple(q.wanted.shape)}"
            for name in values
            for q in run.of(name)
            if q.mismatched
        ]
        yield Finding(Kind.ANOTHER_LOSS, values, "; ".join(shapes) or f"{in_list(values)}: {words}")


def _mistakes(run: WrongRun) -> Iterator[Finding]:
    """Compare with what common mistakes give, by finite differences."""
    for (kind, seen), names in _by_evidence(run).items():
        if kind != Kind.CONSISTENT:
            yield Finding(kind, names, f"{in_list(names)}: {seen}")


def _consistent(run: WrongRun) -> Iterator[Finding]:
    """The gradient is that of the losses which the ranks return."""
    for (kind, seen), names in _by_evidence(run).items():
        if kind != Kind.CONSISTENT:
            continue
        if not run.rank_reduction:
            yield Finding(Kind.SCALED, names, f"{in_list(names)}: {seen}")
        elif not run.has(*_OTHER):
            words = f"{in_list(names)}: not the gradient of one process; {seen}"
            if run.values_differ:
                yield Finding(Kind.ANOTHER_LOSS, names, f"{words}, so the forward is what differs")
            else:
                stopped = run.unstopped.issuperset(names)
                yield Finding(Kind.STOP_GRADIENT if stopped else Kind.ANOTHER_GRADIENT, names, words)


def _by_evidence(run: WrongRun) -> dict[tuple[Kind, str], list[str]]:
    groups: dict[tuple[Kind, str], list[str]] = {}
    for name in run.left("gradient"):
        if found := run.evidence.cause(short(name)):
            groups.setdefault(found, []).append(name)
    return groups


def _scaled_differently(run: WrongRun) -> Iterator[Finding]:
    for name in run.left("gradient") if not run.has(*_OTHER) else []:
        ratios = run.ratios(name)
        several = any(q.got.numel() > 1 for q in run.of(name))  # a single number is a multiple of any other
        if several and None not in ratios and all(ratio is not None for ratio in ratios.values()):
            each = ", ".join(f"{ratio:.4g} on rank {r}" for r, ratio in ratios.items())
            seen = f"{short(name)}: right in direction on each rank, off by {each}"
            yield Finding(Kind.SCALED_DIFFERENTLY, [name], seen)


def _wrong_in_direction(run: WrongRun) -> Iterator[Finding]:
    if (names := run.left("gradient")) and not run.has(*_OTHER):
        yield Finding(Kind.WRONG_IN_DIRECTION, names, f"{in_list(names)}: no multiple of {run.reference}")


def _second_order(run: WrongRun) -> Iterator[Finding]:
    if not run.found and (names := run.left("second order")):
        short = in_list([name.removeprefix("second order of ") for name in names])
        words = f"the first order is right, and the second order is wrong for {short}"
        yield Finding(Kind.SECOND_ORDER, names, words)


#: Where values are others, gradients are too, and need no further words.
_OTHER = (Kind.LOCAL_STATISTICS, Kind.ANOTHER_LOSS, Kind.LEFT_OUT)

HYPOTHESES: Sequence[Callable[[WrongRun], Iterator[Finding]]] = (
    _detached,
    _kinks,
    random,
    not_finite,
    rounding,
    _value_scaled,
    _no_reduction,
    _scaled,
    some_rows,
    _left_out,
    zero,
    restored,
    _mean_of_local_means,
    _mistakes,
    nearly_right,
    _other_values,
    _consistent,
    _scaled_differently,
    _wrong_in_direction,
    _second_order,
)
