"""The report of a sharded program: runs on each mesh, and the causes of what is wrong, axis by axis of the mesh.

A cause is named if the numbers follow from it: a factor that is made of the sizes of axes, a sum over an axis that is
right where its parts are not, another rank's piece, a weighting by the counts of the ranks; or if the outputs are right
once the program is changed accordingly and run again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from diffcoll.testing.harness.causes import Kind, cause_of
from diffcoll.testing.harness.comparison import Quantity, is_near, near
from diffcoll.testing.harness.hypotheses import (
    diagnose,
    nearly_right,
    not_finite,
    random,
    restored,
    rounding,
    some_rows,
    zero,
)
from diffcoll.testing.harness.report import Report
from diffcoll.testing.harness.runs import changed_attributes
from diffcoll.testing.harness.wrong_run import Finding, in_list
from diffcoll.testing.sharding.placements import REPLICATE, Mesh, parsed_mesh, parsed_placements, parsed_reduction
from diffcoll.testing.sharding.program import Sharding
from diffcoll.testing.sharding.rank import Piece
from diffcoll.testing.sharding.wrong_mesh import WrongMesh


def sharded_report(
    sharding: Sharding, tolerance: float | None, mesh: object, placements: object, on: Sequence[str]
) -> Report:
    """Run on each mesh and each kind of ranks."""
    meshes = parsed_mesh(mesh)
    placed, reduction = parsed_placements(placements, meshes[0]), parsed_reduction(sharding.rank_reduction, meshes[0])
    sharding = replace(sharding, placements=placed, rank_reduction=reduction).checked(tolerance)
    runs = sharding.runs([(each,) for each in meshes], on)
    how = [f"{how} over {axis}" for axis, how in reduction.items()]
    report = Report(f"{sharding.name}, {', '.join(how) or 'nothing reduced afterwards'}", ())
    notes = list(changed_attributes(runs))
    wrong = next((run for run in runs if run.quantities and not run.ok()), None)
    if wrong is not None:
        diagnosed = WrongMesh(sharding, wrong)
        found = {name: said for rank in wrong.measured for name, said in rank.found.items()}
        notes += [
            f"{name}: taken to be {said}, by its shape; placements= may say otherwise" for name, said in found.items()
        ]
        causes = diagnose(diagnosed, MESH_HYPOTHESES)
        if shared_state := sharding.shared_state(runs, wrong, causes):
            causes = [shared_state]
        elif wrong.on != "simulated" and any(run.on == "simulated" and run.ok() for run in runs):
            causes.append(cause_of(Kind.ON_PROCESSES, f"right on simulated ranks, wrong on {wrong.on}"))
        report = replace(report, causes=tuple(causes), cuts=diagnosed.cuts.lines, first=diagnosed.first)
    return replace(report, tables=tuple(run.table() for run in runs), notes=tuple(notes))


# ── values and outputs ───────────────────────────────────────────────────────────────────────────────────


def log_of_size(run: WrongMesh) -> Iterator[Finding]:
    """A value is off by the logarithm of the size of an axis."""
    for name in run.left("value", "output"):
        differences = [(q.got - q.wanted).double() for q in run.of(name) if q.got.shape == q.wanted.shape]
        for axis, n in run.mesh.sizes.items():
            right = [torch.full_like(d, math.log(n)) for d in differences]
            if n > 1 and differences and all(map(near, differences, right)):
                words = f"larger than that of one process by {math.log(n):.4g}, the logarithm of the size of {axis}"
                yield Finding(Kind.OFF_BY_LOG_N, [name], f"{name}: {words}")
                break


def experiments(run: WrongMesh) -> Iterator[Finding]:
    """All outputs are right after a change of what one submodule returns."""
    names = run.left("value", "output")
    if names and (change := run.change) is not None:
        kind = Kind.PART_OF_A_SUM if change.summed else Kind.BIAS_REPEATED if change.added else Kind.SCALED_OVER_AN_AXIS
        yield Finding(kind, names + run.left("gradient", "state"), f"{in_list(names)}: right if {change}")


# ── factors ──────────────────────────────────────────────────────────────────────────────────────────────


def factors(run: WrongMesh) -> Iterator[Finding]:
    """A value, output or gradient is the right one times a number that is made of the sizes of axes or of counts."""
    scaled = [name for name in run.left("value", "output", "gradient") if not is_near(run.ratio(name), 1.0)]
    for ratio, names in run.by_ratio(scaled).items():
        several = any(q.wanted.numel() > 1 for name in names for q in run.of(name))
        of_axes = powers(run.mesh, ratio, run.tolerance)
        inexact = any(not q.ok for q in run.quantities if q.group in ("value", "output"))
        shares = [count for count, k in run.shares.items() if inexact and (is_near(ratio, k) or is_near(ratio, 1 / k))]
        if not of_axes and not shares and not several:
            continue  # a single number is a multiple of any other
        words = [_power_in_words(each) for each in of_axes]
        words += [f"the part of all elements that {count} counts" for count in shares]
        seen = f"{in_list(names)}: {ratio:.4g} times that of one process"
        seen += f", which is {' or '.join(words)}" if words else ""
        if shares and not of_axes:
            kind = Kind.PADDING_COUNTED
        elif not of_axes:
            kind = Kind.MULTIPLIED
        elif shares:
            kind = Kind.SCALED
        else:
            both = all(min(each.values()) < 0 < max(each.values()) for each in of_axes)
            kind = Kind.WRONG_AXES if both else Kind.SCALED_OVER_AN_AXIS
        yield Finding(kind, names, seen)


def powers(mesh: Mesh, ratio: float, tolerance: float = 0.0) -> list[dict[str, int]]:
    """Return the products of powers of the axes' sizes that a number is, of the fewest factors."""
    axes = [axis for axis, n in mesh.sizes.items() if n > 1]
    found = []
    for exponents in itertools.product(range(-2, 3), repeat=len(axes)):
        each = {axis: e for axis, e in zip(axes, exponents, strict=True) if e}
        if each and is_near(ratio, math.prod(mesh.sizes[axis] ** e for axis, e in each.items()), tolerance):
            found.append(each)
    fewest = min((sum(map(abs, each.values())) for each in found), default=0)
    return [each for each in found if sum(map(abs, each.values())) == fewest]


def _power_in_words(exponents: Mapping[str, int]) -> str:
    each = {axis + "²" * (abs(e) > 1): e > 0 for axis, e in exponents.items()}
    above, below = ([axis for axis, up in each.items() if up == wanted] for wanted in (True, False))
    number = f"the size of {' times that of '.join(above)}" if above else "1"
    return number + (f" divided by the size of {' and that of '.join(below)}" if below else "")


# ── counts ───────────────────────────────────────────────────────────────────────────────────────────────


def local_counts(run: WrongMesh) -> Iterator[Finding]:
    """Weighted by the counts of the ranks, the average over an axis is right."""
    for count, of_ranks in run.counts.items():
        names = [name for name in run.left("value", "gradient") if _is_weighted(run, name, of_ranks)]
        if names:
            seen = f"{in_list(names)}: right if the ranks are weighted with {count} on each rank"
            yield Finding(Kind.MEAN_OF_LOCAL_MEANS, names + run.left("value", "output"), seen)
            return


def _is_weighted(run: WrongMesh, name: str, counts: Sequence[int]) -> bool:
    """Whether the sum over the axes that are reduced is right with these weights; of an input, its own gradient."""
    pieces, mesh = run.pieces[name], run.mesh
    own = next(iter(pieces.values())).of_input
    if not run.reduction or len(pieces) < mesh.size:
        return False
    for r, piece in pieces.items():
        group = mesh.along([axis for axis in run.reduction if own or piece.kinds[axis] == REPLICATE], r)
        total = sum(counts[s] for s in group)
        among = [r] if own else group
        if not total or len(group) < 2 or any(pieces[s].got.shape != piece.wanted.shape for s in among):
            return False
        weighted = torch.stack([pieces[s].got * (counts[s] / total) for s in among]).sum(0)
        if not _close(weighted, pieces[r], run.tolerance):
            return False
    return True


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────


def part_of_sum(run: WrongMesh) -> Iterator[Finding]:
    """Each rank has a part, and the sum or mean over an axis is right."""
    mesh = run.mesh
    groups: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name in run.left("gradient", "output", "value"):
        pieces = run.pieces[name]
        done = [axis for axis in mesh.sizes if axis in run.reduction or mesh.sizes[axis] == 1]
        kinds = next(iter(pieces.values())).kinds
        free = [axis for axis in mesh.sizes if axis not in done and kinds[axis] == REPLICATE]
        for axes in [some for k in range(1, len(free) + 1) for some in itertools.combinations(free, k)]:
            each = {"sum": 1.0, "mean": 1 / math.prod(mesh.sizes[axis] for axis in axes)}
            if right := [what for what, factor in each.items() if _sums(run, name, axes, factor)]:
                groups.setdefault((axes, right[0]), []).append(name)
                break
    for (axes, how), names in groups.items():
        over = " and ".join(axes)
        if how == "mean" and (inputs := run.inputs_along(axes)):  # an axis of data
            n = math.prod(mesh.sizes[axis] for axis in axes)  # by which the mean divides
            also = [
                name for name in run.left("gradient") if name in inputs and is_near(run.ratio(name), n, run.tolerance)
            ]
            seen = f"{in_list(names + also)}: that of each rank's data along {over}; the mean is right"
            yield Finding(Kind.NOT_AVERAGED, names + also, seen)
        else:
            seen = f"{in_list(names)}: one rank's part of a {how} over {over}; the {how} is right"
            yield Finding(Kind.PART_OF_A_SUM, names, seen)


def _sums(run: WrongMesh, name: str, axes: Sequence[str], factor: float) -> bool:
    """Whether what is compared is right after a sum over axes, times a factor."""
    held = {q.rank: q for q in run.of(name)}
    if None in held:
        return False
    got = {r: held[r] for r in held if r is not None}
    mesh, differ = run.mesh, False
    for r, q in got.items():
        group = [got[s].got for s in mesh.along(axes, r) if s in got]
        if len(group) < 2 or any(x.shape != q.wanted.shape for x in group):
            return False
        if not _close(torch.stack(group).sum(0) * factor, q, run.tolerance):
            return False
        differ = differ or not all(near(x, group[0]) for x in group)
    return differ  # equal ones are the right one times a number


def another_piece(run: WrongMesh) -> Iterator[Finding]:
    """A rank has the piece that belongs to another one."""
    for name in run.left("gradient", "output"):
        each = {q.rank: q for q in run.of(name) if q.rank is not None}
        where = []
        for r, q in each.items():
            if not q.ok:
                found = [s for s, other in each.items() if s != r and near_piece(q.got, other, run.tolerance)]
                where += [f"rank {r} has that of rank {found[0]}"] if len(found) == 1 else []
        if where and len(where) == sum(not q.ok for q in each.values()):
            yield Finding(Kind.ANOTHER_PIECE, [name], f"{in_list([name])}: {', '.join(where)}")


def near_piece(got: Tensor, other: Quantity, tolerance: float) -> bool:
    """Whether a tensor is what another rank should have; one without numbers is nobody's."""
    return got.shape == other.wanted.shape and bool(other.wanted.any()) and _close(got, other, tolerance)


def observed(run: WrongMesh) -> Iterator[Finding]:
    """Nothing explains the rest."""
    if names := run.left("value", "output"):
        words = "not that of one process, under any placement"
        yield Finding(Kind.ANOTHER_LOSS, names + run.left("gradient"), f"{in_list(names)}: {words}")
    if state := run.left("state"):
        yield Finding(Kind.ANOTHER_STATE, state, f"{in_list(state)}: not as on one process after the call")
    if (names := run.left("gradient")) and not run.values_differ:  # else they are those of another function
        yield Finding(Kind.WRONG_IN_DIRECTION, names, f"{in_list(names)}: no multiple of {run.reference}")


def _close(got: Tensor, right: Quantity | Piece, tolerance: float) -> bool:
    return bool(((got - right.wanted).abs().double() <= 10 * tolerance * (right.unit or 1.0)).all())


MESH_HYPOTHESES: Sequence[Callable[[WrongMesh], Iterator[Finding]]] = (
    random,
    not_finite,
    rounding,
    log_of_size,
    part_of_sum,
    factors,
    local_counts,
    another_piece,
    experiments,
    some_rows,
    nearly_right,
    zero,
    restored,
    observed,
)
