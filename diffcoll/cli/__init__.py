"""The command `diffcoll`: `diffcoll verify` checks every collective on this machine, or on those of a launcher."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence

import diffcoll
from diffcoll.collectives import COLLECTIVES
from diffcoll.engines.devices import expect_device

__all__ = ["main"]

_VERIFY = """\
Check the output, the gradient and a second-order gradient of every collective, on real processes, against a reference
in which all ranks live in one autograd graph and PyTorch derives the gradients; forward mode and torch.compile too.

Starts processes on this machine. Under torchrun and under mpiexec it uses the processes that were launched."""

_EXAMPLES = """\
examples:

  diffcoll verify
  diffcoll verify --only all_reduce,all_gather --world-size 3
  torchrun --nproc-per-node 2 -m diffcoll verify --backend nccl
  mpiexec -n 2 python -m diffcoll verify --only shift

exit status: 0 if all is right, 1 if something is wrong, 2 if an argument is wrong"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="diffcoll", description="Are the library's gradients right on this machine?")
    parser.add_argument("--version", action="version", version=f"diffcoll {diffcoll.__version__}")
    verify = parser.add_subparsers(dest="command").add_parser(
        "verify",
        help="check every collective against a reference gradient, on processes",
        description=_VERIFY,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    listed = ", ".join(COLLECTIVES)
    verify.add_argument("--only", type=_names, default=[*COLLECTIVES], metavar="NAMES", help=f"of {listed}")
    verify.add_argument("--world-size", type=_ranks, nargs="+", metavar="N", help="numbers of processes; default: 2 3")
    verify.add_argument("--backend", default="gloo", help="of torch.distributed; default: gloo")
    verify.add_argument("--seed", type=int, default=0, help="of the data")
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    from diffcoll.cli import verify as command  # takes half a second, which --help need not wait for

    engine = command.launcher()
    if engine and options.world_size:
        verify.error("argument --world-size: the launcher has set it; leave it out")
    try:
        expect_device(options.backend, "diffcoll verify", "--backend")
    except (ValueError, RuntimeError) as error:
        verify.error(str(error))
    try:
        return command.run(options, engine)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in COLLECTIVES]:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}, expected one or more of {', '.join(COLLECTIVES)}")
    return names


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of processes")
    return int(text)
