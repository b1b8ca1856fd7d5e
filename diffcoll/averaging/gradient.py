"""One parameter and its gradient: what was accumulated since the last reduction, and what was reduced before.

note  notes/training/gradient-averager.md
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from diffcoll.core.torch_private.tensors import base, is_view, storage_uses, version, version_and_address

#: Gradients of fewer bytes are copied into the bucket by one call: for them a call takes longer than the copy.
SMALL = 64 << 10
#: `storage_uses` of a tensor whose storage nothing else references.
_SOLE_USES = storage_uses(torch.empty(1))


def _state(grad: Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else version_and_address(grad)


class Accumulated:
    """A gradient after its last accumulation; without `keeps_copy` only zero is told from not zero.

    A view of the user's memory is compared by its values: its version is that of its base, which also changes with the
    gradients of other parameters, and not with writes through `.data`. So are a witness, and gradients of which a copy
    is asked for, if the CPU can read them at once.
    """

    def __init__(self, grad: Tensor | None, *, keeps_copy: bool = False, is_witness: bool = False) -> None:
        self.grad, self._state = grad, _state(grad)
        #: Of one that is compared by values: whether it was not zero, a copy if asked for, the version of its base.
        self._any: Tensor | None = None
        self._copy: Tensor | None = None
        self._version = 0
        if grad is not None and (is_view(grad) or ((keeps_copy or is_witness) and is_readable(grad))):
            self._any, self._version = grad.detach().any(), version(grad)
            self._copy = grad.detach().clone() if keeps_copy else None

    def is_modified(self, grad: Tensor | None) -> bool:
        """Whether a parameter's gradient is another one now, or has other values."""
        if grad is not self.grad or _state(grad) != self._state:
            return True
        if grad is None or self._any is None:
            return False
        if grad.any() != self._any:
            return True
        return self._copy is not None and not _equal(grad.detach(), self._copy)

    def is_zeroed(self, grad: Tensor | None) -> bool:
        """Whether the gradient was set to None, or modified to zeros."""
        return grad is None or (self.is_modified(grad) and not grad.any())

    def is_zero_view(self, grad: Tensor | None) -> bool:
        """Whether the gradient is a view that was zero when recorded, and is zero now."""
        is_zero = self._any is not None and not self._any and not self.is_modified(grad)
        return is_zero and grad is not None and is_view(grad)

    def is_base_modified(self, others: Iterable[Accumulated]) -> bool:
        """Whether the base of a view was modified by anything but the recorded accumulations."""
        assert self.grad is not None
        mine = base(self.grad)
        recorded = [a._version for a in others if a.grad is not None and a._any is not None and base(a.grad) is mine]
        return version(self.grad) > max(recorded, default=self._version)


_NOTHING = Accumulated(None)


class Place:
    """The part of a bucket in which the gradient of one parameter is reduced."""

    #: The part of the bucket's memory, in the shape of the gradient, and the state of a new view of it.
    memory: Tensor
    new_state: tuple[int, int]

    def __init__(self, p: Parameter, dtype: torch.dtype) -> None:
        self.tensor, self.strides = p.tensor, p.strides
        #: The view of the memory that was assigned to `.grad`.
        self.view: Tensor | None = None
        #: In this reduction: whether the gradient was put here, and whether there was one.
        self.is_filled = self.is_used = False
        #: `.grad`, if it is a view of the user's memory, which receives the result.
        self.kept: Tensor | None = None
        #: `.grad` when it was put here or taken from here, and its state then.
        self._record(None)
        #: Whether `.grad` can be a view of the memory: False if gradients are sent in another dtype.
        self.shares = p.dtype == dtype
        #: Whether it is put together with other small gradients. They are first in the message, so this depends on
        #: facts that are equal on all ranks.
        self.is_small = self.shares and p.tensor.nbytes < SMALL and p.strides is None

    def put(self, scale: float) -> None:
        """memory ← scale · `.grad`, or zeros if `.grad` is None; then make `.grad` a view of the memory."""
        grad = self.tensor.grad
        if self.holds(grad):
            grad = self.memory
        self.is_filled, self.is_used = True, grad is not None
        self.kept = grad if grad is not None and grad is not self.memory and is_view(grad) else None
        if grad is None or scale == 0:
            self.memory.zero_()
        else:
            _scaled(as_summed(self.memory.dtype, grad), scale, self.memory)
        if self.is_used and self.shares and self.kept is None:
            self._set_view()
        else:
            self._record(self.tensor.grad)

    def _record(self, grad: Tensor | None) -> None:
        self.recorded, self.recorded_state = grad, _state(grad)

    def _set_view(self) -> Tensor:
        """Make `.grad` a view of the memory.

        The view is a new tensor in every step, so that the bucket can tell whether the user still holds an older one.
        `.data` gives it its own version counter, which the library's writes to the bucket do not increment.
        """
        view = self.view
        if view is None or not self.holds(self.tensor.grad):
            view = self.view = self.memory.data
            self.tensor.grad = view
        self._record(view)
        return view

    def holds(self, grad: Tensor | None) -> bool:
        """Whether a gradient is the view of the memory; conversions of the module give the same object other memory."""
        return grad is not None and grad is self.view and grad.is_set_to(self.memory)

    def has_changed(self) -> bool:
        """Whether `.grad` was replaced or modified in place since it was put here or taken from here."""
        grad = self.tensor.grad
        return grad is not self.recorded or _state(grad) != self.recorded_state

    def take(self, earlier: Tensor | None) -> Tensor:
        """Make `.grad` the reduced gradient, with an earlier one added to it; returns it.

        It is a view of the memory, or a copy if the dtypes differ or the user has the memory.
        """
        grad = self.kept
        if grad is None and self.shares:
            grad = self._set_view()
        else:
            if grad is None:
                grad = self.tensor.grad
                # Autograd may have made `.grad` a view of another tensor, e.g. of the cotangent that the user passed.
                if grad is None or storage_uses(grad) > _SOLE_USES:
                    grad = torch.empty_like(self.tensor)
            as_summed(self.memory.dtype, grad.detach()).copy_(self.memory)
            self.tensor.grad = grad
        if earlier is not None:
            grad.add_(earlier)
        self._record(grad)
        return grad


class Parameter:
    """One parameter of an averager."""

    #: Where its gradient is reduced; not of a frozen parameter.
    place: Place

    def __init__(self, index: int, name: str, tensor: Tensor) -> None:
        self.index, self.name, self.tensor = index, name, tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.strides = tensor.stride() if is_channels_last(tensor) else None  # of its place; None: contiguous
        self.hooks: list[Any] = []
        #: Its `.grad` after the last reduction, until it is replaced or added to.
        self.reduced: Tensor | None = None
        #: Whether a pass has begun with another `.grad` than `reduced`, which autograd has not added to yet.
        self.was_replaced = False
        #: The version of the parameter before its hooks that run after an accumulation.
        self.value_version = 0
        #: Keeps swap_tensors, which would drop the hooks, from accepting the parameter.
        self.reference: weakref.ref[Tensor] | None = None
        #: Calls `Accumulation.before` before each accumulation; None: nothing is to be done then.
        self.pre_hook: Callable[..., Any] | None = None
        #: Whether that was called before the current accumulation.
        self.is_prepared = False
        #: Whether its gradient is put into its bucket, which is sent, at the end of backward only.
        self.waits_for_end = False
        self.start_over()

    def start_over(self) -> None:
        """Forget what has happened since the last reduction."""
        #: Whether autograd has accumulated a gradient.
        self.is_accumulated = self.was_replaced = False
        #: A reduced gradient to which the gradient of this step is added at the end.
        self.earlier: Tensor | None = None
        #: `.grad` after accumulation, recorded while `earlier` or a weight depends on it.
        self.accumulated = _NOTHING

    def refuse_changed_kind(self, operation: str) -> None:
        """Raise if shape or dtype differ from those on which the ranks agreed at construction."""
        if self.tensor.shape == self.shape and self.tensor.dtype == self.dtype:
            return
        was, now = f"{tuple(self.shape)} {self.dtype}", f"{tuple(self.tensor.shape)} {self.tensor.dtype}"
        raise RuntimeError(
            f"{operation}: {self.name}: was {was} when {operation} was attached, and is {now}; "
            f"make a new {operation}, which replaces this one"
        )

    def record(self, is_witness: bool = False) -> None:
        """Record `.grad` after an accumulation."""
        self.accumulated = Accumulated(self.tensor.grad, keeps_copy=self.earlier is not None, is_witness=is_witness)

    def is_zeroed(self) -> bool:
        """Whether `.grad` was zeroed since its last accumulation."""
        return self.accumulated.is_zeroed(self.tensor.grad)

    def drop_reduced(self) -> None:
        """Forget the reduced gradient if it is no longer `.grad`."""
        grad = self.tensor.grad
        if self.reduced is not grad:
            self.was_replaced = grad is not None and (self.was_replaced or self.reduced is not None)
            self.reduced = None

    def set_aside(self) -> None:
        """Move a reduced gradient to `earlier`, so that it is not reduced again; it is added back at the end."""
        grad = self.tensor.grad
        assert grad is not None
        if is_view(grad) and not grad.any():
            return
        self.earlier = grad.clone()
        self.zero()
        self.record()

    def restore_earlier(self) -> None:
        """Make `.grad` the gradient that was set aside; None, or zeros in the user's memory, if there is none."""
        self.zero()
        self.reduced = self.earlier
        if self.earlier is not None and self.tensor.grad is not None:
            self.tensor.grad.detach().copy_(self.earlier)
            self.reduced = self.tensor.grad
        elif self.earlier is not None:
            self.tensor.grad = self.earlier

    def zero(self) -> None:
        """Set `.grad` to None, or to zeros if it is a view of the user's memory."""
        grad = self.tensor.grad
        if grad is not None and is_view(grad):
            grad.detach().zero_()
        else:
            self.tensor.grad = None


def is_channels_last(x: Tensor) -> bool:
    """Whether x is dense in channels-last order and not contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return not x.is_contiguous() and x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def is_own(grad: Tensor) -> bool:
    """Whether a gradient is dense and not a view of the user's memory."""
    return grad.layout is torch.strided and not is_view(grad)


def is_readable(grad: Tensor) -> bool:
    """Whether the values can be read without a wait for a device."""
    return grad.is_cpu and grad.layout == torch.strided


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether all numbers are equal or both NaN."""
    x, y = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (x, y))
    return bool(torch.isclose(x, y, rtol=0, atol=0, equal_nan=True).all())


def as_summed(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return x, viewed as real pairs if x is complex and dtype is real."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() and not dtype.is_complex else x


def _scaled(x: Tensor, scale: float, out: Tensor) -> None:
    """out ← scale · x, in the wider of their dtypes."""
    if out.dtype.itemsize > x.dtype.itemsize or scale == 1:
        out.copy_(x)
        x = out
    if scale != 1:
        torch.mul(x, scale, out=out)
