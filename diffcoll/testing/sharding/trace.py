"""What the submodules of a model return, and the first one whose output is not that of one process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diffcoll.core.trees import tree_flatten
from diffcoll.testing.harness.comparison import near
from diffcoll.testing.harness.measure import differentiable
from diffcoll.testing.sharding.placements import PARTIAL, Mesh, Placement, by_function, candidates
from diffcoll.testing.sharding.settling import whole_of


@dataclass
class Trace:
    """Outputs of submodules and their gradients, by the submodule's name, in the order in which they came to be."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Change(NamedTuple):
    """An experiment on the output of a submodule, for an axis of N ranks.

    It is summed over the axis, or divided by N, and a parameter that all ranks have added is taken off N − 1 times.
    """

    module: str
    axis: str
    summed: bool = False
    divided: bool = False
    #: The name of the parameter within the submodule; "": none.
    added: str = ""

    def __str__(self) -> str:
        each = [f"is summed over {self.axis}"] * self.summed
        each += [f"is divided by the size of {self.axis}"] * self.divided
        each += [f"has its {self.added} once"] * bool(self.added)
        return f"the output of {self.module or 'the module'} {' and '.join(each)}"


@contextlib.contextmanager
def traced(modules: Mapping[str, nn.Module]) -> Iterator[Trace]:
    """Record the calls of these modules; the second call of one is "name (call 2)"."""
    found, calls = Trace(), dict.fromkeys(modules, 0)

    def record(name: str, module: nn.Module, inputs: object, output: object) -> None:
        calls[name] += 1
        name = f"{name} (call {calls[name]})" if calls[name] > 1 else name
        y = _tensor_of(output)
        if y is not None:
            found.outputs[name] = whole_of(y.detach()).cpu().clone()
            if y.requires_grad:
                y.register_hook(partial(keep, name))  # type: ignore[no-untyped-call]

    def keep(name: str, g: Tensor) -> None:
        found.gradients[name] = whole_of(g.detach()).cpu().clone()

    with _hooks(modules, record):
        yield found


@contextlib.contextmanager
def changed(modules: Mapping[str, nn.Module], change: Change, group: Any) -> Iterator[None]:
    """Change the output of a module; no gradients."""

    def act(name: str, module: nn.Module, inputs: object, output: object) -> object:
        leaves, rebuild = tree_flatten(output)
        y = _tensor_of(output)
        if name != change.module or y is None:
            return output
        total, n = whole_of(y.detach()).clone(), dist.get_world_size(group)
        if change.summed:
            dist.all_reduce(total, group=group)
        if change.divided:
            total = total / n
        if change.added:
            total = total - (n - 1) * whole_of(module.get_parameter(change.added).detach())
        return rebuild([total if leaf is y else leaf for leaf in leaves])

    with _hooks(modules, act):
        yield


@contextlib.contextmanager
def _hooks(modules: Mapping[str, nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    handles = [module.register_forward_hook(partial(hook, name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensor_of(output: object) -> Tensor | None:
    """Return the first tensor of an output."""
    return next((leaf for leaf in tree_flatten(output)[0] if differentiable(leaf)), None)


def first_difference(
    whole: Mapping[str, Tensor],
    ranks: Sequence[Mapping[str, Tensor]],
    mesh: Mesh,
    functions: Sequence[Callable[..., Any]],
    factors: Sequence[float] = (1.0,),
) -> str | None:
    """Return the first name of which the ranks have no placement of the whole's tensor; None: there is none."""
    for name, wanted in whole.items():
        got = {r: found[name] for r, found in enumerate(ranks) if name in found}
        if got and not any(_agree(wanted * factor, got, mesh, functions) for factor in factors):
            return name
    return None


def suspects(
    first: str,
    whole: Mapping[str, Tensor],
    ranks: Sequence[Mapping[str, Tensor]],
    mesh: Mesh,
    functions: Sequence[Callable[..., Any]],
) -> list[str]:
    """Return the first name that differs, after those before it that are parts of a sum."""
    before = itertools.takewhile(lambda name: name != first, whole)
    found = []
    for name in before:
        got = {r: each[name] for r, each in enumerate(ranks) if name in each}
        if got and not _agree(whole[name], got, mesh, functions, parts=False):
            found.append(name)
    return [*found, first]


def _agree(
    wanted: Tensor, got: Mapping[int, Tensor], mesh: Mesh, functions: Sequence[Callable[..., Any]], parts: bool = True
) -> bool:
    """Whether the ranks have pieces of a tensor, or parts of a sum."""
    from torch.distributed.tensor import Partial

    for said in candidates(wanted, mesh, *[Partial()] * parts, *functions):
        with contextlib.suppress(Exception):  # a function of the user's, meant for another tensor
            if all(_is_piece(wanted, r, got, said, mesh) for r in got):
                return True
    return False


def _is_piece(wanted: Tensor, r: int, got: Mapping[int, Tensor], said: Mapping[str, Placement], mesh: Mesh) -> bool:
    layout = by_function("output", said, wanted, mesh, r)
    piece = layout.piece(wanted)
    mine = [got[s] for s in mesh.along(layout.has(PARTIAL), r) if s in got]
    return all(x.shape == piece.shape for x in mine) and near(torch.stack(mine).sum(0), piece)
