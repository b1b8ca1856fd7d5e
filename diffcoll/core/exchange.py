"""Numbers that the ranks tell each other, such as sizes; a graph that is compiled contains the message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from diffcoll.core.control import digest
from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.core.joint import is_joint
from diffcoll.core.maps import AllGather
from diffcoll.core.rules import apply
from diffcoll.core.torch_private.autograd import is_recomputing
from diffcoll.core.torch_private.tracing import assume
from diffcoll.core.trees import by_dtype
from diffcoll.engines.engine import Engine
from diffcoll.engines.turn import Turn


def exchanged(engine: Engine, numbers: Sequence[int]) -> list[list[int]]:
    """Return each rank's integers, equally many on all; sent between CPUs where the group can, but for graphs."""
    if not engine.compiling:
        with Turn(engine, AllGather.name):
            engine = engine.control()
    mine = torch.tensor(numbers, dtype=torch.int64, device=engine.control_device)
    n, flat = len(numbers), apply(AllGather(engine, 0), mine).tolist()
    return [flat[i : i + n] for i in range(0, len(flat), n)]


def exchanged_alike(
    what: str,
    engine: Engine,
    blocks: Mapping[str, tuple[Tensor, int | None]],
    numbers: Sequence[int],
    replicated: bool = False,
) -> list[list[int]]:
    """Return each rank's integers; in the same message the ranks compare the blocks that they have.

    Unless the call is replicated, whose backward sends nothing, they also compare for which dtypes they need a
    gradient. One rank sends nothing.

    Args:
        what: operation and argument, for errors.
        engine: of the group.
        blocks: by the path of each, with the dimension whose size may differ; None: every dimension.
        numbers: this rank's; equally many on all ranks, whatever their blocks are.
        replicated: whether the call is.

    Raises:
        CollectiveMismatchError: on all ranks, if they differ. A compiled function cannot compare numbers that it
            receives, and sends 0.
    """
    if engine.size == 1:
        return [list(numbers)]

    def facts() -> str:
        shapes = ([-1 if dim in (None, d) else n for d, n in enumerate(x.shape)] for x, dim in blocks.values())
        return "; ".join(f"{path}: {x.dtype} {n}" for path, x, n in zip(blocks, tensors, shapes, strict=True))

    tensors = [x for x, _ in blocks.values()]
    mine = 0 if engine.compiling else digest(facts())
    dtypes = [] if replicated else by_dtype(tensors)
    needed = gradients_needed(*([tensors[i] for i in indices] for indices in dtypes))
    rows = exchanged(engine, [mine, needed, *numbers])
    if mine:
        if r := _differing([row[0] for row in rows]):
            raise CollectiveMismatchError(
                f"{what}: rank {r} differs from rank 0, expected the same paths, dtypes and dimensions other than "
                f"that of sizes (here −1) on all ranks; rank {engine.rank} has {facts()}"
            )
        agree_on_gradients(what, [row[1] for row in rows])
    return [row[2:] for row in rows]


def gradients_needed(*collectives: Iterable[object]) -> int:
    """Return a number that is equal on ranks that run the backwards of the same collectives; 0 says nothing.

    Each collective is given by tensors, and others, on which its x depends. `joint_backward` runs all backwards. A
    checkpoint that recomputes has compared them before.
    """
    if torch.compiler.is_compiling() or is_recomputing():
        return 0
    records = torch.is_grad_enabled() and not is_joint()
    return digest(str([records and any(getattr(t, "requires_grad", False) for t in of) for of in collectives]))


def agree_on_gradients(what: str, numbers: Sequence[int]) -> None:
    """Raise on all ranks unless their `gradients_needed` are equal: some would wait in backward for the others."""
    if r := _differing(numbers):
        raise CollectiveMismatchError(
            f"{what}: of ranks 0 and {r} one needs a gradient that the other does not, expected it on all ranks or on "
            "none; call requires_grad_() on a tensor made for an empty rank, or run the encoder on the empty batch, or "
            "call this and backward within joint_backward()"
        )


def _differing(numbers: Sequence[int]) -> int:
    """Return the first rank whose number differs from rank 0's, neither being 0; 0: there is none."""
    return next((r for r, other in enumerate(numbers) if 0 != other != numbers[0] != 0), 0)


def lengths_of(engine: Engine, rows: Iterable[Sequence[int]], own: int) -> list[int]:
    """Return the first number of each rank, a length; a graph, which does not know so, takes it to be one."""
    lengths = [row[0] for row in rows]
    if engine.compiling:
        for length in lengths:
            assume(length >= 0)
        assume(lengths[engine.rank] == own)
    return lengths
