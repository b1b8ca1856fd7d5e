"""Reductions that are not linear, composed of linear collectives and a local reduction.

    all_to_all: rank r receives block r of every rank, stacked                   (N, block r)
    reduction over dim 0 of the stack, locally, with PyTorch's own derivative    (block r)
    all_gather, or gather, or nothing                                            y

This sends as many bytes as an all-reduce, and each rank keeps one stack of the size of x. All derivatives and
transforms follow from those of the three steps. Small tensors are gathered whole instead, in one round of messages. So
are all tensors if the user's function is not declared elementwise, since its result at one position may depend on every
other:

    all_gather, replicated                                                       (N, shape of x)
    reduction over dim 0, on every rank                                          y, replicated
    sum_gradients, or keep it on one rank, or split                              y
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diffcoll.core.blocks import concatenated
from diffcoll.core.derivatives import apply
from diffcoll.core.dtypes import rounding
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.linear import MAPS, Linear
from diffcoll.core.moves import move
from diffcoll.core.reductions import Reduction
from diffcoll.core.torch_private.tracing import is_known, unobserved
from diffcoll.core.torch_private.transforms import is_within_transform
from diffcoll.engines.devices import forked_rng
from diffcoll.engines.engine import Engine, even_sizes

#: The last collective of the reduction, the tensor to apply it to, and the local function of its result.
Steps = tuple[Linear, Tensor, Callable[[Tensor], Tensor]]
#: Splits a stack (m, …) of tensors like x into stacks of parts of them.
Cut = Callable[[Tensor], Sequence[Tensor]]


class Reducing:
    """One reduction of all ranks' x.

    Every rank builds the same graph, also for an empty block: if a rank's graph lacked a collective, the other ranks
    would wait for it in a higher-order backward.

    Args:
        operation: the collective, for errors.
        reduction: the reduction over the ranks.
        engine: the group.
        x: this rank's tensor.
        checked: whether to compare first what the user's function returns on each rank and for parts of the stack.
    """

    def __init__(
        self, operation: str, reduction: Reduction, engine: Engine, x: Tensor, *, checked: bool = False
    ) -> None:
        self.operation, self.reduction, self.engine, self.x = operation, reduction, engine, x
        self.checked = checked and reduction.users and not is_within_transform()

    def on_all_ranks(self, replicated: bool, deterministic: bool = False) -> Steps:
        """y on every rank; `deterministic`: gradients are added in the order of ranks."""
        sizes = even_sizes(self.x.numel(), self.engine.size)
        self._check(lambda stack: _row(stack).split_with_sizes(list(sizes), 1))
        # Sizes without a value yet are not taken to be small: the graph of every rank must be the same.
        small = self.x.numel() * self.x.element_size() <= self.engine.small(self.x.device.type)
        if is_known(small) or self._in_one_stack(sizes):
            if replicated:
                return self._whole(self._result)
            return self._whole(self._then(MAPS["SumGradients"](self.engine, deterministic)))
        last = MAPS["AllGather"](self.engine, 0, sizes, replicated, deterministic)
        return last, self._row_block(sizes), lambda y: y.view(self.x.shape)

    def on_rank(self, dst: int) -> Steps:
        """y on rank dst, zeros elsewhere."""
        sizes = even_sizes(self.x.numel(), self.engine.size)
        self._check(lambda stack: _row(stack).split_with_sizes(list(sizes), 1))
        here = self.engine.rank == dst

        def shaped(y: Tensor) -> Tensor:
            if not here:  # y is empty, and stays in the graph
                y = concatenated([y, y.new_zeros(self.x.numel())])
            return y.view(self.x.shape)

        if self._in_one_stack(sizes):
            return self._whole(self._then(MAPS["Keep"](self.engine, dst)))
        return MAPS["Gather"](self.engine, dst, 0, sizes), self._row_block(sizes), shaped

    def blocks(self, dim: int, sizes: tuple[int, ...], deterministic: bool = False) -> Steps:
        """Block r of y along dim, on rank r; `deterministic` as in `on_all_ranks`."""
        self._check(lambda stack: stack.split_with_sizes(list(sizes), dim + 1))
        if self._in_one_stack(sizes):
            return self._whole(self._then(MAPS["Split"](self.engine, dim, sizes, deterministic)))
        return MAPS["AllToAll"](self.engine, dim + 1, 0, sizes, self._ones), self.x.unsqueeze(0), self._result

    def _row_block(self, sizes: tuple[int, ...]) -> Tensor:
        """Block r of y as one row, on rank r."""
        return self._reduced(apply(MAPS["AllToAll"](self.engine, 1, 0, sizes, self._ones), self.x.reshape(1, -1)))

    def _in_one_stack(self, sizes: tuple[int, ...]) -> bool:
        """Whether every rank reduces the stack of all ranks' whole x.

        One rank has no parts to share. A user's function is not called with an empty part if other ranks' parts are not
        empty: it might build a different graph.
        """
        if self.reduction.whole or self.engine.size == 1:
            return True
        return self.reduction.users and any(is_known(size == 0) for size in sizes)

    def _whole(self, after: Callable[[Tensor], Tensor]) -> Steps:
        """Every rank reduces the stack of all ranks' x. So the stack and y are replicated."""
        return MAPS["AllGather"](self.engine, 0, self._ones, True), self.x.unsqueeze(0), after

    def _then(self, f: Linear) -> Callable[[Tensor], Tensor]:
        """From the stack to f(y), where f takes the replicated y to what each rank's loss uses.

        Its adjoint adds up the gradients of y before the local derivative. After it, the terms may overflow or be NaN
        where the derivative of the sum is not. On one rank f is the identity.
        """
        return self._result if self.engine.size == 1 else lambda stack: apply(f, self._reduced(stack))

    @property
    def _ones(self) -> tuple[int, ...]:
        return (1,) * self.engine.size

    def _result(self, stack: Tensor) -> Tensor:
        """Reduce dim 0 to a tensor that the caller may modify."""
        return _copy(self._reduced(stack))

    def _reduced(self, stack: Tensor) -> Tensor:
        """Reduce dim 0; may return a view of the stack, or a tensor that autograd has saved."""
        y = self.reduction.of(stack)
        if not isinstance(y, Tensor) or y.shape != stack.shape[1:]:
            got = f"a function that returns {tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__}"
            expected = f"{tuple(stack.shape[1:])}: dim 0 of {tuple(stack.shape)} reduced, the others kept"
            raise ValueError(message(self.operation, "op", got, expected, "reduce with dim=0"))
        return y

    # ── check mode ───────────────────────────────────────────────────────────────────────────────────────

    def _check(self, cut: Cut) -> None:
        """Raise on all ranks if the user's function differs between ranks, or is declared elementwise and is not."""
        if self.checked:
            with unobserved():
                self._compare_functions(cut)

    def _compare_functions(self, cut: Cut) -> None:
        n = self.engine.size
        with forked_rng(self.x):
            stack = self._gathered(self.x.detach())
            y = self._reduced(stack.clone()).detach()
            cuts: list[Cut] = [cut, lambda stack: [_row(stack)[:, k::n] for k in range(n)]]
            broken = not self.reduction.whole and any(self._differs_in_parts(stack, y, cut) for cut in cuts)
        results, verdicts = self._gathered(y), self._gathered(torch.tensor(broken, device=self.engine.control_device))
        for r, other in enumerate(results):
            if not _near(other, results[0]):
                raise CollectiveMismatchError(
                    f"{self.operation}: op: the function returns different values for the same stack on rank {r} and "
                    "on rank 0; pass the same function on all ranks, without random numbers or data of one rank"
                )
        if verdicts.any():
            got = f"{self.reduction.over!r}, whose result at one position depends on other positions"
            expected = "a function that returns the same values for some positions of the stack as for all"
            remedy = "pass the function itself without dc.elementwise: it gets the whole stack"
            raise ValueError(message(self.operation, "op", got, expected, remedy))

    def _differs_in_parts(self, stack: Tensor, y: Tensor, cut: Cut) -> bool:
        for part, expected in zip(cut(stack), cut(y.unsqueeze(0)), strict=True):
            if part.numel():
                try:
                    if not _near(self._reduced(part.clone()).detach(), expected[0]):
                        return True
                except Exception:  # it needs another shape
                    return True
        return False

    def _gathered(self, t: Tensor) -> Tensor:
        return move(t.unsqueeze(0), MAPS["AllGather"](self.engine, 0, self._ones))


def _row(stack: Tensor) -> Tensor:
    return stack.reshape(len(stack), -1)


def _copy(y: Tensor) -> Tensor:
    """Return a copy that the caller may modify: y may be a view, or saved for backward, as the result of amax is."""
    return y.clone(memory_format=torch.contiguous_format)


def _near(a: Tensor, b: Tensor) -> bool:
    """Whether a and b differ only by rounding."""
    tolerance = rounding(a.dtype)
    if a.dtype != b.dtype or not tolerance:
        return torch.equal(a, b)
    finite = b[b.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
