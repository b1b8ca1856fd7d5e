"""Command-line arguments, checked before anything runs; a wrong one exits with status 2.

Imports only torch and diffcoll, so that `diffcoll --help` works without the extras; for these it calls `find_spec`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import diffcoll
from diffcoll.cli.launch import ENGINES, launcher
from diffcoll.collectives import COLLECTIVES
from diffcoll.engines.devices import needs_accelerator


def checked(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the checked options; exits with status 2 if one is wrong or a package is missing."""
    as_written: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    about = "verify: are the library's gradients right? check: are those of my code?"
    parser = argparse.ArgumentParser(prog="diffcoll", description=about, epilog=_EXAMPLES, **as_written)
    parser.add_argument("--version", action="version", version=f"diffcoll {diffcoll.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    text = "check every collective against a reference gradient, on processes"
    verify = commands.add_parser("verify", help=text, description=_VERIFY, epilog=_VERIFY_EXAMPLES, **as_written)
    _add_verify(verify.add_argument)
    text = "check the gradients of your own distributed function"
    check = commands.add_parser("check", help=text, description=_CHECK, epilog=_CHECK_EXAMPLE, **as_written)
    _add_check(check.add_argument)
    options = parser.parse_args(arguments)
    if options.command == "check":
        _check_options(options, check)
    else:
        _verify_options(options, verify)
    return options


def _add_verify(add: Callable[..., object]) -> None:
    add("--world-size", type=number_from(1), nargs="+", metavar="N", help="default: 2 3")
    add("--only", type=names_of(COLLECTIVES), default=[], metavar="NAMES", help=f"of {', '.join(COLLECTIVES)}")
    add("--seed", type=number_from(0), default=0)
    add("--engine", choices=ENGINES, help="default: torch, and under mpiexec mpi")
    add("--backend", type=_backend, default="gloo", help="backend of torch.distributed; default: gloo")
    add("--json", type=writable, metavar="FILE")
    add("--html", type=writable, metavar="FILE", help="one self-contained page")


def _verify_options(options: argparse.Namespace, command: argparse.ArgumentParser) -> None:
    options.names, options.launched = options.only or [*COLLECTIVES], launcher(options.engine)
    if options.launched and options.world_size:
        command.error("argument --world-size: the launcher has set it already; leave it out")
    need(command, "rich", "test")
    if not options.launched:
        need(command, "cloudpickle", "test")
    if "mpi" in (options.engine, options.launched):
        need(command, "mpi4py", "mpi")


#: The text of `diffcoll --help` below the options.
_EXAMPLES = """\
examples:

  diffcoll verify                                          every collective; it takes a minute or two
  diffcoll verify --only all_gather --html page.html       one of them, and a page with the errors
  diffcoll check loss.py:my_loss --batch batch             is backward the derivative of my_loss?
  diffcoll check loss.py:my_loss --against on_one_process  do several ranks match one?
  diffcoll check --help                                    what loss.py has to contain"""

#: The text of `diffcoll verify --help` above and below its options.
_VERIFY = """\
Check the output, the gradient and the second order of every collective, on real processes, against the reference, in
which PyTorch derives the gradient. PyTorch's own functions are checked beside them. It takes a minute or two."""

_VERIFY_EXAMPLES = """\
examples:

  diffcoll verify
  diffcoll verify --only all_reduce,all_gather --world-size 3
  diffcoll verify --only shift --engine mpi
  diffcoll verify --only split --html report.html --json report.json
  torchrun --nproc-per-node 2 -m diffcoll verify --only scan

exit status: 0 if all is right, 1 if something is wrong, 2 if an argument is wrong or hosts cannot be reached"""

#: The text of `diffcoll check --help` above and below its options.
_CHECK = """\
Check that a function which runs on several ranks has right gradients. It may use diffcoll or torch.distributed.

With --against, the ranks are compared with the same loss or layer on one process, which gets the whole batch: its
value, the gradients of the inputs and of the parameters (--module), and the buffers. Without it, backward is compared
with finite differences of the sum of all ranks' losses, which need float64 (or --double).

A wrong result names the cause, the usual bug behind it, and the line of code that loses a gradient."""

_CHECK_EXAMPLE = """\
example, loss.py:

  import torch, diffcoll as dc

  def variance(x):             # of the rows of all ranks; x has this rank's rows
      total, count = dc.all_reduce((x.sum(0), torch.full((1,), len(x), dtype=x.dtype)))
      return ((x - total / count) ** 2).sum() / count.squeeze()

  def reference(x):            # the same on one process
      return x.var(0, unbiased=False).sum()

  def batch(rows):             # the arguments of both, here of one
      return torch.randn(rows, 3, dtype=torch.float64)

  diffcoll check loss:variance
  diffcoll check loss:variance --against reference --rank-reduction sum --html report.html

exit status: 0 if all is right, 1 if something is wrong, 2 if an argument is wrong or the function cannot be run"""


#: The options of `diffcoll check` that name something in the user's code.
_CHECK_NAMES = {
    "--against": (
        "the function on one process; module:name, file.py:name, or a name in TARGET's module, as the next two"
    ),
    "--batch": (
        "a function of a number of rows that returns data with so many rows: a tensor, a tuple (positional arguments) "
        "or a dict (keyword arguments). Called with the rows of all ranks if there is --against, else once for each "
        "rank; it must not seed. Default: `batch` in TARGET's module"
    ),
    "--module": (
        "the nn.Module, or the list of parameters, that the function uses: their gradients are compared too. Default: "
        "TARGET, if it is an nn.Module"
    ),
    "--placements": (
        "a dict: what each rank has of a tensor, as in the argument placements= of assert_matches_single_process (with "
        "--mesh) or of check_gradients. Default with --mesh: what DTensors and shapes say"
    ),
    "--shard": "with --mesh: a function of a copy of the module and the DeviceMesh that returns the rank's module",
}


def _add_check(add: Callable[..., object]) -> None:
    target = "package.module:name or path/to/file.py:name of a function; the current directory is searched first"
    sizes = "the rows of each rank, for each run; default: 4,4 5,3 0,5,3 2,2,2,2"
    on = "simulated, and backends for real processes: gloo, mpi, nccl; default: simulated gloo"
    rank_reduction = (
        "with --against: what is done with the losses and gradients of the ranks afterwards. mean: averaged, as by "
        "DDP; sum: summed; any: one of the two must be right. Default: mean. With --mesh: mean or sum by axis, such as "
        "dp=mean; along others all ranks have the same loss"
    )
    mesh = (
        "with --against, for a sharded program: the sizes of the axes, such as dp=2,tp=2, for each run; --sizes is "
        "then the rows of the whole batch, by default 8"
    )
    timeout = "seconds that each run may take, and the import of TARGET; default: 60"
    add("target", metavar="TARGET", help=target)
    for name, text in _CHECK_NAMES.items():
        add(name, metavar="NAME", help=text)
    add("--sizes", type=_rows, nargs="+", metavar="ROWS", help=sizes)
    add("--on", type=_ranks, nargs="+", metavar="RANKS", help=on)
    add("--mesh", type=_axes, nargs="+", metavar="AXES", help=mesh)
    add("--rank-reduction", metavar="HOW", help=rank_reduction)
    add("--constant", nargs="+", default=(), metavar="NAME", help="arguments that get no gradients, such as masks")
    add("--order", type=int, choices=(1, 2), default=1, help="2: check second-order gradients too")
    add("--double", action="store_true", help="convert the batch and the module to float64, or complex128")
    add("--seed", type=number_from(0), default=0, help="of all random numbers: module, batch, ranks")
    add("--timeout", type=number_from(1), default=60, metavar="S", help=timeout)
    add("--html", type=writable, metavar="FILE", help="one self-contained page, with a picture of the errors")


def _check_options(options: argparse.Namespace, command: argparse.ArgumentParser) -> None:
    for name in ("rank_reduction", "mesh", "shard"):
        if getattr(options, name) and not options.against:
            got = f"argument --{name.replace('_', '-')}: got {getattr(options, name)!r} without --against"
            command.error(f"{got}, expected both; --against names the function on one process")
    if options.shard and not options.mesh:
        command.error(f"argument --shard: got {options.shard!r} without --mesh, expected both, such as --mesh tp=2")
    if options.against and options.placements and not options.mesh:
        command.error(f"argument --placements: got {options.placements!r} without --mesh, expected both")
    if options.mesh and len(options.sizes or [()]) > 1:
        command.error("argument --sizes: got several runs with --mesh, expected the rows of the whole batch, such as 8")
    _check_reduction(options, command)
    if launcher(None):
        got = "got the environment of a launcher, such as WORLD_SIZE"
        command.error(f"{got}, expected none: the ranks are those of --on; run it without torchrun or mpiexec")
    options.on = list(dict.fromkeys(options.on or ["simulated", "gloo"]))
    need(command, "rich", "test")
    need(command, "cloudpickle", "test")
    if "mpi" in options.on:
        need(command, "mpi4py", "mpi")


def _check_reduction(options: argparse.Namespace, command: argparse.ArgumentParser) -> None:
    """Check --rank-reduction, and with --mesh replace it by a dict."""
    said = options.rank_reduction
    if said is None:
        return
    if options.mesh:
        pairs = [part.partition("=") for part in said.split(",")]
        axes = list(options.mesh[0])
        options.rank_reduction = {axis: how for axis, _, how in pairs if axis in axes and how in ("mean", "sum")}
        if len(options.rank_reduction) < len(pairs):
            expected = f"mean or sum once by axis of {', '.join(axes)}, such as {axes[0]}=mean"
            command.error(f"argument --rank-reduction: got {said!r} with --mesh, expected {expected}")
    elif said not in ("mean", "sum", "any"):
        command.error(f"argument --rank-reduction: got {said!r}, expected mean, sum or any")


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


def _rows(text: str) -> tuple[int, ...]:
    try:
        rows = tuple(int(word) for word in text.split(","))
    except ValueError:
        rows = ()
    if not any(rows) or min(rows) < 0:
        expected = "the rows of each rank, such as 4,4 or 5,0,3, not negative, not all zero"
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
    return rows


def _axes(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    sizes = {axis: int(n) for axis, _, n in pairs if axis and n.isdecimal() and int(n) > 0}
    if len(sizes) < len(pairs):
        expected = "the size of each axis once, such as tp=2 or dp=2,tp=2"
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
    return sizes


def _ranks(text: str) -> str:
    return text if text in ("simulated", "mpi") else _backend(text)


def _backend(text: str) -> str:
    real = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    known = [name for name in real if dist.is_backend_available(name)]
    for name in (part.rpartition(":")[2].lower() for part in text.split(",")):  # cpu:gloo,cuda:nccl
        if name not in known:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected one that PyTorch has here: {', '.join(known)}")
        if needs_accelerator(name) and not torch.accelerator.device_count():
            raise argparse.ArgumentTypeError(f"got {text!r}, but PyTorch finds no GPU or other accelerator")
    return text


def writable(text: str) -> Path:
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
