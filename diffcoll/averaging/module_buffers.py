"""Copies the buffers of one rank to all, once per reduction: running statistics, as DDP does.

Ranks may have different numbers of forward passes per reduction, e.g. with micro-batches, but one thing is equal: the
number of reductions. So every rank takes part in exactly one exchange per reduction: before its first training forward
since the last reduction, or, without one, at the end of backward.

note  notes/averaging.md
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from diffcoll.averaging.messages import communicating, refuse_ended, write
from diffcoll.averaging.ownership import Ignored
from diffcoll.averaging.policy import NAME
from diffcoll.averaging.watch import ForwardHook
from diffcoll.core.errors import message
from diffcoll.core.torch_private.autograd import backward_at_work
from diffcoll.core.torch_private.transforms import is_within_transform
from diffcoll.engines.engine import Engine

#: Buffers begin at multiples of as many bytes in a message, a multiple of every item size.
_ALIGNMENT = 16
_REMEDY = (
    "died, hangs, or has neither run a training forward nor called backward; call backward equally often on all ranks"
)


def named_buffers(module: nn.Module, ignored: Ignored) -> dict[str, Tensor]:
    """Return the buffers that are not ignored."""
    return {name: buffer for name, buffer in module.named_buffers() if not ignored(name, buffer)}


def facts(buffers: dict[str, Tensor]) -> list[str]:
    """Describe the buffers; equal on all ranks."""
    return [
        f"buffer {name} {odd or f'{tuple(b.shape)} {b.dtype} on {b.device.type}'}"
        for name, b in buffers.items()
        for odd in [_without_memory(b)]
    ]


def refuse_without_memory(buffers: dict[str, Tensor]) -> None:
    """Raise if a buffer cannot be sent; all ranks have agreed on `facts` before."""
    for name, b in buffers.items():
        odd = _without_memory(b)
        if odd:
            remedy = f'leave it out by ignore=[{name!r}], or say broadcast_buffers="never"'
            expected = "dense tensors with values"
            raise TypeError(message(NAME, "broadcast_buffers", f"buffer {name}, which is {odd}", expected, remedy))


def _without_memory(b: Tensor) -> str:
    """Say why b is not one dense block of memory; "": it is."""
    if b.is_nested or b.is_quantized or b.is_meta:
        return "nested" if b.is_nested else "quantized" if b.is_quantized else "on the meta device"
    return "" if b.layout == torch.strided else str(b.layout)


class ModuleBuffers(ForwardHook):
    """The buffers of a module, and the messages that copy them.

    Args:
        module: held weakly.
        ignored: whether a buffer is left out.
        engine: with messages of its own: ranks may be in another order here than in the reduction of gradients.
    """

    def __init__(self, module: nn.Module, ignored: Ignored, engine: Engine) -> None:
        super().__init__(module)
        self.engine, self._ignored = engine, ignored
        buffers = named_buffers(module, ignored)
        self._facts = facts(buffers)
        self._rows, self._views = _allocate(buffers)
        #: The rank whose buffers are copied; changes between two reductions, at the same time on all ranks.
        self._source = 0
        #: Whether the exchange of this reduction was made.
        self.is_exchanged = self._is_round_open = False
        #: Buffers to be written at the end of backward.
        self._late: dict[str, Tensor] = {}
        self._difference = ""

    def attach(self, before_exchange: Callable[[], None]) -> None:
        """Copy rank 0's buffers now, and again before forward passes.

        Args:
            before_exchange: ends a backward pass that was left by an error, for which other ranks wait.
        """
        self._write(self._exchange())
        self._before_exchange = before_exchange
        self.register()

    def detach(self) -> None:
        """Remove the hook."""
        super().detach()
        if self.engine.size > 1:
            self.engine.close()

    def before_forward(self) -> None:
        """Copy the buffers before the first training forward since the last reduction.

        Not in a recomputation, nor within a transform of torch.func, which refuses writes to these tensors.
        """
        module = self._module()
        if module is None or not module.training or not torch.is_grad_enabled():
            return
        if backward_at_work() >= 0 or is_within_transform():
            return
        refuse_ended(self.engine)
        self._before_exchange()
        if not self.is_exchanged:
            self.is_exchanged = True
            self._write(self._exchange())

    # ── reductions ───────────────────────────────────────────────────────────────────────────────────────

    def open_round(self) -> None:
        """Begin a reduction."""
        self._is_round_open = True

    def end_round(self, source: int) -> None:
        """Take part in the exchange of this reduction, unless it was made before a forward.

        Args:
            source: the rank whose buffers are copied from the next exchange on.
        """
        if not self._is_round_open:
            return
        self._late = {} if self.is_exchanged else self._exchange()
        self._is_round_open = self.is_exchanged = False
        self._source = source

    def write_late(self) -> None:
        """Write what was received at the end of backward: a compiled forward runs no hook."""
        self._write(self._late)
        self._late = {}

    def check(self) -> None:
        """Raise if the module's buffers are others than at the start."""
        if self._difference:
            raise RuntimeError(
                f"{NAME}: broadcast_buffers: {self._difference}; make a new {NAME}, which replaces this one, or leave "
                "the buffer out by ignore=…"
            )

    def synchronize(self, resets_source: bool) -> None:
        """Copy the buffers now; all ranks call it.

        Args:
            resets_source: copy those of rank 0 from the next exchange on; all ranks have made the same ones so far.
        """
        self._write(self._exchange())
        if resets_source:
            self._source = 0

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _exchange(self) -> dict[str, Tensor]:
        """Send or receive the buffers; returns those to be written, none if they are others than at the start."""
        engine, module = self.engine, self._module()
        buffers = {} if module is None else named_buffers(module, self._ignored)
        now = facts(buffers)
        self._difference = "" if now == self._facts else _difference(self._facts, now)
        if self._difference:  # what was sent last is sent again; the error is raised in backward, on all ranks
            buffers = {}
        if engine.size == 1:
            return {}
        if engine.rank == self._source:
            for name, buffer in buffers.items():
                self._views[name].copy_(buffer)
        for row in self._rows:
            with communicating(engine, "buffers", row.nbytes, f"{len(self._facts)} buffers", _REMEDY):
                engine.broadcast(row, self._source)()
        return buffers

    @torch.no_grad()
    def _write(self, buffers: dict[str, Tensor]) -> None:
        """Also on the source: autograd then notices a graph that needs the old values on all ranks or on none."""
        for name, buffer in buffers.items():
            write(buffer, self._views[name])


def _allocate(buffers: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return one row of bytes for each device, and each buffer's view of its row."""
    rows: list[Tensor] = []
    views: dict[str, Tensor] = {}
    for device in dict.fromkeys(b.device for b in buffers.values()):
        here = {name: b for name, b in buffers.items() if b.device == device}
        sizes = [-(-b.nbytes // _ALIGNMENT) * _ALIGNMENT for b in here.values()]
        row = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        for (name, b), part in zip(here.items(), row.split_with_sizes(sizes), strict=True):
            views[name] = part[: b.nbytes].view(b.dtype).view(b.shape)
        rows.append(row)
    return rows, views


def _difference(was: list[str], now: list[str]) -> str:
    before, after = ({fact.split()[1]: fact for fact in facts} for facts in (was, now))
    for name in before.keys() | after.keys():
        if name not in before:
            return f"{after[name]}: the module got it after {NAME} was attached"
        if name not in after:
            return f"{before[name]}: the module has lost it since {NAME} was attached"
        if before[name] != after[name]:
            return f"{name}: was {before[name]} when {NAME} was attached, and is {after[name]}"
    return f"the buffers are in another order than when {NAME} was attached"
