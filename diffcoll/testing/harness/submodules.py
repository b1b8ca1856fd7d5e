"""What the submodules of a model return, and the first one whose output, or gradient, is not that of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from diffcoll.core.trees import tree_flatten
from diffcoll.testing.harness.layout import fits, unwrapped
from diffcoll.testing.harness.mesh import Ranks
from diffcoll.testing.numbers import largest, near


@dataclass
class Traces:
    """Outputs of submodules and their gradients, by the submodule's name, in the order in which they came to be.

    A submodule that is called several times is left out: its calls may be for other rows on ranks than on one process;
    and one that returns a number, which may be of this rank's rows.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def traced(module: nn.Module | None) -> Iterator[Traces]:
    """Record the calls of the submodules."""
    from torch.distributed.tensor import DTensor

    found, called = Traces(), set[str]()

    def whole(x: Tensor) -> Tensor:
        x = x.detach()
        return (x.full_tensor() if isinstance(x, DTensor) else x).cpu().clone()

    def record(name: str, each: nn.Module, inputs: object, output: object) -> None:
        y = next((y for y in tree_flatten(output)[0] if isinstance(y, Tensor) and y.is_floating_point()), None)
        if y is None or y.dim() == 0 or name in called:
            found.outputs.pop(name, None)
        else:
            found.outputs[name] = whole(y)
            if y.requires_grad:
                y.register_hook(partial(keep, name))  # type: ignore[no-untyped-call]
        called.add(name)

    def keep(name: str, g: Tensor) -> None:
        if name in found.outputs:
            found.gradients[name] = whole(g)

    names = {} if module is None else {each: unwrapped(module, name) for name, each in module.named_modules()}
    handles = [each.register_forward_hook(partial(record, name)) for each, name in names.items() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def first_differences(
    whole: Traces, each: Sequence[Traces], ranks: Ranks, factors: Sequence[float], tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yield what is to be said of the first submodule whose output differs, and the first whose gradient does.

    Gradients may be larger by one of the factors; `tensors` are those of the module.
    """
    for name, wanted in whole.outputs.items():
        got = [t.outputs.get(name) for t in each]
        if _differs(wanted, got, ranks):
            words = _words(wanted, got, ranks, tensors.get(f"{name}.bias"))
            yield f"the first output that differs is that of {name}{words}"
            break
    for name, wanted in whole.gradients.items():
        if all(_differs(factor * wanted, [t.gradients.get(name) for t in each], ranks) for factor in factors):
            yield f"of the outputs of submodules, the first in backward order whose gradient differs is that of {name}"
            break


def _ways(wanted: Tensor, got: Sequence[Tensor | None], ranks: Ranks) -> list[list[Tensor | None]]:
    """Return the pieces of a tensor that the ranks may have by their shapes, in each way to divide it."""
    shapes = [None if x is None else tuple(x.shape) for x in got]
    flat = wanted.flatten()
    return [[None if i is None else flat[i] for i in way.index] for way in fits(wanted.shape, shapes, ranks)]


def _differs(wanted: Tensor, got: Sequence[Tensor | None], ranks: Ranks) -> bool:
    """Whether the ranks have pieces of the tensor in no way, and in no order of rows, nor parts of a sum."""
    held = [x for x in got if x is not None]
    # No way: the ranks have other rows, as where tokens were sent to experts. Nothing is known then.
    ways = _ways(wanted, got, ranks) if held else []
    tried = [got, *(_summed(got, ranks, axis) for axis in ranks.axes)]
    right = any(_are(each, pieces) for pieces in ways for each in tried)
    return bool(ways) and not right and not (wanted.dim() > 1 and _same_rows(wanted, held))


def _summed(got: Sequence[Tensor | None], ranks: Ranks, axis: str) -> list[Tensor | None]:
    """Return the sum of what the ranks along an axis have; None: a rank has none, or tensors of other shapes."""
    found: list[Tensor | None] = []
    for r, x in enumerate(got):
        peers = [got[s] for s in ranks.along([axis], r)]
        alike = [y for y in peers if x is not None and y is not None and y.shape == x.shape]
        found.append(torch.stack(alike).sum(0) if len(alike) == len(peers) else None)
    return found


def _are(got: Sequence[Tensor | None], pieces: Sequence[Tensor | None]) -> bool:
    """Whether these are the pieces, on all ranks that have one."""
    return all(y is None or (x is not None and near(x, y)) for x, y in zip(got, pieces, strict=True))


def _same_rows(wanted: Tensor, got: Sequence[Tensor]) -> bool:
    """Whether the rows of the ranks together are those of the whole, in any order."""
    if any(x.shape[1:] != wanted.shape[1:] for x in got):
        return False
    rows, every = torch.cat(list(got)).flatten(1), wanted.flatten(1)
    distance = torch.cdist(rows, every, compute_mode="donot_use_mm_for_euclid_dist")
    allowed = 1e-7 * (largest(wanted) or 1.0)
    return bool(distance.numel()) and bool((distance.amin(0) <= allowed).all() and (distance.amin(1) <= allowed).all())


def _words(wanted: Tensor, got: Sequence[Tensor | None], ranks: Ranks, bias: Tensor | None) -> str:
    """Say what makes the output of a submodule with a bias right, if one of two things does."""
    if bias is None or any(x is not None and x.shape[-1:] != bias.shape for x in (wanted, *got)):
        return ""
    for pieces in _ways(wanted, got, ranks):
        for axis in ranks.axes:
            n = ranks.sizes[axis]
            if _are([None if x is None else x - (n - 1) * bias for x in got], pieces):
                return f", which has its bias {n} times, once for each rank of {axis}"
            if _are(_summed([None if x is None else x - (1 - 1 / n) * bias for x in got], ranks, axis), pieces):
                return f", which is right after a sum over {axis} with its bias once"
    return ""
