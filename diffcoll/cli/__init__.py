"""The command `diffcoll`: `verify` and `check` check gradients."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from diffcoll.cli.arguments import checked

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = checked(arguments)
    status: int = import_module(f"diffcoll.cli.{options.command}").run(options)
    return status
