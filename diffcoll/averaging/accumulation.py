"""What autograd accumulates: in a pass whose gradients are reduced, and between two reductions.

note  notes/training/gradient-averager.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffcoll.averaging.buckets import Bucket
from diffcoll.averaging.functions import weighted
from diffcoll.averaging.gradient import Parameter, is_readable
from diffcoll.averaging.ownership import SPARSE, find_ddp
from diffcoll.averaging.policy import NAME, Policy
from diffcoll.core.torch_private.tensors import is_view, version
from diffcoll.core.torch_private.tracing import untraced
from diffcoll.engines.engine import Wait


@dataclass(eq=False)
class Collecting:
    """A reduction that has begun: of a backward pass with the passes nested in it, or of `synchronize`."""

    #: Autograd's graph task ids of the pass and of those nested in it; none in `synchronize`.
    tasks: set[int]
    #: Whether check mode was on when it began.
    is_checked: bool
    #: Whether the ranks still have to compare which parameters are frozen: it has changed, or check mode is on.
    compares: bool = False
    #: The graph task id of the outermost pass, at whose end gradients are reduced; -1: not known yet.
    ends_with: int = -1
    #: Whether a nested pass has accumulated a gradient: then nothing is sent before the end.
    is_nested: bool = False
    #: Whether this rank has taken part in the exchange of the module's buffers.
    is_exchanged: bool = False
    #: Parameters in the order in which their gradients were accumulated.
    collected: dict[Parameter, None] = field(default_factory=dict)
    #: The number of gradients that each bucket waits for; empty if an error has prevented that buckets are prepared.
    pending: dict[Bucket, int] = field(default_factory=dict)
    #: For each parameter whether it counts as used; known when the last bucket is sent.
    used: list[bool] = field(default_factory=list)
    #: One for each bucket that was sent.
    waits: list[Wait] = field(default_factory=list)


class Accumulation:
    """The gradients of an averager between two reductions; a reduced one is never reduced again."""

    def __init__(self, parameters: Sequence[Parameter], policy: Policy) -> None:
        self._parameters, self._policy = parameters, policy
        self._witness: Parameter | None = None

    def before(self, p: Parameter, g: Tensor | None) -> Tensor | None:
        """Prepare `.grad` for a gradient that autograd is about to add to it, and return that times its weight."""
        p.value_version, p.is_prepared = version(p.tensor), True
        weight = self._policy.weight(before_first=self.drop_weights_of_zeroed)
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
        """Prepare `.grad` for its reduction, or raise if that would be wrong.

        Not in backward, `synchronize` reduces what is in `.grad`, whoever has assigned it.
        """
        self._set_aside(p)
        grad = p.tensor.grad
        if grad is None:
            return
        if grad.layout != torch.strided:
            raise TypeError(f"{NAME}: {p.name}: {SPARSE}")
        if in_backward:
            self._refuse_replaced(p)
        if self._policy.is_weighted and not p.is_accumulated and grad.any():
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

    def is_new(self, parameters: Sequence[Parameter]) -> bool:
        """Whether nothing but layout and graph is to be checked of their gradients, which are of this step alone."""
        return not self._policy.changes_reduced or all(
            p.is_accumulated and p.reduced is None and p.earlier is None and not p.was_replaced for p in parameters
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

    def undo(self) -> None:
        """After an error: drop the gradients of this step, and restore those that they were added to.

        A mean that they were added to is dropped as well: only the sum of both is in memory.
        """
        self._policy.drop_weights()
        self._witness = None
        for p in self._parameters:
            if p.tensor.requires_grad:
                if self._is_reduced(p):  # the reduction has not come to it
                    p.set_aside()
                p.restore_earlier()
                p.start_over()

    def _is_reduced(self, p: Parameter) -> bool:
        """Whether `.grad` was reduced before and not added to since; False for a mean, which does not change it."""
        return p.reduced is not None and p.reduced is p.tensor.grad and self._policy.changes_reduced

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
        if self._is_reduced(p):
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


# ── gradients that were changed, or that nobody uses ─────────────────────────────────────────────────────


def is_used(p: Parameter) -> bool:
    """Whether autograd has accumulated a gradient since the last reduction, or the user has assigned one."""
    grad = p.tensor.grad
    return p.is_accumulated or (grad is not None and grad is not p.reduced and grad is not p.place.view)


def refuse_changes(trainable: Sequence[Parameter], now: Collecting) -> None:
    """Raise if a gradient or its parameter was modified in this pass after the gradient was accumulated."""
    for p in now.collected:
        tensor, place = p.tensor, p.place
        if tensor.grad is None:
            why = "its gradient was set to None"
        elif place.is_filled and place.has_changed():
            why = "its gradient was changed"
        elif version(tensor) != p.value_version:
            why = "its value was changed"
        else:
            continue
        _refuse_ddp(p, trainable)
        raise RuntimeError(
            f"{NAME}: {p.name}: {why} in backward, before it was averaged, as by an optimizer that steps within "
            "backward: its step would differ between ranks; step after backward, or change gradients in hooks of "
            "the tensor, p.register_hook(…)"
        )


@untraced
def refuse_second_average(trainable: Sequence[Parameter]) -> None:
    """Raise if DistributedDataParallel has averaged the gradients again, in a callback after all averagers'."""
    reduced = (p for p in trainable if p.reduced is not None and (p.tensor.grad is not p.reduced or version(p.reduced)))
    changed = next((p for p in reduced if p.place.has_changed()), None)
    if changed is not None:
        _refuse_ddp(changed, trainable)


def refuse_views_of_ddp(trainable: Sequence[Parameter]) -> None:
    """Raise if gradients are views of buckets of DistributedDataParallel, which may have averaged them already."""
    view = next((p for p in trainable if p.tensor.grad is not None and is_view(p.tensor.grad)), None)
    if view is not None:
        _refuse_ddp(view, trainable)


def _refuse_ddp(p: Parameter, trainable: Sequence[Parameter]) -> None:
    if find_ddp(q.tensor for q in trainable):
        raise RuntimeError(
            f"{NAME}: {p.name}: DistributedDataParallel averages this parameter, too; remove one of the two: call "
            "detach(), or use the module without DistributedDataParallel"
        )


def refuse_unused(trainable: Sequence[Parameter], flags: Sequence[float]) -> None:
    """Raise the names of the parameters that no rank has used; the same on all ranks."""
    names = [p.name for p, flag in zip(trainable, flags, strict=False) if not flag]
    if names:
        raise RuntimeError(
            f"{NAME}: unused: got {len(names)} of {len(trainable)} parameters that no rank's loss has used "
            f'since the last reduction, expected none with unused="error": {", ".join(names)}; use them, freeze '
            "them by requires_grad_(False), or leave them out by ignore=[…]"
        )
