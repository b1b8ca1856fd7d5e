"""Tells whether the user has zeroed or modified a gradient after autograd accumulated it.

note  notes/averaging.md
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from diffcoll.core.torch_private.tensors import base, is_view, version


class Accumulated:
    """One gradient after its last accumulation.

    A view of the user's memory is compared by its values: its version is that of its base, which also changes with the
    gradients of other parameters, and not with writes through `.data`. So are a witness, and gradients of which a copy
    is asked for, if the CPU can read them at once.
    """

    grad: Tensor | None = None
    _state = 0, 0
    #: Of one that is compared by values: whether it was not zero, a copy if one was asked for, the version of its base.
    _any: Tensor | None = None
    _copy: Tensor | None = None
    _version = 0

    def record(self, grad: Tensor | None, *, keeps_copy: bool, is_witness: bool = False) -> None:
        """Record a gradient; without a copy `is_modified` only tells zero from not zero."""
        self.clear()
        self.grad, self._state = grad, state(grad)
        if grad is not None and (is_view(grad) or ((keeps_copy or is_witness) and is_readable(grad))):
            self._any, self._version = grad.detach().any(), version(grad)
            self._copy = grad.detach().clone() if keeps_copy else None

    def clear(self) -> None:
        """Forget the gradient."""
        self.grad = self._any = self._copy = None

    def is_modified(self, grad: Tensor | None) -> bool:
        """Whether a parameter's gradient is another one now, or has other values."""
        if grad is not self.grad or state(grad) != self._state:
            return True
        if grad is None or self._any is None:
            return False
        if grad.any() != self._any:
            return True
        return self._copy is not None and not _equal(grad.detach(), self._copy)

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


def is_readable(grad: Tensor) -> bool:
    """Whether the values can be read without a wait for a device."""
    return grad.is_cpu and grad.layout == torch.strided


def state(grad: Tensor | None) -> tuple[int, int]:
    """Return the version of a gradient and its address, which `.data = …` changes alone; sparse ones have none."""
    if grad is None:
        return 0, 0
    # A view has the version of its base, which changes with the gradients of other parameters.
    return 0 if is_view(grad) else version(grad), grad.data_ptr() if grad.layout == torch.strided else 0


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether all numbers are equal or both NaN."""
    x, y = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (x, y))
    return bool(torch.isclose(x, y, rtol=0, atol=0, equal_nan=True).all())
