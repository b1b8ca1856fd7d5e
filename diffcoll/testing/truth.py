"""The ground truth of a program: N ranks in one autograd graph, of which PyTorch derives the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffcoll import truth
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.torch_private.transforms import is_transformed
from diffcoll.core.trees import tree_map
from diffcoll.engines.rank_state import THREAD
from diffcoll.testing._calls import per_rank_arguments
from diffcoll.testing.simulate import run_ranks

T = TypeVar("T")


def true_gradients(fn: Callable[..., Tensor], *per_rank: Sequence[Any], seed: int = 0) -> list[tuple[Tensor, ...]]:
    """Return the gradients of the sum of all ranks' losses, derived by PyTorch alone, as a reference for programs.

    N simulated ranks run in one autograd graph, in which each collective is its definition in `diffcoll.truth`, a few
    lines of PyTorch. No backward rule of this library takes part.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import true_gradients
    >>> xs = [torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)]
    >>> true_gradients(lambda x, w: w * dc.all_reduce(x), xs, [1.0, 10.0])
    [(tensor(11.),), (tensor(11.),)]

    Args:
        fn: called as fn(a_r, b_r, …) on rank r; returns the rank's loss, a 0-d tensor, and does not call backward.
        per_rank: one or more sequences of equal length N, one element for each rank: tensors, trees of them, or
            anything else. Each rank differentiates by tensors of its own, also where ranks get the same one.
        seed: as for `simulate`.

    Returns:
        For each rank a tuple: the gradients of the tensors in its arguments that require one, in their order; zeros
        where no loss depends on one. The tensors' `.grad` are not touched.

    Raises:
        TypeError: fn returned something else than a loss.
        CollectiveMismatchError: ranks call different collectives, or with arguments that differ.
        RuntimeError: fn calls backward, or a collective runs in the backward of the joint graph: in a checkpoint, which
            recomputes, an `autograd.Function` or a hook; or torch.distributed's collectives get what needs a gradient.
        Exception: the first exception that fn raised on any rank.
    """
    leaves: list[list[Tensor]] = []

    def as_leaves(row: tuple[Any, ...]) -> Any:
        own: dict[int, Tensor] = {}

        def leaf(x: Any) -> Any:
            if not (isinstance(x, Tensor) and x.requires_grad):
                return x
            return own.setdefault(id(x), x.detach().requires_grad_())

        rebuilt = tree_map(leaf, list(row))
        leaves.append(list(own.values()))
        return rebuilt

    rows = [as_leaves(row) for row in per_rank_arguments("true_gradients", per_rank)]
    losses = in_one_graph(fn, rows, seed)
    for r, loss in enumerate(losses):
        if not (isinstance(loss, Tensor) and loss.dim() == 0):
            got = f"{type(loss).__name__} {tuple(loss.shape) if isinstance(loss, Tensor) else ''} from rank {r}"
            raise TypeError(message("true_gradients", "fn", got, "the rank's loss, a 0-d tensor"))
    flat = [x for of_rank in leaves for x in of_rank]
    total: Tensor = sum(losses)  # type: ignore[assignment]
    given: Iterator[Tensor]
    if total.requires_grad and flat:
        with no_collectives():
            given = iter(torch.autograd.grad(total, flat, allow_unused=True, materialize_grads=True))
    else:
        given = map(torch.zeros_like, flat)
    return [tuple(next(given) for _ in of_rank) for of_rank in leaves]


def in_one_graph(fn: Callable[..., T], rows: Sequence[Sequence[Any]], seed: int = 0) -> list[T]:
    """Run fn on ranks in one autograd graph; return the results, of which the caller calls backward."""
    return run_ranks(fn, rows, seed, _truth)


@contextmanager
def no_collectives() -> Iterator[None]:
    """Refuse collectives in a backward of the joint graph, where the ranks have ended."""
    THREAD.refusal = (
        "called in the backward of the graph of all ranks (by a checkpoint that is recomputed, the backward of an "
        "autograd.Function, or a hook), where the ranks cannot meet; under simulate each rank calls backward itself"
    )
    try:
        with torch.autograd.set_multithreading_enabled(False):  # an accelerator's backward stays in this thread
            yield
    finally:
        THREAD.refusal = ""


def _truth(name: str, calls: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    """Return the results of all ranks' calls of one collective by its definition in `diffcoll.truth`."""
    xs, arguments = map(list, zip(*calls, strict=True))
    if any(isinstance(x, Tensor) and is_transformed(x) for x in xs):
        raise CollectiveMismatchError(
            f"{name}: a torch.func transform in one rank cannot differentiate through the graph of all ranks"
        )
    common = dict(arguments[0])
    for key in truth.PER_RANK:
        if key in common and any(a[key] is not None for a in arguments):
            common[key] = [a[key] for a in arguments]
    ys: list[Any] = getattr(truth, name)(xs, **common)
    for y in ys:
        if isinstance(y, Tensor) and y.requires_grad:
            y.register_hook(partial(_refuse_on_ranks, name))  # type: ignore[no-untyped-call]
    return ys


def _refuse_on_ranks(name: str, gradient: Tensor) -> None:
    if THREAD.rank is not None:
        raise RuntimeError(
            f"backward ran through {name} on a rank of true_gradients, where it would differentiate one rank's loss "
            "alone; return the loss instead"
        )
