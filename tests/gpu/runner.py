"""Runs rows: each in processes of its own, which are killed at its limit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event

#: Rows that run at once.
TOGETHER = 3
#: Seconds that the other ranks of a row have once one has died.
GRACE = 10.0


def run(rows, machine, folder, on_end):
    """Run rows and call on_end(result) after each. On a GPU those that measure times run last, one at a time."""
    stop = Event()
    alone = [row for row in rows if row.alone and machine.device == "cuda"]
    others = sorted((row for row in rows if row not in alone), key=lambda row: -row.seconds)
    for together, some in ((TOGETHER, others), (1, alone)):
        with ThreadPoolExecutor(together) as pool:
            jobs = [pool.submit(run_row, row, machine, folder, stop) for row in some]
            try:
                for job in as_completed(jobs):
                    on_end(job.result())
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise


def run_row(row, machine, folder, stop):
    """Run a row; return what it has found: what is wrong, and figures, are lists of [part, text]."""
    folder, begin = Path(tempfile.mkdtemp(dir=folder)), time.monotonic()
    limit, why, killed = begin + row.seconds, f"killed after {row.seconds:g} s", ""
    processes = [start_rank(row, r, machine, folder) for r in range(1 if row.starts_ranks else row.ranks)]
    while None in (codes := [process.poll() for process in processes]) and not killed:
        now = time.monotonic()
        if any(codes) and limit > now + GRACE:
            limit, why = now + GRACE, f"killed {GRACE:g} s after another rank had died"
        if now > limit or stop.is_set():
            killed = why
        time.sleep(0.05)
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
    seconds = round(time.monotonic() - begin, 1)
    return {"row": row.body.__name__, "ranks": row.ranks, "seconds": seconds, **written_by(processes, folder, killed)}


def start_rank(row, r, machine, folder):
    """Start the process of a rank."""
    command = [sys.executable, "-m", "gpu.rank", row.file, row.name, f"{r}", folder, machine.device]
    with open(folder / f"{r}.log", "w") as log:
        return subprocess.Popen(
            command,
            env=machine.environment(row.ranks),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that it is killed with what it has started
        )


def written_by(processes, folder, killed):
    """Return what the ranks have written, and how those ended that did not come to their end."""
    parts, ends = {}, []
    for r, process in enumerate(processes):
        file = folder / f"{r}.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        written = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        for part in (one for one in written if "name" in one):
            parts.setdefault(part["name"], []).append((r, part))
        if not any("end" in one for one in written):
            begun = [one["begin"] for one in written if one.get("begin")]
            how = killed or f"ended with status {process.returncode}"
            where = f" in or after {begun[-1]}" if begun else ""
            tail = _tail((folder / f"{r}.log").read_text(errors="replace"))
            ends.append(["", f"rank {r} {how}{where}: {tail}"])
    wrong = {name: [f"rank {r}: {text}" for r, part in each for text in part["wrong"]] for name, each in parts.items()}
    figures = {name: part["figures"] for name, each in parts.items() for r, part in each if r == 0}
    return {
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
