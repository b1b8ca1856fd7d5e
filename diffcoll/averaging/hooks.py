"""The hooks by which an averager follows the backward passes of its parameters.

| autograd | here |
|---|---|
| pre-hook of AccumulateGrad | `_before_accumulate`: multiply by the weight |
| post-accumulate hook of the parameter | `_after_accumulate`: into the bucket; a complete bucket is sent |
| first of these in a pass | `on_backward_start` |
| callback of the engine at the end of the outermost pass | `_on_backward_end`: send the rest, wait, write `.grad` |
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from diffcoll.averaging.buckets import Parameter
from diffcoll.averaging.functions import weighted
from diffcoll.averaging.reducer import Reducer, ending
from diffcoll.averaging.state import NAME
from diffcoll.core._torch import (
    after_backward,
    backward_at_work,
    has_earlier_hooks,
    is_backward_nested,
    nodes_after_nested_backward,
    untraced,
    version,
)
from diffcoll.core.errors import message

__all__ = ["Hooks"]


class Hooks:
    """The hooks of one averager's parameters, which hold it weakly."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        #: Autograd has a thread for each GPU: gradients of several may be accumulated at the same time.
        self._lock = threading.RLock()
        #: How many `no_sync` blocks have been entered and not left.
        self.paused = 0

    def attach(self) -> None:
        """Register hooks on all parameters; on frozen ones too, so that they are averaged once they are not frozen."""
        for p in self._reducer.parameters:
            if p.tensor.is_inference():
                continue  # never has a gradient
            with _requiring_grad(p.tensor):
                hook = self._hook(Hooks._after_accumulate, p)
                p.hooks.append(p.tensor.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            if self._reducer.reduction != "mean" or has_earlier_hooks(p.tensor):
                self._hook_before(p)

    def hook_before(self) -> None:
        """Register hooks that see gradients before they are accumulated, where there are none yet."""
        for p in self._reducer.parameters:
            self._hook_before(p)

    def _hook_before(self, p: Parameter) -> None:
        """On the node that accumulates: a hook of the tensor would also see torch.autograd.grad."""
        if p.hooks and p.node is None:
            with _requiring_grad(p.tensor):
                p.node = get_gradient_edge(p.tensor).node
            p.hooks.append(p.node.register_prehook(self._hook(Hooks._before_accumulate, p)))

    def detach(self) -> None:
        """Remove the hooks."""
        for p in self._reducer.parameters:
            for hook in p.hooks:
                hook.remove()
            p.hooks, p.node = [], None

    def _hook(self, method: Callable[[Hooks, Any, Any], Any], p: Parameter) -> Callable[..., Any]:
        """Return a hook of p that holds neither these hooks nor p."""
        hooks, parameter = weakref.ref(self), weakref.ref(p)

        def hook(given: Any) -> Any:
            alive = hooks()
            if alive is None:
                return None
            with alive._lock:
                return method(alive, parameter(), given)

        return untraced(hook)

    # ── events of autograd ───────────────────────────────────────────────────────────────────────────────

    def _before_accumulate(self, p: Parameter, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Multiply a gradient by the weight, and set aside what it would be added to if that has been reduced."""
        reducer = self._reducer
        p.value_version = version(p.tensor)
        weight: float | Tensor = 1.0
        if reducer.reduction == "weighted":
            if reducer.weights.set_at != reducer.count:
                remedy = (
                    "call set_weight(w) before the backward of each batch, and take all losses of one in one backward"
                )
                raise RuntimeError(message(NAME, "weight", "none for this batch", "one", remedy))
            weight = reducer.weights.current
        reducer.put_aside(p)
        p.reduced = None
        if reducer.join.ran_out:
            weight = 0.0
        (g,) = grads
        if g is None or (isinstance(weight, float) and weight == 1.0):
            return None
        if isinstance(weight, Tensor):
            return (weighted(g, weight),)
        return (g * weight if weight else torch.zeros_like(g),)

    def _after_accumulate(self, p: Parameter, tensor: Tensor) -> None:
        """Put a gradient into its bucket, and send the bucket if it is complete."""
        reducer, now = self._reducer, self._reducer.backward
        if p.kept is not None:
            p.note()
        if self.paused:
            return
        task = backward_at_work()
        if task not in now.tasks:
            self.on_backward_start(task)
        if p.is_put:
            raise RuntimeError(
                f"{NAME}: {p.name}: a second gradient in one backward, after the first was taken; checkpoints with "
                "use_reentrant=True share it: use use_reentrant=False, or no_sync() and synchronize()"
            )
        if p.turn == now.number:
            return  # it was accumulated in a pass within this one before
        p.turn = now.number
        if reducer.arrived is not None:
            reducer.arrived.append(p.index)
        bucket = p.bucket
        if bucket.stream is not None:
            bucket.enter_stream()
        bucket.pending -= 1
        if now.is_nested:
            return
        if not p.is_small:  # while it is in the cache, and before the next one needs memory
            reducer.put(p)
        if bucket.pending == 0:
            reducer.send_ready()

    def on_backward_start(self, task: int) -> None:
        """Follow a backward pass, or one within it, from its first gradient on."""
        reducer, now = self._reducer, self._reducer.backward
        nested = is_backward_nested()
        if now.tasks and not nested and task > max(now.tasks):  # not the outer one of those, which is older
            reducer.abandon()
        if not now.tasks:
            now.tasks.add(task)
            reducer.begin()
        now.tasks.add(task)
        now.is_nested = now.is_nested or nested
        self._await_end(nested)

    def after_new_parameter(self) -> None:
        """A parameter that nobody averages has a gradient: follow the pass, whose end raises."""
        if not self.paused and not self._reducer.backward.tasks:
            self.on_backward_start(backward_at_work())

    def _await_end(self, nested: bool) -> None:
        """Have `_on_backward_end` called at the end of the outermost pass."""
        if self._reducer.backward.is_end_awaited:
            return
        if nested:
            after_backward(self._on_nested_end)
            return
        self._reducer.backward.is_end_awaited = True
        task = backward_at_work()
        if task not in ending:
            after_backward(partial(_on_backward_end, task))
        ending.setdefault(task, []).append(self._reducer)

    @untraced
    def _on_nested_end(self) -> None:
        """A pass within another one has ended: its outer one goes on, and its end can be awaited from there."""
        if self._reducer.backward.is_end_awaited:
            return
        following = nodes_after_nested_backward()
        if not following:
            raise RuntimeError(
                f"{NAME}: a backward within another, and no way to know when the outer one ends; use "
                "use_reentrant=False, or no_sync() and synchronize()"
            )
        handles: list[Any] = []

        def before_next_node(_: object) -> None:
            for handle in handles:
                handle.remove()
            handles.clear()
            self._await_end(is_backward_nested())

        handles += [node.register_prehook(untraced(before_next_node)) for node in following]


@untraced
def _on_backward_end(task: int) -> None:
    """Reduce the rest: on all ranks in the order in which averagers were made, whichever has met this pass first."""
    reducers = sorted(ending.pop(task, []), key=lambda reducer: reducer.number)
    errors: list[Exception] = []
    sent: list[Reducer] = []
    for reducer in reducers:
        try:
            reducer.send_rest()
            sent.append(reducer)
        except Exception as error:  # what the others have sent must be received
            errors.append(error)
    for reducer in sent:
        try:
            reducer.receive()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    if any(reducer.engine.size > 1 for reducer in reducers):
        after_backward(partial(_after_backward_end, reducers))


@untraced
def _after_backward_end(reducers: list[Reducer]) -> None:
    for reducer in reducers:
        reducer.check_unchanged()


@contextlib.contextmanager
def _requiring_grad(p: Tensor) -> Iterator[None]:
    """Let p have hooks, also if it is frozen."""
    frozen = not p.requires_grad
    if frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        if frozen:
            p.requires_grad_(False)
