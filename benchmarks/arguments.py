"""The arguments of `python -m benchmarks`, checked before anything runs; a wrong one exits with status 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from diffcoll.collectives import COLLECTIVES

_MEASURED = (*COLLECTIVES, "trees", "overlap", "averager")


def checked(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the checked options; exits with status 2 if one is wrong or a package is missing."""
    command = argparse.ArgumentParser(
        prog="benchmarks", description="time, bytes and memory of forward + backward, next to PyTorch's own"
    )
    add = command.add_argument
    add("names", nargs="*", type=name_of(_MEASURED), metavar="NAME", help=f"of {', '.join(_MEASURED)}; default: all")
    add("--engine", choices=("torch", "mpi"), default="torch", help="mpi: run diffcoll on MPI; baselines on gloo")
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


def need(command: argparse.ArgumentParser, module: str, extra: str) -> None:
    """Exit with status 2 if a module is missing."""
    if find_spec(module) is None:
        remedy = f"from a checkout of diffcoll: pip install '.[{extra}]'"
        command.exit(2, f"{command.prog}: error: the module {module} is missing; {remedy}\n")


def number_from(least: int) -> Callable[[str], int]:
    """Return a type of arguments: integers that are not below `least`."""

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


def name_of(known: Sequence[str]) -> Callable[[str], str]:
    """Return a type of arguments: one of these names."""

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected names of {', '.join(known)}")
        return text

    return name


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a type of arguments: several of these names, separated by commas."""
    one = name_of(known)
    return lambda text: list(dict.fromkeys(one(word.strip()) for word in text.split(",") if word.strip()))


def writable(text: str) -> Path:
    """Return the path of a writable file."""
    path = Path(text)
    new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    if new:
        path.unlink()
    return path
