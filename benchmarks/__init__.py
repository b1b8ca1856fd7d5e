"""What measures the library: time, bytes and memory of its calls beside others', and a model of their costs.

    python -m benchmarks --help

Not installed; run in a checkout. README.md explains the tables.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    from benchmarks.arguments import checked

    options = checked(arguments)
    from benchmarks.bench import run

    return run(options)
