"""Makes every rank run the backward of every collective, also if the ranks' losses use different outputs.

A collective's backward is a collective. A rank whose loss does not depend on its output does not run it, and the other
ranks wait. Within a region each collective has one more output, a token, which is one more input of the next
collective. `joint(loss)` makes the loss depend on the last token, so backward runs the adjoints of all collectives of
the region, in reverse order, with zero gradients for unused outputs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from diffcoll.core import checks, expect
from diffcoll.core.errors import message, user_line
from diffcoll.core.torch_private.autograd import backward_at_work, is_within_reentrant_checkpoint, save_under_each_hook
from diffcoll.core.torch_private.transforms import (
    apply_rule,
    carries_tangents,
    is_batched_by_autograd,
    is_within_transform,
    tangents_ignored,
)


class _Chain:
    """The last token of a region, which the next collective of this rank takes as input; its gradient is zero."""

    def __init__(self) -> None:
        self.token = torch.zeros((), device="cpu", requires_grad=True)

    def save_token(self) -> None:
        """Make every checkpoint around the last collective recompute it on every rank, at the same place in backward.

        A checkpoint recomputes when backward needs a tensor saved within it, and stops after the last such tensor; both
        may differ between ranks. So a token is saved after each collective, and needed at the same place in backward.
        """
        save_under_each_hook(self._save, _recomputing)

    def _save(self) -> None:
        with torch.enable_grad():
            self.token = _Saved.apply(self.token)  # type: ignore[no-untyped-call]


def _recomputing() -> AbstractContextManager[None]:
    """Return the context in which a checkpoint recomputes a part of a region.

    It must save as many tensors as the first time, so collectives are recorded; the graph is not used, so they are
    recorded on a separate chain.
    """
    return _recording_on(_Chain())


class _ChainOfThread(threading.local):
    chain: _Chain | None = None
    #: The backward pass in which the chain was entered; -1: none. Nothing is recorded in any other, nested or not.
    backward: int = -1


of_thread = _ChainOfThread()


@contextmanager
def _recording_on(chain: _Chain | None) -> Iterator[None]:
    before = of_thread.chain, of_thread.backward
    of_thread.chain, of_thread.backward = chain, backward_at_work()
    try:
        yield
    finally:
        of_thread.chain, of_thread.backward = before


class joint_backward:
    """Losses that use different collectives on different ranks: make every rank run every collective's backward.

    Use it if a rank may have no labels, no positives, an empty batch or another branch, so that its loss ignores the
    output of a collective: without it the other ranks wait in that collective's backward. Where every rank's loss uses
    every output it changes nothing and sends nothing more.

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

    All ranks enter the region, make the same collectives in the same order, and call `joint(loss)` and then backward
    equally often. Within the region every floating-point or complex result of a collective requires a gradient, even
    if this rank's x does not. A nested region joins the outer one. Use a new region for each training step: backward
    runs through all collectives of the region so far.

    Checkpoints within it must be `use_reentrant=False`; all ranks recompute them. In forward mode an x without a
    tangent has a tangent of zero.

    `joint(loss)` returns the loss as a function of all collectives of the region so far: shape, dtype and value are
    unchanged, and it requires a gradient even if it is a constant. It may be called several times, also after the
    region.

    Raises:
        TypeError: the loss is not a floating-point or complex tensor.
        RuntimeError: a collective within the region is called in a reentrant checkpoint.

    Source: notes/collectives/joint_backward.md.
    """

    def __init__(self) -> None:
        self._chain: _Chain | None = None
        self._outer: tuple[_Chain | None, int] = None, -1

    def __enter__(self) -> joint_backward:
        """Start recording collectives."""
        self._outer = of_thread.chain, of_thread.backward
        self._chain = recording() or _Chain()
        of_thread.chain, of_thread.backward = self._chain, backward_at_work()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop recording collectives; those recorded so far stay in the region."""
        of_thread.chain, of_thread.backward = self._outer

    def __call__(self, loss: Tensor) -> Tensor:
        """Return the loss as a function of all collectives of the region so far."""
        expect.floating(
            "joint_backward", "loss", loss, "torch.tensor(0.0) is a loss that uses nothing", or_complex=True
        )
        if self._chain is None:
            remedy = "`with dc.joint_backward() as joint:` before the collectives"
            raise RuntimeError(message("joint_backward", "loss", "a loss before the region", "one within it", remedy))
        return _Tie.apply(loss, self._chain.token)  # type: ignore[no-untyped-call,no-any-return]


def is_joint() -> bool:
    """Whether this thread is within a region."""
    return of_thread.chain is not None


def recording() -> _Chain | None:
    """Return the chain that records a collective called now; None: it is not recorded."""
    return of_thread.chain if of_thread.backward == backward_at_work() else None


def recording_again(chain: _Chain | None, backward: int) -> AbstractContextManager[None]:
    """Return a context that records collectives on a chain, also after its region, whose `of_thread.backward` is given.

    A result may be waited for after the region in which it was started; its wait belongs to the same chain.
    """
    again = chain is not None and chain is not of_thread.chain and backward == backward_at_work()
    return _recording_on(chain) if again else nullcontext()


def record(rule: Any, x: Tensor, *more: Any) -> Tensor:
    """Return rule.apply(x, *more), recorded on the region's chain if there is one."""
    chain = None if of_thread.chain is None else recording()
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
    chain.save_token()
    return y


def _record_dual(rule: Any, x: Tensor, tx: Tensor, *more: Any) -> Tensor:
    """Record two collectives, of x and of its tangent tx, in this order on every rank; return the dual result."""
    ctx = SimpleNamespace()
    with tangents_ignored():
        y = record(rule, x, *more)
        rule.setup_context(ctx, (x, *more), y)
        ty = rule.jvp(ctx, tx)
    dual: Tensor = forward_ad.make_dual(y, ty)  # type: ignore[no-untyped-call]
    return dual


class _Link(Function):
    """(x, token) ↦ (rule(x), next token)."""

    @staticmethod
    def forward(x: Tensor, token: Tensor, rule: Any, chain: Any, *more: Any) -> tuple[Tensor, Tensor]:
        return rule.forward(x, *more), torch.zeros((), device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, _, ctx.rule, ctx.chain, *more = inputs  # weakly: the chain's token holds this node
        ctx.rule.setup_context(ctx, (x, *more), output[0])

    @staticmethod
    def backward(ctx: Any, gy: Tensor, gtoken: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph the adjoint is recorded too; backward may run in another thread than the region.
        with _recording_on(ctx.chain() if torch.is_grad_enabled() else None):
            gx, *nothing = ctx.rule.backward(ctx, gy)
        return gx, gtoken, None, None, *nothing


class _Saved(Function):
    """token ↦ next token; saves a tensor that backward needs."""

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
    """(loss, token) ↦ loss; the token's gradient is zero."""

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

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], loss: Tensor, token: Tensor) -> tuple[Tensor, int]:
        return _Tie.apply(loss, token), in_dims[0]  # type: ignore[no-untyped-call]
