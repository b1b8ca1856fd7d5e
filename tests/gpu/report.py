"""The table and the JSON file of what rows have found."""

import json
import os
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path

WIDTH = 120


@dataclass
class Result:
    """What one row has found."""

    row: str
    ranks: int
    seconds: float
    checks: int = 0
    #: The check that is nearest to its bound.
    nearest: str = ""
    #: Part and text, each.
    wrong: list[list[str]] = field(default_factory=list)
    known: list[list[str]] = field(default_factory=list)
    now_right: list[list[str]] = field(default_factory=list)
    figures: list[list[str]] = field(default_factory=list)

    def lines(self, with_figures):
        """Return this row's lines of the table."""
        found = {"wrong": self.wrong, "known": self.known, "now right": self.now_right}
        counts = [f"{len(parts)} {word}" for word, parts in found.items() if parts]
        words = ["WRONG" if self.wrong else "right", *counts]
        words += [f"{self.checks} checks"] if self.checks else []
        words += [f"nearest to its bound: {self.nearest}"] if self.nearest else []
        yield line(self.row, self.ranks, f"{self.seconds:.0f}", ", ".join(words))
        for word, found in self._sections():
            for part, text in found if with_figures or word != "figures" else ():
                first = f"{part}: {text}" if part else text
                first = first if word == "figures" else f"{word.upper() if word == 'wrong' else word}: {first}"
                yield from textwrap.wrap(first, WIDTH, initial_indent="    ", subsequent_indent="      ")

    def _sections(self):
        parts = {}
        for part, was in self.now_right:
            parts.setdefault(was, []).append(part)
        now_right = [[", ".join(names), was] for was, names in parts.items()]
        return (("wrong", self.wrong), ("known", self.known), ("now right", now_right), ("figures", self.figures))


def line(row, ranks, seconds, result):
    """Return one line of the table."""
    return f"{row:<25} {ranks:>5} {seconds:>4}  {result}"


def result_of(row, seconds, killed, codes, lines, logs):
    """Return the result of a row.

    Args:
        row: the row.
        seconds: how long it took.
        killed: why it was killed; "": it was not.
        codes: exit status of each process.
        lines: what each process has written by `Rank.write`.
        logs: the output of each process.
    """
    result = Result(row.body.__name__, row.ranks, round(seconds, 1))
    parts, share = {}, -1.0
    for r, written in enumerate(lines):
        for part in (found for found in written if "name" in found):
            parts.setdefault(part["name"], []).append((r, part))
    for name, found in parts.items():
        result.checks += sum(part["checks"] for _, part in found)
        texts = {known: [] for known in ("", *(part["known"] for _, part in found))}
        for r, part in found:
            texts[part["known"]] += [f"rank {r}: {text}" for text in part["wrong"]]
        why = max(texts)  # "" or the reason, the same on all ranks
        if texts[""]:
            result.wrong.append([name, _first(texts[""])])
        elif texts[why]:
            result.known.append([name, f"{why} ({_first(texts[why])})"])
        elif why:
            result.now_right.append([name, f"was: {why}"])
        if not any(texts.values()):
            share, result.nearest = max([(share, result.nearest), *((p["share"], p["nearest"]) for _, p in found)])
        r, part = found[0]
        if r == 0 and part["figures"]:
            result.figures.append([name, ", ".join(part["figures"])])
    for r, (code, written, log) in enumerate(zip(codes, lines, logs, strict=True)):
        if not any("end" in found for found in written):
            begun = [found["begin"] for found in written if found.get("begin")]
            where = f" in or after {begun[-1]}" if begun else ""
            result.wrong.append(["", f"rank {r} {killed or f'ended with status {code}'}{where}: {_tail(log)}"])
    return result


def _first(texts):
    return texts[0] if len(texts) == 1 else f"{texts[0]} (and {len(texts) - 1} more)"


def _tail(log):
    """Return where a rank hung, if it has said so at its limit, or the end of its output."""
    output, _, stacks = log.partition("Timeout (")
    frames = [text.strip() for text in stacks.splitlines() if "/tests/" in text or "/diffcoll/" in text]
    lines = frames[:5] or [text.strip() for text in output.strip().splitlines()[-12:]]
    return " | ".join(lines)[-900:] or "no output"


class Report:
    """Prints the table while rows end, and writes the JSON file after each.

    Args:
        file: the JSON file.
        machine: what the rows run on.
        keep: keep the rows of the file that were found on the same machine with the same versions.
    """

    def __init__(self, file, machine, keep):
        self._file, self._facts, self.results = Path(file), machine.facts, []
        print(machine.line())
        print(line("row", "ranks", "s", "result"), flush=True)
        if keep and self._file.exists():
            before = json.loads(self._file.read_text(encoding="utf-8"))
            for found in before["rows"] if before["machine"] == self._facts else ():
                self.add(Result(**found))

    def add(self, result):
        """Print and write the result of a row."""
        self.results.append(result)
        print("\n".join(result.lines(self._facts["device"] != "CPU")), flush=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_name(f".{self._file.name}.new")
        found = {"machine": self._facts, "rows": [asdict(result) for result in self.results]}
        new.write_text(json.dumps(found, indent=1), encoding="utf-8")
        os.replace(new, self._file)

    def has(self, row):
        """Return whether the row has a result."""
        return any((result.row, result.ranks) == (row.body.__name__, row.ranks) for result in self.results)

    def end(self, skipped, seconds):
        """Print the last lines; return the exit status: 1 if a row is wrong."""
        for why, names in skipped.items():
            print(*textwrap.wrap(f"skipped: {', '.join(names)}: {why}", WIDTH, subsequent_indent="    "), sep="\n")
        wrong = [f"{result.row}-{result.ranks}" for result in self.results if result.wrong]
        counts = f"{len(self.results) - len(wrong)} of {len(self.results)} rows right in {seconds:.0f} s"
        known = sum(len(result.known) for result in self.results)
        right = sum(len(result.now_right) for result in self.results)
        print(f"{counts}; {known} parts known to be wrong, {right} now right; figures: {self._file}")
        if wrong:
            print(f"WRONG: {', '.join(wrong)}")
        return int(bool(wrong))
