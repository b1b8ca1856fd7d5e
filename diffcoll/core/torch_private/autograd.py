"""The backward that runs, its graph, and checkpoints; private torch API."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

#: Returns the graph task id of the current backward, -1: none; a nested backward has its own id.
backward_at_work: Callable[[], int] = torch._C._current_graph_task_id


def is_recomputing() -> bool:
    """Whether a checkpoint recomputes its function, which may stop in the middle.

    No API tells. Grad mode is on within a backward only in a recomputation, or with create_graph=True.
    """
    return backward_at_work() >= 0 and torch.is_grad_enabled()


def nodes_of_graph(x: Tensor) -> list[Any]:
    """Return all nodes of the autograd graph of x."""
    seen: dict[Any, None] = {}
    waiting = [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting += [following for following, _ in node.next_functions]
    return list(seen)


def leaves_of_graph(x: Tensor) -> list[Tensor]:
    """Return the leaf tensors that the gradient of x is accumulated in. No public API names a node's leaf."""
    return [node.variable for node in nodes_of_graph(x) if node.name().endswith("AccumulateGrad")]


def is_within_reentrant_checkpoint() -> bool:
    """Whether code runs in the first forward of `checkpoint(…, use_reentrant=True)`; only the stack tells."""
    # Not imported here: it takes time, and where it was not imported nobody has called checkpoint.
    reentrant = getattr(sys.modules.get("torch.utils.checkpoint"), "CheckpointFunction", None)
    if reentrant is None:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not reentrant.forward.__code__:
        frame = frame.f_back
    return frame is not None


with torch.inference_mode(False):  # the library may be imported within inference mode, whose tensors nobody can save
    _TOKEN = torch.zeros((), device="cpu")


def save_in_checkpoint(ctx: Any) -> None:
    """Save a tensor for a node's backward if a checkpoint, or another hook for saved tensors, is in force.

    A checkpoint recomputes what runs in it when backward needs a tensor that was saved there. So every rank whose
    backward reaches the node, which reads it, recomputes at the same place. No public API tells whether one is.
    """
    ctx.saves = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if ctx.saves:
        ctx.save_for_backward(_TOKEN)


class AutogradMode:
    """Inference mode and hooks for saved tensors, as they are where it is made."""

    __slots__ = ("_hooks", "_inference")

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run code as if it stood where this was made: without the hooks entered since, which no public API leaves.

        Gradients are recorded: where they were not, nothing requires one. A checkpoint entered since would count what
        is saved, and not count it when it recomputes.
        """
        hooks, left = torch._C._autograd, []
        while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
            if self._hooks is not None and pair[0] == self._hooks[0]:
                break
            left.append(pair)
            hooks._pop_saved_tensors_default_hooks()
        try:
            with torch.inference_mode(self._inference):  # False enables gradients, too
                yield
        finally:
            for pair in reversed(left):
                hooks._push_saved_tensors_default_hooks(*pair)


class _UnpackWithin:
    """The unpack hook of a pair of hooks for saved tensors, with a context."""

    def __init__(self, unpack: Callable[[Any], Tensor], context: Callable[[], AbstractContextManager[None]]) -> None:
        self._unpack, self._context = unpack, context

    def __call__(self, packed: Any) -> Tensor:
        with self._context():
            return self._unpack(packed)


def unpack_within(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let the innermost hooks for saved tensors in force, such as a checkpoint's, unpack within a context.

    A checkpoint recomputes when it unpacks. No public API returns the hooks that other code has entered.
    """
    hooks = torch._C._autograd
    pair = hooks._top_saved_tensors_default_hooks(True)
    if pair is not None and not isinstance(pair[1], _UnpackWithin):
        hooks._pop_saved_tensors_default_hooks()
        hooks._push_saved_tensors_default_hooks(pair[0], _UnpackWithin(pair[1], context))
