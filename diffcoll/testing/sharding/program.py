"""Runs a sharded program on the ranks of a mesh, and compares it with one process that has the whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from diffcoll.core.errors import message
from diffcoll.core.trees import tree_flatten
from diffcoll.engines.devices import device_of_backend
from diffcoll.testing.harness.comparison import Quantity, rows, together, unused
from diffcoll.testing.harness.measure import Measurement, differentiable, on_rank, outputs_on_rank
from diffcoll.testing.harness.packing import Packed, pack
from diffcoll.testing.harness.parts import input_names, marked, named_tensors
from diffcoll.testing.harness.runs import Against, ComparedRun
from diffcoll.testing.launched import LAUNCHED
from diffcoll.testing.sharding.placements import (
    NAME,
    PARTIAL,
    REPLICATE,
    SHARD,
    Mesh,
    Placement,
    by_function,
    refuse_unused,
    said_of,
)
from diffcoll.testing.sharding.rank import (
    MeshPlan,
    OfRank,
    Piece,
    Program,
    Whole,
    copies,
    on_mesh,
    output_names,
    piece_name,
    tensors_by_name,
)


def program(
    distributed: Callable[..., Any], single: Callable[..., Any], module: Any, shard: Callable[..., Any] | None
) -> tuple[Packed, Packed]:
    """Return the functions with their module, which the first argument is if it is sharded."""
    if shard is None:
        each = Program(distributed, None), single
    else:
        if not isinstance(module, nn.Module):
            raise TypeError(message(NAME, "module", type(module).__name__, "an nn.Module, which shard= gets"))
        for argument, f in (("distributed", distributed), ("single", single), ("shard", shard)):
            if not callable(f):
                raise TypeError(message(NAME, argument, type(f).__name__, "a function"))
        each = Program(distributed, shard), partial(single, module)
    return pack(NAME, "distributed", each[0], module), pack(NAME, "single", each[1], module)


@dataclass(frozen=True)
class Sharding(Against):
    """A sharded program, the same on one process, and how they are compared."""

    placements: Mapping[str, Placement] = field(default_factory=dict)

    def checked(self, tolerance: float | None) -> Sharding:
        """Refuse wrong names, and take this tolerance, or that of the dtypes."""
        if callable(self.batch) and not isinstance(self.batch, Tensor):
            got, remedy = "a function with mesh=", "call it"
            raise TypeError(
                message(NAME, "batch", got, "the whole batch, of which placements= says the pieces", remedy)
            )
        subject, outputs = self.distributed.unpack(), self.on_one(outputs_on_rank, self.single, self.whole_batch)
        names = [*self.inputs, *copies(subject), *output_names(len(outputs))]
        refuse_unused(NAME, self.placements, names)
        return self.with_losses(outputs).with_tolerance(tolerance, self.inputs.values())

    @cached_property
    def fn(self) -> Callable[..., Any]:
        """What is called with the batch."""
        return self.single.unpack().fn

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors of the batch by name."""
        return named_tensors(self.fn, self.batch)

    @cached_property
    def whole_batch(self) -> Any:
        """The batch of one process."""
        return marked(NAME, self.fn, self.batch, self.constant)

    @cached_property
    def whole(self) -> Whole:
        """What one process has."""
        measured: Measurement = self.on_one(on_rank, self.single, self.plan, 0, self.whole_batch)
        whole = self.whole_from(measured)
        values = [(f"value[{i}]", y) for i, y in enumerate(measured.outputs) if y.dim() == 0]
        self.refuse_nothing(whole.gradients.values(), [*whole.gradients.items(), *values])
        if measured.first.parameters and not any(g.any() for g in measured.first.parameters):
            raise unused(NAME, "single")
        return whole

    def whole_from(self, measured: Measurement) -> Whole:
        """Return a measurement of one process with names."""
        subject = self.single.unpack()
        names = input_names(subject.fn, self.whole_batch)
        first = {id(x): f"parameter {name}" for name, x in subject.parameters.items()}
        found = dict(zip([*names, *first.values()], measured.first.every, strict=True))
        for name, x in tensors_by_name(subject):  # a tied parameter has several names
            if id(x) in first:
                found[name] = found[first[id(x)]]
        gradients = {name.removeprefix("parameter "): g for name, g in found.items()}
        inputs = {name: x.detach().cpu() for name, x in self.inputs.items()}
        return Whole(measured.outputs, gradients, copies(subject) | measured.state, measured.scale, inputs)

    def parts(self, mesh: Mesh) -> list[Any]:
        """Return the pieces of the batch that each rank gets."""
        leaves, rebuild = tree_flatten(self.batch)
        names = list(self.inputs)
        of_ranks: list[list[Tensor]] = []
        for r in range(mesh.size):
            layouts = [by_function(name, said_of(self.placements, name), x, mesh, r) for name, x in self.inputs.items()]
            of_ranks.append(
                [each.piece(x).detach().clone() for each, x in zip(layouts, self.inputs.values(), strict=True)]
            )
            kinds = [each.kinds for each in layouts]
        self._refuse_equal(mesh, names, kinds, of_ranks)
        parts = []
        for pieces in of_ranks:
            given = iter(pieces)
            part = rebuild([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
            parts.append(marked(NAME, self.fn, part, self.constant))
        return parts

    def run(self, on: str, mesh: Mesh) -> ComparedRun:
        """Measure on the ranks of a mesh."""
        whole, plan = self.whole, self.plan_of(on, mesh)
        ranks: list[OfRank] = self.on_parts(on, on_mesh, [self.distributed] * mesh.size, self.parts(mesh), plan)
        held = {piece.what for rank in ranks for piece in rank.pieces}
        missing = [name for name in whole.gradients if f"gradient of {name}" not in held]
        if missing and "gradient" in self.groups:
            got, expected = f"no {missing[0]} on any rank", "every parameter of the whole on some rank"
            raise ValueError(message(NAME, "shard", got, expected, "let it keep its name, or freeze it in the whole"))
        quantities = reduced([rank.pieces for rank in ranks], plan, self.tolerance)
        return self.judged(self.of_results(on, mesh, quantities=quantities, measured=ranks))

    def of_results(self, on: str, mesh: Mesh, **results: Any) -> ComparedRun:
        """Return a run with these results."""
        return ComparedRun(on, (mesh,), mesh.size, f"mesh {mesh}", groups=self.groups, **results)

    def plan_of(self, on: str, mesh: Mesh) -> MeshPlan:
        """Return what the ranks of a mesh measure."""
        backend = dist.get_backend() if on == LAUNCHED else on
        return MeshPlan(mesh, self.placements, self.rank_reduction, self.plan, self.whole, device_of_backend(backend))

    @override
    def noise(self, run: ComparedRun) -> dict[str, float]:
        plan = replace(self.plan, jitter=True)
        other = self.whole_from(self.on_one(on_rank, self.single, plan, 0, self.whole_batch))
        pairs = {f"gradient of {name}": (g, other.gradients[name]) for name, g in self.whole.gradients.items()}
        outputs = self.whole.outputs
        names = [piece_name(*each) for each in zip(output_names(len(outputs)), outputs, strict=True)]
        pairs |= dict(zip(names, zip(outputs, other.outputs, strict=True), strict=True))
        units = {q.what: q.unit for q in run.quantities}
        return {
            what: Quantity(what, "", None, y, x, units[what], 0.0, rows(x, units[what])).error
            for what, (x, y) in pairs.items()
            if what in units and differentiable(x) and x.numel()
        }

    def _refuse_equal(
        self, mesh: Mesh, names: Sequence[str], kinds: Sequence[Mapping[str, str]], of_ranks: Sequence[Sequence[Tensor]]
    ) -> None:
        """Raise if two ranks have the same piece of everything that is spread over an axis."""
        for axis in mesh.sizes:
            spread = [i for i in range(len(names)) if kinds[i][axis] == SHARD]
            for r in range(mesh.size):
                for s in mesh.along([axis], r):
                    pairs = [(of_ranks[r][i], of_ranks[s][i]) for i in spread]
                    if s < r and pairs and all(a.numel() and torch.equal(a, b) for a, b in pairs):
                        got = f"the same pieces of {', '.join(names[i] for i in spread)} on ranks {s} and {r}"
                        expected = "different ones on every rank, since equal ranks hide wrong gradients"
                        raise ValueError(message(NAME, "batch", got, expected, "pass random numbers"))


def reduced(ranks: Sequence[Sequence[Piece]], plan: MeshPlan, tolerance: float) -> list[Quantity]:
    """Return what is compared: the pieces of the ranks after the reductions over axes."""
    mesh, found = plan.mesh, []
    by_rank = [{piece.what: piece for piece in pieces} for pieces in ranks]
    for what in dict.fromkeys(piece.what for pieces in ranks for piece in pieces):
        holders = {r: pieces[what] for r, pieces in enumerate(by_rank) if what in pieces}
        seen: set[int] = set()
        for r, piece in holders.items():
            axes = reduced_axes(piece, plan)
            group = [s for s in mesh.along(axes, r) if s in holders]
            if r in seen:
                continue
            seen.update(group if axes else [r])
            got = _combined([holders[s].got for s in group], piece, plan)
            rank = None if len(group) == mesh.size and axes else r
            of_rows = rows(piece.wanted, piece.unit) if piece.group == "gradient" else 1.0
            found.append(Quantity(what, piece.group, rank, got, piece.wanted, piece.unit, tolerance, of_rows))
    return found


def reduced_axes(piece: Piece, plan: MeshPlan) -> list[str]:
    """Return the axes over which the training loop, or somebody later, sums this."""
    if piece.group == "state":
        return []
    axes = [axis for axis, kind in piece.kinds.items() if kind == PARTIAL]
    if piece.group in ("value", "gradient") or piece.got.dim() == 0:
        axes += [axis for axis, kind in piece.kinds.items() if kind == REPLICATE and axis in plan.reduction]
    return axes


def _combined(each: Sequence[Tensor], piece: Piece, plan: MeshPlan) -> Tensor:
    """Return the sum or mean over the ranks of a group."""
    if any(x.shape != each[0].shape for x in each):
        return torch.full((1,), math.nan)
    if not differentiable(piece.wanted):
        return together(each, piece.wanted) if len(each) > 1 else each[0]
    factor = 1.0
    for axis, how in plan.reduction.items():
        averaged = piece.kinds[axis] == REPLICATE and piece.group in ("value", "gradient")
        if how == "mean" and (averaged or (piece.of_input and piece.kinds[axis] == SHARD)):
            factor /= plan.mesh.sizes[axis]
    total = torch.stack(list(each)).sum(0) if len(each) > 1 else each[0]
    return total if factor == 1 else total * factor
