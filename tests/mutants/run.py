"""Run the tests on each mutant until one notices it: `make mutants`, or `make mutants ARGS="-k averaging"`.

Each mutant runs in a copy of the tree, in processes of its own: first the tests that it names, then those of the
suite. Results are kept in build/mutants.jsonl, a line a mutant. One that was killed does not run again while it and
its file are the same: an interrupted run goes on where it stopped.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutants.mutant import ROOT, Mutant, mutants_of

RESULTS = ROOT / "build" / "mutants.jsonl"
#: Seconds of one test, of the tests that a mutant names, and of the suite.
TEST, LIKELY, SUITE = 60, 300, 1500
#: The suite, but for the test that a mutant applies to the code as it is.
ALL_TESTS = ("-m", "not slow", "-n", "2", "--dist", "worksteal", "--ignore", "tests/test_mutants.py")
LIVES, NOT_RUN = "LIVES", "pytest could not run the tests that the mutant names"


def all_mutants() -> list[Mutant]:
    """Return the mutants of every area."""
    return [mutant for path in sorted(Path(__file__).parent.glob("*.diff")) for mutant in mutants_of(path)]


def key(mutant: Mutant) -> str:
    """Return a digest of the mutant and of the mutated file."""
    return hashlib.sha256(repr((mutant, mutant.source())).encode()).hexdigest()[:16]


def copy_of_the_tree(folder: Path) -> Path:
    """Copy the files of the working tree that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def killer(tree: Path, arguments: list[str], limit: float) -> tuple[str | None, str]:
    """Run pytest until the first failure; return the test that failed, if any, and the end of the output."""
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, "--timeout", str(TEST), *arguments],
            cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        try:  # whatever hangs in the ranks that it has started
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        output.seek(0)
        text = output.read()
    if status == 0:
        return None, text[-500:]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", text, re.MULTILINE)
    if failed:
        return failed[-1], text[-2000:]
    if status in (2, 3, 4, 5):  # 2: a file could not be collected
        return NOT_RUN, text[-2000:]
    started = re.findall(r"^(\S+::[^\n]*?)(?: (?:PASSED|SKIPPED|XFAIL).*)?$", text, re.MULTILINE)
    how = "hangs" if status in (None, 1) else f"exit {status}"
    return f"{started[-1] if started else 'collection'} ({how})", text[-2000:]


def run(mutant: Mutant, tree: Path, *, suite: bool) -> dict[str, object]:
    """Return the row of one mutant."""
    path = tree / "diffcoll" / mutant.file
    original = path.read_text(encoding="utf-8")
    began = time.monotonic()
    try:
        path.write_text(mutant.source(), encoding="utf-8")
        test, text = killer(tree, shlex.split(mutant.tests), LIKELY)
        if test is None and suite:
            test, text = killer(tree, [*ALL_TESTS], SUITE)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, (time.time() + 1, time.time() + 1))  # no bytecode of the mutant is taken for the original's
    seconds = round(time.monotonic() - began, 1)
    test = test or LIVES
    row = {"key": key(mutant), "name": mutant.name, "promise": mutant.promise, "seconds": seconds, "test": test}
    return row | {"output": text if test in (LIVES, NOT_RUN) else ""}


def read_results() -> dict[str, dict[str, object]]:
    """Return the rows of earlier runs by their keys."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def main() -> int:
    """Run the selected mutants; the exit status is 1 if one lives."""
    parser = argparse.ArgumentParser(prog="make mutants ARGS=…", description=__doc__)
    parser.add_argument(
        "-k", default="", metavar="WORDS", help="only mutants whose name or promise has one of these words"
    )
    parser.add_argument("-n", type=int, default=2, metavar="N", help="mutants at a time (default: 2)")
    parser.add_argument("--again", action="store_true", help="also those that have run")
    parser.add_argument("--likely", action="store_true", help="only the tests that a mutant names, not the suite")
    arguments = parser.parse_args()
    words = arguments.k.split()
    chosen = [m for m in all_mutants() if not words or any(word in f"{m.name} {m.promise}" for word in words)]
    found = read_results()
    left = [m for m in chosen if arguments.again or _lives(found.get(key(m)))]
    print(f"{len(chosen)} mutants, {len(chosen) - len(left)} of them run before", flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(arguments.n) as threads:
        for i in range(arguments.n):
            trees.put(copy_of_the_tree(Path(folder, str(i))))

        def row(mutant: Mutant) -> dict[str, object]:
            tree = trees.get()
            try:
                return run(mutant, tree, suite=not arguments.likely)
            finally:
                trees.put(tree)

        for done in concurrent.futures.as_completed([threads.submit(row, m) for m in left]):
            result = done.result()
            found[str(result["key"])] = result
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{result['seconds']:6} s  {result['name']}\n          {result['test']}", flush=True)
    alive = [m.name for m in chosen if _lives(found[key(m)])]
    print("\n".join([f"{len(chosen) - len(alive)} of {len(chosen)} mutants killed", *alive]))
    return int(bool(alive))


def _lives(row: dict[str, object] | None) -> bool:
    """Whether no test is known to notice: such a mutant runs again, since a test may have been added."""
    return row is None or row["test"] in (LIVES, NOT_RUN)


if __name__ == "__main__":
    sys.exit(main())
