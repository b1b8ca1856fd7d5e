"""What a row gets, and the process that runs it on one rank: python -m gpu.rank FILE ROW RANK FOLDER DEVICE."""

import contextlib
import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gpu.row import rows


@dataclass
class Part:
    """What was found in one part of a row."""

    name: str
    #: Why it is expected to be wrong; "": it is not.
    known: str = ""
    wrong: list[str] = field(default_factory=list)
    checks: int = 0
    #: The check whose value is nearest to its bound, or furthest above it.
    nearest: str = ""
    share: float = -1.0
    figures: list[str] = field(default_factory=list)


class Rank:
    """This rank of a row: `r` of `n`, with tensors on `device`."""

    def __init__(self, r, n, folder, device):
        self.r, self.n, self.device, self.folder = r, n, device, Path(folder)
        self.on_gpu = device == "cuda"
        self._part = Part("")

    def join(self, timeout=60.0):
        """Join the default group, whose ranks find each other through a file."""
        if self.on_gpu:
            torch.cuda.set_device(0)
        dist.init_process_group(
            "nccl" if self.on_gpu else "gloo",
            init_method=f"file://{self.folder}/store",
            rank=self.r,
            world_size=self.n,
            timeout=timedelta(seconds=timeout),
        )

    @contextlib.contextmanager
    def part(self, name, known="", seen=""):
        """Report what is checked within under this name; an exception ends the part, not the row.

        Args:
            name: what the table calls it.
            known: why it is expected to be wrong on the GPU today. Such a part does not fail the row, and is reported
                as "now right" once it is right.
            seen: what the text of the error is expected to contain; another one is not known.
        """
        outer, self._part = self._part, Part(name, known if self.on_gpu else "")
        self.write(begin=name)
        try:
            yield self._part
        except Exception as error:
            self._part.wrong.append(in_short(error))
        finally:
            if not all(seen in text for text in self._part.wrong):
                self._part.known = ""
            self.write(**asdict(self._part))
            self._part = outer

    def check(self, name, value, at_most):
        """Check a number, on the CPU too."""
        value, part = float(value), self._part
        part.checks += 1
        share = value / at_most if math.isfinite(value) else math.inf
        if share > part.share:
            part.share, part.nearest = share, f"{name} {value:.1e} of {at_most:.0e}"
        if not share <= 1:
            part.wrong.append(f"{name}: {value:.2e}, expected at most {at_most:.0e}")

    def goal(self, name, value, at_most, known=""):
        """Report a time, a ratio or a number of bytes; on the GPU compare it with a bound, in a part of its own."""
        self.figure(name, value)
        with self.part(f"{self._part.name}: {name}" if self._part.name else name, known):
            if self.on_gpu and not value <= at_most:
                self._part.wrong.append(f"{value:.3g}, expected at most {at_most:.3g}")

    def figure(self, name, value):
        """Report a number or a text."""
        self._part.figures.append(f"{name} {value if isinstance(value, str) else format(value, '.3g')}")

    def write(self, **found):
        """Append a line to this rank's file, so that it is there whatever ends the process."""
        with open(self.folder / f"{self.r}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")

    def wait(self):
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()


def in_short(error):
    """Return an error in one line, with the last lines of this repository's code that raised the first cause."""
    first = error
    while first.__context__ is not None:
        first = first.__context__
    folders = [str(Path(__file__).parents[2] / folder) for folder in ("diffcoll", "tests")]
    frames = [f for f in traceback.extract_tb(first.__traceback__) if f.filename.startswith(tuple(folders))]
    frames = [f for f in frames if f.filename != __file__]
    places = ", ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[-3:])
    words, cause = (" ".join(f"{type(e).__name__}: {e}".split())[:300] for e in (error, first))
    words += "" if words == cause else f"; after {cause}"
    return f"{words} (at {places})" if places else words


def _end_with(parent):
    """Kill this process and what it has started once its parent has ended."""

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(file, name, r, folder, device):
    _end_with(os.getppid())
    row = rows(file)[name]
    faulthandler.dump_traceback_later(max(row.seconds - 5, 1), exit=False)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = Rank(int(r), row.ranks, folder, device)
    with rank.part("") as body:
        if not row.starts_ranks:
            rank.join(row.seconds)
        row.body(rank)
        if not row.starts_ranks:
            dist.barrier()
            rank.wait()
    rank.write(end=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(bool(body.wrong))  # without destroying a group in which other ranks may be stuck


if __name__ == "__main__":
    main(*sys.argv[1:])
