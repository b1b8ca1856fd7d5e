"""How the ranks' gradients become one: the arguments, and what a gradient is multiplied and divided by.

note  notes/training/averaging.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from diffcoll.core import expect
from diffcoll.core.dtypes import FLOATS
from diffcoll.core.errors import message
from diffcoll.core.reductions import spelled
from diffcoll.engines.types import ReduceOp

BroadcastBuffers = Literal["never", "once", "each forward"]
#: How gradients are combined; `all_reduce` accepts the same spellings, and those of `torch.distributed.ReduceOp`.
Averaging: TypeAlias = Literal["mean", "avg", "average", "sum"] | ReduceOp
Unused = Literal["allow", "error"]

#: Name in errors, profiles and check mode.
NAME = "GradientAverager"


class Join:
    """What the loop over unequal numbers of batches says of this rank's gradients; as it is outside of the loop."""

    #: The loop that runs, or has ended with gradients that are not reduced yet; a later one replaces it.
    loop: object = None
    #: The loop has ended, and gradients accumulated in it have not been reduced yet.
    is_leaving = False
    #: This rank has no more batches; it repeats its last one with weight zero.
    ran_out = False
    #: Whether the gradients to be reduced next may include a batch that is not such a repetition.
    took_part = True
    #: The rank whose buffers are copied to the others: the lowest that has batches; 0 outside of the loop.
    source = 0

    def enter(self) -> object:
        """Begin a loop, which replaces one that has not ended; returns what stands for it in `loop`."""
        self.loop, self.is_leaving, self.ran_out = object(), False, False
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
        self.loop, self.is_leaving, self.took_part, self.source = None, False, True, 0


class Policy:
    """Mean, sum or weighted mean: result = Σ_r scale · weight_r · g_r / divisor, over the ranks that take part."""

    def __init__(self, reduction: str, has_hook: bool, ranks: int) -> None:
        self.is_weighted = reduction == "weighted"
        #: Whether to reduce a value that is equal on all ranks may change it; a mean does not, a hook may.
        self.changes_reduced = reduction != "mean" or has_hook
        self.join = Join()
        self._is_mean, self._has_hook, self._ranks = reduction == "mean", has_hook, ranks
        #: The weight of the current batch, and whether no gradient of it has been accumulated yet.
        self._of_batch: float | Tensor | None = None
        self._is_new = False
        #: Sum, in float64 where possible, of the weights of the batches whose gradients are reduced together.
        self.total: float | Tensor = 0.0

    def set_weight(self, weight: float | Tensor) -> None:
        """Set the weight of the next batch."""
        if isinstance(weight, Tensor):  # sums of half precision and small integers would overflow
            wide = torch.float64 if weight.device.type in ("cpu", "cuda") else torch.float32
            weight = weight.to(wide, copy=True)  # a counter of the user's may be reset before backward
        self._of_batch, self._is_new = 0.0 if self.join.ran_out else weight, True

    def weight(self, before_first: Callable[[], None]) -> float | Tensor:
        """Return the weight of a gradient that is about to be accumulated.

        Calls `before_first` before the first gradient of a batch, whose weight counts from then on.
        """
        if not self.is_weighted:
            return 0.0 if self.join.ran_out else 1.0
        if self._of_batch is None:
            remedy = "call set_weight(w) before the backward of each batch, and take all losses of one in one backward"
            raise RuntimeError(message(NAME, "weight", "none for this batch", "one", remedy))
        if self._is_new:
            before_first()
            self.total, self._is_new = self.total + self._of_batch, False
        return 0.0 if self.join.ran_out else self._of_batch

    @property
    def scale(self) -> float:
        """The factor of all of this rank's gradients: 1/N before the sum, which may overflow in half precision."""
        if not self.join.took_part:
            return 0.0
        return 1 / self._ranks if self._is_mean and not self._counts_ranks else 1.0

    def divisor(self, weights: Tensor, ranks: Tensor) -> Tensor | None:
        """Return the divisor of the sum, from the sums of what the ranks have sent; None: 1."""
        if not self.is_weighted and not (self._is_mean and self._counts_ranks):
            return None
        divisor = weights if self.is_weighted else ranks
        return torch.where(divisor == 0, 1.0, divisor)

    @property
    def _counts_ranks(self) -> bool:
        """Whether a mean is divided by the number of ranks that take part, which the last bucket brings."""
        return self.join.loop is not None or self._has_hook

    def drop_weights(self) -> None:
        """All gradients were dropped: the weight of the current batch counts again with its next gradient."""
        self.total, self._is_new = 0.0, True

    def on_reduction(self) -> None:
        """Gradients were reduced."""
        self.total, self._of_batch, self._is_new = 0.0, None, False
        self.join.on_reduction()


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
        if dtype is not None and dtype not in FLOATS:
            expected = f"{', '.join(map(str, FLOATS))}, in which gradients can be added, or None"
            raise TypeError(message(NAME, "comm_dtype", repr(dtype), expected))
        if self.comm_hook is not None and not callable(self.comm_hook):
            expected = "a function of a bucket, or None"
            raise TypeError(message(NAME, "comm_hook", type(self.comm_hook).__name__, expected))

    def _check_choices(self, module: nn.Module | None) -> None:
        if expect.flag(NAME, "deterministic", self.deterministic) and self.comm_hook is not None:
            got, remedy = "True with a comm_hook", "let the hook add in the order of ranks"
            raise ValueError(message(NAME, "deterministic", got, "False, since the hook replaces the sum", remedy))
        expect.choice(NAME, "unused", self.unused, ("allow", "error"))
        given: object = self.broadcast_buffers
        remedy = 'True of DistributedDataParallel is "each forward", its False is "never"' * isinstance(given, bool)
        expect.choice(NAME, "broadcast_buffers", given, ("never", "once", "each forward"), remedy)
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
    found = spelled(value)
    if found is None or found not in allowed:
        *others, last = (f'"{each}"' for each in allowed)
        raise ValueError(message(name, "reduction", repr(value), f"{', '.join(others)} or {last}"))
    return found


def name_of(hook: Callable[..., Any]) -> str:
    """Return a function's name, or that of an object's class."""
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name
