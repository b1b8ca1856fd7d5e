"""The arguments of `python -m benchmarks`, checked before anything runs; a wrong one exits with status 2."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from diffcoll.cli.arguments import name_of, names_of, need, number_from, writable
from diffcoll.cli.launch import ENGINES
from diffcoll.collectives import COLLECTIVES

_MEASURED = (*COLLECTIVES, "trees", "overlap", "averager")


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
    add("--json", type=writable, metavar="FILE", help="what collectives took; schema: benchmarks/README.md")
    options = command.parse_args(arguments)
    _check(options, command)
    for module, extra, is_used in (
        ("rich", "test", True),
        ("cloudpickle", "test", True),
        ("mpi4py", "mpi", options.engine == "mpi"),
    ):
        if is_used:
            need(command, module, extra)
    return options


def _check(options: argparse.Namespace, command: argparse.ArgumentParser) -> None:
    options.names = options.names + options.only or [*_MEASURED]
    others = [name for name in options.names if name not in COLLECTIVES]
    if options.json and len(others) == len(options.names):
        got = f"argument --json: got only {', '.join(others)}"
        command.error(f"{got}, expected a collective among the names; only those are written")
