"""What the ranks exchange about a call before it sends x: a comparison in check mode, and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from diffcoll.core import checks
from diffcoll.core.control import Control, digest
from diffcoll.core.derivatives import apply
from diffcoll.core.errors import CollectiveMismatchError, failure, user_line
from diffcoll.core.linear import MAPS, PER_RANK, Linear, common_shape
from diffcoll.core.reductions import Reduction, elementwise
from diffcoll.core.torch_private.tracing import integers, is_traced
from diffcoll.core.torch_private.transforms import batch_sizes
from diffcoll.core.torch_private.trees import tree_paths
from diffcoll.engines.engine import Engine


@dataclass(frozen=True, eq=False, repr=False)
class Agreement:
    """One call of a collective, as its ranks compare it."""

    #: Of the collective.
    name: str
    #: As the user passed it.
    x: Any
    engine: Engine
    #: Whether the call returns before the result is ready.
    async_op: bool
    #: The others by name, as the user passed them.
    arguments: dict[str, Any]

    # ── compared in check mode ───────────────────────────────────────────────────────────────────────────

    def agree(self, f: Linear, x: Tensor, reduction: Reduction | None = None) -> None:
        """In check mode, compare this call, which applies f to x, with those of the other ranks."""
        if self.compares():
            self._compare((*self.meaning(f, reduction), *kind(f, x)), self.settled(f, x, reduction))

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
        leaves_in_words = [f"x{path}: {x.dtype} {shape}" for path, x, shape in rows]
        self._compare((self.name, "a tree"), self.arguments, leaves_in_words)

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
                    Control(self.engine).refuse(
                        self._text(self.arguments), f"the ranks of {self.engine.description} disagree: {why}"
                    )

    def compares(self) -> bool:
        """Whether the ranks compare this call."""
        engine = self.engine
        if not checks.is_on() or engine.in_one_graph or engine.compiling or engine.size == 1:
            return False
        return not (isinstance(self.x, Tensor) and is_traced(self.x))  # the op is compared when it runs

    def _compare(
        self, facts: tuple[object, ...], arguments: dict[str, Any], leaves: Sequence[str] | None = None
    ) -> None:
        try:
            later = self.async_op and not self.engine.in_one_graph  # where `async_op` changes nothing
            checks.compare(self.engine, (*facts, later), self._text(arguments), leaves)
        except CollectiveMismatchError:
            raise
        except RuntimeError as error:
            raise failure(self.name, self.engine.description, self.engine.rank, None, error) from error

    def meaning(self, f: Linear, reduction: Reduction | None) -> tuple[object, ...]:
        """Return what the arguments mean, which must be equal on all ranks; their spelling may differ."""
        values = [getattr(f, field.name) for field in fields(f) if field.name not in ("engine", *PER_RANK)]
        op: list[object] = []
        if reduction is not None:
            op = [v for field in fields(reduction) if not callable(v := getattr(reduction, field.name))]
            op.append(self.arguments.get("ties") if reduction.name in ("max", "min") else None)
        return self.name, *values, *op

    def settled(self, f: Linear, x: Tensor, reduction: Reduction | None) -> dict[str, Any]:
        """Return the arguments of the call, which applies f to x, in one spelling: truth accepts it, errors show it."""
        found = dict(self.arguments)
        if reduction is not None and not reduction.users:
            found["op"] = reduction.name
        if "grad_placement" in found:
            found["grad_placement"] = "replicate" if vars(f)["replicated"] else "partial"
        for name in ("dim", "split_dim", "concat_dim"):
            if found.get(name, 0) < 0:
                found[name] %= max(1, x.dim())
        return found

    def _text(self, arguments: dict[str, Any]) -> str:
        """Return the description of this call for an error."""
        x = type(self.x).__name__
        if isinstance(self.x, Tensor):
            x = f"{self.x.dtype} {tuple(self.x.shape)}" + "".join(f", batched by {n}" for n in batch_sizes(self.x))
        given = {k: _function_text(v) if callable(v) else v for k, v in arguments.items()}
        if self.async_op:
            given["async_op"] = True
        words = ", ".join([x, *(f"{k}={v!r}" for k, v in given.items())])
        return f"{self.name}({words}) at {user_line()}"

    # ── exchanged ────────────────────────────────────────────────────────────────────────────────────────

    def gather_numbers(self, numbers: list[int], what: str = "sizes") -> list[list[int]]:
        """Return each rank's integers, equally many on all; a graph that is compiled or traced contains the message."""
        if self.compares():
            self._compare((self.name, what, len(numbers)), self.arguments)
        n, of_all = len(numbers), (len(numbers),) * self.engine.size
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.engine.control_device)
        flat = integers(apply(MAPS["AllGather"](self.engine, 0, of_all), mine))
        return [flat[i : i + n] for i in range(0, len(flat), n)]

    def exchanged_sizes(self, x: Tensor, dim: int) -> tuple[int, ...]:
        """Return the size of each rank's x along dim.

        Raises:
            CollectiveMismatchError: on all ranks, if their x differ in dtype or in another dimension. A compiled
                function cannot compare numbers that it receives, and sends 0.
        """
        facts = f"{x.dtype} {[*x.shape[:dim], -1, *x.shape[dim + 1 :]]}"
        compared = not (torch.compiler.is_compiling() or is_traced(x))
        rows = self.gather_numbers([digest(facts) if compared else 0, x.shape[dim]])
        for r, (other, _) in enumerate(rows if compared else ()):
            if 0 != other != rows[0][0] != 0:
                raise CollectiveMismatchError(
                    f"{self.name}: x: rank {r} differs from rank 0 in dtype or in a dimension other than {dim}, "
                    f'expected the same on all ranks; sizes="auto" serves dim {dim} alone; rank {self.engine.rank} '
                    f"has {facts}"
                )
        return tuple(size for _, size in rows)

    def header(
        self, root: int, numbers: list[int], structure: int = 0, valid: bool = True, forward: bool = False
    ) -> list[int]:
        """Return on all ranks the numbers by which the root describes what it sends.

        Args:
            root: the rank that sends.
            numbers: on the root, and on a rank that requires these numbers; elsewhere none.
            structure: a number for the structure of x.
            valid: whether this rank's arguments are valid. If not, it returns none, and raises its own error.
            forward: on the root, whether it sends a tangent; elsewhere, whether this rank can.

        Raises:
            CollectiveMismatchError: on all ranks, if they differ in one of these.
        """
        if self.compares():
            self._compare((self.name, root), self.arguments)
        mine = self.engine.rank == root
        state = 2 * (len(numbers) if mine else 0) + forward if valid else -1
        rows = self.gather_numbers([root, state, structure, digest(repr(numbers)) if numbers else 0])
        if not valid:
            return []
        if (found := self._differing(root, rows)) is not None:
            raise CollectiveMismatchError(f"{self.name}: {found}")
        if self.compares():
            self._compare((self.name, root), self.arguments)
        row = torch.tensor(
            numbers if mine else [0] * (rows[root][1] // 2), dtype=torch.int64, device=self.engine.control_device
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
        if states[root] % 2 and (others := [r for r, state in enumerate(states) if not state % 2]):
            where = f"on rank {', '.join(map(str, others))}"
            return f"x: got a tangent on rank {root}, expected it within forward_ad.dual_level, also {where}"
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
    return x.dtype, common_shape(f, x), batch_sizes(x)
