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

#: Ranks that run at once on a GPU.
TOGETHER = 6
#: Seconds that the other ranks of a row have once one has died.
GRACE = 10.0


class Job:
    """The processes of one row."""

    def __init__(self, row, machine, folder):
        self.row, self._folder = row, Path(tempfile.mkdtemp(dir=folder))
        self._begin, self._killed = time.monotonic(), ""
        self._limit, self._why = self._begin + row.seconds, f"killed after {row.seconds:g} s"
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
        codes, now = [process.poll() for process in self._processes], time.monotonic()
        if None not in codes:
            return True
        if any(codes) and self._limit > now + GRACE:
            self._limit, self._why = now + GRACE, f"killed {GRACE:g} s after another rank had died"
        if now > self._limit:
            self._killed = self._why
            self.kill()
        return bool(self._killed)

    def kill(self):
        """Kill the processes and what they have started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def result(self):
        """Return what the row has found, once all have ended; what is wrong, and figures, are lists of [part, text]."""
        self.kill()  # what the row has started may still run
        seconds, parts, ends = round(time.monotonic() - self._begin, 1), {}, []
        for r, process in enumerate(self._processes):
            file = self._folder / f"{r}.jsonl"
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            written = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            for part in (found for found in written if "name" in found):
                parts.setdefault(part["name"], []).append((r, part))
            if not any("end" in found for found in written):
                begun = [found["begin"] for found in written if found.get("begin")]
                how = self._killed or f"ended with status {process.returncode}"
                where = f" in or after {begun[-1]}" if begun else ""
                tail = _tail((self._folder / f"{r}.log").read_text(errors="replace"))
                ends.append(["", f"rank {r} {how}{where}: {tail}"])
        wrong = {
            name: [f"rank {r}: {text}" for r, part in each for text in part["wrong"]] for name, each in parts.items()
        }
        figures = {name: part["figures"] for name, each in parts.items() for r, part in each if r == 0}
        return {
            "row": self.row.body.__name__,
            "ranks": self.row.ranks,
            "seconds": seconds,
            "checks": sum(part["checks"] for each in parts.values() for _, part in each),
            "wrong": [[name, _first(texts)] for name, texts in wrong.items() if texts] + ends,
            "figures": [[name, ", ".join(texts)] for name, texts in figures.items() if texts],
        }


def _first(texts):
    return texts[0] if len(texts) == 1 else f"{texts[0]} (and {len(texts) - 1} more)"


def _tail(log):
    """Return where a rank hung, if it has said so at its limit, or the end of its output."""
    output, _, stacks = log.partition("Timeout (")
    frames = [text.strip() for text in stacks.splitlines() if "/tests/" in text or "/diffcoll/" in text]
    lines = frames[:5] or [text.strip() for text in output.strip().splitlines()[-12:]]
    return " | ".join(lines)[-900:] or "no output"


def run(rows, machine, folder, on_end):
    """Run rows and call on_end(result) after each. Those that measure times run last, one at a time."""
    on_gpu = machine.device == "cuda"
    waiting = sorted(rows, key=lambda row: (row.alone and on_gpu, -row.seconds))
    limit = TOGETHER if on_gpu else 2 * os.cpu_count()  # they often wait
    running = []

    def fits(row):
        others = [job.row for job in running]
        if on_gpu and others and any(other.alone for other in (row, *others)):
            return False
        return not others or row.ranks + sum(other.ranks for other in others) <= limit

    try:
        while waiting or running:
            while waiting and fits(waiting[0]):
                running.append(Job(waiting.pop(0), machine, folder))
            time.sleep(0.05)
            for job in [job for job in running if job.has_ended()]:
                running.remove(job)
                on_end(job.result())
    finally:
        for job in running:
            job.kill()
