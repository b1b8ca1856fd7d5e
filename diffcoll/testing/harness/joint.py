"""Compares the measured gradients with those that PyTorch derives from the joint graph of all ranks."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from diffcoll.core.torch_private.autograd import nodes_of_graph
from diffcoll.testing.harness.comparison import SMALL, Quantity
from diffcoll.testing.harness.measure import Measurement, MeasurementPlan, leaves_of, objective, with_leaves
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.report import Table
from diffcoll.testing.numbers import largest
from diffcoll.testing.simulate import calls_torch_distributed, simulate

#: The relative error that is right.
_JOINT = 1e-9
_OTHERS = "fn calls torch.distributed, and this graph has diffcoll's collectives alone"


def joint_graph(
    packed: Packed,
    parts: Sequence[Any],
    names: Sequence[str],
    plan: MeasurementPlan,
    measured: Sequence[Measurement],
) -> Table:
    """Compare with the gradients that PyTorch derives from the graph of all ranks, if the function allows it."""
    n, result = len(parts), Table("the joint graph of all ranks", len(parts))
    try:
        found = simulate(_in_truth, [packed] * n, [plan] * n, range(n), parts)
        total = torch.stack([loss for loss, _ in found]).sum()
        own = [type(node).__name__ for node in nodes_of_graph(total) if isinstance(node, BackwardCFunction)]
        leaves = [leaf for _, leaves in found for leaf in leaves]
        given = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    except Exception as error:
        what = traceback.format_exception_only(error)[0].strip().partition("\n")[0]
        return replace(result, skipped=_OTHERS if calls_torch_distributed(error) else f"in it fn raises {what}")
    if own:
        return replace(result, skipped=f"fn has a backward of its own, {own[0]}")
    got = [objective(plan.weights(r, m.outputs), m.outputs) for r, m in enumerate(measured)]
    if not torch.allclose(torch.stack(got).sum(), total.detach(), rtol=1e-9, atol=1e-12):
        return replace(
            result, skipped="fn has another loss in it, as where it tests whether torch.distributed is set up"
        )
    return replace(result, rows=tuple(q.row for q in _beside(names, measured, given)))


def _beside(names: Sequence[str], measured: Sequence[Measurement], given: Sequence[Tensor]) -> Iterator[Quantity]:
    """Return the measured gradients beside those given for each rank's tensors in turn."""
    most, count = largest(*given), len(names)
    for i, name in enumerate(names):
        of_ranks = given[i::count]
        unit = max(largest(*of_ranks), SMALL * most)
        for r, (m, wanted) in enumerate(zip(measured, of_ranks, strict=True)):
            mine = m.first.every[i]
            yield Quantity(f"gradient of {name}", "gradient", r, mine, wanted, unit, _JOINT)


def _in_truth(packed: Packed, plan: MeasurementPlan, rank: int, part: Any) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's objective and the tensors it is differentiated by."""
    subject = packed.unpack()
    with torch.inference_mode(False), torch.enable_grad():
        inputs = leaves_of(part)
        outputs = subject.call(with_leaves(part, inputs))
        return objective(plan.weights(rank, outputs), outputs), inputs + list(subject.parameters.values())
