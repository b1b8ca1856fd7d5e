"""The command `diffcoll`: `verify` and `check` check gradients."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from diffcoll.cli.arguments import checked

__all__ = ["main"]

#: The exit status after Ctrl-C, as of a shell's commands.
INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = checked(arguments)
    try:
        status: int = import_module(f"diffcoll.cli.{options.command}").run(options)
    except KeyboardInterrupt:
        print(f"diffcoll {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status
