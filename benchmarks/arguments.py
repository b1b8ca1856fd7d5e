"""The arguments of `python -m benchmarks`, checked before anything runs; a wrong one exits with status 2."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from diffcoll.cli.arguments import name_of, names_of, need, number_from, writable
from diffcoll.cli.launch import ENGINES
from diffcoll.collectives import COLLECTIVES

_MEASURED = (*COLLECTIVES, "trees", "overlap", "stages", "averager", "simulate", "ranks")
_PICTURES = ".png, .svg or .pdf"


def checked(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the checked options; exits with status 2 if one is wrong or a package is missing."""
    command = argparse.ArgumentParser(
        prog="benchmarks", description="time, bytes and memory of forward + backward, next to PyTorch's own"
    )
    add = command.add_argument
    add("names", nargs="*", type=name_of(_MEASURED), metavar="NAME", help=f"of {', '.join(_MEASURED)}; default: all")
    add("--engine", choices=ENGINES, default="torch", help="mpi: run diffcoll on MPI; baselines on gloo")
    add("--world-size", type=number_from(1), default=2, metavar="N")
    add("--only", type=names_of(_MEASURED), default=[], metavar="NAMES", help="the same, separated by commas")
    add("--rounds", type=number_from(1), default=15)
    add("--fit", action="store_true", help="fit latency and bandwidth of collectives; predict a size, and more ranks")
    add("--json", type=writable, metavar="FILE", help="what collectives took; schema: benchmarks/README.md")
    add("--plot", type=_picture, metavar="FILE", help=f"a picture of the ratios over size; ends in {_PICTURES}")
    options = command.parse_args(arguments)
    _check(options, command)
    for module, extra, is_used in (
        ("rich", "test", True),
        ("cloudpickle", "test", True),
        ("mpi4py", "mpi", options.engine == "mpi"),
        ("matplotlib", "examples", options.plot),
    ):
        if is_used:
            need(command, module, extra)
    return options


def _check(options: argparse.Namespace, command: argparse.ArgumentParser) -> None:
    options.names = options.names + options.only or [*(COLLECTIVES if options.fit else _MEASURED)]
    if options.json and options.plot and options.json.resolve() == options.plot.resolve():
        command.error(f"argument --plot: got {str(options.plot)!r}, the file of --json too; pass another file")
    others = [name for name in options.names if name not in COLLECTIVES]
    if options.fit and others:
        command.error(f"argument --fit: got {', '.join(others)} too, expected collectives only")
    if options.fit and options.world_size == 1:
        command.error("argument --fit: got --world-size 1, expected at least 2: one rank sends no messages")
    if options.fit and options.plot:
        command.error("argument --plot: got --fit too, expected one of them; --fit measures no other system")
    for name, file in (("--json", options.json), ("--plot", options.plot)):
        if file and len(others) == len(options.names):
            got = f"argument {name}: got only {', '.join(others)}"
            command.error(f"{got}, expected a collective among the names; only those are written")


def _picture(text: str) -> Path:
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a file name that ends in {_PICTURES}")
    return writable(text)
