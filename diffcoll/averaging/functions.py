"""Averages over ranks as functions.

note  notes/training/averaging.md
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffcoll.averaging.policy import Averaging, read_reduction
from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.core.arguments import Tree
from diffcoll.core.dtypes import wider
from diffcoll.core.errors import message
from diffcoll.core.expect import is_number, not_negative
from diffcoll.core.groups import resolve
from diffcoll.core.reductions import Op
from diffcoll.core.trees import tree_flatten
from diffcoll.engines.types import Group


def average_gradients(
    tree: Tree, *, reduction: Averaging = "mean", weight: float | Tensor | None = None, group: Group = None
) -> Tree:
    """MAML, gradient penalties: average gradients over the ranks, differentiable to any order.

    For gradients that are part of a loss; for an ordinary training loop use `GradientAverager`. Gradients of one dtype
    are sent in one message.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def f(x, w):
    ...     p = torch.tensor(1.0, requires_grad=True)
    ...     (g,) = torch.autograd.grad(x * p**2, [p], create_graph=True)
    ...     return dc.average_gradients([g], weight=w)[0]
    >>> simulate(f, [torch.tensor(3.0), torch.tensor(5.0)], [1, 3])  # (1 · 6 + 3 · 10) / 4
    [tensor(9., grad_fn=<DivBackward0>), tensor(9., grad_fn=<DivBackward0>)]

    Args:
        tree: a tensor, or nested tuples, lists and dicts of tensors; any floating-point or complex dtype; the same
            structure and shapes on all ranks.
        reduction: `"mean"` or `"sum"`, in any spelling that `all_reduce` accepts.
        weight: None: every rank counts the same. For unequal batches this rank's number of samples or tokens, a
            non-negative number or a 0-d tensor: the mean is Σ_r w_r g_r / Σ_r w_r, the sum Σ_r w_r g_r. A rank of
            weight zero contributes zero, even if its gradients are NaN. If all weights are zero, the mean is zero.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        The same structure; the same values on every rank.

    Raises:
        TypeError, ValueError: an argument is wrong on its own.

    Source: notes/training/averaging.md.
    """
    op: Op = "mean" if read_reduction("average_gradients", reduction, ("mean", "sum")) == "mean" else "sum"
    if weight is None:
        reduced: Tree = all_reduce(tree, op, group=group)
        return reduced
    leaves, rebuild = tree_flatten(tree)
    tensors = [g for g in leaves if isinstance(g, Tensor)]
    # The weight is sent in the message of the widest of these dtypes, which can represent it.
    precise = [g for g in tensors if g.dtype in (torch.float32, torch.float64)]
    like = max(precise, key=lambda g: g.dtype.itemsize, default=None)
    near = tensors[0] if like is None and tensors else like
    dtype = torch.float64 if like is None else like.dtype
    w = _number(checked_weight("average_gradients", weight), dtype, None if near is None else near.device)
    terms = [weighted(g, w) if isinstance(g, Tensor) else g for g in leaves]  # all_reduce raises for other leaves
    summed: list[Tensor] = all_reduce([*terms, w], "sum", group=group)
    if op == "mean":
        total = torch.where(summed[-1] == 0, 1.0, summed[-1])
        summed = [_divided(g, total) for g in summed]
    averaged: Tree = rebuild(summed[:-1])
    return averaged


def global_mean(value: float | Tensor, weight: float | Tensor | None = None, *, group: Group = None) -> Tensor:
    """Logging: mean of a value over the ranks, Σ_r w_r v_r / Σ_r w_r, without a gradient.

    >>> import diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda loss, tokens: dc.global_mean(loss, tokens).item(), [2.0, 5.0], [100, 50])
    [3.0, 3.0]

    Args:
        value: a number or a 0-d tensor, or a tensor of the same shape on all ranks. It is averaged in float64, complex
            values in complex128; ranks may differ in dtype, if all are real or all complex.
        weight: None: every rank counts the same. Otherwise a non-negative number or a 0-d tensor. The value of a rank
            of weight zero is ignored, even if it is NaN; if all weights are zero, the mean is NaN.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        A tensor of the value's shape and dtype, float64 for a number, float32 for an integer or half-precision tensor;
        the same on every rank but for the dtype.

    Raises:
        TypeError, ValueError: an argument is wrong on its own.

    Source: notes/training/averaging.md.
    """
    if not isinstance(value, Tensor) and not is_number(value):
        raise TypeError(message("global_mean", "value", type(value).__name__, "a number or a tensor"))
    # A number is put on the group's control device: not every backend can send CPU tensors.
    device = resolve(group, "global_mean").control_device
    v = value.detach() if isinstance(value, Tensor) else _number(value, torch.float64, device)
    v = v if v.dtype in (torch.float64, torch.complex64, torch.complex128) else v.float()
    w = checked_weight("global_mean", 1.0 if weight is None else weight)
    w = _number(w, torch.float64, v.device)
    with torch.no_grad():
        wide = v.to(torch.complex128 if v.is_complex() else torch.float64)  # messages of two dtypes end a gloo process
        total = all_reduce(torch.stack([weighted(wide, w), w.to(wide).expand(v.shape)]), "sum", group=group)
        return (total[0] / total[1]).to(v.dtype)


def _number(value: float | Tensor, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return a 0-d tensor; a Python number is filled in on the device, since a copy would block the host."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype)
    return torch.full((), value, dtype=dtype, device=device)


def _divided(x: Tensor, total: Tensor) -> Tensor:
    wide = x.to(wider(x.dtype))
    return (wide / total.to(wide)).to(x.dtype)


def weighted(x: Tensor, w: Tensor) -> Tensor:
    """Return w · x, computed in float32 for half precision; zeros if w is zero, even if x is NaN."""
    wide = x.to(wider(x.dtype))
    return torch.where(w.to(x.device) == 0, torch.zeros_like(x), (wide * w.to(wide)).to(x.dtype))


def checked_weight(name: str, weight: float | Tensor) -> float | Tensor:
    """Return a weight: a non-negative number, or a 0-d tensor, whose value is not checked."""
    expected = "a number or a 0-d tensor"
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(message(name, "weight", f"a tensor of {tuple(weight.shape)}", expected))
        return weight.detach().reshape(())
    not_negative(name, expected, weight=weight)
    return weight
