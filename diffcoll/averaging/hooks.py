"""The autograd hooks of an averager.

| autograd event | hook |
|---|---|
| hook of the parameter | `_on_gradient`: register the pre-hook |
| pre-hook of AccumulateGrad | `_before_accumulate`: multiply by the weight |
| post-accumulate hook of the parameter | `_after_accumulate`: copy into the bucket; a complete bucket is sent |
| first post-accumulate hook in a pass | `on_backward_start` |
| callback of the engine at the end of the outermost pass | `_on_backward_end`: send the rest, wait, write `.grad` |
| an error in one of these hooks | `_undo`: restore `.grad` |
| the callback is freed uncalled: another error has ended the pass | `_BackwardEnd.__del__`: restore `.grad` |
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.hooks import unserializable_hook

from diffcoll.averaging import ownership
from diffcoll.averaging.accumulation import Collecting, refuse_second_average
from diffcoll.averaging.gradient import Parameter
from diffcoll.averaging.messages import numbers_of_ranks
from diffcoll.averaging.policy import NAME
from diffcoll.averaging.reducer import Reducer
from diffcoll.core.torch_private.autograd import (
    after_backward,
    backward_at_work,
    hooks_after_nested_backward,
    is_backward_compiled,
    is_backward_nested,
    is_backward_on_this_thread,
    is_backward_returned,
    node_at_work,
)
from diffcoll.core.torch_private.tensors import has_earlier_hooks, is_last_hook, version
from diffcoll.core.torch_private.tracing import untraced

_numbers = itertools.count()


class Hooks:
    """The hooks of one averager; parameters hold it weakly."""

    def __init__(self, reducer: Reducer, no_sync_depth: int) -> None:
        self._reducer, self.no_sync_depth = reducer, no_sync_depth
        #: Autograd has a thread per GPU, so hooks of parameters on several GPUs may run at the same time.
        self._lock = threading.RLock()
        #: Marks nodes that have the pre-hook.
        self._key = f"diffcoll {next(_numbers)}"
        #: The number of reductions when `skip_step` was last called; 0: never.
        self._skipped_at = 0

    def attach(self) -> None:
        """Register hooks on all parameters, frozen ones included: they may be unfrozen later."""
        for p in self._reducer.parameters:
            if p.tensor.is_inference():
                continue
            # torch.utils.swap_tensors, by which load_state_dict and conversions may replace a parameter, removes its
            # hooks without a word. It refuses tensors with weak references.
            p.reference = weakref.ref(p.tensor)
            self._register(p, p.tensor.register_post_accumulate_grad_hook, self._hook_after(p))
            if self._reducer.policy.changes_reduced or has_earlier_hooks(p.tensor):
                self.hook_before([p])

    def hook_before(self, parameters: Iterable[Parameter]) -> None:
        """Let `_before_accumulate` run for these parameters."""
        for p in parameters:
            if p.hooks and p.pre_hook is None:
                p.pre_hook = self._hook(Hooks._before_accumulate, p)
                self._register(p, p.tensor.register_hook, self._hook(Hooks._on_gradient, p))

    def _register(self, p: Parameter, register: Callable[..., Any], hook: Callable[..., Any]) -> None:
        requires_grad = p.tensor.requires_grad
        p.tensor.requires_grad_(True)  # otherwise no hook can be registered
        p.hooks.append(register(hook))
        p.tensor.requires_grad_(requires_grad)

    def detach(self) -> None:
        """Remove the hooks."""
        for p in self._reducer.parameters:
            handles, p.hooks = p.hooks, []
            p.reference = p.pre_hook = None
            for handle in handles:
                handle.remove()

    def _hook(self, method: Callable[[Hooks, Any, Any], Any], p: Parameter) -> Callable[..., Any]:
        """Return a hook of p that holds this object and p weakly."""
        hooks, parameter = weakref.ref(self), weakref.ref(p)

        def hook(given: Any) -> Any:
            alive, of = hooks(), parameter()
            if alive is None or of is None or not of.hooks:
                return None
            with alive._lock:
                try:
                    return method(alive, of, given)
                except BaseException:
                    alive._undo()
                    raise

        unserializable_hook(untraced(hook))  # type: ignore[no-untyped-call]
        return hook

    def _hook_after(self, p: Parameter) -> Callable[[Tensor], None]:
        """Return the post-accumulate hook of p: `_after_accumulate`, or all that it does for most small parameters.

        For thousands of them calls in Python are the larger part of the averager's time (benchmarks/README.md).
        """
        hooks, parameter, otherwise = weakref.ref(self), weakref.ref(p), self._hook(Hooks._after_accumulate, p)

        def hook(tensor: Tensor) -> None:
            alive, of = hooks(), parameter()
            if alive is None or of is None:
                return
            now = alive._reducer.now
            if (
                now is not None
                and of.waits_for_end
                and of.pre_hook is None
                and of not in now.collected
                and backward_at_work() in now.tasks
            ):
                of.is_accumulated, of.value_version = True, version(tensor)
                now.collected[of] = None
            else:
                otherwise(tensor)

        unserializable_hook(untraced(hook))  # type: ignore[no-untyped-call]
        return hook

    def _undo(self) -> None:
        """Restore `.grad` if a reduction has begun in the current backward."""
        now = self._reducer.now
        if now is not None and backward_at_work() in now.tasks:
            self._reducer.undo()

    # ── events of autograd ───────────────────────────────────────────────────────────────────────────────

    def _on_gradient(self, p: Parameter, grad: Tensor) -> Tensor | None:
        """Register `_before_accumulate` on the AccumulateGrad that runs, after this and all other hooks of the tensor.

        The hook of the tensor also runs in torch.autograd.grad, the pre-hook does not. A node that is held for its
        pre-hook owns the parameter where the garbage collector does not see it, and would keep alive what the hooks of
        the parameter refer to.
        """
        node = node_at_work()
        if node is None:
            return self._in_compiled_autograd(p, grad)
        if self._key not in node.metadata:
            node.metadata[self._key] = None
            node.register_prehook(p.pre_hook)
        return None

    def _in_compiled_autograd(self, p: Parameter, grad: Tensor) -> Tensor | None:
        """Do here what `_before_accumulate` does: no node runs."""
        if is_backward_returned():
            return None
        if not is_last_hook(p.tensor, p.hooks[-1]):
            raise RuntimeError(
                f"{NAME}: {p.name}: compiled autograd runs this backward, and the parameter has a hook that was "
                f"registered after the averager's, which would not get this rank's own gradient; make the {NAME} after "
                "the hook, or turn compiled autograd off (torch._dynamo.config.compiled_autograd)"
            )
        return self._reducer.accumulation.before(p, grad)

    def _before_accumulate(self, p: Parameter, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        changed = self._reducer.accumulation.before(p, grads[0])
        return None if changed is grads[0] else (changed,)

    def _after_accumulate(self, p: Parameter, tensor: Tensor) -> None:
        """Copy a gradient into its bucket, and send the bucket if it is complete."""
        reducer = self._reducer
        reducer.accumulation.after(p)
        if self.no_sync_depth:
            return
        task, now = backward_at_work(), reducer.now
        if now is None or task not in now.tasks:
            now = self.on_backward_start(task)
        reducer.collect(p, now)

    def on_backward_start(self, task: int) -> Collecting:
        """Prepare the buckets at the first gradient of a backward pass, or of a pass nested in it."""
        reducer = self._reducer
        nested = is_backward_nested()
        # A larger id that is not nested is a new pass: an error ended the earlier one. An outer pass has a smaller id.
        if reducer.now is not None and not nested and task > max(reducer.now.tasks, default=-1):
            reducer.abandon()
        now = reducer.begin(task) if reducer.now is None else reducer.now
        if is_backward_compiled():
            raise RuntimeError(
                f"{NAME}: compiled autograd runs this backward, which does not tell when it ends, so gradients would "
                "not be averaged; turn it off (torch._dynamo.config.compiled_autograd), since torch.compile of a whole "
                "step does not need it, or call backward within no_sync() and synchronize() after it"
            )
        now.tasks.add(task)
        now.is_nested = now.is_nested or nested
        self._register_end_callback(nested, now)
        return now

    def end_failed_backward(self) -> None:
        """Tell the ranks that still wait in a backward pass that this rank has left it by an error."""
        if self._reducer.now is not None:
            self._reducer.abandon()

    def skip_step(self, failed: bool) -> bool:
        """End the reduction of this step if the other ranks wait in it; return whether a rank has failed."""
        reducer, name = self._reducer, f"{NAME}.skip_step"
        if backward_at_work() >= 0:
            raise RuntimeError(f"{name}: called within backward; call it after backward has returned or raised")
        count = reducer.count - self._skipped_at
        is_open = reducer.now is not None and bool(reducer.now.pending)
        failed = failed or is_open
        if is_open or (failed and not count):
            reducer.skip()
        elif count and not self._skipped_at:
            # The first call: if this rank has failed before its backward, the others may wait in a reduction.
            if not reducer.was_skipped():
                reducer.skip(failed)
        elif count != 1:
            raise RuntimeError(
                f"{name}: got {count} reductions since it was last called, expected one; call it on all ranks once per "
                "step after the first call, after the only backward outside of no_sync()"
            )
        reducer.now = None
        # If a rank has skipped the reduction, all ranks know that: no message, since it may have to end the reductions
        # of other averagers in this pass, for which ranks wait, before those call this.
        skips = reducer.was_skipped() or any(numbers_of_ranks(failed, reducer.engine))
        reducer.is_skipped = False
        self._skipped_at = reducer.count
        if skips:
            reducer.accumulation.drop()
        return skips

    def after_new_parameter(self) -> None:
        """Register the callback at the end of the pass, which raises for parameters that no averager averages."""
        if not self.no_sync_depth and self._reducer.now is None:
            self.on_backward_start(backward_at_work())

    def _register_end_callback(self, nested: bool, now: Collecting) -> None:
        """Register `_on_backward_end` at the end of the outermost pass; in a nested pass register `_on_nested_end`."""
        if now.ends_with >= 0:
            return
        if nested:
            after_backward(partial(self._on_nested_end, now))
            return
        task = backward_at_work()
        if not _reducers_of(task):
            after_backward(_BackwardEnd(task))
        now.ends_with = task

    @untraced
    def _on_nested_end(self, now: Collecting) -> None:
        """Register the callback of the outer pass as soon as its node ends or its next one runs, where it can be."""
        if now.ends_with >= 0 or now is not self._reducer.now:
            return
        handles: list[Any] = []

        def in_outer_pass(*_: object) -> None:
            for handle in handles:
                handle.remove()
            handles.clear()
            if now is self._reducer.now:  # not after an error that ended the outer pass
                self._register_end_callback(is_backward_nested(), now)

        handles += hooks_after_nested_backward(untraced(in_outer_pass))


def _reducers_of(task: int) -> list[Reducer]:
    """Return the reducers that end with this pass, in order of construction, which is equal on all ranks."""
    reducers = [claim.reducer for claim in ownership.claims()]
    return [reducer for reducer in reducers if reducer.now is not None and reducer.now.ends_with == task]


class _BackwardEnd:
    """The callback at the end of a pass. If an error ends the pass, it is not called, and freed before backward raises.

    Autograd runs a pass on a GPU in a thread of its own, which frees it a little later: too late to touch `.grad`.
    """

    def __init__(self, task: int) -> None:
        self._task, self._is_called, self._is_freed_in_time = task, False, is_backward_on_this_thread()

    @untraced
    def __call__(self) -> None:
        self._is_called = True
        try:
            _on_backward_end(self._task)
        except BaseException:
            self._undo()
            raise

    @untraced
    def __del__(self) -> None:
        if not self._is_called and self._is_freed_in_time:
            self._undo()

    def _undo(self) -> None:
        for reducer in _reducers_of(self._task):
            reducer.undo()


@untraced
def _on_backward_end(task: int) -> None:
    """Finish the reductions of all averagers of this pass."""
    reducers = _reducers_of(task)
    errors: list[Exception] = []
    sent: list[tuple[Reducer, Collecting]] = []
    for reducer in reducers:
        try:
            sent.append((reducer, reducer.send_rest()))
        except Exception as error:  # the other averagers must still receive what they have sent
            errors.append(error)
    for reducer, now in sent:
        try:
            reducer.receive(now)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    if any(reducer.engine.size > 1 for reducer in reducers):
        after_backward(partial(refuse_second_average, [p for reducer in reducers for p in reducer.trainable]))
