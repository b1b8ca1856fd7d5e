"""Gradient clipping where some parameters are split over ranks and some are the same on all.

    ‖g‖ = (Σ_l Σ_{ranks of the groups of list l} Σ_{p in list l} ‖g_p‖^k)^{1/k},    g ← g · min(1, max_norm / ‖g‖)

note  notes/how-to/recipes.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import torch
from torch import Tensor, nn

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.engines.types import Group
from diffcoll.nn.axes import axes, reduced
from diffcoll.nn.inputs import is_dtensor

_NAME = "clip_grad_norm_"
#: Whether numbers are complex → the dtype in which their squares are added: those of float32 overflow above 1e19.
_WIDE = {False: torch.float64, True: torch.complex128}


@torch.no_grad()
def clip_grad_norm_(
    parameters: Sequence[Iterable[Tensor]],
    max_norm: float,
    groups: Sequence[Sequence[Group]],
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Tensor, expert and pipeline parallelism: clip all gradients by the norm that one process with all of them has.

    Each rank scales its gradients by the same factor, where a clipping by the norm of its own gradients would use
    another factor on each rank, and so would change the replicated parameters differently.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def clipped(shard):
    ...     norm = torch.nn.Parameter(torch.ones(1))  # the same on both ranks, counts once
    ...     weight = torch.nn.Parameter(torch.ones(1))  # this rank's part
    ...     norm.grad, weight.grad = torch.tensor([6.0]), shard
    ...     total = dc.nn.clip_grad_norm_([[norm], [weight]], 1.0, [(), (None,)])  # None: the default group
    ...     return total, norm.grad, weight.grad
    >>> simulate(clipped, [torch.tensor([2.0]), torch.tensor([3.0])])[1]  # √(6² + 2² + 3²) = 7
    (tensor(7., dtype=torch.float64), tensor([0.8571]), tensor([0.4286]))

    Call it after the gradients have been reduced, on all ranks of all groups, with the lists in the same order.

    Args:
        parameters: lists of parameters, one for each way in which they are split. A parameter without a gradient
            counts as zero. One that is listed twice, such as a tied weight, counts once.
        max_norm: the largest norm.
        groups: for each list, the groups over which its parameters are split: each rank of such a group has another
            part. `()`: every rank has the same. `(tensor_parallel,)`, `(pipeline, expert_parallel)`: groups as
            everywhere, and None is the default group; those of one list have only this rank in common. Ranks over which
            a parameter is replicated, as data parallel ones, are not named. One small message for each of the groups.
        norm_type: k > 0, or `inf` for the largest absolute value.
        error_if_nonfinite: raise, on all ranks, if the norm is infinite or NaN. If not, gradients become NaN or zero.

    Returns:
        The norm before clipping, 0-d, float64; the same on all ranks if the gradients of replicated parameters are.

    Raises:
        TypeError, ValueError: an argument is invalid, or a gradient is sparse or a DTensor.
        RuntimeError: with `error_if_nonfinite`.

    Source: torch.nn.utils.clip_grad_norm_ on one process; notes/how-to/recipes.md.
    """
    expect.not_negative(_NAME, max_norm=max_norm)
    if not expect.is_number(norm_type) or not norm_type > 0:
        raise ValueError(message(_NAME, "norm_type", repr(norm_type), "a number above 0, or inf"))
    expect.flag(_NAME, "error_if_nonfinite", error_if_nonfinite)
    lists, largest = _checked(parameters, groups), norm_type == inf
    over = [axes(_NAME, tuple(of_list)) for of_list in groups]
    terms = []
    for listed, of_list in zip(lists, over, strict=True):
        gradients = [p.grad for p in listed if p.grad is not None and p.grad.numel()]  # an empty one has no maximum
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=_WIDE[g.is_complex()]).real for g in gradients]
        term = _combined(norms if largest else [norm**norm_type for norm in norms], largest)
        terms.append(reduced(_NAME, term, "max" if largest else "sum", of_list))
    total = _combined(terms, largest)
    total = total if largest else total ** (1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        remedy = "skip this step on all ranks, or look for the gradient that is not finite"
        raise RuntimeError(message(_NAME, "parameters", f"gradients of norm {total.item()}", "a finite norm", remedy))
    nn.utils.clip_grads_with_norm_([p for listed in lists for p in listed], max_norm, total)
    return total


def _combined(terms: Sequence[Tensor], largest: bool) -> Tensor:
    """Return the sum of numbers, or the largest."""
    if not terms:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    row = torch.stack([term.to(terms[0].device) for term in terms])
    return row.amax() if largest else row.sum()


def _checked(parameters: Sequence[Iterable[Tensor]], groups: Sequence[Sequence[Group]]) -> list[list[Tensor]]:
    """Return the lists, each parameter once; raise unless they fit the groups, and gradients are dense tensors."""
    remedy = f"{_NAME}([replicated, split], max_norm, [(), (group,)])"
    for argument, given, of in (("parameters", parameters, "parameters"), ("groups", groups, "groups")):
        listed = isinstance(given, (list, tuple))
        if not listed or any(isinstance(x, Tensor) or not isinstance(x, Iterable) for x in given):
            got = f"a {type(given).__name__}" + (f" of {type(given[0]).__name__}" if listed and given else "")
            raise TypeError(message(_NAME, argument, got, f"a list with one list of {of} for each split", remedy))
    if len(groups) != len(parameters):
        expected = f"{len(parameters)}, one for each list of parameters"
        raise ValueError(message(_NAME, "groups", f"{len(groups)} entries", expected, remedy))
    lists = [list({id(p): p for p in listed}.values()) for listed in parameters]
    if len({id(p) for listed in lists for p in listed}) < sum(map(len, lists)):
        raise ValueError(message(_NAME, "parameters", "a parameter in two lists", "each in one", remedy))
    for p in (p for listed in lists for p in listed):
        if p.grad is not None and is_dtensor(p.grad):
            remedy = "torch.nn.utils.clip_grad_norm_ knows the placements of DTensors"
            raise TypeError(message(_NAME, "parameters", "a gradient that is a DTensor", "plain tensors", remedy))
        if p.grad is not None and p.grad.layout is not torch.strided:
            got = f"a gradient of layout {p.grad.layout}"
            raise TypeError(message(_NAME, "parameters", got, "dense gradients", "p.grad = p.grad.to_dense()"))
    return lists
