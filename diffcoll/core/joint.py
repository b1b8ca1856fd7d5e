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
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.core.torch_private.autograd import backward_at_work, is_within_reentrant_checkpoint, unpack_within
from diffcoll.core.torch_private.transforms import carries_tangents


class _Chain:
    """The last token of a region, which the next collective of this rank takes as input; its gradient is zero."""

    def __init__(self) -> None:
        self.token = torch.zeros((), device="cpu", requires_grad=True)


class _ChainOfThread(threading.local):
    chain: _Chain | None = None
    #: The backward pass in which the chain was entered; -1: none. Nothing is recorded in any other, nested or not.
    backward: int = -1


of_thread = _ChainOfThread()


@contextmanager
def _recording_on(chain: _Chain | None) -> Iterator[None]:
    """Record on a chain in this backward pass, or outside of any; None: record nothing."""
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
    >>> simulate(gradient, [torch.tensor(1.0, requires_grad=True) for _ in range(2)])
    [tensor(3.), tensor(3.)]

    All ranks enter the region, make the same collectives in the same order, and call `joint(loss)` and then backward
    equally often. `torch.autograd.grad` runs only what leads to its inputs: all collectives must depend on these, on
    every rank. Within the region every floating-point or complex result of a collective requires a gradient, even if
    this rank's x does not. A nested region joins the outer one. Use a new region for each training step: backward runs
    through all collectives of the region so far.

    Checkpoints within it must be `use_reentrant=False`; all ranks recompute them. Forward mode within it is an error;
    collectives in transforms of torch.func are not recorded.

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

    def __enter__(self) -> joint_backward:
        """Start recording collectives."""
        self._chain = recording() or _Chain()
        self._recording = _recording_on(self._chain)
        self._recording.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop recording collectives; those recorded so far stay in the region."""
        self._recording.__exit__(None, None, None)

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


def recorded(chain: _Chain, rule: Any, x: Tensor, *more: Any) -> Tensor:
    """Return rule.apply(x, *more), on a chain."""
    y: Tensor
    y, chain.token = _Link.apply(x, chain.token, rule, weakref.ref(chain), *more)  # type: ignore[no-untyped-call]
    return y


def is_recorded(x: Tensor, name: str) -> bool:
    """Whether a region records a collective of x; raise where it cannot."""
    if carries_tangents():
        raise RuntimeError(message("joint_backward", name, "forward mode", "reverse mode", "leave the region"))
    if (x.is_floating_point() or x.is_complex()) and torch.is_grad_enabled():
        if not x.requires_grad:
            unpack_within(_recording_apart)
        return True
    if is_within_reentrant_checkpoint():
        got, expected = "a reentrant checkpoint within joint_backward", "use_reentrant=False"
        remedy = "a rank that ignores the result of a reentrant one would not make this call again in backward"
        raise RuntimeError(message(name, "checkpoint", got, expected, remedy))
    return False


def _recording_apart() -> AbstractContextManager[None]:
    """Return the context in which a checkpoint recomputes a part of a region where x needs no gradient.

    The results need one there, as the first time, or fewer tensors would be saved. The graph is not used, so the
    collectives are recorded on a chain of their own.
    """
    return _recording_on(_Chain())


def read_in_checkpoint(ctx: Any) -> None:
    """Read what `save_in_checkpoint` has saved, so that a checkpoint recomputes; what it recomputes is not recorded."""
    with _recording_on(None):
        _ = ctx.saved_tensors


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


class _Tie(Function):
    """(loss, token) ↦ loss; the token's gradient is zero."""

    generate_vmap_rule = True

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
