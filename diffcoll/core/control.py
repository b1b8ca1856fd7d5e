"""Small messages between the ranks of a group, beside the data of its collectives: numbers, and agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import NoReturn

import torch
from torch import Tensor

from diffcoll.core.errors import CollectiveMismatchError, Origin
from diffcoll.core.torch_private.tracing import constant_in_graphs, unobserved
from diffcoll.engines.engine import Engine
from diffcoll.engines.turn import Turn


class Control:
    """The small messages of a group. All ranks call the same methods; autograd, tracers and modes do not see it.

    They are sent between CPUs where the group can do that, see `Engine.control`. Numbers that a program computes with,
    such as sizes, go through `exchanged`: graphs contain those.

    Args:
        engine: of the group.
        name: what sends them, for errors of the backend.
        origin: the forward call, if they are sent in its backward.
    """

    def __init__(self, engine: Engine, name: str = "check mode", origin: Origin | None = None) -> None:
        self._name, self._origin = name, origin
        with Turn(engine, name, origin, compared=True):
            self._engine = engine.control()

    def agree(self, facts: object, text: Callable[[], str]) -> None:
        """Raise on all ranks unless facts are equal on all; text describes this rank's call."""
        mine = digest(repr(facts))
        if {number for (number,) in self.numbers([mine])} != {mine}:
            self.refuse(text(), f"the ranks of {self._engine.description} disagree:")

    @unobserved()
    def agree_on_each(self, facts: Sequence[str], what: str) -> None:
        """Raise on all ranks, with the first difference, unless these facts, `what` in words, are equal on all."""
        counts = [count for (count,) in self.numbers([len(facts)])]
        rows = self.gather(self._integers([digest(fact) for fact in facts]), counts)
        for i, of_ranks in enumerate(zip_longest(*(row.tolist() for row in rows))):
            if len(set(of_ranks)) > 1:
                fact = facts[i] if i < len(facts) else "nothing"
                self.refuse(fact, f"{self._name}: the ranks' {what} differ; the first difference is at index {i}:")

    @unobserved()
    def refuse(self, text: str, why: str) -> NoReturn:
        """Raise on all ranks, which all call this for the same reason `why`; text describes this rank's call."""
        calls = "\n".join(f"  rank {r}: {of_rank}" for r, of_rank in enumerate(self.texts(text)))
        raise CollectiveMismatchError(f"{why}\n{calls}")

    @unobserved()
    def texts(self, mine: str) -> list[str]:
        """Return each rank's text."""
        words = torch.tensor(list(mine.encode()), dtype=torch.uint8, device=self._engine.control_device)
        found = self.gather(words, [length for (length,) in self.numbers([len(words)])])
        return [bytes(text.tolist()).decode() for text in found]

    @unobserved()
    def numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """Return each rank's integers, equally many on all."""
        return [row.tolist() for row in self.gather(self._integers(mine), [len(mine)] * self._engine.size)]

    @unobserved()
    def gather(self, mine: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return each rank's row, of these lengths."""
        row = mine.new_empty(sum(lengths))
        with Turn(self._engine, self._name, self._origin, compared=True):
            self._engine.all_gather(mine, row, list(lengths))()
        return list(row.split_with_sizes(list(lengths)))

    def _integers(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._engine.control_device)


@constant_in_graphs
def digest(text: str) -> int:
    """Return a 56-bit hash, equal on all ranks for equal texts."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
