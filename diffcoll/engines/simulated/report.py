"""Where simulated ranks are that cannot go on, in few lines for any number of ranks.

It runs no operation of torch, since the rank that reports may be in a mode that refuses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from diffcoll.core.errors import not_run
from diffcoll.engines.simulated.meetings import Entry, Meeting

#: Ranks that do the same are one line from this number on, or if there is a mesh.
_MANY = 9
_LINES = 12


@dataclass(frozen=True)
class Mesh:
    """The dimensions of a `DeviceMesh`, and the coordinates of ranks in it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    coordinates: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, names: Sequence[str] | None, shape: Sequence[int], ranks: Sequence[int]) -> Mesh:
        """Return the mesh of these ranks, in the order of their coordinates."""
        return cls(
            tuple(names or (f"dim {dim}" for dim in range(len(shape)))),
            tuple(shape),
            dict(zip(ranks, product(*map(range, shape)), strict=True)),
        )


@dataclass
class Report:
    """What is known when ranks cannot go on."""

    ranks: Sequence[Any]
    mesh: Mesh | None = None
    first_split: str = ""  # the first meeting of ranks in different submodules, in words

    def text(self, why: str, meetings: Sequence[Meeting], deadlock: bool = False) -> str:
        """Return why these meetings are called off, and where each rank is."""
        entries = {number: entry for meeting in meetings for number, entry in meeting.entries.items()}
        split = self.first_split or next((self.words_of_split(m) for m in meetings if m.is_split), "")
        lines = [
            f"simulated ranks: {why}",
            *self._where(meetings, entries, deadlock),
            *(self._root() if deadlock else ()),
        ]
        if split:
            lines.append(f"the first collective that ranks joined from different submodules: {split}")
        if of_backward := [e.origin for e in entries.values() if e.origin or (e.within and not e.of_torch)]:
            lines.append(f"a rank that is elsewhere {not_run(next(filter(None, of_backward), None))}")
        return "\n".join(lines)

    def incomplete(self, meetings: Sequence[Meeting]) -> str:
        """Return which communications some ranks have started, and others have not joined, when all have ended."""
        lines = [
            f"  {self.names(sorted(m.entries))}: {next(iter(m.entries.values())).words()}, not {self.names(m.missing)}"
            for m in meetings
        ]
        more = [f"  and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
        return "\n".join(("simulated ranks: not all ranks have called, and nobody waited:", *lines[:_LINES], *more))

    def _where(self, meetings: Sequence[Meeting], entries: dict[int, Entry], deadlock: bool) -> list[str]:
        """Return a line for each rank, or, of those that meet or of all that wait, for all that do the same."""
        if len(self.ranks) < _MANY and self.mesh is None:
            return [f"  rank {r.number} {self._doing(r, meetings, entries, 1)}" for r in self.ranks]
        alike: dict[str, list[int]] = {}
        concerned = {r for meeting in meetings for r in meeting.ranks}
        for rank in self.ranks:
            if deadlock or rank.number in concerned:
                alike.setdefault(self._doing(rank, meetings, entries, 2), []).append(rank.number)
        groups = sorted(alike.items(), key=lambda group: (len(group[1]), group[1]))
        lines = []
        for doing, numbers in groups[:_LINES]:
            one = self._doing(self.ranks[numbers[0]], meetings, entries, 1) if len(numbers) == 1 else doing
            lines.append(f"  {self.names(numbers)} {one}")
        more = sum(len(numbers) for _, numbers in groups[_LINES:])
        return [*lines, f"  {more} more ranks are elsewhere"] if more else lines

    def _doing(self, rank: Any, meetings: Sequence[Meeting], entries: dict[int, Entry], count: int) -> str:
        """Return what a rank does, which has added these entries to `meetings`, as words about one rank or several."""
        waits_for: Meeting | None = rank.waits_for
        if rank.outcome:
            return str(rank.outcome)
        if waits_for is not None and (waits_for in meetings or rank.number not in entries):
            entry = waits_for.entries[rank.number]
        elif rank.number in entries:
            entry = entries[rank.number]
        else:
            return "is in no collective" if count == 1 else "are in no collective"
        return f"{'waits' if count == 1 else 'wait'} in {entry.words(relative=count > 1)}"

    def _root(self) -> list[str]:
        """Return what all ranks wait for in the end: ranks that have ended, or a shortest circle of meetings."""
        meetings = list({id(r.waits_for): r.waits_for for r in self.ranks if r.waits_for}.values())
        ended: dict[str, set[int]] = {}
        for rank in {r for meeting in meetings for r in meeting.missing}:
            if outcome := self.ranks[rank].outcome:
                ended.setdefault(outcome, set()).add(rank)
        if ended:
            words = ", and ".join(f"{self.names(sorted(ranks))}: {outcome}" for outcome, ranks in ended.items())
            return [f"in the end the ranks wait for {words}"]
        follow = {m: {self.ranks[r].waits_for: r for r in m.missing} for m in meetings}
        circle = min(filter(None, (_circle(m, follow) for m in meetings)), key=len, default=[])
        lines = ["in the end these wait for one another:"] if circle else []
        for meeting, following in zip(circle, circle[1:] + circle[:1], strict=True):
            absent = [r for r in meeting.missing if self.ranks[r].waits_for is following]
            entry = next(iter(meeting.entries.values()))
            lines.append(f"  {self.names(sorted(meeting.entries))} in {entry.words()}, for {self.names(absent)}")
        return lines

    def words_of_split(self, meeting: Meeting) -> str:
        """Return words for a meeting that ranks have joined from different submodules."""
        groups: dict[str, list[int]] = {}
        for number, entry in meeting.entries.items():
            groups.setdefault(entry.submodule, []).append(number)
        each = [
            f"{self.names(sorted(numbers))} {f'in {name}' if name else 'outside of modules'}"
            for name, numbers in sorted(groups.items(), key=lambda group: len(group[1]))
        ]
        return f"{next(iter(meeting.entries.values())).words()}: {', '.join(each)}"

    def names(self, numbers: Sequence[int]) -> str:
        """Return words for some ranks, with their coordinates in the mesh."""
        if self.mesh is None:
            one = f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {ranges(numbers)}"
            return f"all {len(numbers)} ranks" if len(numbers) == len(self.ranks) > 1 else one
        head = f"rank {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} ranks"
        if len(numbers) == len(self.ranks) or not self.mesh.coordinates.keys() >= {*numbers}:
            return head
        boxes = _boxes({self.mesh.coordinates[r] for r in numbers}, self.mesh.names, self.mesh.shape)
        return f"{head} ({'; '.join(boxes[:4])}{'; …' * (len(boxes) > 4)})"


def _circle(start: Meeting, follow: dict[Meeting, dict[Meeting, int]]) -> list[Meeting]:
    """Return a shortest circle of meetings through this one, of which each waits for the next; []: none."""
    before: dict[Meeting, Meeting] = {}
    queue = deque([start])
    while queue:
        meeting = queue.popleft()
        for following in follow[meeting]:
            if following is start:
                circle = [meeting]
                while circle[-1] is not start:
                    circle.append(before[circle[-1]])
                return circle[::-1]
            if following not in before:
                before[following] = meeting
                queue.append(following)
    return []


def _boxes(points: Iterable[tuple[int, ...]], names: Sequence[str], shape: Sequence[int]) -> list[str]:
    """Return words for sets of coordinates, each a product of a set in every dimension, which together are `points`."""
    if not names:
        return [""]
    below: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in points:
        below.setdefault(first, set()).add(tuple(rest))
    alike: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first in sorted(below):
        alike.setdefault(frozenset(below[first]), []).append(first)
    found = []
    for rests, firsts in alike.items():
        own = f"{names[0]} {ranges(firsts, ' ')}" if len(firsts) < shape[0] else ""
        found += [", ".join(filter(None, (own, box))) for box in _boxes(rests, names[1:], shape[1:])]
    return found


def ranges(numbers: Sequence[int], between: str = ", ") -> str:
    """Return sorted numbers in words, such as 0–3, 5."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return between.join("–".join(map(str, run)) for run in runs)
