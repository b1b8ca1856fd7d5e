"""Command-line arguments, checked before anything runs; a wrong one exits with status 2.

Imports only torch and diffcoll, so that `diffcoll --help` works without the extras; for these it calls `find_spec`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

import diffcoll
from diffcoll.cli.launch import ENGINES, launcher
from diffcoll.collectives import COLLECTIVES

__all__ = ["TRAINING", "checked"]

TRAINING = "digits"
_VERIFIED = (*COLLECTIVES, TRAINING)
_MEASURED = (*COLLECTIVES, "trees", "overlap", "averager")


def checked(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the checked options; exits with status 2 if one is wrong or a package is missing."""
    parser = argparse.ArgumentParser(
        prog="diffcoll", description="verify: are the gradients right? bench: what do they cost?"
    )
    parser.add_argument("--version", action="version", version=f"diffcoll {diffcoll.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    verify = commands.add_parser("verify", help="check every collective against a reference gradient, on processes")
    add = verify.add_argument
    add("--world-size", type=_number(1), nargs="+", metavar="N", help="default: 2 3; digits runs on the largest")
    add("--only", type=_names(_VERIFIED), default=[], metavar="NAMES", help=f"of {', '.join(_VERIFIED)}")
    add("--seed", type=_number(0), default=0)
    add("--engine", choices=ENGINES, help="default: torch, and under mpiexec mpi")
    add("--backend", type=_backend, default="gloo", help="backend of torch.distributed; default: gloo")
    add("--json", type=_file, metavar="FILE")
    add("--html", type=_file, metavar="FILE", help="one self-contained page")

    bench = commands.add_parser("bench", help="time, bytes and memory of forward + backward, next to PyTorch's own")
    add = bench.add_argument
    add("names", nargs="*", type=_name(_MEASURED), metavar="NAME", help=f"of {', '.join(_MEASURED)}; default: all")
    add("--engine", choices=ENGINES, default="torch", help="mpi: run diffcoll on MPI; baselines on gloo")
    add("--world-size", type=_number(1), default=2, metavar="N")
    add("--only", type=_names(_MEASURED), default=[], metavar="NAMES", help="the same, separated by commas")
    add("--rounds", type=_number(1), default=15)

    options = parser.parse_args(arguments)
    if options.command == "bench":
        options.names = options.names + options.only or [*_MEASURED]
        options.launched, command = None, bench
    else:
        options.names = options.only or [*_VERIFIED]
        options.launched, command = launcher(options.engine), verify
    if options.launched and options.world_size:
        command.error("argument --world-size: the launcher has set it already; leave it out")
    _need(command, "rich", "test")
    if not options.launched:
        _need(command, "cloudpickle", "test")
    if TRAINING in options.names:
        _need(command, "sklearn", "test")
    if "mpi" in (options.engine, options.launched):
        _need(command, "mpi4py", "mpi")
    return options


def _need(command: argparse.ArgumentParser, module: str, extra: str) -> None:
    if find_spec(module) is None:
        remedy = f"from a checkout of diffcoll: pip install '.[{extra}]'"
        command.exit(2, f"{command.prog}: error: the module {module} is missing; {remedy}\n")


def _number(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        most = 2**31 - 1
        try:
            value = int(text)
        except ValueError:
            value = -1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer from {least} to {most}")
        return value

    return number


def _name(known: Sequence[str]) -> Callable[[str], str]:
    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected names of {', '.join(known)}")
        return text

    return name


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    one = _name(known)
    return lambda text: list(dict.fromkeys(one(word.strip()) for word in text.split(",") if word.strip()))


def _backend(text: str) -> str:
    real = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    known = [name for name in real if dist.is_backend_available(name)]
    for name in (part.rpartition(":")[2].lower() for part in text.split(",")):  # cpu:gloo,cuda:nccl
        if name not in known:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected one that PyTorch has here: {', '.join(known)}")
        if name == "nccl" and not torch.cuda.device_count():
            raise argparse.ArgumentTypeError(f"got {text!r}, but PyTorch finds no GPU")
    return text


def _file(text: str) -> Path:
    """Return the path of a writable file; checked on rank 0 only, since the others may run on other hosts."""
    path = Path(text)
    ranks = [os.environ.get(name, "0") for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")]
    if any(rank != "0" for rank in ranks) or (path.exists() and not path.is_file() and not path.is_dir()):
        return path  # opening and closing a pipe would send end of file to its reader
    new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    if new:
        path.unlink()
    return path
