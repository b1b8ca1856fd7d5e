"""`diffcoll check`: check the gradients of a user's function, against one process or against finite differences."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn
from typing_extensions import override

from diffcoll.cli.importing import NotUsableError, called, named, place
from diffcoll.cli.page import STYLES, page
from diffcoll.core.trees import tree_flatten
from diffcoll.engines.process_state import seed_rank
from diffcoll.testing.gradients import assert_matches_single_process, check_gradients
from diffcoll.testing.harness.packing import arguments_of
from diffcoll.testing.harness.parts import refuse_equal_ranks
from diffcoll.testing.harness.report import GradientMismatchError, Report, Table, UncheckedWarning, title_of
from diffcoll.testing.harness.runs import Runs
from diffcoll.testing.harness.variables import shared
from diffcoll.testing.processes import in_words, start_server

_DEFAULTS = inspect.signature(assert_matches_single_process).parameters


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    path = list(sys.path)
    if set(options.on) - {"simulated"}:
        start_server()  # in parallel with the import of the user's module and the runs on simulated ranks
    try:
        seed_rank(options.seed, 0)
        subject = _subject(options)
        seed_rank(options.seed, 0)  # so the data do not depend on what the import drew
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncheckedWarning)  # the report has the notes
            try:
                report = _against(subject, options) if options.against else _Alone(subject, options).report(options.on)
            except GradientMismatchError as error:
                report = error.report
    except (Exception, SystemExit) as error:  # a function that ends the program has not been checked
        text = str(error) if isinstance(error, NotUsableError) else in_words(error)
        print(f"diffcoll check: error: {text}", file=sys.stderr)
        return 2
    finally:
        sys.path[:] = path
    written = not options.html or _written(options, report)
    _show(report)
    return 2 if not written else 0 if report.ok else 1


# ── what is checked ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Subject:
    """What the command line names."""

    fn: Callable[..., Any]
    #: The function on one process, or None.
    single: Callable[..., Any] | None
    module: Any
    batch: Callable[[int], Any]
    sizes: Sequence[tuple[int, ...]]
    placements: Any = None
    shard: Callable[..., Any] | None = None


def _subject(options: argparse.Namespace) -> _Subject:
    find = functools.partial(named, timeout=options.timeout)
    home, fn = find(options.target, "TARGET")
    _expect_function(fn, "TARGET", options.target)
    single = module = None
    if options.against:
        _, single = find(options.against, "--against", home)
        _expect_function(single, "--against", options.against)
    if options.module:
        _, module = find(options.module, "--module", home)
        module = list(module) if isinstance(module, Iterator) else module  # such as model.parameters()
    else:
        module = _own_module(fn, single)
    more = {
        name: find(given, f"--{name}", home)[1] for name in ("placements", "shard") if (given := getattr(options, name))
    }
    if not options.batch and not hasattr(home, "batch"):
        remedy = (
            f"define it, such as `def batch(rows): return torch.randn(rows, 3)` for {called(fn)}(x), or pass --batch"
        )
        expected = f"a function `batch` in {place(home)}, of a number of rows"
        raise NotUsableError("--batch", "nothing", expected, remedy)
    _, batch = find(options.batch or "batch", "--batch", home)
    _expect_function(batch, "--batch", options.batch or "batch")
    if options.double:
        for tensor in _tensors(module):  # in place, since the function may refer to them
            tensor.data = tensor.data.to(_double(tensor.dtype))
    sizes = options.sizes or _DEFAULTS["sizes"].default
    first = (None,) if options.shard else ()  # the module
    return _Subject(fn, single, module, functools.partial(_data, fn, first, batch, options.double), sizes, **more)


def _expect_function(found: Any, argument: str, text: str) -> None:
    if inspect.isclass(found):
        remedy = "name an instance, or a function that makes one and calls it"
        raise NotUsableError(argument, f"the class {text!r}", "a function", remedy)
    if not callable(found):
        raise NotUsableError(argument, f"{text!r}, of type {type(found).__name__}", "a function")


def _own_module(fn: Any, single: Any) -> nn.Module | None:
    """Return the function itself if it is a module whose gradients can be compared."""
    if not isinstance(fn, nn.Module):
        return None
    if single in (None, fn):
        return fn
    if any(p.requires_grad for p in fn.parameters()):
        expected = "the module or the parameters that TARGET and --against share"
        raise NotUsableError("--module", "nothing, for a TARGET with parameters", expected)
    return None


def _data(fn: Callable[..., Any], first: tuple[Any, ...], batch: Callable[[int], Any], double: bool, rows: int) -> Any:
    """Return the user's batch, as arguments that fn can be called with."""
    found = batch(rows)
    if double:
        leaves, rebuild = tree_flatten(found)
        found = rebuild([leaf.to(_double(leaf.dtype)) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    args, kwargs = arguments_of(found)
    signature = _signature(fn)
    try:
        signature.bind(*first, *args, **kwargs)
    except TypeError as error:
        words = [type(a).__name__ for a in args] + [f"{key}={type(a).__name__}" for key, a in kwargs.items()]
        expected = f"the arguments of {called(fn)}{signature}"
        remedy = f"{error}; return a tuple of positional or a dict of keyword arguments"
        got = f"({', '.join(words)}) from {called(batch)}({rows})"
        raise NotUsableError("--batch", got, expected, remedy) from None
    return found


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except ValueError:  # a builtin has none
        return inspect.signature(lambda *args, **kwargs: None)


def _double(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


def _tensors(module: Any) -> list[Tensor]:
    """Return the tensors of a module or a list; what is neither is refused by the check."""
    if isinstance(module, nn.Module):
        return [*module.parameters(), *module.buffers()]
    return [x for x in module if isinstance(x, Tensor)] if isinstance(module, Iterable) else []


# ── the checks ───────────────────────────────────────────────────────────────────────────────────────────


def _against(subject: _Subject, options: argparse.Namespace) -> Report:
    assert subject.single is not None
    if options.mesh:
        batch = subject.batch(sum(subject.sizes[0]))
        more = {"mesh": options.mesh, "shard": subject.shard, "placements": subject.placements}
    else:
        batch, more = subject.batch, {"sizes": subject.sizes}
    how = {**more, **_how(subject, options), "rank_reduction": options.rank_reduction, "on": options.on}
    return assert_matches_single_process(subject.fn, subject.single, batch, **how)


def _how(subject: _Subject, options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that both checks have."""
    names = ("order", "constant", "seed", "timeout")
    return {"module": subject.module, **{name: getattr(options, name) for name in names}}


class _Alone(Runs[Report]):
    """Runs of `check_gradients`, one for each kind of ranks and the rows of each rank."""

    def __init__(self, subject: _Subject, options: argparse.Namespace) -> None:
        self._how = {**_how(subject, options), "placements": subject.placements}
        self._calls = {rows: _calls(subject, [subject.batch(k) for k in rows]) for rows in subject.sizes}

    def report(self, on: Sequence[str]) -> Report:
        """Return one report for all kinds and sizes of ranks."""
        reports = self.runs([(rows,) for rows in self._calls], on)

        def merged(name: str) -> tuple[Any, ...]:
            return tuple(dict.fromkeys(entry for report in reports for entry in getattr(report, name)))

        tables = tuple(table for report in reports for table in report.tables)
        return Report("check_gradients", tables, merged("causes"), merged("cuts"), merged("notes"))

    def run(self, on: str, rows: tuple[int, ...]) -> Report:
        """Return the report, right or wrong."""
        fn, per_rank = self._calls[rows]
        try:
            report = check_gradients(fn, *per_rank, on=[on], **self._how)
        except GradientMismatchError as error:
            report = error.report
        return replace(report, tables=tuple(replace(t, title=f"{t.title}, {_in_words(rows)}") for t in report.tables))

    def of_results(self, on: str, rows: tuple[int, ...], **words: Any) -> Report:
        """Return the report of a run without results."""
        return Report("check_gradients", (Table(title_of(on, len(rows), _in_words(rows)), len(rows), **words),))

    @override
    def is_right(self, run: Report) -> bool:
        return run.ok


def _in_words(rows: Sequence[int]) -> str:
    return f"rows {', '.join(map(str, rows))}"


def _calls(subject: _Subject, parts: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return the function and the arguments of `check_gradients`, which it refuses in terms of the command line."""
    parts = shared(subject.placements, subject.fn, parts)
    given = [arguments_of(part) for part in parts]
    shapes = {(len(args), *sorted(kwargs)) for args, kwargs in given}
    if len(shapes) > 1:
        raise NotUsableError("--batch", "other arguments on other ranks", "the same on all ranks")
    _expect_double("--batch", [leaf for part in parts for leaf in tree_flatten(part)[0]])
    _expect_double("--module", _tensors(subject.module))
    try:
        if subject.placements is None:  # else check_gradients knows which may be equal
            refuse_equal_ranks("check", "batch", parts)
    except ValueError:
        got, expected = "the same numbers on two ranks", "different ones, since equal ranks hide wrong gradients"
        remedy = "do not seed in the function: it is called once for each rank, after --seed"
        raise NotUsableError("--batch", got, expected, remedy) from None
    names = list(given[0][1])
    per_rank = list(zip(*([*args, *(kwargs[n] for n in names)] for args, kwargs in given), strict=True))
    return _by_position(subject.fn, names) if names else subject.fn, per_rank


def _expect_double(argument: str, values: Iterable[Any]) -> None:
    for x in values:
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and x.dtype != _double(x.dtype):
            expected = "float64 or complex128, the precision that finite differences need"
            raise NotUsableError(argument, x.dtype, expected, "pass --double")


def _by_position(fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return fn with these keyword arguments as positional ones, under the same names."""

    @functools.wraps(fn, updated=())
    def call(*args: Any) -> Any:
        return fn(**dict(zip(names, args, strict=True)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    return call


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────


def _written(options: argparse.Namespace, report: Report) -> bool:
    """Write the page; returns whether it could be written."""
    try:
        options.html.write_text(page(report, options.target, _about(options)), encoding="utf-8")
    except OSError as error:  # the file was writable when the run began
        print(f"diffcoll check: error: {error}", file=sys.stderr)
        return False
    return True


def _show(report: Report) -> None:
    """Print the report, in color on a terminal; lines are not wrapped or cut."""
    console = Console()
    for line in report.lines():
        console.print(Text(line.text, style=STYLES[line.style]), soft_wrap=True)


def _about(options: argparse.Namespace) -> str:
    """Return in words what was compared, and where."""
    against = f"against {options.against}" if options.against else "against finite differences"
    more = [f"module {options.module}"] if options.module else []
    more += [f"mesh {', '.join(f'{axis}={n}' for axis, n in mesh.items())}" for mesh in options.mesh or ()]
    more += [f"placements {options.placements}"] if options.placements else []
    more += ["second order"] if options.order > 1 else []
    more += [f"on {', '.join(options.on)}", f"torch {torch.__version__}", f"seed {options.seed}"]
    return f"{options.target} {against}, data from {options.batch or 'batch'}, {', '.join(more)}"
