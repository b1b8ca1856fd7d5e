"""What a row gets, and the process that runs it on one rank: python -m gpu.rank FILE ROW RANK FOLDER DEVICE."""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gpu.row import rows


class Rank:
    """This rank of a row: `r` of `n`, with tensors on `device`. What it finds is in a file, a line for each part."""

    def __init__(self, r, n, folder, device):
        self.r, self.n, self.device, self.folder = r, n, device, Path(folder)
        self.on_gpu = device == "cuda"
        self._part = {}

    def join(self, backend="nccl", timeout=60.0):
        """Join the default group, whose ranks find each other through a file."""
        if self.on_gpu:
            torch.cuda.set_device(0)
        dist.init_process_group(
            backend if self.on_gpu else "gloo",
            init_method=f"file://{self.folder}/store",
            rank=self.r,
            world_size=self.n,
            timeout=timedelta(seconds=timeout),
        )

    @contextlib.contextmanager
    def part(self, name):
        """Report what is checked within under this name; an exception ends the part, not the row."""
        part = {"name": name, "wrong": [], "checks": 0, "figures": []}
        outer, self._part = self._part, part
        self.write(begin=name)
        try:
            yield part
        except Exception as error:
            part["wrong"].append(in_short(error))
        finally:
            self.write(**part)
            self._part = outer

    def check(self, name, value, at_most):
        """Check a number, on the CPU too."""
        self._part["checks"] += 1
        if not float(value) <= at_most:
            self._part["wrong"].append(f"{name}: {float(value):.2e}, expected at most {at_most:.1e}")

    def figure(self, name, value):
        """Report a number or a text."""
        self._part["figures"].append(f"{name} {value if isinstance(value, str) else format(value, '.3g')}")

    def goal(self, name, value, at_most):
        """Report a time, a ratio or a number of bytes; check it on the GPU."""
        self.figure(name, value)
        if self.on_gpu:
            self.check(name, value, at_most)

    @contextlib.contextmanager
    def refused(self, error, *words):
        """Check that what is called within raises this error, whose text has these words."""
        try:
            yield
        except error as caught:
            missing = [word for word in words if word not in str(caught)]
            assert not missing, f"{missing} are not in: {caught}"
        else:
            raise AssertionError("nothing was raised")

    def write(self, **found):
        """Append a line to this rank's file, so that it is there whatever ends the process."""
        with open(self.folder / f"{self.r}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")

    def wait(self):
        """Wait for the device."""
        if self.device != "cpu":
            torch.accelerator.synchronize()


def in_short(error):
    """Return an error in one line, with the last lines of this repository's code that raised it."""
    folders = [str(Path(__file__).parents[2] / folder) for folder in ("diffcoll", "tests")]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(tuple(folders))]
    places = ", ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[-3:] if f.filename != __file__)
    cause = error.__context__
    words = f"{type(error).__name__}: {error}" + (f"; after {type(cause).__name__}: {cause}" if cause else "")
    return " ".join(words.split())[:500] + (f" (at {places})" if places else "")


def main(file, name, r, folder, device):
    row = rows(file)[name]
    signal.alarm(int(row.seconds) + 30)  # ends this process if the runner is gone
    faulthandler.dump_traceback_later(max(row.seconds - 5, 1), exit=False)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = Rank(int(r), row.ranks, folder, device)
    with rank.part("") as body:
        if not row.starts_ranks:
            rank.join(row.backend, row.seconds)
        row.body(rank)
        if not row.starts_ranks:
            dist.barrier()
            rank.wait()
    rank.write(end=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(bool(body["wrong"]))  # without destroying a group in which other ranks may be stuck


if __name__ == "__main__":
    main(*sys.argv[1:])
