"""The command behind `make test-gpu`, see --help."""

import argparse
import signal
import sys
import tempfile
import time

from gpu.machine import Machine
from gpu.report import Report
from gpu.row import rows
from gpu.runner import run

signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def main():
    parser = argparse.ArgumentParser(prog="make test-gpu ARGS=", description="Run rows on one GPU; print their table.")
    parser.add_argument("-k", nargs="+", default=[""], metavar="WORD", help="rows whose name has one of these words")
    parser.add_argument("--left", action="store_true", help="keep the rows of the JSON file, and run those not in it")
    parser.add_argument("--json", metavar="FILE", help="default: build/gpu-cuda.json, on the CPU build/gpu-cpu.json")
    parser.add_argument("--nccl", metavar="FILE", help="an NCCL for rows of several ranks, packed by thin_nccl.py")
    parser.add_argument("--dry", action="store_true", help="on the CPU and gloo, as far as rows go")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    options = parser.parse_args()
    chosen = [row for name, row in rows().items() if any(word in name for word in options.k)]
    if options.list:
        print(*(row.name for row in chosen), sep="\n")
        return 0
    if not chosen:
        parser.error(f"no row has one of these words: {' '.join(options.k)}")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="test-gpu-") as folder:
        machine = Machine(options.dry, options.nccl, folder)
        report = Report(options.json or f"build/gpu-{machine.device}.json", machine, options.left)
        skipped = {}
        for row in chosen:
            if why := machine.skips(row):
                skipped.setdefault(why, []).append(row.name)
        left = [row for row in chosen if not machine.skips(row) and not report.has(row)]
        run(left, machine, folder, report.add)
        return report.end(skipped, time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(main())
