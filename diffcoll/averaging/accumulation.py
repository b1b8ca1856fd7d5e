"""What autograd accumulates between two reductions, and the weights that it is multiplied by.

note  notes/averaging.md
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffcoll.averaging.functions import weighted
from diffcoll.averaging.gradient import Parameter, is_readable
from diffcoll.averaging.ownership import SPARSE
from diffcoll.averaging.policy import NAME, Policy
from diffcoll.core.torch_private.tensors import version


class Accumulation:
    """The gradients of an averager between two reductions; a reduced one is never reduced again."""

    def __init__(self, parameters: Sequence[Parameter], policy: Policy) -> None:
        self._parameters, self._policy = parameters, policy
        self._witness: Parameter | None = None

    def before(self, p: Parameter, g: Tensor | None) -> Tensor | None:
        """Prepare `.grad` for a gradient that autograd is about to add to it, and return that times its weight."""
        p.value_version, p.is_prepared = version(p.tensor), True
        weight = self._policy.weight(before_first=self.drop_weights_of_zeroed)
        p.is_weighted = True
        self._refuse_replaced(p)
        self._set_aside(p)
        p.reduced, p.was_replaced = None, False
        if g is None or g.layout != torch.strided or (isinstance(weight, float) and weight == 1.0):
            return g  # the reduction raises for sparse gradients, at the end of backward
        if isinstance(weight, Tensor):
            return weighted(g, weight)
        return g * weight if weight else torch.zeros_like(g)

    def after(self, p: Parameter) -> None:
        """Record that autograd has accumulated a gradient."""
        if p.pre_hook is not None and not p.is_prepared:
            raise RuntimeError(
                f"{NAME}: {p.name}: its gradient was accumulated without the averager's tensor hook, which was "
                f"removed; make a new {NAME}, which replaces this one"
            )
        p.is_accumulated, p.is_prepared = True, False
        self._policy.join.on_gradient()
        if p.earlier is not None or self._policy.is_weighted:
            p.record(is_witness=self._is_witness(p))

    def check(self, p: Parameter, *, in_backward: bool) -> None:
        """Prepare `.grad` for its reduction, or raise if its reduction would be wrong.

        Args:
            p: the parameter.
            in_backward: False: `synchronize` reduces what is in `.grad`, whoever has assigned it.
        """
        self._set_aside(p)
        grad = p.tensor.grad
        if grad is None:
            return
        if grad.layout != torch.strided:
            raise TypeError(f"{NAME}: {p.name}: {SPARSE}")
        if in_backward:
            self._refuse_replaced(p)
        if self._policy.is_weighted and not p.is_weighted and grad.any():
            raise RuntimeError(
                f"{NAME}: {p.name}: its gradient was not multiplied by the weight, since no backward has accumulated "
                "it since the last reduction; call set_weight(w) before backward, and average gradients that you "
                "assign by dc.average_gradients(…, weight=w)"
            )
        if grad.requires_grad:
            raise RuntimeError(
                f"{NAME}: {p.name}: its gradient is part of a graph (create_graph=True), and reduction in a bucket is "
                "not differentiable; use torch.autograd.grad(…, create_graph=True) and dc.average_gradients, which is"
            )

    def has_gradients(self) -> bool:
        """Whether a gradient was accumulated, and not set to None."""
        return any(p.is_accumulated and p.tensor.grad is not None for p in self._parameters)

    def start_over(self) -> None:
        """Forget what has happened since the last reduction."""
        self._policy.on_reduction()
        self._witness = None
        for p in self._parameters:
            p.start_over()

    def drop(self) -> None:
        """Drop all gradients, of this step and those that it was added to."""
        for p in self._parameters:
            p.zero()
            p.reduced = None
            p.start_over()

    # ── gradients that were reduced before ───────────────────────────────────────────────────────────────

    def _set_aside(self, p: Parameter) -> None:
        """Set aside a gradient that was reduced before. Not where the reduction keeps what is equal on all ranks."""
        if p.earlier is not None and p.is_zeroed():
            p.earlier = None
        if p.earlier is not None and (p.accumulated.is_modified(p.tensor.grad) or self._may_be_zeroed(p)):
            raise RuntimeError(
                f"{NAME}: {p.name}: its gradient was changed while backward calls were added to a reduced gradient; "
                "call zero_grad() before the first of them, or synchronize() before the change"
            )
        if p.reduced is not None and p.reduced is p.tensor.grad and self._policy.changes_reduced:
            p.set_aside()

    def _refuse_replaced(self, p: Parameter) -> None:
        """Raise, before it is sent or added to, if `.grad` replaces a reduced gradient, and is not zero."""
        grad = p.tensor.grad
        is_other = p.was_replaced or (p.reduced is not None and p.reduced is not grad)
        if grad is None or not is_other or not self._policy.changes_reduced:
            return
        if grad.layout != torch.strided or grad.any():
            raise RuntimeError(
                f"{NAME}: {p.name}: its gradient was replaced after its reduction, and would be reduced twice; modify "
                "it in place, or call zero_grad() before backward"
            )

    # ── gradients that the user zeroes ───────────────────────────────────────────────────────────────────

    def drop_weights_of_zeroed(self) -> None:
        """Forget the weights of earlier batches if all of their gradients were set to None or to zero."""
        accumulated = [p for p in self._parameters if p.is_accumulated]
        if self._witness is not None and self._witness.is_zeroed():  # perhaps through `.data`, as all others then
            rest = [p.tensor.grad for p in accumulated if p.tensor.grad is not None]
            if any(g.layout != torch.strided or g.any() for g in rest):
                return
        elif not all(p.is_zeroed() or p.accumulated.is_zero_view(p.tensor.grad) for p in accumulated):
            return
        if not accumulated or any(p.is_zeroed() for p in accumulated):
            self._policy.total, self._witness = 0.0, None
        elif any(map(self._may_be_zeroed, accumulated)) and self._policy.total != 0:
            raise RuntimeError(
                f"{NAME}: {accumulated[0].name}, …: all gradients are zero, and views of memory that was modified "
                "after they were accumulated, so whether the weight of their batch counts is not known; call "
                "set_weight(0) for a batch without gradients, or do not write to that memory before the reduction"
            )

    def _is_witness(self, p: Parameter) -> bool:
        """Whether the gradient of p tells whether gradients were zeroed through `.data`: the first that is not zero."""
        grad = p.tensor.grad
        if self._witness is None and self._policy.is_weighted and grad is not None and is_readable(grad):
            self._witness = p if grad.any() else None
        return self._witness is p

    def _may_be_zeroed(self, p: Parameter) -> bool:
        """Whether a gradient that was zero may have been zeroed: it is a view, and its base was modified."""
        of_all = [q.accumulated for q in self._parameters]
        return p.accumulated.is_zero_view(p.tensor.grad) and p.accumulated.is_base_modified(of_all)
