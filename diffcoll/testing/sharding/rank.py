"""What each rank of a mesh runs: the user's sharded module, its loss and gradients, beside the pieces of the whole's.

A rank gets what one process has, and returns for each tensor its own numbers and the piece of the whole that they
should be. What pieces the tensors are that nothing is said of, all ranks settle together from their shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diffcoll.core.errors import message
from diffcoll.testing.harness.comparison import SMALL, near
from diffcoll.testing.harness.measure import MeasurementPlan, differentiable, differs, leaves_of, objective, with_leaves
from diffcoll.testing.harness.packing import Packed, Subject
from diffcoll.testing.harness.parts import input_names
from diffcoll.testing.numbers import largest
from diffcoll.testing.sharding.placements import NAME, SHARD, Layout, Mesh, Placement, by_function, said_of, short_name
from diffcoll.testing.sharding.settling import local, refuse_another_order, settled, whole_of
from diffcoll.testing.sharding.trace import Change, Trace, changed, traced

#: What wrappers of modules put into the names of parameters; Fabric's has the module twice, with and without DDP.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_original_module")


@dataclass(frozen=True)
class Program:
    """The user's function, and the function that shards its module; pickled together with the module."""

    func: Callable[..., Any]
    shard: Callable[..., Any] | None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function."""
        return self.func(*arguments, **named)


@dataclass(frozen=True)
class Whole:
    """What one process has."""

    outputs: list[Tensor]
    #: Gradients by the name of the input or parameter.
    gradients: dict[str, Tensor]
    #: Buffers and parameters after the call, by what they are.
    state: dict[str, Tensor]
    #: Σ |g · x|, see `Measurement`.
    scale: float
    #: The tensors of the batch by name.
    inputs: dict[str, Tensor]


@dataclass(frozen=True)
class MeshPlan:
    """What is measured on the ranks of one mesh."""

    mesh: Mesh
    placements: Mapping[str, Placement]
    #: "mean" or "sum" for the axes over which gradients are reduced afterwards.
    reduction: Mapping[str, str]
    measurement: MeasurementPlan
    whole: Whole
    device: str = "cpu"
    #: Whether the outputs of submodules are recorded.
    traced: bool = False

    def settled(self, wholes: Mapping[str, Tensor], held: Mapping[str, Tensor], rank: int) -> dict[str, Layout]:
        """Return the layout of each tensor that this rank holds; all ranks call it, and may hold others."""
        return settled(wholes, held, self.placements, self.mesh, rank)


@dataclass(frozen=True, eq=False)
class Piece:
    """One tensor of one rank, and the piece of the whole that it should be."""

    what: str
    #: "value", "output", "gradient" or "state".
    group: str
    kinds: dict[str, str]
    got: Tensor
    wanted: Tensor
    #: What errors are relative to.
    unit: float
    #: Whether it is the gradient of an input: nobody averages those.
    of_input: bool = False


@dataclass(frozen=True)
class OfRank:
    """The results of one rank."""

    pieces: list[Piece]
    #: What was taken from shapes: name, and the placement in words.
    found: dict[str, str]
    #: Names of attributes of modules that the call changed.
    attributes: tuple[str, ...]
    trace: Trace


def on_mesh(packed: Packed, plan: MeshPlan, rank: int, part: Any) -> OfRank:
    """Measure on this rank; all ranks run it."""
    with torch.inference_mode(False), torch.enable_grad():
        subject = sharded(packed.unpack(), plan, rank)
        with traced(modules_by_name(subject) if plan.traced else {}) as trace:
            return _measured(subject, plan, rank, part, trace)


def outputs_on_mesh(packed: Packed, plan: MeshPlan, change: Change | None, rank: int, part: Any) -> list[Piece]:
    """Return the outputs alone, with a change."""
    with torch.inference_mode(False), torch.no_grad():
        subject = sharded(packed.unpack(), plan, rank)
        with contextlib.ExitStack() as stack:
            if change is not None:
                groups = _device_mesh(plan)
                stack.enter_context(changed(modules_by_name(subject), change, groups.get_group(change.axis)))
            outputs = [whole_of(y) for y in subject.call(with_leaves(part, leaves_of(part)))]
        return list(_outputs(_layouts_of_outputs(outputs, plan, rank), outputs, plan))


def trace_of_one(packed: Packed, plan: MeasurementPlan, batch: Any) -> Trace:
    """Return what submodules have on one process."""
    subject = packed.unpack()
    with torch.inference_mode(False), torch.enable_grad(), traced(modules_by_name(subject)) as trace:
        outputs = subject.call(with_leaves(batch, leaves_of(batch)))
        total = objective(plan.weights(0, outputs), outputs)
        torch.autograd.backward(total)
    return trace


def _measured(subject: Subject, plan: MeshPlan, rank: int, part: Any, trace: Trace) -> OfRank:
    held = {name: x.clone() for name, x in subject.attributes.items()}
    before = dict(tensors_by_name(subject))
    for x in before.values():
        x.grad = None
    inputs = leaves_of(part)
    outputs = [whole_of(y) for y in subject.call(with_leaves(part, inputs))]
    layouts = _layouts_of_outputs(outputs, plan, rank)
    total = objective(_weights(layouts, outputs, plan), outputs)
    if total.requires_grad:
        torch.autograd.backward(total)
    pieces = list(_outputs(layouts, outputs, plan)) + list(_inputs(subject.fn, inputs, plan, rank, part))
    del total
    after = {name: x for name, x in tensors_by_name(subject) if name in plan.whole.state}
    found = plan.settled({name: plan.whole.state[name] for name in after}, after, rank)
    pieces += _parameters(after, found, plan)
    pieces += _state(after, before, found, plan)
    others = tuple(name for name, x in subject.attributes.items() if differs(x, held.get(name)))
    layouts.update(found)
    words = {short_name(name): layout.found for name, layout in layouts.items() if layout.found}
    return OfRank(pieces, words, others, trace)


def sharded(subject: Subject, plan: MeshPlan, rank: int) -> Subject:
    """Return the subject with this rank's module, which gets its pieces of the whole's numbers."""
    assert isinstance(subject.fn, Program)
    if subject.fn.shard is None:
        return replace(subject, fn=subject.fn.func)
    wholes = {name: x.detach().clone() for name, x in tensors_by_name(subject)}
    module = subject.fn.shard(subject.modules[""], _device_mesh(plan))
    if not isinstance(module, nn.Module):
        raise TypeError(message(NAME, "shard", f"a function that returned {type(module).__name__}", "a module"))
    found = replace(subject, fn=partial(subject.fn.func, module), modules={"": module})
    mine = {name: x for name, x in tensors_by_name(found) if name in wholes}
    unknown = [name for name, x in tensors_by_name(found) if name not in wholes and x.requires_grad]
    if unknown:
        expected = f"those of the whole: {', '.join(wholes)}"
        remedy = "let the sharded module call its tensors as the whole does"
        raise ValueError(message(NAME, "shard", f"a module with {unknown[0]}", expected, remedy))
    layouts = plan.settled({name: wholes[name] for name in mine}, mine, rank)
    refuse_another_order(mine, wholes, layouts, plan.mesh)
    with torch.no_grad():
        for name, x in mine.items():
            local(x).copy_(layouts[name].piece(wholes[name]))
    return found


def _device_mesh(plan: MeshPlan) -> dist.device_mesh.DeviceMesh:
    axes = plan.mesh.sizes
    return dist.device_mesh.init_device_mesh(plan.device, tuple(axes.values()), mesh_dim_names=tuple(axes))


# ── what a rank returns ──────────────────────────────────────────────────────────────────────────────────


def _layouts_of_outputs(outputs: list[Tensor], plan: MeshPlan, rank: int) -> dict[str, Layout]:
    wholes = plan.whole.outputs
    if len(outputs) != len(wholes):
        raise ValueError(f"distributed returned {len(outputs)} outputs, single {len(wholes)}, expected equally many")
    names = output_names(len(wholes))
    return plan.settled(dict(zip(names, wholes, strict=True)), dict(zip(names, outputs, strict=True)), rank)


def _weights(layouts: Mapping[str, Layout], outputs: list[Tensor], plan: MeshPlan) -> list[Tensor | None]:
    """Return the weights of the outputs: this rank's pieces of those of the whole.

    An output whose rows are spread over an axis on which gradients are averaged has N times the weight.
    """
    found: list[Tensor | None] = []
    every = plan.measurement.weights(0, plan.whole.outputs)
    for layout, weight, y in zip(layouts.values(), every, outputs, strict=True):
        means = [plan.mesh.sizes[a] for a in layout.has(SHARD) if plan.reduction.get(a) == "mean"]
        factor = float(torch.tensor(means).prod()) if means else 1.0
        found.append(None if weight is None else factor * layout.piece(weight).to(y.device))
    return found


def _outputs(layouts: Mapping[str, Layout], outputs: list[Tensor], plan: MeshPlan) -> Iterator[Piece]:
    for (name, layout), y, whole in zip(layouts.items(), outputs, plan.whole.outputs, strict=True):
        what, got = piece_name(name, whole), y.detach().cpu()
        is_value = what.startswith("value")
        unit = max(largest(whole), SMALL * plan.whole.scale) if is_value else largest(whole)
        yield Piece(what, "value" if is_value else "output", layout.kinds, got, layout.piece(whole), unit)


def _inputs(fn: Callable[..., Any], inputs: list[Tensor], plan: MeshPlan, rank: int, part: Any) -> Iterator[Piece]:
    for name, x in zip(input_names(fn, part), inputs, strict=True):
        layout = by_function(name, said_of(plan.placements, name), plan.whole.inputs[name], plan.mesh, rank)
        yield _gradient(name, layout, torch.zeros_like(x) if x.grad is None else x.grad, plan, of_input=True)


def _parameters(after: Mapping[str, Tensor], layouts: Mapping[str, Layout], plan: MeshPlan) -> Iterator[Piece]:
    for name, p in after.items():
        kind, short = name.split(" ", 1)
        if kind == "parameter" and short in plan.whole.gradients:
            yield _gradient(short, layouts[name], _gradient_of(p), plan)


def _gradient(name: str, layout: Layout, got: Tensor, plan: MeshPlan, of_input: bool = False) -> Piece:
    whole = plan.whole.gradients[name]
    unit = max(largest(whole), SMALL * largest(*plan.whole.gradients.values()))
    got = got.to_dense() if got.is_sparse else got
    piece = layout.piece(whole)
    return Piece(f"gradient of {name}", "gradient", layout.kinds, got.detach().cpu().clone(), piece, unit, of_input)


def _state(
    after: Mapping[str, Tensor], before: Mapping[str, Tensor], layouts: Mapping[str, Layout], plan: MeshPlan
) -> Iterator[Piece]:
    """Yield the buffers, and the parameters that the call changed, here or on one process."""
    for name, x in after.items():
        whole, mine = plan.whole.state[name], local(x).cpu()
        piece = layouts[name].piece(whole)
        if name.startswith("buffer") or not near(mine, piece) or name not in before:
            yield Piece(name, "state", layouts[name].kinds, mine.clone(), piece, largest(whole))


# ── tensors of a module ──────────────────────────────────────────────────────────────────────────────────


def tensors_by_name(subject: Subject) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by what they are; tied ones by each of their names."""
    for prefix, module in subject.modules.items():
        if not isinstance(module, nn.Module):
            yield f"parameter {prefix.removesuffix('.')}", module
            continue
        for kind, each in (("parameter", module.named_parameters), ("buffer", module.named_buffers)):
            for name, x in each(remove_duplicate=False):
                yield f"{kind} {prefix}{_unwrapped(module, name)}", x


def modules_by_name(subject: Subject) -> dict[str, nn.Module]:
    """Return the submodules by name."""
    return {
        f"{prefix}{_unwrapped(module, name)}".removesuffix("."): each
        for prefix, module in subject.modules.items()
        if isinstance(module, nn.Module)
        for name, each in module.named_modules()
    }


def _unwrapped(module: nn.Module, name: str) -> str:
    """Return a name without what wrappers have put into it."""
    kept: list[str] = []
    holder: Any = module
    for part in name.split("."):
        inner = part == "module" and isinstance(holder, nn.parallel.DistributedDataParallel)
        if part not in _WRAPPERS and not inner:
            kept.append(part)
        holder = getattr(holder, part, None)
    return ".".join(kept)


def copies(subject: Subject) -> dict[str, Tensor]:
    """Return copies of the parameters and buffers by what they are."""
    return {name: x.detach().cpu().clone() for name, x in tensors_by_name(subject)}


def _gradient_of(p: Tensor) -> Tensor:
    """Return this rank's gradient, placed as the parameter is."""
    from torch.distributed.tensor import DTensor

    g = p.grad
    if g is None:
        return torch.zeros_like(local(p))
    if isinstance(p, DTensor) and isinstance(g, DTensor) and g.placements != p.placements:
        g = g.redistribute(p.device_mesh, p.placements)
    return local(g)


# ── layouts ──────────────────────────────────────────────────────────────────────────────────────────────


def output_names(count: int) -> list[str]:
    """Return the names of outputs in placements."""
    return ["output"] if count == 1 else [f"output[{i}]" for i in range(count)]


def piece_name(name: str, whole: Tensor) -> str:
    """Return what reports call an output: a number is a value."""
    return name.replace("output", "value") if whole.dim() == 0 and differentiable(whole) else name
