"""Copies the buffers of one rank to all, once per reduction: running statistics, as DDP does.

Ranks may have different numbers of forward passes per reduction, e.g. with micro-batches, but one thing is equal: the
number of reductions. So every rank takes part in exactly one exchange per reduction: before its first training forward
since the last reduction, or, without one, at the end of backward.

note  notes/training/gradient-averager.md
"""

from __future__ import annotations

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

_REMEDY = (
    "died, hangs, or has neither run a training forward nor called backward; call backward equally often on all ranks"
)


def named_buffers(module: nn.Module | None, ignored: Ignored) -> dict[str, Tensor]:
    """Return the buffers that are not ignored."""
    pairs = () if module is None else module.named_buffers()
    return {name: buffer for name, buffer in pairs if not ignored(name, buffer)}


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

    The engine has messages of its own: ranks may be in another order here than in the reduction of gradients. The
    callback, before an exchange in a forward, ends a backward that was left by an error, for which other ranks wait.
    """

    def __init__(self, module: nn.Module | None, ignored: Ignored, engine: Engine) -> None:
        super().__init__(module)
        self.engine, self._ignored = engine, ignored
        buffers = named_buffers(module, ignored)
        self._facts = facts(buffers)
        self._rows, self._views = _allocate(buffers)
        #: The rank whose buffers are copied; changes between two reductions, at the same time on all ranks.
        self._source = 0
        #: Whether the exchange of this reduction was made.
        self.is_exchanged = False
        #: Buffers to be written at the end of backward.
        self._late: dict[str, Tensor] = {}
        self._difference = ""

    def detach(self) -> None:
        """Remove the hook."""
        super().detach()
        if self.engine.size > 1:
            self.engine.close()

    def before_forward(self) -> None:
        """Copy the buffers before the first training forward since the last reduction.

        Not in a recomputation, nor within a transform of torch.func, which refuses writes to these tensors.
        """
        module = self.module()
        if module is None or not module.training or not torch.is_grad_enabled():
            return
        if backward_at_work() >= 0 or is_within_transform():
            return
        refuse_ended(self.engine)
        self._callback()
        if not self.is_exchanged:
            self.is_exchanged = True
            self._write(self._exchange())

    # ── reductions ───────────────────────────────────────────────────────────────────────────────────────

    def end_round(self, source: int) -> None:
        """End a reduction: take part in its exchange, unless that was made before a forward.

        From the next exchange on, the buffers of rank `source` are copied.
        """
        self._late = {} if self.is_exchanged else self._exchange()
        self.is_exchanged = False
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

        `resets_source`: all ranks have made the same exchanges so far, and from the next on those of rank 0 are copied.
        """
        self._write(self._exchange())
        if resets_source:
            self._source = 0

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _exchange(self) -> dict[str, Tensor]:
        """Send or receive the buffers; returns those to be written, none if they are others than at the start."""
        engine, buffers = self.engine, named_buffers(self.module(), self._ignored)
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
    """Return one row of bytes for each device, and each buffer's view of its row, in which its values are."""
    rows: list[Tensor] = []
    views: dict[str, Tensor] = {}
    for device in dict.fromkeys(b.device for b in buffers.values()):
        here = [(name, b) for name, b in buffers.items() if b.device == device]
        here.sort(key=lambda pair: -pair[1].itemsize)  # so that each begins at a multiple of its item size
        sizes = [b.nbytes for _, b in here]
        row = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        for (name, b), part in zip(here, row.split_with_sizes(sizes), strict=True):
            views[name] = part.view(b.dtype).view(b.shape).copy_(b.detach())
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
