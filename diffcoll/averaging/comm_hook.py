"""The hook of a user in the place of the all-reduce of a bucket: compression, noise.

A hook communicates by `GradientBucket.all_reduce`. Before each of its messages, and after the last, the ranks compare
what they are about to do. So a hook that raises, or that differs, on one rank is an error on all of them.

note  notes/training/gradient-averager.md, examples/powersgd.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from diffcoll.averaging.buckets import Bucket
from diffcoll.averaging.messages import communicating
from diffcoll.averaging.policy import NAME, name_of
from diffcoll.core import check_mode
from diffcoll.core.pending import Pending
from diffcoll.engines.engine import Engine, Wait
from diffcoll.engines.types import Group

_REMEDY = "died or hangs"


class Waitable(Protocol):
    """What a hook may return instead of a tensor: a `Pending`, a `torch.futures.Future`."""

    def wait(self) -> Any:
        """Return the tensor."""


@dataclass(frozen=True, eq=False)
class GradientBucket:
    """What a `comm_hook` receives: the gradients of this rank that are reduced in one message.

    A hook in float16:

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def half(bucket):
    ...     return bucket.all_reduce(bucket.row.half()).wait().to(bucket.row.dtype)
    >>> def gradient(x):
    ...     w = torch.nn.Parameter(torch.tensor(1.0))
    ...     dc.GradientAverager([w], comm_hook=half)
    ...     (w * x).backward()
    ...     return w.grad
    >>> simulate(gradient, [torch.tensor(2.0), torch.tensor(4.0)], rules=True)
    [tensor(3.), tensor(3.)]
    """

    #: The gradients, flat, one after the other; 1-d. With `"weighted"`, multiplied by the weight; not divided by
    #: anything. Zeros for parameters that this rank has not used. The hook may overwrite it.
    row: Tensor
    #: Views of `row` by the parameters' names, in their shapes; complex gradients in `comm_dtype` are real pairs.
    gradients: dict[str, Tensor]
    #: The averager's `group` argument, for `get_rank(group)` and `get_world_size(group)`. Messages that the hook sends
    #: in it are not compared: if it raises on one rank, the others wait until the backend's timeout.
    group: Group
    index: int
    is_last: bool
    _comm_hook: CommHook = field(repr=False)

    def all_reduce(self, x: Tensor) -> Pending[Tensor]:
        """Start the sum of x over the ranks; `wait()` returns it, bitwise the same on all ranks.

        Args:
            x: any tensor of the same shape and dtype on all ranks, not of dtype bool; not modified.

        Raises:
            CollectiveMismatchError: on all ranks, if a hook has raised on one, or if x differs in shape or dtype.
        """
        return self._comm_hook.all_reduce(x)


Hook: TypeAlias = Callable[[GradientBucket], Tensor | Waitable]


class CommHook:
    """Calls the user's hook of one averager for all buckets, and sends its messages, each after a comparison."""

    def __init__(self, hook: Hook, engine: Engine, group: Any) -> None:
        self._hook, self._engine, self._group = hook, engine, group
        self._name = f"comm_hook {name_of(hook)}"
        #: The bucket at work, for errors and comparisons.
        self._at = self._name
        #: An error that all ranks have raised in this reduction; no rank answers to further messages.
        self._error: Exception | None = None
        self._waits: dict[object, Wait] = {}

    @torch.no_grad()
    def reduce(self, buckets: Sequence[Bucket]) -> None:
        """Replace each bucket's row by what the hook returns; an error of the hook is raised on all ranks."""
        self._error, self._waits = None, {}
        try:
            results = [self._call(i, buckets) for i in range(len(buckets))]
            for i, (bucket, result) in enumerate(zip(buckets, results, strict=True)):
                self._enter(i, buckets)
                reduced = result if isinstance(result, Tensor) else _waited(result)
                _refuse_unlike(reduced, bucket.row)
                if not reduced.is_set_to(bucket.row):
                    bucket.row.copy_(reduced)
            while self._waits:
                with communicating(self._engine, self._at, 0, "not waited for", _REMEDY):
                    self._waits.pop(next(iter(self._waits)))()
        except BaseException as error:
            if error is self._error:
                raise
            text = f"raised {type(error).__name__}: {error}"
            self._agree("raised", text)
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(f"{NAME}, {self._at}: {text}") from error
        self._at = self._name
        self._agree("ended", f"has returned for all {len(buckets)} buckets")

    def _enter(self, i: int, buckets: Sequence[Bucket]) -> None:
        self._at = f"{self._name}, bucket {i} of {len(buckets)} ({buckets[i]})"

    def _call(self, i: int, buckets: Sequence[Bucket]) -> Any:
        self._enter(i, buckets)
        # Tensors of their own: the bucket counts them, and allocates new memory if the hook keeps one.
        row, gradients = buckets[i].row.detach(), {p.name: p.place.memory.detach() for p in buckets[i].parameters}
        return self._hook(GradientBucket(row, gradients, self._group, i, i == len(buckets) - 1, self))

    @torch.no_grad()
    def all_reduce(self, x: Tensor) -> Pending[Tensor]:
        """Start the sum of x over ranks, in this bucket's place among the messages of all ranks."""
        if not isinstance(x, Tensor) or x.dtype == torch.bool or x.layout != torch.strided:
            got = f"{x.dtype}, {x.layout}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"bucket.all_reduce: x: got {got}, expected a strided tensor of a dtype other than bool")
        what = f"all_reduce of {tuple(x.shape)} {x.dtype}"
        self._agree(what, what)
        y = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        engine, at, waits, key = self._engine, self._at, self._waits, object()
        if engine.size > 1:
            with communicating(engine, at, y.nbytes, what, _REMEDY):
                waits[key] = engine.all_reduce(y, y, engine.overlaps(y))

        def wait() -> Tensor:
            if key in waits:
                with communicating(engine, at, y.nbytes, what, _REMEDY):
                    waits.pop(key)()
            return y

        return Pending(f"{NAME}, {at}: bucket.all_reduce", wait)

    def _agree(self, does: str, text: str) -> None:
        """Raise on all ranks unless all of them do the same; the error has each rank's text."""
        if self._error is not None:
            raise self._error
        if self._engine.size == 1:
            return
        try:
            check_mode.compare(self._engine, (NAME, self._at, does), f"{NAME}, {self._at}: {text}")
        except Exception as error:
            self._error = error
            raise


def _waited(result: Any) -> Any:
    if not callable(getattr(result, "wait", None)):
        raise TypeError(f"it returned {type(result).__name__}, expected a tensor or an object whose wait() returns one")
    value = result.wait()
    if isinstance(value, (list, tuple)) and len(value) == 1:  # the futures of torch.distributed
        value = value[0]
    if not isinstance(value, Tensor):
        got = f"wait() of the returned {type(result).__name__} gave {type(value).__name__}"
        raise TypeError(f"{got}, expected a tensor; for a Work return its get_future()")
    return value


def _refuse_unlike(reduced: Tensor, row: Tensor) -> None:
    got, expected = (f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (reduced, row))
    if got != expected:
        raise ValueError(f"it returned a tensor {got}, expected the sum over ranks of bucket.row, {expected}")
