"""Ranks whose losses use different outputs, made to enter every backward together.

A collective's backward is a collective. A rank whose loss does not depend on its output does not run it, and the
others wait. Within a region all collectives of a rank hang on one chain: each has one more output, a token that the
next one takes as one more input. The loss is tied to the last token, so its backward passes through all of them, last
one first, with zeros where nothing else arrives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from diffcoll.core import checks
from diffcoll.core._torch import (
    apply_rule,
    backward_at_work,
    carries_tangents,
    is_batched_by_autograd,
    is_within_reentrant_checkpoint,
    is_within_transform,
    save_under_each_hook,
    tangents_ignored,
)
from diffcoll.core.errors import message, user_line

__all__ = ["is_joint", "joint_backward", "record"]


class _Chain:
    """What the next collective of this rank is tied to; its gradient is zero."""

    def __init__(self) -> None:
        self.token = torch.zeros((), device="cpu", requires_grad=True)

    def anchor(self) -> None:
        """Make every checkpoint around the collective just made compute it again on every rank, at one place.

        A checkpoint does so when a tensor saved within it is needed, up to the last such tensor: both are local to a
        rank. So the chain saves one after each collective, and needs it in backward.
        """
        save_under_each_hook(self._save, _again)

    def _save(self) -> None:
        with torch.enable_grad():
            self.token = _Saved.apply(self.token)  # type: ignore[no-untyped-call]


def _again() -> AbstractContextManager[None]:
    """Return the context in which a checkpoint computes a part of a region again, wherever backward runs.

    As many tensors must be saved as before, so it is recorded; its graph is not used, so it is on a chain of its own.
    """
    return _recording_on(_Chain())


class _Here(threading.local):
    chain: _Chain | None = None
    #: The backward in which the chain was entered. In another one, a nested one too, nothing is recorded.
    backward: int = -1


here = _Here()


@contextmanager
def _recording_on(chain: _Chain | None) -> Iterator[None]:
    before = here.chain, here.backward
    here.chain, here.backward = chain, backward_at_work()
    try:
        yield
    finally:
        here.chain, here.backward = before


class joint_backward:
    """A region in which every collective takes part in backward on every rank, whatever the ranks' losses use.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def gradient(x):
    ...     with dc.joint_backward() as joint:
    ...         y = dc.all_reduce(x)
    ...         loss = 3 * y if dc.get_rank() == 0 else torch.tensor(7.0)  # rank 1 does not use y
    ...         joint(loss).backward()
    ...     return x.grad
    >>> simulate(gradient, [torch.tensor(1.0, requires_grad=True) for _ in range(2)], rules=True)
    [tensor(3.), tensor(3.)]

    All ranks enter the region, make the same collectives in it in the same order, as everywhere, and call
    `joint(loss)` and then backward equally often. Within it every floating-point or complex result of a collective
    requires a gradient, also where this rank's x does not. A region within another belongs to the outer one. Make one
    for each step: a backward passes through all collectives of the region so far.

    Checkpoints within it must be `use_reentrant=False`; all ranks compute their parts again. Within a level of forward
    mode x has a tangent of zero where it has none.

    Calling it returns the loss, tied to all collectives of the region so far: shape, dtype and value unchanged, and it
    requires a gradient even if it is a constant. It may be called several times, also after the region.

    Raises:
        TypeError: the loss is no floating-point or complex tensor.
        RuntimeError: a collective within the region is called in a reentrant checkpoint.

    Source: notes/joint_backward.md.
    """

    def __init__(self) -> None:
        self._chain: _Chain | None = None
        self._outer: tuple[_Chain | None, int] = None, -1

    def __enter__(self) -> joint_backward:
        """Begin; collectives are recorded from here on."""
        self._outer = here.chain, here.backward
        self._chain = _recording() or _Chain()
        here.chain, here.backward = self._chain, backward_at_work()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, also by an exception; what was recorded stays tied."""
        here.chain, here.backward = self._outer

    def __call__(self, loss: Tensor) -> Tensor:
        """Return the loss, tied to all collectives of the region."""
        if not isinstance(loss, Tensor) or not (loss.is_floating_point() or loss.is_complex()):
            got = loss.dtype if isinstance(loss, Tensor) else type(loss).__name__
            remedy = "torch.tensor(0.0) is a loss that uses nothing"
            raise TypeError(message("joint_backward", "loss", got, "a floating-point or complex tensor", remedy))
        if self._chain is None:
            remedy = "`with dc.joint_backward() as joint:` before the collectives"
            raise RuntimeError(message("joint_backward", "loss", "a loss before the region", "one within it", remedy))
        return _Tie.apply(loss, self._chain.token)  # type: ignore[no-untyped-call,no-any-return]


def is_joint() -> bool:
    """Whether this thread is within a region."""
    return here.chain is not None


def _recording() -> _Chain | None:
    """Return the chain on which a collective called here is to be."""
    return here.chain if here.backward == backward_at_work() else None


def record(rule: Any, x: Tensor, *more: Any) -> Tensor:
    """Return rule.apply(x, *more); within a region as a link of its chain."""
    chain = here.chain and _recording()
    if chain is None or is_within_transform() or is_batched_by_autograd(x):
        return apply_rule(rule, x, *more)
    differentiable = x.is_floating_point() or x.is_complex()
    if differentiable and carries_tangents():
        x, tangent = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
        if tangent is not None or not rule.awaits:
            return _record_dual(rule, x, torch.zeros_like(x) if tangent is None else tangent, *more)
    y: Tensor
    recorded = differentiable and torch.is_grad_enabled()
    if checks.is_on() and more[0].engine.size > 1:
        what = "recorded for" if recorded else "of integers, or with grad mode off, and not recorded for"
        text = f"{more[0].name} at {user_line()}, {what} joint_backward"
        checks.compare(more[0].engine, ("joint_backward", recorded), text)
    if recorded:
        y, chain.token = _Link.apply(x, chain.token, rule, weakref.ref(chain), *more)  # type: ignore[no-untyped-call]
    else:
        if is_within_reentrant_checkpoint():
            got, expected = "a reentrant checkpoint within joint_backward", "use_reentrant=False"
            remedy = "a rank that ignores the result of a reentrant one would not make this call again in backward"
            raise RuntimeError(message(more[0].name, "checkpoint", got, expected, remedy))
        y = apply_rule(rule, x, *more)
    chain.anchor()
    return y


def _record_dual(rule: Any, x: Tensor, tx: Tensor, *more: Any) -> Tensor:
    """Return the rule of x with the tangent that comes of tx, two links in this order.

    On every rank: tangents meet in a collective, so a rank whose x has none brings one of zero.
    """
    ctx = SimpleNamespace()
    with tangents_ignored():
        y = record(rule, x, *more)
        rule.setup_context(ctx, (x, *more), y)
        ty = rule.jvp(ctx, tx)
    dual: Tensor = forward_ad.make_dual(y, ty)  # type: ignore[no-untyped-call]
    return dual


class _Link(Function):
    """(x, token) ↦ (rule of x, the next token)."""

    @staticmethod
    def forward(x: Tensor, token: Tensor, rule: Any, chain: Any, *more: Any) -> tuple[Tensor, Tensor]:
        return rule.forward(x, *more), torch.zeros((), device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, _, ctx.rule, ctx.chain, *more = inputs  # weakly: the chain's token holds this node
        ctx.rule.setup_context(ctx, (x, *more), output[0])

    @staticmethod
    def backward(ctx: Any, gy: Tensor, gtoken: Tensor) -> tuple[Tensor | None, ...]:
        # A backward of higher order is joint as well, in whatever thread this one runs.
        with _recording_on(ctx.chain() if torch.is_grad_enabled() else None):
            gx, *nothing = ctx.rule.backward(ctx, gy)
        return gx, gtoken, None, None, *nothing


class _Saved(Function):
    """The next token, after a tensor that backward needs."""

    @staticmethod
    def forward(token: Tensor) -> Tensor:
        return torch.zeros((), device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gtoken: Tensor) -> Tensor:
        (_,) = ctx.saved_tensors
        return gtoken


class _Tie(Function):
    """The loss, and a gradient of zero for the last token."""

    @staticmethod
    def forward(loss: Tensor, token: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gloss: Tensor) -> tuple[Tensor, Tensor]:
        return gloss, torch.zeros((), device="cpu")

    @staticmethod
    def jvp(ctx: Any, tloss: Tensor, ttoken: Tensor) -> Tensor:
        return tloss
