"""The batch, the part of it that each rank gets, and the names of the tensors in it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from diffcoll.core.errors import message
from diffcoll.core.trees import tree_flatten, tree_paths
from diffcoll.testing.harness.measure import Constant, differentiable


def marked(name: str, fn: Callable[..., Any], batch: Any, constant: Sequence[str]) -> Any:
    """Return the batch with the tensors of these arguments as constants."""
    if not isinstance(constant, (Sequence, Set)) or isinstance(constant, str):
        raise TypeError(message(name, "constant", repr(constant), 'names of arguments, such as ("mask",)'))
    if not constant:
        return batch
    leaves, rebuild = tree_flatten(batch)
    names = iter(input_names(fn, batch))
    of_leaves = [next(names) if differentiable(leaf) else "" for leaf in leaves]
    held = [re.split(r"[.\[]", each)[0] for each in of_leaves]
    if missing := set(constant).difference(of_leaves, held):
        expected = f"arguments with floating-point tensors: {', '.join(dict.fromkeys(filter(None, held)))}"
        raise ValueError(message(name, "constant", repr(min(missing)), expected))
    chosen = [bool({which, top} & set(constant)) for which, top in zip(of_leaves, held, strict=True)]
    return rebuild([Constant(leaf) if is_one else leaf for leaf, is_one in zip(leaves, chosen, strict=True)])


def split(whole: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the part of each rank: its rows of every tensor, and other leaves as they are."""
    ends = accumulate(sizes)
    return [
        _of_tensors(lambda x, k=k, end=end: x.detach()[end - k : end].clone(), whole)
        for k, end in zip(sizes, ends, strict=True)
    ]


def rolled(part: Any, by: int) -> Any:
    """Return the tree with the rows of every tensor in another order."""
    return _of_tensors(lambda x: x.roll(by, 0), part)


def joined(parts: Sequence[Any]) -> Any:
    """Return the tree with the rows of all ranks."""
    return _of_tensors(lambda *xs: torch.cat(xs), *parts)


def _of_tensors(f: Callable[..., Tensor], *trees: Any) -> Any:
    """Return the tree of f of the tensors of trees, constants too; other leaves are those of the first."""

    def of_leaf(*xs: Any) -> Any:
        if isinstance(xs[0], Constant):
            return Constant(f(*(x.tensor for x in xs)))
        return f(*xs) if isinstance(xs[0], Tensor) else xs[0]

    leaves, rebuild = zip(*map(tree_flatten, trees), strict=True)
    return rebuild[0](list(map(of_leaf, *leaves)))


def hides_tensors(leaf: Any) -> bool:
    """Whether a leaf holds tensors that would not be split, such as a dataclass or a `UserDict`."""
    held = leaf.values() if isinstance(leaf, Mapping) else vars(leaf).values() if hasattr(leaf, "__dict__") else ()
    return not isinstance(leaf, Tensor) and any(isinstance(x, Tensor) for x in held)


def refuse_equal_ranks(
    name: str, argument: str, parts: Sequence[Any], in_any_order: bool = False, of: str = "ranks", first: int = 0
) -> None:
    """Raise if two ranks, or steps, have the same rows, as far as both have any; or permuted or mirrored ones."""
    tensors = [[t for t in tree_flatten(part)[0] if isinstance(t, Tensor) and t.numel()] for part in parts]
    for r, mine in enumerate(tensors):
        for s in range(r):
            pairs = [(a, b) for a, b in zip(mine, tensors[s], strict=False) if a.shape[1:] == b.shape[1:]]
            same = bool(pairs) and all(_same_rows(a, b) for a, b in pairs)
            moved = in_any_order and any(differentiable(a) and not _same_rows(a, b) for a, b in pairs)
            alike = moved and all(_same_but_for_order(a, b) for a, b in pairs)
            if same or alike:
                what = "numbers" if same else "rows, in another order or mirrored,"
                got = f"the same {what} on {of} {s + first} and {r + first}"
                hidden = f"{'equal' if same else 'such'} {of} hide wrong gradients"
                expected = f"different ones on every {of.removesuffix('s')}, since {hidden}"
                raise ValueError(message(name, argument, got, expected, "pass random numbers"))


def _same_rows(a: Tensor, b: Tensor) -> bool:
    if a.dim() == 0:
        return torch.equal(a, b)
    rows = min(len(a), len(b))
    return torch.equal(a[:rows], b[:rows])


def _same_but_for_order(a: Tensor, b: Tensor) -> bool:
    """Whether b has the rows of a, or their negatives, in any order."""

    def ordered(x: Tensor) -> list[list[float]]:
        x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
        return sorted(x.unsqueeze(-1).flatten(1).double().tolist())

    return a.shape == b.shape and a.dim() > 0 and ordered(b) in (ordered(a), ordered(-1.0 * a))


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────


def input_names(fn: Callable[..., Any], part: Any) -> list[str]:
    """Return a name for each differentiable leaf: that of the function's argument, and the path within it."""
    return _names_of(fn, part, differentiable)


def tensor_names(fn: Callable[..., Any], part: Any) -> list[str]:
    """Return a name for each tensor, constants too, in the same way."""
    return _names_of(fn, part, lambda leaf: isinstance(leaf, (Tensor, Constant)))


def named_tensors(fn: Callable[..., Any], part: Any) -> dict[str, Tensor]:
    """Return the tensors by these names."""
    leaves = [leaf.tensor if isinstance(leaf, Constant) else leaf for leaf in tree_flatten(part)[0]]
    return dict(zip(tensor_names(fn, part), [leaf for leaf in leaves if isinstance(leaf, Tensor)], strict=True))


def _names_of(fn: Callable[..., Any], part: Any, which: Callable[[Any], bool]) -> list[str]:
    leaves = tree_flatten(part)[0]
    paths = [path for path, leaf in zip(tree_paths(part), leaves, strict=True) if which(leaf)]
    try:
        called = fn.forward if isinstance(fn, nn.Module) else fn
        arguments = [p.name for p in inspect.signature(called).parameters.values() if p.kind < p.VAR_POSITIONAL]
    except (TypeError, ValueError):
        arguments = []
    if isinstance(part, (tuple, list)):
        known = {f"[{i}]": name for i, name in enumerate(arguments)}
        return [_named(path, known) for path in paths]
    if isinstance(part, dict):
        return [_named(path, {f"[{key!r}]": str(key) for key in part}) for path in paths]
    return [f"{arguments[0] if arguments else 'x'}{path}" for path in paths]


def _named(path: str, known: dict[str, str]) -> str:
    """Replace the first index of a path by the name of an argument."""
    head, bracket, rest = path.partition("]")
    return known.get(head + bracket, f"argument{head + bracket}") + rest
