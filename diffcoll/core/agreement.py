"""What the ranks exchange about a call before it sends x: a comparison in check mode, and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from diffcoll.core import checks
from diffcoll.core.checks import digest
from diffcoll.core.derivatives import apply
from diffcoll.core.errors import CollectiveMismatchError, failure, user_line
from diffcoll.core.linear import MAPS, PER_RANK, Linear, common_shape
from diffcoll.core.reductions import Reduction, elementwise
from diffcoll.core.torch_private.tracing import integers, is_traced
from diffcoll.core.torch_private.trees import tree_paths
from diffcoll.engines.engine import Engine


class Agreement:
    """One call of a collective, as its ranks compare it.

    Attributes:
        name: of the collective.
        x: as the user passed it.
        engine: the group.
        arguments: the others by name; each is replaced by its normalised value once it is read.
        async_op: whether the call returns before the result is ready.
        reduction: the one that `op` names, if the collective has an `op`.
        exchanged: whether the ranks have exchanged sizes for this call.
    """

    def __init__(self, name: str, x: Any, engine: Engine, async_op: bool, arguments: dict[str, Any]) -> None:
        self.name = name
        self.x = x
        self.engine = engine
        self.async_op = async_op
        self.arguments = arguments
        self.reduction: Reduction | None = None
        self.exchanged = False
        self._agreed = False

    # ── compared in check mode ───────────────────────────────────────────────────────────────────────────

    def agree(self, f: Linear, x: Tensor) -> None:
        """In check mode, compare this call, which applies f to x, with those of the other ranks."""
        if not self._agreed and self.compares():
            self._agreed = True
            self._compare((*self.meaning(f), *kind(f, x)))

    def agree_on_leaves(self, shapes: Sequence[object], leaves: Sequence[Tensor]) -> None:
        """In check mode, compare the leaves of a tree, which have these shapes, with those of the other ranks.

        In a simulation of one graph compare paths and dtypes, check mode or not: there each leaf is a separate call.
        """
        engine = self.engine
        if engine.in_one_graph:
            shapes = [""] * len(leaves)
        elif not self.compares():
            return
        rows = zip(tree_paths(self.x), leaves, shapes, strict=True)
        self._compare((self.name, "a tree"), [f"x{path}: {x.dtype} {shape}" for path, x, shape in rows])

    def agree_on_blocks(self, sent: list[list[int]], expected: list[list[int]]) -> None:
        """In check mode, compare the shapes of the blocks for and from each rank."""
        if not self.compares():
            return
        n, ndim = self.engine.size, len(sent[0])
        rows = self.gather_numbers([size for block in sent + expected for size in block], "blocks")
        shapes = [torch.tensor(row, device="cpu").view(2, n, ndim).tolist() for row in rows]
        for r in range(n):
            for s in range(n):
                block, expects = shapes[r][0][s], shapes[s][1][r]
                if block != expects:
                    why = f"rank {r} sends {tuple(block)} to rank {s}, which expects {tuple(expects)}"
                    checks.refuse(self.engine, self._text(), f"{checks.disagree(self.engine)} {why}")

    def compares(self) -> bool:
        """Whether the ranks compare this call."""
        engine = self.engine
        if not checks.is_on() or engine.in_one_graph or engine.compiling or engine.size == 1:
            return False
        return not (isinstance(self.x, Tensor) and is_traced(self.x))  # the op is compared when it runs

    def _compare(self, facts: tuple[object, ...], leaves: Sequence[str] | None = None) -> None:
        try:
            later = self.async_op and not self.engine.in_one_graph  # where `async_op` changes nothing
            checks.compare(self.engine, (*facts, later), self._text(), leaves)
        except CollectiveMismatchError:
            raise
        except RuntimeError as error:
            raise failure(self.name, self.engine.description, self.engine.rank, None, error) from error

    def meaning(self, f: Linear) -> tuple[object, ...]:
        """Return the normalised arguments, which must be equal on all ranks; their spelling may differ."""
        values = [getattr(f, field.name) for field in fields(f) if field.name not in ("engine", *PER_RANK)]
        op: list[object] = []
        if self.reduction is not None:
            op = [v for field in fields(self.reduction) if not callable(v := getattr(self.reduction, field.name))]
            op.append(self.arguments.get("ties") if self.reduction.name in ("max", "min") else None)
        return self.name, *values, *op

    def _text(self) -> str:
        """Return the description of this call for an error."""
        x = f"{self.x.dtype} {tuple(self.x.shape)}" if isinstance(self.x, Tensor) else type(self.x).__name__
        given = {k: _function_text(v) if callable(v) else v for k, v in self.arguments.items()}
        if self.async_op:
            given["async_op"] = True
        words = ", ".join([x, *(f"{k}={v!r}" for k, v in given.items())])
        return f"{self.name}({words}) at {user_line()}"

    # ── exchanged ────────────────────────────────────────────────────────────────────────────────────────

    def gather_numbers(self, numbers: list[int], what: str = "sizes") -> list[list[int]]:
        """Exchange a few integers, equally many on each rank; return one list per rank, in order."""
        self.exchanged = True
        if self.compares():
            self._compare((self.name, what, len(numbers)))
        n = self.engine.size
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.engine.control_device)
        flat = integers(apply(MAPS["AllGather"](self.engine, 0, (len(numbers),) * n), mine))
        return [flat[i * len(numbers) : (i + 1) * len(numbers)] for i in range(n)]

    def header(self, root: int, numbers: list[int], structure: int = 0, valid: bool = True) -> list[int]:
        """Return on all ranks the numbers by which the root describes what it sends.

        Args:
            root: the rank that sends.
            numbers: on the root, and on a rank that requires these numbers; elsewhere none.
            structure: a number for the structure of x.
            valid: whether this rank's arguments are valid. If not, it returns none, and raises its own error.

        Raises:
            CollectiveMismatchError: on all ranks, if they differ in one of these.
        """
        if self.compares():
            self._compare((self.name, root))
        mine = self.engine.rank == root
        state = (len(numbers) if mine else 0) if valid else -1
        rows = self.gather_numbers([root, state, structure, digest(repr(numbers)) if numbers else 0])
        if not valid:
            return []
        if (found := self._differing(root, rows)) is not None:
            raise CollectiveMismatchError(f"{self.name}: {found}")
        if self.compares():
            self._compare((self.name, root))
        row = torch.tensor(
            numbers if mine else [0] * rows[root][1], dtype=torch.int64, device=self.engine.control_device
        )
        return integers(apply(MAPS["Broadcast"](self.engine, root), row))

    def _differing(self, root: int, rows: list[list[int]]) -> str | None:
        """Return in what the ranks' headers differ, from the numbers that every rank has sent; None: nothing."""
        roots, states, structures, digests = zip(*rows, strict=True)
        if -1 in states:
            return f"an argument is invalid on rank {states.index(-1)}, see the error there"
        if len(set(roots)) > 1:
            return f"src: got {', '.join(map(str, roots))} on the ranks in order, expected the same on all"
        if others := [r for r, structure in enumerate(structures) if structure != structures[root]]:
            where = f"on rank {', '.join(map(str, others))}"
            if not structures[root]:
                return f"x: got a tree {where}, expected a tensor or None; pass the same structure on all ranks"
            expected = f"a tree with the paths of rank {root}'s; off src the leaves may be None, but not the whole tree"
            return f"x: got another structure {where}, expected {expected}"
        if others := [r for r, wanted in enumerate(digests) if wanted not in (0, digests[root])]:
            facts = "shape, dtype, device or requires_grad of x, dim or sizes"
            return (
                f"x: rank {others[0]} was compiled for another {facts} than rank {root} has, expected the same; under "
                f"torch.compile pass on every rank a tensor like that of rank {root}, whose values are not used"
            )
        return None


def _function_text(op: object) -> str:
    """Return a description of a function that is equal on all ranks; a repr would contain an address."""
    return "elementwise(a function)" if isinstance(op, elementwise) else "a function"


def kind(f: Linear, x: Tensor) -> tuple[object, ...]:
    """Return the properties of f's x that must be equal on all ranks."""
    return x.dtype, common_shape(f, x)
