"""What the submodules of a model return, and the first one whose output, or gradient, is not that of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from diffcoll.core.trees import tree_flatten
from diffcoll.testing.harness.layout import Ranks, fits, unwrapped
from diffcoll.testing.numbers import largest

#: The relative difference of outputs that are the same.
_NEAR = 1e-7


@dataclass
class Traces:
    """Outputs of submodules and their gradients, by the submodule's name, in the order in which they came to be.

    A submodule that is called several times is left out: its calls may be for other rows on ranks than on one process;
    and one that returns a number, which may be of this rank's rows.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    #: Parameters of one dimension, which may be biases, of each submodule.
    biases: dict[str, list[tuple[str, Tensor]]] = field(default_factory=dict)


@contextlib.contextmanager
def traced(module: nn.Module) -> Iterator[Traces]:
    """Record the calls of the submodules."""
    from torch.distributed.tensor import DTensor

    found, calls = Traces(), dict[str, int]()

    def whole(x: Tensor) -> Tensor:
        x = x.detach()
        return (x.full_tensor() if isinstance(x, DTensor) else x).cpu().clone()

    def record(name: str, each: nn.Module, inputs: object, output: object) -> None:
        y = next((y for y in tree_flatten(output)[0] if isinstance(y, Tensor) and y.is_floating_point()), None)
        calls[name] = calls.get(name, 0) + 1
        if y is None or y.dim() == 0 or calls[name] > 1:
            found.outputs.pop(name, None)
            return
        found.outputs[name] = whole(y)
        if y.requires_grad:
            y.register_hook(partial(keep, name))  # type: ignore[no-untyped-call]
        own = each.named_parameters(recurse=False)
        found.biases[name] = [(which, whole(p)) for which, p in own if p.dim() == 1]

    def keep(name: str, g: Tensor) -> None:
        if calls[name] == 1:
            found.gradients[name] = whole(g)

    names = {each: unwrapped(module, name) for name, each in module.named_modules()}
    handles = [each.register_forward_hook(partial(record, name)) for each, name in names.items() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def first_differences(whole: Traces, each: Sequence[Traces], ranks: Ranks, factors: Sequence[float]) -> Iterator[str]:
    """Yield what is to be said of the first submodule whose output differs, and the first whose gradient does."""
    for name, wanted in whole.outputs.items():
        got = [t.outputs.get(name) for t in each]
        if _differs(wanted, got, ranks, [1.0]):
            biases = {which: b for t in each[:1] for which, b in t.biases.get(name, [])}
            yield f"the first output that differs is that of {name}{_words(wanted, got, ranks, biases)}"
            break
    for name, wanted in whole.gradients.items():
        if _differs(wanted, [t.gradients.get(name) for t in each], ranks, factors):
            yield f"the first gradient in backward order that differs is that of the output of {name}"
            break


def _differs(wanted: Tensor, got: Sequence[Tensor | None], ranks: Ranks, factors: Sequence[float]) -> bool:
    """Whether the ranks have pieces of the tensor under no placement, and in no order of rows, nor parts of a sum."""
    if all(x is None for x in got):
        return False
    shapes = [None if x is None else tuple(x.shape) for x in got]
    ways = list(fits(wanted.shape, shapes, ranks))
    if not ways:  # other rows on each rank, as where tokens were sent to experts: nothing is known
        return False
    for factor in factors:
        for way in ways:
            pieces = [
                (x, factor * wanted.flatten()[i])
                for x, i in zip(got, way.index, strict=True)
                if x is not None and i is not None
            ]
            if all(_near(x, y) for x, y in pieces):
                return False
            if any(
                axis_sum_is(way.index, got, factor * wanted, ranks, axis) for axis, n in ranks.sizes.items() if n > 1
            ):
                return False
        if wanted.dim() > 1 and _same_rows(factor * wanted, [x for x in got if x is not None]):
            return False
    return True


def axis_sum_is(
    index: Sequence[Tensor | None], got: Sequence[Tensor | None], wanted: Tensor, ranks: Ranks, axis: str
) -> bool:
    """Whether the sums over an axis are pieces of a tensor."""
    for r, i in enumerate(index):
        peers = [got[s] for s in ranks.along([axis], r)]
        if i is None or any(x is None or x.shape != i.shape for x in peers):
            return False
        if not _near(torch.stack([x for x in peers if x is not None]).sum(0), wanted.flatten()[i]):
            return False
    return True


def _same_rows(wanted: Tensor, got: Sequence[Tensor]) -> bool:
    """Whether the rows of the ranks together are those of the whole, in any order."""
    if any(x.shape[1:] != wanted.shape[1:] for x in got):
        return False
    rows, every = torch.cat(list(got)).flatten(1), wanted.flatten(1)
    if len(rows) < len(every):
        return False
    distance = torch.cdist(rows, every, compute_mode="donot_use_mm_for_euclid_dist")
    allowed = _NEAR * (largest(wanted) or 1.0)
    return bool((distance.amin(0) <= allowed).all() and (distance.amin(1) <= allowed).all())


def _words(wanted: Tensor, got: Sequence[Tensor | None], ranks: Ranks, biases: Mapping[str, Tensor]) -> str:
    """Say what makes the output right, if one of a few things does."""
    for way in fits(wanted.shape, [None if x is None else tuple(x.shape) for x in got], ranks):
        for axis in (axis for axis, n in ranks.sizes.items() if n > 1):
            n = ranks.sizes[axis]
            held = [
                (x, wanted.flatten()[i]) for x, i in zip(got, way.index, strict=True) if x is not None and i is not None
            ]
            for name, b in biases.items():
                if wanted.dim() and len(b) == wanted.shape[-1] and all(_near(x - (n - 1) * b, y) for x, y in held):
                    return f", which has its {name} {n} times, once for each rank of {axis}"
                less = [None if x is None or x.shape[-1:] != b.shape else x - (1 - 1 / n) * b for x in got]
                if wanted.dim() and len(b) == wanted.shape[-1] and axis_sum_is(way.index, less, wanted, ranks, axis):
                    return f", which is right after a sum over {axis} with its {name} once"
    return ""


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= _NEAR * (largest(b) or 1.0)).all())
