"""The batch: its tensors by name, which of them have gradients, and the part of it that each rank gets."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffcoll.core.errors import message
from diffcoll.core.trees import tree_flatten, tree_paths
from diffcoll.testing.harness.layout import Placement, Span, placed, said_of
from diffcoll.testing.harness.mesh import NAME, RANKS, Ranks
from diffcoll.testing.harness.packing import Subject
from diffcoll.testing.numbers import differentiable


class Batch:
    """The arguments of one process, or of one rank.

    Args:
        subject: the function that gets them, which names them.
        tree: the arguments; floating-point tensors get gradients, or, if any requires one, only those.
        dtype: what floating-point tensors are converted to; None: nothing is.
        name: what errors begin with.
        in_parts: whether the function gets a list of parts of it, as a loop over micro-batches does.
    """

    def __init__(
        self, subject: Subject, tree: Any, dtype: torch.dtype | None = None, name: str = NAME, in_parts: bool = False
    ) -> None:
        leaves, self._rebuild = tree_flatten(tree)
        self._in_parts = in_parts
        for kind in {type(leaf) for leaf in leaves if _hides_tensors(leaf)}:
            got, remedy = f"a {kind.__name__} with tensors inside", "use dict(…) or torch.utils._pytree's registration"
            raise ValueError(message(name, "batch", got, "a tree of tuples, lists, dicts and namedtuples", remedy))
        self._leaves = dict(zip(_names(None if in_parts else subject, tree, name), leaves, strict=True))
        #: The tensors by name.
        self.tensors = {name: _converted(x, dtype) for name, x in self._leaves.items() if isinstance(x, Tensor)}
        #: Whether some tensors require gradients, and the others are no variables.
        self.asked = any(self._leaves[name].requires_grad for name in self.tensors)
        #: The names of those that have gradients.
        self.variables = [
            name
            for name, x in self.tensors.items()
            if differentiable(x) and (self._leaves[name].requires_grad or not self.asked)
        ]

    def part(self, *each: Mapping[str, Tensor] | None) -> Any:
        """Return what the function gets: the tree with the numbers at these positions of each tensor, None: all.

        If it gets a list of parts, one for each that is given.
        """
        parts = [self._part(index) for index in each]
        return (parts,) if self._in_parts else parts[0]

    def _part(self, index: Mapping[str, Tensor] | None) -> Any:
        found = dict(self._leaves)
        for name, x in self.tensors.items():
            part = x.detach().clone() if index is None else x.detach().flatten()[index[name]]
            found[name] = part.requires_grad_(name in self.variables)
        return self._rebuild(list(found.values()))

    def spans(self, start: int) -> list[Span]:
        """Return the variables as tensors of the whole, whose numbers begin here."""
        found: list[Span] = []
        for name in self.variables:
            found.append(Span(name, "input", start, self.tensors[name].detach(), first=True))
            start = found[-1].end
        return found

    def positions(self, ranks: Ranks, placements: Mapping[str, Placement]) -> dict[str, list[Tensor]]:
        """Return the positions of each tensor on each rank."""
        for name, x in self.tensors.items() if ranks.rows else ():
            if x.dim() == 0 or len(x) != sum(ranks.rows):
                got = f"a tensor {name} with {len(x)} rows" if x.dim() else f"a 0-d tensor {name}"
                expected = f"tensors with {sum(ranks.rows)} rows, the sum of {ranks.rows}"
                remedy = "pass other ranks=, or the batch as a function of its number of rows; other tensors in module="
                remedy += "; the rows of micro-batches of one run are ranks=[((2, 2), (4,))]"
                raise ValueError(message(NAME, "batch", got, expected, remedy))
        found = {name: placed(name, x, said_of(placements, name), ranks) for name, x in self.tensors.items()}
        self._refuse_equal(found, ranks)
        return found

    def micro_batches(self, ranks: Ranks, index: Mapping[str, list[Tensor]], r: int) -> list[dict[str, Tensor]]:
        """Return the positions of each tensor in each part that a rank gets."""
        mine = {name: each[r] for name, each in index.items()}
        if not ranks.micro:
            return [mine]
        rows = list(ranks.micro[r])
        for name, i in mine.items():
            if i.dim() == 0 or len(i) != sum(rows):
                got = f"a tensor {name} of shape {tuple(i.shape)} on rank {r}"
                raise ValueError(message(NAME, "micro_batches", got, f"{sum(rows)} rows, the sum of {ranks.micro[r]}"))
        parts = zip(*(torch.split_with_sizes(i, rows) for i in mine.values()), strict=True)
        return [dict(zip(mine, part, strict=True)) for part in parts]

    def _refuse_equal(self, index: Mapping[str, list[Tensor]], ranks: Ranks) -> None:
        """Raise if two ranks along an axis have the same rows of all that is divided, or permuted or mirrored ones."""
        for axis in ranks.sizes:
            divided = [name for name, each in index.items() if axis in ranks.split(each)]
            flat = {name: self.tensors[name].detach().flatten() for name in divided}
            parts = [{name: x[index[name][r]] for name, x in flat.items()} for r in range(ranks.size)]
            for peers in {tuple(ranks.along([axis], r)) for r in range(ranks.size)}:
                refuse_equal(NAME, "batch", {r: parts[r] for r in peers}, permuted=axis == RANKS)

    def counts(self, each: Sequence[Mapping[str, Tensor]]) -> dict[str, list[int]]:
        """Return numbers of these parts of the batch that a loss may divide by, in words."""
        found: dict[str, list[int]] = {}
        for name, x in self.tensors.items():
            parts = [x.detach().flatten()[index[name]] for index in each]
            if x.dim():
                found["rows"] = [len(part) for part in parts]
            counted = {"ones": bool(((x == 0) | (x == 1)).all()), "labels other than −100": bool((x == -100).any())}
            for words in (words for words, is_such in counted.items() if is_such):
                are = [part != (0 if words == "ones" else -100) for part in parts]
                found[f"{words} of {name}"] = [int(part.sum()) for part in are]
                if x.dim() > 1:  # as where the next token is predicted
                    found[f"{words} of {name} but their first column"] = [int(part[:, 1:].sum()) for part in are]
        return found

    def shares(self) -> dict[str, float]:
        """Return the parts of masks that are one, in words."""
        masks = {name: x for name, x in self.tensors.items() if x.numel() and bool(((x == 0) | (x == 1)).all())}
        return {f"the part of {name} that is one": float(x.detach().double().mean().real) for name, x in masks.items()}


def rows_of(tree: Any) -> int:
    """Return the rows of the first tensor of a batch that has rows; 8 if there is none."""
    tensors = (x for x in tree_flatten(tree)[0] if isinstance(x, Tensor) and x.dim())
    return next((len(x) for x in tensors if len(x)), 8)


def _converted(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    if x.is_complex():
        return x.to(torch.complex128) if dtype == torch.double else x
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x


def _names(subject: Subject | None, tree: Any, name: str) -> list[str]:
    """Return a name for each leaf: that of the function's argument, and the path within it; None: it gets parts."""
    parameters, argument = list[inspect.Parameter](), "argument" if subject is not None else "part"
    if subject is not None:
        fn = subject.fn.forward if isinstance(subject.fn, nn.Module) else subject.fn
        with contextlib.suppress(TypeError, ValueError):
            parameters = list(inspect.signature(fn).parameters.values())[subject.module is not None :]
    arguments = [p.name for p in parameters if p.kind < p.VAR_POSITIONAL]
    if isinstance(tree, list) and len(tree) > len(arguments) == len(parameters) > 0:
        got, remedy = f"a list of {len(tree)} arguments", "torch.stack(samples) makes one tensor of a list of samples"
        raise ValueError(message(name, "batch", got, f"{len(arguments)}, those of the function", remedy))
    if isinstance(tree, (tuple, list)) and not hasattr(tree, "_fields"):
        known = {f"[{i}]": name for i, name in enumerate(arguments)}
    elif isinstance(tree, dict):
        known = {f"[{key!r}]": str(key) for key in tree}
    else:
        only = arguments[0] if arguments else "part" if subject is None else "x"
        return [f"{only}{path}" for path in tree_paths(tree)]
    each = [path.partition("]") for path in tree_paths(tree)]  # the first index is replaced by a name
    return [known.get(head + bracket, f"{argument}{head}{bracket}") + rest for head, bracket, rest in each]


def _hides_tensors(leaf: Any) -> bool:
    """Whether a leaf holds tensors that would not be divided, such as a dataclass or a `UserDict`."""
    held = leaf.values() if isinstance(leaf, Mapping) else vars(leaf).values() if hasattr(leaf, "__dict__") else ()
    return not isinstance(leaf, Tensor) and any(isinstance(x, Tensor) for x in held)


def refuse_unmoved(name: str, argument: str, spans: Sequence[Span], moved: Sequence[bool]) -> None:
    """Raise if no tensor moves the loss, or no parameter of the module."""
    expected = "a loss with a gradient, or a changed module"
    if not any(moved):
        got, remedy = "results that depend on no tensor", "remove detach() and no_grad, or choose other data"
        raise ValueError(message(name, argument, got, expected, remedy))
    of_module = [some for span, some in zip(spans, moved, strict=True) if span.trained and span.kind == "parameter"]
    if of_module and not any(of_module):
        got, remedy = "parameters of which none has a gradient", "use the argument, and not another copy"
        raise ValueError(message(name, "module", got, "the module that the function uses", remedy))


def refuse_equal(name: str, argument: str, parts: Mapping[int, Mapping[str, Tensor]], permuted: bool = False) -> None:
    """Raise if a rank has the rows of another one, as far as both have any, or the same rows in another order."""
    for (r, mine), (s, theirs) in itertools.combinations(parts.items(), 2):
        each = [(mine[key], theirs[key]) for key in mine.keys() & theirs.keys()]
        pairs = [
            (a, b) for a, b in each if a.numel() and b.numel() and (a.dim(), a.shape[1:]) == (b.dim(), b.shape[1:])
        ]
        same = bool(pairs) and all(_same_rows(a, b) for a, b in pairs)
        moved = permuted and any(differentiable(a) and not _same_rows(a, b) for a, b in pairs)
        if same or (moved and all(_same_but_for_order(a, b) for a, b in pairs)):
            what = "numbers" if same else "rows, in another order or mirrored,"
            got = f"the same {what} of {', '.join(mine)} on ranks {r} and {s}"
            expected = "different ones on every rank, since equal ranks hide wrong gradients"
            raise ValueError(message(name, argument, got, expected, "pass random numbers"))


def _same_rows(a: Tensor, b: Tensor) -> bool:
    rows = min(len(a), len(b)) if a.dim() else None
    return torch.equal(a, b) if rows is None else torch.equal(a[:rows], b[:rows])


def _same_but_for_order(a: Tensor, b: Tensor) -> bool:
    """Whether b has the rows of a, or their negatives, in any order."""

    def ordered(x: Tensor) -> list[list[float]]:
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        rows: list[list[float]] = x.unsqueeze(-1).flatten(1).double().tolist()
        return sorted(rows)

    return a.shape == b.shape and a.dim() > 0 and ordered(b) in (ordered(a), ordered(-1.0 * a))
