"""Where simulated ranks are that cannot go on, in few lines for any number of ranks.

It runs no operation of torch, since the rank that reports may be in a mode that refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffcoll.core.errors import not_run
from diffcoll.engines.simulated.meetings import Entry, Meeting

#: Ranks that do the same are one line from this number on, or if there is a mesh.
_MANY = 9
_LINES = 12


@dataclass
class Report:
    """What is known when ranks cannot go on."""

    ranks: Sequence[Any]
    dims: tuple[str, ...] = ()  # of a mesh of all ranks
    shape: tuple[int, ...] = ()
    coordinates: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    first_split: str = ""  # the first meeting of ranks in different submodules, in words

    def text(self, why: str, meetings: Sequence[Meeting], deadlock: bool = False) -> str:
        """Return why these meetings are called off, and where each rank is."""
        entries = {number: entry for meeting in meetings for number, entry in meeting.entries.items()}
        of_backward = [entry.origin for entry in entries.values() if entry.origin or entry.within]
        for rank in self.ranks:
            if (waits_for := rank.waits_for) and (waits_for in meetings or rank.number not in entries):
                entries[rank.number] = waits_for.entries[rank.number]
        lines = [f"simulated ranks: {why}", *self._where(meetings, entries, deadlock)]
        lines += self._root() if deadlock else []
        if split := self.first_split or next(filter(None, map(self.split, meetings)), ""):
            lines.append(f"the first collective that ranks joined from different submodules: {split}")
        if of_backward:
            lines.append(f"a rank that is elsewhere {not_run(next(filter(None, of_backward), None))}")
        return "\n".join(lines)

    def _where(self, meetings: Sequence[Meeting], entries: dict[int, Entry], deadlock: bool) -> list[str]:
        """Return a line for each rank; of many, for those that do the same, and that meet or all wait."""
        many = self.dims or len(self.ranks) >= _MANY
        concerned = {r for meeting in meetings for r in meeting.ranks}
        alike: dict[object, list[int]] = {}
        for rank in self.ranks:
            if not many or deadlock or rank.number in concerned:
                key = self._doing(rank.number, entries, 2) if many else rank.number
                alike.setdefault(key, []).append(rank.number)
        groups = sorted(alike.values(), key=lambda numbers: (len(numbers), numbers))
        more = sum(map(len, groups[_LINES:]))
        return [
            *(f"  {self.names(group)} {self._doing(group[0], entries, len(group))}" for group in groups[:_LINES]),
            *([f"  {more} more ranks are elsewhere"] if more else []),
        ]

    def _doing(self, number: int, entries: dict[int, Entry], count: int) -> str:
        """Return what a rank does, as words about one rank or several."""
        if outcome := self.ranks[number].outcome:
            return str(outcome)
        if number not in entries:
            return "is in no collective" if count == 1 else "are in no collective"
        return f"{'waits' if count == 1 else 'wait'} in {entries[number].words(relative=count > 1)}"

    def _root(self) -> list[str]:
        """Return what all ranks wait for in the end: ranks that have ended, or meetings in a circle."""
        meetings = list(dict.fromkeys(rank.waits_for for rank in self.ranks if rank.waits_for))
        ended: dict[str, set[int]] = {}
        for rank in {r for meeting in meetings for r in meeting.missing}:
            if outcome := self.ranks[rank].outcome:
                ended.setdefault(outcome, set()).add(rank)
        if ended:
            words = ", and ".join(f"{self.names(sorted(ranks))}: {outcome}" for outcome, ranks in ended.items())
            return [f"in the end the ranks wait for {words}"]
        path: list[Meeting] = []
        following = meetings[0]
        while following not in path:
            path.append(following)
            following = self.ranks[following.missing[0]].waits_for
        circle = path[path.index(following) :]
        lines = ["in the end these wait for one another:"]
        for meeting, following in zip(circle[:_LINES], circle[1:] + circle[:1], strict=False):
            absent = [r for r in meeting.missing if self.ranks[r].waits_for is following]
            entry = next(iter(meeting.entries.values()))
            lines.append(f"  {self.names(sorted(meeting.entries))} in {entry.words()}, for {self.names(absent)}")
        return lines

    def split(self, meeting: Meeting) -> str:
        """Return words for a meeting that ranks have joined from different submodules; "": they have not."""
        groups: dict[str, list[int]] = {}
        for number, entry in meeting.entries.items():
            groups.setdefault(entry.submodule, []).append(number)
        if len(groups) < 2:
            return ""
        each = [
            f"{self.names(sorted(numbers))} {f'in {name}' if name else 'outside of modules'}"
            for name, numbers in sorted(groups.items(), key=lambda group: len(group[1]))
        ]
        return f"{next(iter(meeting.entries.values())).words()}: {', '.join(each)}"

    def names(self, numbers: Sequence[int]) -> str:
        """Return words for some ranks, with their coordinates in the mesh."""
        head = f"rank {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} ranks"
        if len(numbers) == len(self.ranks) > 1:
            return f"all {head}"
        if not self.dims:
            return head if len(numbers) == 1 else f"ranks {ranges(numbers)}"
        boxes = _boxes({self.coordinates[r] for r in numbers}, self.dims, self.shape)
        return f"{head} ({'; '.join(boxes[:4])}{'; …' * (len(boxes) > 4)})"


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
