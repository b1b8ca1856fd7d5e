"""Checks that the gradients of distributed code are right: against one process, or against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.engines.devices import expect_device
from diffcoll.testing._calls import per_rank_arguments
from diffcoll.testing.harness.batch import rows_of
from diffcoll.testing.harness.compare import Asked
from diffcoll.testing.harness.differences import Checking
from diffcoll.testing.harness.explain import concluded
from diffcoll.testing.harness.layout import Placement, parsed_placements
from diffcoll.testing.harness.matching import Matching
from diffcoll.testing.harness.mesh import RANKS, parsed_ranks, ranks_of_rows
from diffcoll.testing.harness.packing import Subject, pack
from diffcoll.testing.harness.rank import Machines
from diffcoll.testing.harness.report import GradientMismatchError, Report

_MATCHES, _CHECK = "assert_matches_single_process", "check_gradients"
#: pytest shows the line of the test and the report, and not the code of a check that failed.
_hidden = methodcaller("errisinstance", GradientMismatchError)


def assert_matches_single_process(
    distributed: Callable[..., Any],
    single: Callable[..., Any],
    batch: Any,
    *,
    module: nn.Module | None = None,
    shard: Callable[[Any, Any], nn.Module] | None = None,
    ranks: Sequence[Any] | Mapping[str, int] | None = None,
    micro_batches: Sequence[int] | None = None,
    placements: Mapping[str, Placement] | None = None,
    losses: str | Mapping[str, str] = "mean",
    already_reduced: Sequence[str] | None = None,
    context: Callable[[], Any] | None = None,
    order: int = 1,
    on: Sequence[str] = ("simulated", "gloo"),
    dtype: torch.dtype | None = torch.double,
    tolerance: float | None = None,
    timeout: float = 60,
) -> Report:
    """Tests of a distributed loss, layer or training step: check that N ranks compute what one process computes.

    Compared are values and outputs, the gradients of the inputs and of the module's parameters, its buffers and the
    parameters that the call changes, and with `order=2` a Hessian-vector product. A function that calls backward
    itself, as a training step does, has its gradients at the optimizer's first step and what that did to the parameters
    compared.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import assert_matches_single_process
    >>> def variance(x):  # of the rows of all ranks; the same code runs on one process
    ...     total, count = dc.all_reduce((x.sum(0), torch.full((1,), len(x), dtype=x.dtype)))
    ...     return ((x - total / count) ** 2).sum() / count.squeeze()
    >>> x = torch.randn(8, 3)
    >>> report = assert_matches_single_process(variance, variance, x, losses="sum", on=["simulated"])
    >>> report.ok
    True

    Needs the `test` extra (cloudpickle).

    Args:
        distributed: called on each rank as distributed(*part), or distributed(module, *part), with the rank's part of
            the batch. It may use diffcoll or torch.distributed. Returns losses (0-d or of shape (1,)), outputs, or
            other numbers, in tuples, dicts, dataclasses; None and strings in it are left out.
        single: called as single(*whole), or single(module, *whole), on one process, in a group of one rank.
        batch: a tensor, or a tuple (positional arguments) or dict (keyword arguments) of trees of tensors; or, if
            ranks have rows, a function that returns one for a number of rows. All floating-point tensors get
            gradients, or, if any of them requires one, only those.
        module: what both functions get as their first argument. Each rank gets a copy of the functions and the module.
        shard: called on each rank as shard(copy of module, DeviceMesh), returns the rank's module. Which numbers of
            the whole the rank then has is found by itself, if `shard` moves numbers, and does not compute with them.
            Tensors that it makes anew need the names of the whole's, and shapes that can mean one piece only, or
            `placements`; ranks that have the same piece must start with the same numbers, and they get the whole's.
        ranks: the rows of each rank, such as (5, 3), or a mesh, such as {"dp": 2, "tp": 2}; or a list of such, each a
            run. None: equal, uneven and empty ranks, two to four, that divide the rows of the batch, such as
            ((4, 4), (5, 3), (0, 5, 3), (2, 2, 2, 2)); eight rows if the batch is a function. A run may have the rows of
            each micro-batch of each rank, such as [((2, 2), (4,)), ((1, 0, 3), ())]; an int is one micro-batch. Both
            functions then get a list of parts of the batch; on one process it has one part, the whole batch.
        micro_batches: on a mesh the rows of each micro-batch of every rank, such as (1, 3); the functions get lists.
        placements: on a mesh, what each rank has of an input, a parameter made anew, or the "output" (or "output[1]"),
            by its name or a pattern: `Shard`, `Replicate` or `Partial` of `torch.distributed.tensor`, or a function
            (whole, {axis: coordinate}) -> piece, by axis. An axis that is not named is Replicate. What is not named is
            found: outputs from their shapes. `Partial`: the ranks have parts of a sum that somebody sums later. A tuple
            of both, such as (tile, Partial()): an input whose pieces overlap.
        losses: how the ranks' losses combine: "mean" or "sum", over the axes along which the batch is divided; or by
            axis. Along other axes every rank has the same loss, and it counts once; {}: along all axes.
        already_reduced: axes over which the program itself reduces the gradients of parameters. Each rank's gradient
            must be the whole's then; over other axes the check combines them, and says so. DistributedDataParallel,
            FSDP and a DTensor's `Replicate()` say it by themselves.
        context: returns a context manager in which forward and backward run, such as `loss_parallel`.
        order: 2: check second order too.
        on: "simulated", and backends for real processes: "gloo", "nccl". What is wrong on one of them is run on the
            next only to see whether it is wrong there too.
        dtype: of the floating-point numbers of the batch and the module; None: as they are.
        tolerance: the largest relative error that is right; by default 4e-10 for float64 and 2e-4 for float32. An
            error is relative to the largest element of a value, and of a gradient's row: rows below 1/100 of the
            largest one, and gradients below 1/1000 of the largest one, count as that. A larger error is compared with
            what four runs of one process change with other last digits: it is right, wrong, or not decided.
        timeout: seconds that each run on processes may take.

    Returns:
        The report; `print(report)` shows it. `report.condition` says what the check has combined and the program has
        not, `report.not_compared` what it says nothing of. A loss that is off by exactly the size of an axis while all
        gradients are right is noted, and right; so is a metric that is the mean or the sum of the ranks'.

    Raises:
        GradientMismatchError: something differs. An AssertionError, with the report as `report` and as its text.
        TypeError, ValueError: an argument is wrong, a reducer's group is along no axes, nothing is divided along an
            axis, `shard` computes with numbers, rounding hides every gradient, or two ranks have the same rows, which
            hides wrong gradients.
        Exception: what `distributed` raised in the first run, or `single`.
    """
    __tracebackhide__ = _hidden
    _check_choices(_MATCHES, order, on)
    runs = parsed_ranks(ranks_of_rows(rows_of(batch)) if ranks is None else ranks, micro_batches)
    if runs[0].rows and shard is not None:
        raise TypeError(message(_MATCHES, "shard", "ranks that have rows", 'a mesh, such as ranks={"dp": 2}'))
    if isinstance(already_reduced, str):
        raise TypeError(
            message(_MATCHES, "already_reduced", repr(already_reduced), f'a sequence of axes, such as ["{RANKS}"]')
        )
    if shard is not None and module is None:
        raise TypeError(message(_MATCHES, "module", "None", "an nn.Module, which shard= gets"))
    axes = tuple(dict.fromkeys(axis for run in runs for axis in run.sizes))
    for axis, how in (losses if isinstance(losses, Mapping) else dict.fromkeys(axes, losses)).items():
        expect.choice(_MATCHES, "losses", axis, axes)
        expect.choice(_MATCHES, "losses", how, ("mean", "sum"))
    for axis in already_reduced or ():
        expect.choice(_MATCHES, "already_reduced", axis, axes)
    said = parsed_placements(_MATCHES, placements, axes)
    asked = Asked(batch, losses, tuple(already_reduced or ()), said, order, dtype, tolerance)
    with torch.inference_mode(False), closing(Machines(timeout, dtype)) as machines:
        of_ranks = pack(_MATCHES, "distributed", Subject(distributed, module, shard, context), dtype)
        of_one = pack(_MATCHES, "single", Subject(single, module), dtype)
        report = concluded(Matching(machines, of_ranks, of_one, asked), runs, on)
    if not report.ok:
        raise GradientMismatchError(report)
    return report


def check_gradients(
    fn: Callable[..., Any],
    *per_rank: Sequence[Any],
    module: nn.Module | None = None,
    placements: Mapping[str, Placement] | None = None,
    order: int = 1,
    on: Sequence[str] = ("simulated", "gloo"),
    timeout: float = 60,
) -> Report:
    """Tests without a reference: check that backward gives the gradient of the sum of all ranks' losses.

    Every rank's tensors are moved, and the losses of all ranks evaluated; the finite differences are compared with what
    backward gave on each rank.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import check_gradients
    >>> xs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    >>> report = check_gradients(lambda x, w: w * dc.all_reduce(x, "product").sum(), xs, [1.0, 10.0], on=["simulated"])
    >>> report.ok
    True

    Needs the `test` extra (cloudpickle).

    Args:
        fn: called as fn(a_r, b_r, …), or fn(module, a_r, b_r, …), on rank r. Returns the rank's loss, or a tree of
            outputs, which get random weights. It may use diffcoll or torch.distributed.
        per_rank: one or more sequences with one element for each rank, as for `simulate`. Floating-point tensors in
            them, in trees too, get gradients, or, if any of them requires one, only those; in float64 or complex128.
        module: fn's first argument. Each rank gets a copy of fn and the module, in float64. The gradient of a rank's
            parameters is compared with finite differences that move this rank's copy alone.
        placements: what all ranks share, by the name of an input or parameter, or a pattern, in the words of
            `torch.distributed.tensor`. `Replicate()`: one variable, which has the same numbers on all ranks, and of
            which each rank should have the whole gradient. `Partial()`: one variable, of which the sum of the ranks'
            gradients is the gradient. {"output": Replicate()}: every rank returns the same loss, as in tensor
            parallelism, and it counts once. By default each rank's tensors are variables of their own, and the losses
            are summed.
        order: 2: check a Hessian-vector product too.
        on: "simulated", and backends for real processes: "gloo"; as in `assert_matches_single_process`.
        timeout: seconds that each run on processes may take.

    Returns:
        The report; `print(report)` shows it.

    Raises:
        GradientMismatchError: something differs, or the loss is not differentiable at these inputs.
        TypeError, ValueError: an argument is wrong, the loss varies too fast for finite differences, or two ranks have
            the same tensors, which hides wrong gradients.
        Exception: what fn raised.
    """
    __tracebackhide__ = _hidden
    _check_choices(_CHECK, order, on)
    given: list[Any] = per_rank_arguments(_CHECK, per_rank)
    with torch.inference_mode(False), closing(Machines(timeout, torch.double)) as machines:
        packed = pack(_CHECK, "fn", Subject(fn, module), torch.double)
        checking = Checking(machines, packed, given, placements or {}, order)
        report = concluded(checking, [checking.ranks], on)
    if not report.ok:
        raise GradientMismatchError(report)
    return report


def _check_choices(name: str, order: object, on: Sequence[str]) -> None:
    expect.choice(name, "order", order, (1, 2))
    if isinstance(on, str) or not on or not all(isinstance(kind, str) for kind in on):
        raise TypeError(message(name, "on", repr(on), 'a sequence of "simulated" and backends, such as ["simulated"]'))
    for backend in (kind for kind in on if kind != "simulated"):
        expect_device(backend, name, "on", '"simulated" are ranks of this process')
