"""The interface between the collectives and the backends that move data: `Engine`.

An engine stands for one group as seen by one of its ranks. A backend must provide one primitive, `exchange`; the
others have defaults built on it, which a backend overrides where its own operation is faster. Engines know nothing of
autograd.

The docstrings below state laws. tests/engines/laws.py checks each of them on every engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diffcoll.core.dtypes import wider
from diffcoll.engines.scratch import Scratch
from diffcoll.engines.turn import IDLE, Turn

Wait = Callable[[], object]

Blocks = Sequence[Tensor | None]


class Engine(ABC):
    """One group, seen by one of its ranks.

    Calls. All ranks of the group call the same primitives in the same order, with shapes, dtypes, devices and `later`
    that fit together. A call may block until the other ranks make theirs. Which messages it sends depends only on facts
    that are equal on all ranks: the group, shapes, dtypes, devices and `later`. It never depends on the values or
    on how a rank's tensors are laid out in memory: strides, offsets, one allocation or several.

    `later`: whether the caller does something else between a primitive and its Wait. If not, the primitive may block
    until its result is there.

    Tensors. All are contiguous, except where a primitive says otherwise. Dimensions of size 1 may have any stride. Any
    size is allowed: 0-d tensors, empty ones, and empty blocks among others. Blocks may differ in size from rank to
    rank. Tensors of any dtype are moved. Sums are for integers, floating-point and complex numbers, not for bool.
    A primitive writes to its outputs only. Outputs share no memory with other arguments except where a primitive
    allows it.

    Waits. Every primitive returns a `Wait`. The caller calls it exactly once: in any order relative to the group's
    other Waits, and in any thread, while no other thread uses the group; on simulated ranks in the rank's own. Its
    tensors must not be modified, and its outputs must not be read, until the Wait has returned. The engine keeps their
    memory alive until then, so the caller may drop its references. A Wait sends no new messages: a rank that waits
    late, or in another order, delays nobody.
    On a GPU all this holds in the order of the current stream; the host does not wait.

    Errors. An error of the backend is a `BackendError`, see `of_backend`.
    """

    #: For error messages: what kind of group this is.
    description: str = "an engine"
    #: The name by which a compiled graph finds this group in its process.
    key: str = ""
    #: Types of the devices whose tensors this engine moves; None: any device, also meta.
    devices: tuple[str, ...] | None = None
    #: Whether it stands for another engine while Dynamo traces.
    compiling: bool = False
    #: Whether the ranks share one autograd graph, in which collectives are computed by `diffcoll.truth`.
    in_one_graph: bool = False
    #: The collective in progress on this rank, for warnings and errors.
    now: Turn = IDLE

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.scratch = Scratch()
        self.calls = 0  # forward calls of collectives, by which check mode tells them apart
        self.abandoned: deque[Wait] = deque()  # Waits whose caller dropped them; the next call in the group calls them

    @property
    def control_device(self) -> torch.device:
        """A device whose tensors the engine moves, equal on all ranks but for its index; the CPU if possible."""
        return torch.device("cpu")

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The ranks of the group, in order, by the numbers that they have in the launched program."""
        return tuple(range(self.size))

    @property
    def ended(self) -> bool:
        """Whether the backend has destroyed the group. A group that has ended cannot be used again."""
        return False

    def control(self) -> Engine:
        """Return the engine, with the same ranks, for numbers that the host reads; all ranks call this.

        Its `control_device` is the CPU where that is possible, so that reading a number does not wait for an
        accelerator.
        """
        return self

    def run_truth(self, name: str, x: Any, arguments: dict[str, Any], facts: str) -> Any:
        """Return this rank's result of the collective `name`, as `diffcoll.truth` has it (simulated joint graph only).

        `facts` says what must be equal on all ranks: the arguments, and what x is.
        """
        raise NotImplementedError

    def small(self, device: str) -> int:
        """Largest size in bytes at which an all-gather and a local reduction beat a reduction by parts; 0: none.

        Equal on all ranks.
        """
        return 0

    def twin(self) -> Engine:
        """Return an engine with the same ranks in the same order, and its own message space. All ranks call it.

        Messages of one are never received by the other, also if the ranks call the two in different orders.
        """
        raise NotImplementedError(f"{self.description} has no twin")

    def connect(self, device: torch.device) -> None:
        """Prepare for tensors on a device that is not the CPU. All ranks call it before their first call with such.

        Further calls do nothing.
        """
        return

    def overlaps(self, x: Tensor) -> bool:
        """Whether `all_reduce` of x with `later` runs in the background.

        If True, it returns before the other ranks have called it, and is completed without further calls on this rank.
        Equal on all ranks, whatever the memory layout of x.
        """
        return False

    def close(self) -> None:
        """Release a twin. All ranks call it, after their last Wait. The engine that it is a twin of is not affected."""
        return

    @abstractmethod
    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        """Send `sends[s]` to each rank s, and fill `recvs[s]` with the block from rank s.

        Both lists have one entry for each rank. `sends[s]` on rank r and `recvs[r]` on rank s have the same shape and
        dtype, or both are None. `recvs[rank]` is filled from `sends[rank]`, and may be the same tensor. The same tensor
        may be sent to several ranks.
        """

    # ── defaults, built on exchange ──────────────────────────────────────────────────────────────────────

    def all_gather(self, x: Tensor | None, row: Tensor, counts: list[int], later: bool = False) -> Wait:
        """row ← x_0, …, x_{N−1}, one after the other, on every rank.

        `row` is 1-d. x_s has `counts[s]` numbers in any shape. None: x is in its place in `row` already; if so on one
        rank, then on all.
        """
        parts = row.split_with_sizes(counts)
        return self.exchange([parts[self.rank] if x is None else x.view(-1)] * self.size, parts, later)

    def reduce_scatter(self, row: Tensor, counts: list[int], out: Tensor, later: bool = False) -> Wait:
        """out ← Σ_s part `rank` of row_s.

        `row` is 1-d, and the same size on every rank: N parts with `counts[s]` numbers, one after the other. `out` has
        `counts[rank]` numbers in any shape.

        Here and in `all_reduce` and `reduce`, a backend's own operation adds up in its own order and precision. The
        defaults add up in the order of ranks, half precisions in float32, rounded once.
        """
        out, rank = out.view(-1), self.rank
        terms = self._terms(out, rank)
        parts: list[Any] = [*row.split_with_sizes(counts)]
        mine, parts[rank] = parts[rank], None
        return self._adding(self.exchange(parts, terms, later), terms, rank, mine, out)

    def all_reduce(self, x: Tensor, y: Tensor, later: bool = False) -> Wait:
        """y ← Σ_s x_s, bitwise equal on all ranks.

        x need not be contiguous. It may be y, the same object; if so on one rank, then on all. With `later`, x has been
        read when this returns, and may be modified before the Wait.
        """
        if self.size == 1:
            y.copy_(x)
            return done
        if y.nbytes <= self.small(y.device.type):  # one round of messages: every rank adds up all x
            memory = self.scratch.take(self.size * y.numel(), like=y)
            terms = [*memory.view(self.size, *y.shape).unbind()]
            mine = terms[self.rank].copy_(x)
            wait = self.all_gather(None, memory, [y.numel()] * self.size, later)
            return self._adding(wait, terms, self.rank, mine, y)
        # Each part is added up on one rank, so all ranks get the same bits.
        y.copy_(x)
        row, counts = y.view(-1), list(even_sizes(y.numel(), self.size))
        part = row.new_empty(counts[self.rank])
        self.reduce_scatter(row, counts, part)()
        return self.all_gather(part, row, counts, later)

    def broadcast(self, y: Tensor, src: int, later: bool = False) -> Wait:
        """y ← y_src, in place. Not modified on rank src."""
        peers = range(self.size)
        sends = [y if self.rank == src and s != src else None for s in peers]
        return self.exchange(sends, [y if self.rank != src and s == src else None for s in peers], later)

    def reduce(self, y: Tensor, dst: int, later: bool = False) -> Wait:
        """y_dst ← Σ_s y_s, in place. Not modified on the other ranks."""
        nothing = [None] * self.size
        if self.rank != dst:
            return self.exchange([y if s == dst else None for s in range(self.size)], nothing, later)
        terms = self._terms(y, dst)
        return self._adding(self.exchange(nothing, terms, later), terms, dst, y, y)

    def _terms(self, like: Tensor, rank: int) -> list[Any]:
        """Return memory for the other ranks' tensors, with None for this rank."""
        others = self.size - 1
        memory = self.scratch.take(others * like.numel(), like=like)
        terms: list[Any] = [*memory.view(others, *like.shape).unbind()] if others else []
        terms.insert(rank, None)
        return terms

    def _adding(self, wait: Wait, terms: list[Any], rank: int, mine: Tensor, out: Tensor) -> Wait:
        """Return the wait for `terms`, which then adds them and `mine` up in the order of ranks."""

        def finish() -> None:
            wait()
            terms[rank] = mine
            add_up(terms, out)

        return finish


def add_up(terms: Sequence[Tensor], out: Tensor) -> None:
    """out ← Σ terms, in their order; half precisions in float32, rounded once.

    `out` may be one of the terms.
    """
    wide, n = wider(out.dtype), len(terms)
    if wide != out.dtype or n == 1 or (n > 2 and any(t is out for t in terms[2:])):
        total = terms[0].to(wide, copy=True)
        for t in terms[1:]:
            total += t
        out.copy_(total)
    else:
        torch.add(terms[0], terms[1], out=out)
        for t in terms[2:]:
            out += t


def even_sizes(numel: int, n: int) -> tuple[int, ...]:
    """Cut numel into n sizes that differ by at most one."""
    return tuple((numel + n - 1 - r) // n for r in range(n))  # no branch, because numel may be symbolic


def is_even(counts: Sequence[int]) -> bool:
    """Whether all parts have the same size."""
    return counts.count(counts[0]) == len(counts)


def done() -> None:
    """Do nothing: the Wait of a call whose result is there."""
