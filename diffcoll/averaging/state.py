"""State of an averager: its arguments, the backward pass, the weights, and the loop over unequal numbers of batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from diffcoll.core.errors import message
from diffcoll.core.reductions import spelled
from diffcoll.engines.types import ReduceOp

BroadcastBuffers = Literal["never", "once", "each forward"]
#: How gradients are combined; `all_reduce` accepts the same spellings, and those of `torch.distributed.ReduceOp`.
Averaging: TypeAlias = Literal["mean", "avg", "average", "sum"] | ReduceOp
Unused = Literal["allow", "error"]

_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Name in errors, profiles and check mode.
NAME = "GradientAverager"


@dataclass(frozen=True)
class Settings:
    """Arguments of an averager that must be equal on all ranks, under the names of its signature."""

    reduction: str
    bucket_mb: float
    comm_dtype: torch.dtype | None
    deterministic: bool
    comm_hook: Callable[..., Any] | None
    unused: Unused
    broadcast_parameters: bool
    broadcast_buffers: BroadcastBuffers
    hooks: bool

    def check(self, module: nn.Module | None) -> None:
        """Raise if one is wrong on its own; `module` is None if parameters were given."""
        self._check_choices(module)
        if not isinstance(self.bucket_mb, (int, float)) or not self.bucket_mb > 0:
            raise ValueError(message(NAME, "bucket_mb", repr(self.bucket_mb), "a number of megabytes above zero"))
        dtype = self.comm_dtype
        if dtype is not None and dtype not in _SUMMED:
            expected = f"{', '.join(map(str, _SUMMED))}, in which gradients can be added, or None"
            raise TypeError(message(NAME, "comm_dtype", repr(dtype), expected))
        if self.comm_hook is not None and not callable(self.comm_hook):
            expected = "a function of a bucket, or None"
            raise TypeError(message(NAME, "comm_hook", type(self.comm_hook).__name__, expected))

    def _check_choices(self, module: nn.Module | None) -> None:
        if self.deterministic is not True and self.deterministic is not False:
            raise TypeError(message(NAME, "deterministic", type(self.deterministic).__name__, "True or False"))
        if self.deterministic and self.comm_hook is not None:
            got, remedy = "True with a comm_hook", "let the hook add in the order of ranks"
            raise ValueError(message(NAME, "deterministic", got, "False, since the hook replaces the sum", remedy))
        if self.unused not in ("allow", "error"):
            raise ValueError(message(NAME, "unused", repr(self.unused), '"allow" or "error"'))
        given: object = self.broadcast_buffers
        if given not in ("never", "once", "each forward"):
            remedy = 'True of DistributedDataParallel is "each forward", its False is "never"'
            expected = '"never", "once" or "each forward"'
            args = ("broadcast_buffers", repr(given), expected, *([remedy] if isinstance(given, bool) else []))
            raise ValueError(message(NAME, *args))
        if given == "each forward" and module is None:
            raise TypeError(message(NAME, "broadcast_buffers", repr(given), "a module, which has buffers"))

    def facts(self) -> list[str]:
        """Describe the arguments; equal on all ranks."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["bucket_mb"] = float(self.bucket_mb)
        if self.comm_hook is not None:
            values["comm_hook"] = name_of(self.comm_hook)
        return [f"{name}={value!r}" for name, value in values.items()]


def read_reduction(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return the name that an argument `reduction` stands for, as `op` of `all_reduce` may be spelled."""
    found, factor = spelled(value) or (None, None)
    if found not in allowed or factor is not None:
        *others, last = (f'"{each}"' for each in allowed)
        raise ValueError(message(name, "reduction", repr(value), f"{', '.join(others)} or {last}"))
    return found


def name_of(hook: Callable[..., Any]) -> str:
    """Return a function's name, or that of an object's class."""
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name


@dataclass
class Backward:
    """The current backward pass, including passes nested in it."""

    #: Count of backward passes.
    number: int = 0
    #: Autograd's graph task ids of the pass and of those nested in it; empty: no pass runs.
    tasks: set[int] = field(default_factory=set)
    #: Whether the buckets are prepared for it, and its reduction has not ended.
    is_open: bool = False
    #: Index of the bucket to be sent next.
    next_bucket: int = 0
    #: The graph task id of the outermost pass, at whose end gradients are reduced; -1: not known yet.
    ends_with: int = -1
    #: Whether a nested pass has accumulated a gradient: then nothing is sent before the end.
    is_nested: bool = False
    #: Whether check mode was on when the pass began.
    is_checked: bool = False
    #: The version of each trainable parameter when the pass began.
    value_versions: list[int] = field(default_factory=list)


@dataclass
class Weights:
    """The weights of this rank's batches since gradients were last reduced."""

    #: Weight of the next batch.
    current: float | Tensor = 0.0
    #: Whether no gradient of the next batch was accumulated yet.
    is_pending: bool = False
    #: Sum, in float64 where possible, of the weights of all batches whose gradients are reduced together.
    total: float | Tensor = 0.0
    #: The number of reductions when a weight was last set.
    set_at: int = -1

    def set(self, weight: float | Tensor, count: int) -> None:
        """Set the weight of the next batch, after so many reductions."""
        if self.set_at != count:
            self.total, self.set_at = 0.0, count
        if isinstance(weight, Tensor):  # sums of half precision and small integers would overflow
            weight = weight.to(torch.float64 if weight.device.type in ("cpu", "cuda") else torch.float32)
        self.current, self.is_pending = weight, True


@dataclass
class Join:
    """State of `join`, the loop over unequal numbers of batches."""

    is_active: bool = False
    #: The loop that runs; a later one replaces it.
    loop: object = None
    #: The loop has ended, and gradients accumulated in it have not been reduced yet.
    is_leaving: bool = False
    #: This rank has no more batches; it repeats its last one with weight zero.
    ran_out: bool = False
    #: Whether the gradients to be reduced next may include a batch that is not such a repetition.
    took_part: bool = True
    #: The rank whose buffers are copied to the others: the lowest that has batches; 0 outside of the loop.
    source: int = 0

    def enter(self) -> object:
        """Begin a loop, which replaces one that has not ended; returns what stands for it in `loop`."""
        self.is_active, self.is_leaving, self.ran_out = True, False, False
        self.loop = object()
        return self.loop

    def run_out(self, has_gradients: bool) -> None:
        """End of this rank's batches; says whether it has accumulated gradients that are not reduced yet."""
        self.ran_out = True
        self.took_part = self.took_part and has_gradients

    def on_gradient(self) -> None:
        """A gradient is accumulated; outside of the loop it is no repetition."""
        self.took_part = self.took_part or not self.ran_out

    def on_reduction(self) -> None:
        """Gradients were reduced: those that follow are of this iteration, or outside of the loop."""
        if self.is_leaving:
            self.leave()
        self.took_part = not self.ran_out

    def leave(self) -> None:
        """Return to the state outside of the loop: every rank's gradients count."""
        self.is_active = self.is_leaving = False
        self.took_part = True
        self.source = 0
