"""Runs rows: each in processes of its own, which are killed at its limit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu.report import Result, result_of

#: Ranks that run at once on a GPU.
TOGETHER = 6
#: Seconds that the other ranks of a row have once one has died.
GRACE = 10.0


class Job:
    """The processes of one row."""

    def __init__(self, row, machine, folder):
        self.row, self._folder = row, Path(tempfile.mkdtemp(dir=folder))
        self._begin, self._killed = time.monotonic(), ""
        self._died = None  # when a rank has ended with an error
        self._processes = [self._start(r, machine) for r in range(1 if row.starts_ranks else row.ranks)]

    def _start(self, r, machine):
        command = [sys.executable, "-m", "gpu.rank", self.row.file, self.row.name, f"{r}", self._folder, machine.device]
        with open(self._folder / f"{r}.log", "w") as log:
            return subprocess.Popen(
                command,
                env=machine.environment(self.row.ranks),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that it is killed with what it has started
            )

    def has_ended(self):
        """Return whether all processes have ended; kill them if their time is over."""
        codes = [process.poll() for process in self._processes]
        now = time.monotonic()
        if None not in codes:
            return True
        if self._died is None and any(codes):
            self._died = now
        if now - self._begin > self.row.seconds:
            self._killed = f"killed after {self.row.seconds:g} s"
        elif self._died is not None and now - self._died > GRACE:
            self._killed = f"killed {GRACE:g} s after another rank had died"
        if self._killed:
            self.kill()
            return True
        return False

    def kill(self):
        """Kill the processes and what they have started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def result(self) -> Result:
        """Return what the ranks have written, once all have ended."""
        self.kill()  # what the row has started may still run
        lines, logs, codes = [], [], []
        for r, process in enumerate(self._processes):
            file = self._folder / f"{r}.jsonl"
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            lines.append([json.loads(line) for line in text.splitlines() if line.endswith("}")])
            logs.append((self._folder / f"{r}.log").read_text(errors="replace"))
            codes.append(process.returncode)
        return result_of(self.row, time.monotonic() - self._begin, self._killed, codes, lines, logs)


def run(rows, machine, folder, on_end):
    """Run rows and call on_end(result) after each. Those that measure times run last, one at a time."""
    waiting = sorted((row for row in rows if not _alone(row, machine)), key=lambda row: -row.seconds)
    waiting += [row for row in rows if _alone(row, machine)]
    limit = TOGETHER if machine.device == "cuda" else 2 * os.cpu_count()  # they often wait
    running = []
    try:
        while waiting or running:
            while waiting and _fits(waiting[0], [job.row for job in running], machine, limit):
                running.append(Job(waiting.pop(0), machine, folder))
            time.sleep(0.05)
            for job in [job for job in running if job.has_ended()]:
                running.remove(job)
                on_end(job.result())
    finally:
        for job in running:
            job.kill()


def _alone(row, machine):
    return row.alone and machine.device == "cuda"


def _fits(row, running, machine, limit):
    if not running:
        return True
    if any(_alone(other, machine) for other in (row, *running)):
        return False
    return row.ranks + sum(other.ranks for other in running) <= limit
