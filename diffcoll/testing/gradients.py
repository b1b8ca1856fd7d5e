"""Checks that the gradients of distributed code are right: against one process, or against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.testing._calls import per_rank_arguments
from diffcoll.testing.harness.checking import Checking
from diffcoll.testing.harness.matching import Matching
from diffcoll.testing.harness.measure import MeasurementPlan, leaves_of
from diffcoll.testing.harness.one_process import report_of
from diffcoll.testing.harness.packing import pack
from diffcoll.testing.harness.parts import input_names, marked, refuse_equal_ranks
from diffcoll.testing.harness.report import GradientMismatchError, Report, concluded
from diffcoll.testing.harness.variables import variables
from diffcoll.testing.launched import LAUNCHED, expect_launched
from diffcoll.testing.sharding.placements import parsed_mesh
from diffcoll.testing.sharding.program import Sharding, program
from diffcoll.testing.sharding.report import sharded_report

_MATCHES, _CHECK = "assert_matches_single_process", "check_gradients"
#: pytest shows the line of the test and the report, and not the code of a check that failed.
_hidden = methodcaller("errisinstance", GradientMismatchError)
#: What `compare` names, and the groups of quantities.
_COMPARED = {"values": ("value", "output"), "gradients": ("gradient", "second order"), "state": ("state",)}
_SIZES = ((4, 4), (5, 3), (0, 5, 3), (2, 2, 2, 2))


def assert_matches_single_process(
    distributed: Callable[..., Any],
    single: Callable[..., Any],
    batch: Any,
    *,
    module: nn.Module | Sequence[nn.Module | Tensor] | None = None,
    sizes: Sequence[Sequence[int]] | int = _SIZES,
    steps: int = 1,
    mesh: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    shard: Callable[[Any, Any], nn.Module] | None = None,
    placements: Mapping[str, Any] | None = None,
    rank_reduction: str | Mapping[str, str] | None = None,
    order: int = 1,
    constant: Sequence[str] = (),
    compare: Sequence[str] = ("values", "gradients", "state"),
    on: Sequence[str] = ("simulated", "gloo"),
    tolerance: float | None = None,
    seed: int = 0,
    timeout: float = 60,
    strict: bool = False,
) -> Report:
    """Tests of a distributed loss or layer: check that N ranks compute what one process computes on the whole batch.

    Compared are the value, the gradients of the inputs and of the parameters, the buffers and the values of parameters
    after the call, and with `order=2` a Hessian-vector product. A failure names the cause and the line of code that
    loses a gradient.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import assert_matches_single_process
    >>> def variance(x):  # of the rows of all ranks; the same code runs on one process
    ...     total, count = dc.all_reduce((x.sum(0), torch.full((1,), len(x), dtype=x.dtype)))
    ...     return ((x - total / count) ** 2).sum() / count.squeeze()
    >>> x = torch.randn(8, 3, dtype=torch.double)
    >>> report = assert_matches_single_process(variance, variance, x, rank_reduction="sum", on=["simulated"])
    >>> report.ok
    True

    Needs the `test` extra (cloudpickle).

    Args:
        distributed: called on each rank as distributed(*part) with the rank's rows of the batch. It may use diffcoll or
            torch.distributed. Returns a loss (0-d or of shape (1,)), or a tree of outputs with one row for each row of
            its input, in tuples, dicts, dataclasses; None and strings in it are left out.
        single: called as single(*whole) on one process, in a group of one rank.
        batch: a tensor, or a tuple (positional arguments) or dict (keyword arguments) of trees of tensors, which are
            split along dim 0; or a function that returns one for a number of rows. Other values are passed on as they
            are. All floating-point tensors get gradients.
        module: an `nn.Module`, or a list of modules and parameters, used by both functions. Each rank gets a copy of
            the functions and the module, as on real processes.
        sizes: for each run, the rows of each rank. The default has equal, uneven and empty ranks, two to four. A number
            multiplies it: code that works in chunks needs so many rows that a rank has several chunks.
        steps: how many calls in a row are checked, each with other rows, as the steps of a training loop: what a call
            keeps, such as a queue, shows in the next. The batch has so many times the rows, those of the first step
            first. Parameters are not updated between the steps, unless the functions do.
        mesh: for a sharded program, the sizes of the axes, such as {"dp": 2, "tp": 2}, or a list of such, each a run;
            instead of `sizes`.
        shard: called on each rank as shard(copy of module, DeviceMesh), returns the rank's module. Its tensors have the
            names that they have in the whole, and get the rank's pieces of the whole's numbers. Both functions are
            called with the module as their first argument.
        placements: what each rank has of an input, parameter, buffer or of the "output" (or "output[1]"), by its name
            or a pattern: `Shard`, `Replicate` or `Partial` of `torch.distributed.tensor`, or a function (whole, {axis:
            coordinate}) -> piece, by axis. An axis that is not named is Replicate. By default a batch is replicated,
            and the others are what their shapes and DTensors say. `Partial`: somebody sums it over the axis later.
        rank_reduction: what is done with the losses and gradients of the ranks afterwards. "mean", the default:
            averaged, as by DDP and by `GradientAverager`. "sum": summed. "any": one of the two must be right for all
            gradients. With a mesh: "mean" or "sum" by axis; along others every rank has the same loss.
        order: 2: check second order too.
        constant: names of arguments whose tensors get no gradients, such as masks, weights or a teacher's logits.
        compare: what is compared: "values" and outputs, "gradients", and the "state" of the module after the call. A
            loss whose value is N times too large while its gradients are exact passes with ["gradients"].
        on: "simulated", and backends for real processes: "gloo", "mpi", "nccl". A run that is wrong on one of them is
            not repeated on the next. "launched": the ranks of torch's default group, as torchrun starts them on one
            host or several. All of them call this with the same arguments, and get the same report.
        tolerance: the largest relative error that is right; by default 4e-10 for float64 and 2e-4 for float32. An
            error is relative to the largest element of a value, and of a gradient's row: rows below 1/100 of the
            largest one, and gradients below 1/1000 of the largest one, count as that. Where the last
            digits of its inputs change a gradient of one process by more, more is allowed.
        seed: of the random numbers of the ranks, of cotangents and of directions.
        timeout: seconds that each run on processes may take.
        strict: fail if there are notes, which say what could not be judged or was not compared, such as a gradient that
            is zero in every run. By default each note is an `UncheckedWarning`.

    Returns:
        The report; `print(report)` shows it.

    Raises:
        GradientMismatchError: something differs. An AssertionError, with the report as `report` and as its text.
        TypeError, ValueError: an argument is wrong, or two ranks have the same rows, which hides wrong gradients.
        Exception: what `distributed` raised in the first run, or `single`.
        CollectiveMismatchError: the launched ranks have other arguments.
        RuntimeError: "launched" without a process group, or after an error on some of its ranks alone.
    """
    __tracebackhide__ = _hidden
    _check_choices(_MATCHES, order, on, strict)
    groups, plan = _groups(compare), MeasurementPlan(order=order, seed=seed)
    if mesh is not None:
        _refuse_with_mesh(order, on, sizes, steps)
        functions = program(distributed, single, module, shard)
        _expect_launched(_MATCHES, on, "mesh", [each.size for each in parsed_mesh(mesh)])
        sharding = Sharding(_MATCHES, *functions, batch, rank_reduction, plan, timeout, constant, groups)
        report = sharded_report(sharding, tolerance, mesh, placements, on)
    else:
        for argument, given in (("shard", shard), ("placements", placements)):
            if given is not None:
                raise TypeError(message(_MATCHES, argument, "no mesh with it", 'mesh= too, such as {"tp": 2}'))
        rank_reduction = "mean" if rank_reduction is None else rank_reduction
        expect.choice(_MATCHES, "rank_reduction", rank_reduction, ("mean", "sum", "any"))
        functions = pack(_MATCHES, "distributed", distributed, module), pack(_MATCHES, "single", single, module)
        how = _MATCHES, *functions, batch, rank_reduction, plan, timeout, constant, groups
        matching = Matching(*how, steps=expect.integer(_MATCHES, "steps", steps, 1))
        report = report_of(matching, tolerance, _sizes(sizes, on), on)
    return concluded(report, strict)


def check_gradients(
    fn: Callable[..., Any],
    *per_rank: Sequence[Any],
    order: int = 1,
    constant: Sequence[str] = (),
    module: nn.Module | Sequence[nn.Module | Tensor] | None = None,
    placements: Mapping[str, Any] | None = None,
    on: Sequence[str] = ("simulated", "gloo"),
    seed: int = 0,
    timeout: float = 60,
    strict: bool = False,
) -> Report:
    """Tests without a reference: check that backward gives the gradient of the sum of all ranks' losses.

    Every rank's tensors are moved, and the losses of all ranks evaluated; the finite differences are compared with what
    backward gave on each rank. If fn uses diffcoll's collectives alone, the gradients that PyTorch derives from one
    graph of all ranks are compared too.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import check_gradients
    >>> xs = [torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 4.0]).double()]
    >>> report = check_gradients(lambda x, w: w * dc.all_reduce(x, "product").sum(), xs, [1.0, 10.0], on=["simulated"])
    >>> report.ok
    True

    Needs the `test` extra (cloudpickle).

    Args:
        fn: called as fn(a_r, b_r, …) on rank r. Returns the rank's loss, or a tree of outputs, which get random
            weights. It may use diffcoll or torch.distributed.
        per_rank: one or more sequences with one element for each rank, as for `simulate`. Floating-point tensors in
            them, in trees too, get gradients. They must be float64 or complex128.
        order: 2: check a Hessian-vector product too.
        constant: names of arguments whose tensors get no gradients, such as masks.
        module: an `nn.Module`, or a list of modules and parameters, used by fn. Each rank gets a copy of fn and the
            module. The gradient of a rank's parameters is compared with finite differences that move this rank's copy
            alone.
        placements: what all ranks share, by the name of an input or parameter, or a pattern, in the words of
            `torch.distributed.tensor`. `Replicate()`: one variable, which has the same numbers on all ranks, and of
            which each rank should have the whole gradient. `Partial()`: one variable, of which the sum of the ranks'
            gradients is the gradient. {"output": Replicate()}: every rank returns the same loss, as in tensor
            parallelism, and it counts once. By default each rank's tensors are variables of their own, and the losses
            are summed.
        on: "simulated", and backends for real processes: "gloo", "mpi"; "launched", as in
            `assert_matches_single_process`.
        seed: of the random numbers of the ranks, which start anew for each evaluation, and of directions.
        timeout: seconds that each run on processes may take.
        strict: as in `assert_matches_single_process`.

    Returns:
        The report; `print(report)` shows it.

    Raises:
        GradientMismatchError: something differs, or the loss is not differentiable at these inputs.
        TypeError, ValueError: an argument is wrong, or two ranks have the same tensors, which hides wrong gradients.
        Exception: what fn raised.
        CollectiveMismatchError, RuntimeError: of launched ranks, as in `assert_matches_single_process`.
    """
    __tracebackhide__ = _hidden
    _check_choices(_CHECK, order, on, strict)
    if placements is not None and order != 1:
        raise ValueError(message(_CHECK, "order", f"{order} with placements=", "1: second order is not checked there"))
    given: list[Any] = per_rank_arguments(_CHECK, per_rank)
    _expect_launched(_CHECK, on, "per_rank", [len(given)])
    parts = [marked(_CHECK, fn, part, constant) for part in given]
    packed = pack(_CHECK, "fn", fn, module)
    names = input_names(fn, parts[0])
    subject = packed.unpack()
    names += list(subject.parameters)
    if not names:
        raise ValueError(message(_CHECK, "per_rank", "no floating-point tensor", "at least one, or a module"))
    for r, part in enumerate(parts):
        mine = input_names(fn, part)
        if mine != names[: len(mine)] or len(mine) + len(subject.parameters) != len(names):
            got = f"tensors {mine} on rank {r}, {names[: len(names) - len(subject.parameters)]} on rank 0"
            raise ValueError(message(_CHECK, "per_rank", got, "the same tensors on every rank"))
    for t in [t for part in parts for t in leaves_of(part)] + list(subject.parameters.values()):
        if t.dtype not in (torch.float64, torch.complex128):
            remedy = "finite differences need the precision: pass x.double(), and module.double()"
            raise ValueError(message(_CHECK, "per_rank", str(t.dtype), "float64 or complex128", remedy))
    shared = variables(_CHECK, placements, fn, given, list(subject.parameters))
    refuse_equal_ranks(_CHECK, "per_rank", shared.own(fn, parts))
    plan = MeasurementPlan(order=order, seed=seed, alike=shared.once)
    return concluded(Checking(_CHECK, packed, parts, names, plan, timeout, shared).report(on), strict)


def _refuse_with_mesh(order: int, on: Sequence[str], sizes: object, steps: int) -> None:
    """Raise for arguments that mean nothing with a mesh."""
    if sizes is not _SIZES:
        raise TypeError(message(_MATCHES, "sizes", "sizes with mesh=", "one of the two", "a mesh says how many ranks"))
    if steps != 1:
        raise ValueError(message(_MATCHES, "steps", f"{steps} with mesh=", "1: one call is checked there"))
    if order != 1:
        raise ValueError(message(_MATCHES, "order", f"{order} with mesh=", "1: second order is not checked there"))
    if "mpi" in on:
        raise ValueError(message(_MATCHES, "on", '"mpi" with mesh=', '"simulated", "gloo" or "nccl"'))


def _groups(compare: Sequence[str]) -> list[str]:
    """Return the groups of quantities of the argument `compare`."""
    if isinstance(compare, str) or not compare:
        raise TypeError(message(_MATCHES, "compare", repr(compare), f"a sequence of {', '.join(_COMPARED)}"))
    for each in compare:
        expect.choice(_MATCHES, "compare", each, tuple(_COMPARED))
    return [group for each in compare for group in _COMPARED[each]]


def _check_choices(name: str, order: object, on: Sequence[str], strict: object) -> None:
    expect.choice(name, "order", order, (1, 2))
    expect.choice(name, "strict", strict, (False, True))
    if isinstance(on, str) or not on or not all(isinstance(kind, str) for kind in on):
        raise TypeError(message(name, "on", repr(on), 'a sequence of "simulated" and backends, such as ["simulated"]'))


def _expect_launched(name: str, on: Sequence[str], argument: str, sizes: Sequence[int]) -> None:
    if LAUNCHED in on:
        expect_launched(name, argument, sizes)


def _sizes(sizes: Sequence[Sequence[int]] | int, on: Sequence[str]) -> list[tuple[int, ...]]:
    expected = (
        "for each run the rows of each rank, such as [(4, 4), (5, 0, 3)], or a number that multiplies the default"
    )
    default: Sequence[Sequence[int]] = _SIZES
    if LAUNCHED in on:
        default = _of_as_many(expect_launched(_MATCHES, "sizes", []))
    if sizes is _SIZES:
        sizes = default
    if isinstance(sizes, int):
        times = expect.integer(_MATCHES, "sizes", sizes, 1)
        sizes = [tuple(times * k for k in each) for each in default]
    try:
        found = [tuple(index(k) for k in each) for each in sizes]
    except TypeError:
        raise TypeError(message(_MATCHES, "sizes", repr(sizes), expected)) from None
    if not found or any(sum(each) == 0 or min(each) < 0 for each in found):
        raise ValueError(message(_MATCHES, "sizes", repr(sizes), expected + ", not negative, not all zero"))
    _expect_launched(_MATCHES, on, "sizes", list(map(len, found)))
    return found


def _of_as_many(n: int) -> list[tuple[int, ...]]:
    """Return the default sizes on n ranks: as many rows on each, fewer on every second, none on every third."""
    each = [(4,), (5, 3), (0, 5, 3)]
    return [tuple(rows[r % len(rows)] for r in range(n)) for rows in each if len(rows) <= n]
