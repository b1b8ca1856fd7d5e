"""What simulated ranks do to each other's tensors when they meet in a call of torch.distributed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.core.torch_private.transforms import is_transformed
from diffcoll.engines.delivery import Delivery, unlike
from diffcoll.engines.engine import Wait
from diffcoll.engines.guards import NO_GRAPHS

_MEMORY = "backends read and write its memory in order, whatever the strides"

_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class SimulatedWork(dist.Work):
    """What `async_op=True`, isend and irecv return."""

    def __init__(self, wait: Wait, outputs: list[Tensor], source: int = -1) -> None:
        super().__init__()
        self._wait: Wait | None = wait
        self._outputs = outputs
        self.source = source

    @override
    def wait(self, timeout: object = None) -> bool:
        """Return when the outputs are there; on simulated ranks there are no timeouts."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return True

    # A rank that polls would never let another rank run, so a poll waits.
    is_completed = is_success = synchronize = block_current_stream = wait  # type: ignore[assignment]

    @override
    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    @override
    def get_future(self) -> Future[Any]:
        self.wait()  # DistributedDataParallel waits for a future in C++, where no other rank would run
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future

    @override
    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank


@dataclass(eq=False)
class Message:
    """A send or receive that waits for its counterpart."""

    what: str
    x: Tensor
    #: Of the other side; None: any.
    peer: int | None
    tag: int
    work: SimulatedWork
    finish: Callable[[], None]


@dataclass
class Mailbox:
    """Messages to one rank of a group that were sent, or expected, and not yet delivered; in their order."""

    sends: list[tuple[int, Message]] = field(default_factory=list)
    recvs: list[Message] = field(default_factory=list)


def deliver(source: int, destination: int, sent: Message, expected: Message) -> None:
    """Move a message to its receiver, and let both sides go on."""
    if (sent.x.numel(), sent.x.dtype) != (expected.x.numel(), expected.x.dtype):
        error = unlike(destination, expected.x, source, sent.x)
        lines = f"  rank {source} is in {sent.what}\n  rank {destination} is in {expected.what}"
        raise CollectiveMismatchError(f"simulated ranks cannot go on: {error}\n{lines}")
    with torch.inference_mode():
        expected.x.copy_(sent.x.view_as(expected.x))
    expected.work.source = source
    sent.finish()
    expected.finish()


@torch.inference_mode()  # outputs of a rank in inference mode can be written in that mode only
def carry_out(step: str, op: str, payloads: list[list[Any]]) -> list[None]:
    """Carry out calls of a method of `Delivery` for all ranks; of a mean the sum.

    Rounds after each term, as gloo does, which has its own order.
    """

    def total(xs: Sequence[Tensor]) -> Tensor:
        first, *others = (x.reshape(-1) for x in xs)
        return reduce(_FOLDS[op], others, first) if others else first.clone()

    if len({len(calls) for calls in payloads}) > 1:
        raise CollectiveMismatchError(f"the ranks pass {[len(calls) for calls in payloads]} tensors")
    delivery = Delivery(total, reshapes=True)
    writes = [w for ranks in zip(*payloads, strict=True) for w in getattr(delivery, step)(*ranks)]
    outputs = {out.untyped_storage().data_ptr() for _, out, _ in writes}
    # An output may be an input too, or overlap one.
    blocks = [b.clone() if b.untyped_storage().data_ptr() in outputs else b for _, _, b in writes]
    for (_, out, _), block in zip(writes, blocks, strict=True):
        out.copy_(block.reshape_as(out))
    return [None] * len(payloads)


def divide(x: Tensor, n: int) -> None:
    """Turn a sum into the mean. As on gloo, autograd records the division; whole numbers are truncated, as on NCCL."""
    x.div_(n, rounding_mode=None if _is_fractional(x) else "trunc")


def _is_fractional(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class LostGradientWarning(UserWarning):
    """A backward passes a gradient on through values that a collective has replaced."""


def warn_in_backward(call: str, y: Tensor) -> None:
    """Warn in a backward through y, whose values a collective has replaced; torch does so on processes."""
    if not (torch.is_grad_enabled() and y.requires_grad):
        return

    def warn(_: Tensor) -> None:
        warnings.warn(
            f"{call} has replaced the values of a tensor of an autograd graph, and backward passes its gradient on as "
            "if it had not; diffcoll's collectives have gradients, see notes/why/which-gradient.md",
            LostGradientWarning,
            stacklevel=2,
        )

    y.register_hook(warn)  # type: ignore[no-untyped-call]


def wrong(
    name: str, argument: str, got: object, expected: str, remedy: str = "", kind: type[Exception] = ValueError
) -> Exception:
    """Return the error about an argument of a function of torch.distributed."""
    return kind(message(f"torch.distributed.{name}", argument, got, expected, remedy))


def reduction(name: str, opts: Any, tensors: list[Tensor]) -> tuple[str, list[Tensor]]:
    """Return the name of the reduction, and what to reduce."""
    blocks = [plain(x) for x in tensors]
    chosen: Any = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    op = str(getattr(chosen, "op", chosen).name)
    if op not in _FOLDS:
        raise wrong(name, "op", op, f"one of {', '.join(_FOLDS)}")
    for x in blocks:
        if (op == "AVG" and x.dtype == torch.bool) or (op[0] == "B" and _is_fractional(x)):
            expected = "numbers" if op == "AVG" else "integers or bool"
            raise wrong(name, "op", f"{op} of {x.dtype}", f"{expected} for {op}")
    return op, blocks


def plain(x: Tensor) -> Tensor:
    """Return a tensor with memory; raise if there is none, or if a transform or tracer watches it."""
    if hasattr(x, "trigger_wait"):  # the result of a functional collective
        x = x.trigger_wait()
    if is_transformed(x):
        raise RuntimeError(
            "torch.distributed: called within a transform of torch.func, which it does not support; use diffcoll's "
            "collectives"
        )
    if is_traced(x):
        raise RuntimeError(f"torch.distributed: {NO_GRAPHS}")
    if x.layout != torch.strided:
        raise TypeError(
            message("torch.distributed", "tensor", f"layout {x.layout}", "a dense tensor on simulated ranks")
        )
    return x.detach()


def contiguous(name: str, x: Tensor) -> Tensor:
    """Return the plain tensor; raise if it is not contiguous, for calls that read memory one behind the other."""
    if not (x := plain(x)).is_contiguous():
        raise wrong(name, "tensor", f"strides {x.stride()}", "a contiguous tensor", _MEMORY)
    return x


def layout(name: str, tensors: list[Tensor]) -> str:
    """Return in words what of the tensors' memory layout must be equal on all ranks.

    Backends reduce and broadcast memory, element by element. So gloo returns wrong numbers if tensors have gaps, or
    other strides on other ranks.
    """
    strided = [x for x in tensors if not x.is_contiguous()]
    for x in strided:
        if torch.empty_like(x).stride() != x.stride():  # equal if x has no gaps and no overlaps
            got, expected = f"strides {x.stride()} for shape {tuple(x.shape)}", "a tensor without gaps or overlaps"
            raise wrong(name, "tensor", got, expected, _MEMORY)
    return f", strides {', '.join(str(x.stride()) for x in strided)}" if strided else ""
