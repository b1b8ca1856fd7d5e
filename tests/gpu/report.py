"""The table and the JSON file of what rows have found."""

import json
import os
import textwrap
from pathlib import Path

WIDTH = 120


def line(row, ranks, seconds, result):
    """Return one line of the table."""
    return f"{row:<25} {ranks:>5} {seconds:>4}  {result}"


def lines(result, with_figures):
    """Yield a row's lines of the table."""
    kinds = ("wrong", "known", "now_right", *(["figures"] if with_figures else []))
    words = ["WRONG" if result["wrong"] else "right"]
    words += [f"{len(result[kind])} {kind}" for kind in kinds[:3] if result[kind]]
    words += [f"{result['checks']} checks"] if result["checks"] else []
    yield line(result["row"], result["ranks"], f"{result['seconds']:.0f}", ", ".join(words))
    for kind in kinds:
        for part, text in result[kind]:
            first = ": ".join(word for word in ("" if kind == "figures" else kind, part, text) if word)
            yield from textwrap.wrap(first, WIDTH, initial_indent="    ", subsequent_indent="      ")


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
            for result in before["rows"] if before["machine"] == self._facts else ():
                self.add(result)

    def add(self, result):
        """Print and write the result of a row."""
        self.results.append(result)
        print("\n".join(lines(result, self._facts["device"] != "CPU")), flush=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_name(f".{self._file.name}.new")
        new.write_text(json.dumps({"machine": self._facts, "rows": self.results}, indent=1), encoding="utf-8")
        os.replace(new, self._file)

    def has(self, row):
        """Return whether the row has a result."""
        return any(f"{result['row']}-{result['ranks']}" == row.name for result in self.results)

    def end(self, skipped, seconds):
        """Print the last lines; return the exit status: 1 if a row is wrong."""
        for why, names in skipped.items():
            print(*textwrap.wrap(f"skipped: {', '.join(names)}: {why}", WIDTH, subsequent_indent="    "), sep="\n")
        wrong = [f"{result['row']}-{result['ranks']}" for result in self.results if result["wrong"]]
        known, right = (sum(len(result[kind]) for result in self.results) for kind in ("known", "now_right"))
        print(f"{len(self.results) - len(wrong)} of {len(self.results)} rows right in {seconds:.0f} s; ", end="")
        print(f"{known} parts known to be wrong, {right} now right; figures: {self._file}")
        if wrong:
            print(f"WRONG: {', '.join(wrong)}")
        return int(bool(wrong))
