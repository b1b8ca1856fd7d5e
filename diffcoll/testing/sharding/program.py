"""Runs a sharded program on the ranks of a mesh, and compares it with one process that has the whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from diffcoll.core.errors import message
from diffcoll.core.torch_private.trees import tree_flatten
from diffcoll.testing.harness.comparison import (
    Quantity,
    in_doubt,
    nothing_compared,
    rows,
    together,
    tolerance_of,
    unused,
    with_noise,
)
from diffcoll.testing.harness.measure import (
    Measurement,
    MeasurementPlan,
    differentiable,
    leaves_of,
    on_rank,
    run_on,
    with_leaves,
)
from diffcoll.testing.harness.names import input_names, named_tensors
from diffcoll.testing.harness.packing import Packed, pack
from diffcoll.testing.harness.parts import marked
from diffcoll.testing.harness.report import Table
from diffcoll.testing.processes import in_words
from diffcoll.testing.sharding.placements import PARTIAL, REPLICATE, SHARD, Mesh, Placement, refuse_unused
from diffcoll.testing.sharding.rank import (
    MeshPlan,
    OfRank,
    Piece,
    Program,
    Whole,
    copies,
    layout_of_input,
    on_mesh,
    output_names,
    piece_name,
    tensors_by_name,
)

_NAME = "assert_matches_single_process"


@dataclass(frozen=True, eq=False)
class MeshRun:
    """The results of one run."""

    on: str
    mesh: Mesh
    #: What is compared.
    quantities: list[Quantity] = field(default_factory=list)
    #: Whether values or outputs are not those of one process, compared or not.
    values_differ: bool = False
    ranks: list[OfRank] = field(default_factory=list)
    raised: str = ""
    skipped: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing was raised, and every quantity is right."""
        return self.table.ok

    @property
    def table(self) -> Table:
        """The table of the report."""
        n = self.mesh.size
        title = f"{self.on}, {n} rank{'s' * (n != 1)}, mesh {self.mesh}"
        return Table(title, n, tuple(q.row for q in self.quantities), self.raised, self.skipped)


def program(
    distributed: Callable[..., Any], single: Callable[..., Any], module: Any, shard: Callable[..., Any] | None
) -> tuple[Packed, Packed]:
    """Return the functions with their module, which the first argument is if it is sharded."""
    if shard is None:
        each = Program(distributed, None), single
    else:
        if not isinstance(module, nn.Module):
            raise TypeError(message(_NAME, "module", type(module).__name__, "an nn.Module, which shard= gets"))
        for argument, f in (("distributed", distributed), ("single", single), ("shard", shard)):
            if not callable(f):
                raise TypeError(message(_NAME, argument, type(f).__name__, "a function"))
        each = Program(distributed, shard), partial(single, module)
    return pack(_NAME, "distributed", each[0], module), pack(_NAME, "single", each[1], module)


@dataclass(frozen=True)
class Sharding:
    """A sharded program, the same on one process, and how they are compared."""

    distributed: Packed
    single: Packed
    batch: Any
    plan: MeasurementPlan
    timeout: float
    #: Names of arguments without gradients.
    constant: Sequence[str]
    #: What is compared: groups of quantities.
    groups: Sequence[str]
    #: The largest relative error that is right; None: that of the dtypes.
    given_tolerance: float | None
    placements: Mapping[str, Placement] = field(default_factory=dict)
    reduction: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def tolerance(self) -> float:
        """The largest relative error that is right."""
        tensors = [*self.inputs.values(), *self.single.unpack().tensors]
        return tolerance_of(tensors) if self.given_tolerance is None else self.given_tolerance

    def on(self, kind: str, fn: Callable[..., Any], *per_rank: Sequence[Any]) -> list[Any]:
        """Run fn once per rank on one kind of ranks."""
        return run_on(kind, fn, *per_rank, seed=self.plan.seed, timeout=self.timeout)

    def with_losses(self) -> Sharding:
        """Refuse wrong names, and take results of shape (1,) as losses."""
        if callable(self.batch) and not isinstance(self.batch, Tensor):
            got, remedy = "a function with mesh=", "call it"
            raise TypeError(
                message(_NAME, "batch", got, "the whole batch, of which placements= says the pieces", remedy)
            )
        subject = self.distributed.unpack()
        (outputs,) = self.on("simulated", forward, [self.single], [self.whole_batch])
        names = [*self.inputs, *(name.split(" ", 1)[1] for name in copies(subject)), *output_names(len(outputs))]
        refuse_unused(_NAME, self.placements, names)
        losses = tuple(i for i, y in enumerate(outputs) if y.shape == (1,))
        distributed, single = (replace(packed, losses=losses) for packed in (self.distributed, self.single))
        return replace(self, distributed=distributed, single=single)

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
        return marked(_NAME, self.fn, self.batch, self.constant)

    @cached_property
    def whole(self) -> Whole:
        """What one process has."""
        measured: Measurement
        (measured,) = self.on("simulated", on_rank, [self.single], [self.plan], [0], [self.whole_batch])
        whole = self.whole_from(measured)
        self._refuse(measured, whole.gradients)
        if measured.first.parameters and not any(g.any() for g in measured.first.parameters):
            raise unused(_NAME, "single")
        return whole

    def whole_from(self, measured: Measurement) -> Whole:
        """Return a measurement of one process with names."""
        subject = self.single.unpack()
        names = input_names(subject.fn, self.whole_batch)
        first = {id(x): f"parameter {name}" for name, x in subject.parameters.items()}
        found = dict(zip([*names, *first.values()], measured.first.inputs + measured.first.parameters, strict=True))
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
            layouts = [layout_of_input(name, x, self.placements, mesh, r) for name, x in self.inputs.items()]
            of_ranks.append(
                [each.piece(x).detach().clone() for each, x in zip(layouts, self.inputs.values(), strict=True)]
            )
            kinds = [each.kinds for each in layouts]
        self._refuse_equal(mesh, names, kinds, of_ranks)
        parts = []
        for pieces in of_ranks:
            given = iter(pieces)
            part = rebuild([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
            parts.append(marked(_NAME, self.fn, part, self.constant))
        return parts

    def run(self, on: str, mesh: Mesh) -> MeshRun:
        """Measure on the ranks of a mesh."""
        n, whole, plan = mesh.size, self.whole, self.plan_of(on, mesh)
        ranks: list[OfRank] = self.on(on, on_mesh, [self.distributed] * n, [plan] * n, range(n), self.parts(mesh))
        held = {piece.what for rank in ranks for piece in rank.pieces}
        missing = [name for name in whole.gradients if f"gradient of {name}" not in held]
        if missing and "gradient" in self.groups:
            got, expected = f"no {missing[0]} on any rank", "every parameter of the whole on some rank"
            raise ValueError(message(_NAME, "shard", got, expected, "let it keep its name, or freeze it in the whole"))
        every = list(reduced([rank.pieces for rank in ranks], plan, self.tolerance))
        if doubtful := in_doubt(every):
            every = with_noise(every, doubtful, self.noise(every))
        differ = any(not q.ok for q in every if q.group in ("value", "output"))
        compared = [q for q in every if q.group in self.groups]
        if not compared:
            raise nothing_compared(_NAME, self.groups)
        return MeshRun(on, mesh, compared, differ, ranks)

    def plan_of(self, on: str, mesh: Mesh) -> MeshPlan:
        """Return what the ranks of a mesh measure."""
        device = "cuda" if on == "nccl" else "cpu"
        return MeshPlan(mesh, self.placements, self.reduction, self.plan, self.whole, device)

    def noise(self, quantities: Sequence[Quantity]) -> dict[str, float]:
        """Return by how much each quantity changes on one process with the last digits of inputs and parameters."""
        plan = replace(self.plan, jitter=True)
        (found,) = self.on("simulated", on_rank, [self.single], [plan], [0], [self.whole_batch])
        other, whole = self.whole_from(found), self.whole
        pairs = {f"gradient of {name}": (g, other.gradients[name]) for name, g in whole.gradients.items()}
        names = [piece_name(*each) for each in zip(output_names(len(whole.outputs)), whole.outputs, strict=True)]
        pairs |= dict(zip(names, zip(whole.outputs, other.outputs, strict=True), strict=True))
        units = {q.what: q.unit for q in quantities}
        return {
            what: Quantity(what, "", None, y, x, units[what], 0.0, rows(x, units[what])).error
            for what, (x, y) in pairs.items()
            if what in units and differentiable(x) and x.numel()
        }

    def attempt(self, on: str, mesh: Mesh) -> MeshRun:
        """Do the same, and keep the error if one is raised."""
        try:
            return self.run(on, mesh)
        except Exception as error:
            return MeshRun(on, mesh, raised=in_words(error))

    def _refuse(self, measured: Measurement, gradients: Mapping[str, Tensor]) -> None:
        """Raise if there is no number to compare with."""
        if not any(g.any() for g in gradients.values()):
            got, remedy = "gradients that are all zero", "remove detach() and no_grad, or choose other data"
            raise ValueError(message(_NAME, "single", got, "a result with a gradient to compare with", remedy))
        named = [*gradients.items(), *((f"value[{i}]", y) for i, y in enumerate(measured.outputs) if y.dim() == 0)]
        if bad := [name for name, x in named if not x.isfinite().all()]:
            got = f"NaN or infinity in {', '.join(bad)}"
            raise ValueError(message(_NAME, "single", got, "finite numbers to compare with", "choose other data"))

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
                        raise ValueError(message(_NAME, "batch", got, expected, "pass random numbers"))


def reduced(ranks: Sequence[Sequence[Piece]], plan: MeshPlan, tolerance: float) -> Iterator[Quantity]:
    """Return what is compared: the pieces of the ranks after the reductions over axes."""
    mesh = plan.mesh
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
            yield Quantity(what, piece.group, rank, got, piece.wanted, piece.unit, tolerance, of_rows)


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


def forward(packed: Packed, batch: Any) -> list[Tensor]:
    """Run the forward on this rank."""
    with torch.inference_mode(False), torch.enable_grad():
        return [y.detach().cpu() for y in packed.unpack().call(with_leaves(batch, leaves_of(batch)))]
