"""The command behind `make test-gpu`, see --help, and its table and JSON file."""

import argparse
import json
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from gpu.machine import Machine
from gpu.row import rows
from gpu.runner import run

WIDTH = 120


class Report:
    """Prints the table while rows end, and writes the JSON file after each."""

    def __init__(self, file, machine):
        self._file, self._facts, self.results = Path(file), machine.facts, {}
        print(", ".join(f"{name} {value}" for name, value in machine.facts.items()))
        self._print("row", "ranks", "s", "result")

    def _print(self, row, ranks, seconds, result):
        print(f"{row:<25} {ranks:>5} {seconds:>4}  {result}", flush=True)

    def add(self, result):
        """Print and write the result of a row."""
        self.results[f"{result['row']}-{result['ranks']}"] = result
        word = "WRONG" if result["wrong"] else "right"
        self._print(result["row"], result["ranks"], f"{result['seconds']:.0f}", f"{word}, {result['checks']} checks")
        texts = [("wrong", *found) for found in result["wrong"]]
        if self._facts["device"] != "CPU":
            texts += [("", *found) for found in result["figures"]]
        for words in texts:
            text = ": ".join(word for word in words if word)
            print(textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="      "), flush=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": self._facts, "rows": [*self.results.values()]}
        self._file.write_text(json.dumps(content, indent=1), encoding="utf-8")

    def end(self, skipped, seconds):
        """Print the last lines; return the exit status: 1 if a row is wrong."""
        for why, names in skipped.items():
            print(textwrap.fill(f"skipped: {', '.join(names)}: {why}", WIDTH, subsequent_indent="    "))
        wrong = [name for name, result in self.results.items() if result["wrong"]]
        print(f"{len(self.results) - len(wrong)} of {len(self.results)} rows right in {seconds:.0f} s: {self._file}")
        if wrong:
            print(f"WRONG: {', '.join(wrong)}")
        return int(bool(wrong))


def main():
    parser = argparse.ArgumentParser(prog="make test-gpu ARGS=", description="Run rows on one GPU; print their table.")
    parser.add_argument("-k", nargs="+", default=[""], metavar="WORD", help="rows whose name has one of these words")
    parser.add_argument("--json", metavar="FILE", help="default: build/gpu-cuda.json, on the CPU build/gpu-cpu.json")
    parser.add_argument("--nccl", metavar="FILE", help="an NCCL for rows of several ranks, packed by thin_nccl.py")
    parser.add_argument("--dry", action="store_true", help="on the CPU and gloo, as far as rows go")
    options = parser.parse_args()
    chosen = [row for name, row in rows().items() if any(word in name for word in options.k)]
    if not chosen:
        parser.error(f"no row has one of these words: {' '.join(options.k)}")
    begin, skipped, runnable = time.monotonic(), {}, []
    with tempfile.TemporaryDirectory(prefix="test-gpu-") as folder:
        machine = Machine(options.dry, options.nccl, folder)
        report = Report(options.json or f"build/gpu-{machine.device}.json", machine)
        for row in chosen:
            if why := machine.skips(row):
                skipped.setdefault(why, []).append(row.name)
            else:
                runnable.append(row)
        run(runnable, machine, folder, report.add)
        return report.end(skipped, time.monotonic() - begin)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
