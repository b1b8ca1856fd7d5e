"""The command `diffcoll`: `verify` (is it right?) and `bench` (what does it cost?)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="diffcoll", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    try:
        from diffcoll.cli import bench, verify
    except ImportError as error:
        parser.exit(2, f"diffcoll: {error.name} is missing; pip install 'diffcoll[test]'\n")
    for command in (verify, bench):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status
