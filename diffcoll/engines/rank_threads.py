"""What PyTorch keeps for a thread, for simulated ranks, which are threads of which one runs at a time."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad, grad_mode, graph
from torch.autograd.function import BackwardCFunction
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from diffcoll.engines.replacing import replace

# Forward mode has one level, kept in globals of the process, not of the thread. Simulated ranks are threads that
# switch within it. So the globals are saved and restored for each rank; the first rank enters the level and the last
# one exits it.


def forward_mode() -> tuple[int, int]:
    """Return the current level of forward mode and the nesting depth of torch.func.jvp."""
    return forward_ad._current_level, eager_transforms.JVP_NESTING


def set_forward_mode(state: tuple[int, int]) -> None:
    """Restore a state returned by `forward_mode`."""
    forward_ad._current_level, eager_transforms.JVP_NESTING = state


@contextlib.contextmanager
def shared_forward_mode() -> Iterator[None]:
    """Let threads of which one runs at a time be in forward mode at the same time."""
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    inside = 0

    def enter_dual_level() -> int:
        nonlocal inside
        if inside == 0 or forward_ad._current_level >= 0:
            enter()  # type: ignore[no-untyped-call]  # raises if this thread is in forward mode already
        forward_ad._current_level = 0
        inside += 1
        return 0

    def exit_dual_level(*, level: int | None = None) -> None:
        nonlocal inside
        inside -= 1
        if inside == 0:
            leave(level=level)  # type: ignore[no-untyped-call]
        forward_ad._current_level = -1

    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_dual_level, exit_dual_level
    try:
        yield
    finally:
        forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter, leave


def ambient() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager that gives another thread the modes of this one.

    PyTorch has no public API to copy them; its own threads (autograd's, jit's) copy them in C++.
    """
    modes = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()  # type: ignore[no-untyped-call]
    traced = [type(m).__name__ for m in modes[1] if getattr(m, "_mode_key", None) is not None]
    if traced:
        raise RuntimeError(
            f"simulate: called within {traced[-1]}, expected a call outside of it: its state belongs to one thread, "
            "and ranks are other threads; trace, or make fake tensors, in the function that each rank runs"
        )
    autocast = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in torch._C._autocast_supported_devices()
    ]
    cached = torch.is_autocast_cache_enabled()
    recording = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled(), torch.is_inference_mode_enabled()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    replay = torch._C._is_view_replay_enabled()
    has_layout_policy = hasattr(grad_mode, "enforce_grad_layout_policy")  # since torch 2.13
    layout = has_layout_policy and torch._C._is_grad_layout_enforcement_enabled()
    functions = torch._C._get_torch_function_state()  # type: ignore[attr-defined]
    default_device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)
        torch._C._set_torch_function_state(functions)  # type: ignore[attr-defined]
        if default_device is not None:
            torch._GLOBAL_DEVICE_CONTEXT.device_context = default_device
        with contextlib.ExitStack() as stack:
            grad, forward, inference = recording
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(forward_ad._set_fwd_grad_enabled(forward))
            # Else the backward of an accelerator's tensors runs in a thread of autograd's, which is no rank.
            stack.enter_context(grad_mode.set_multithreading_enabled(False))
            stack.enter_context(grad_mode._force_original_view_tracking(replay))
            if has_layout_policy:
                stack.enter_context(grad_mode.enforce_grad_layout_policy(layout))
            stack.callback(_pop_modes)
            for mode in modes[0]:
                _push_mode(mode)  # type: ignore[no-untyped-call]  # without calling __enter__ a second time
            for mode in modes[1]:
                _push_dispatch_mode(mode)
            if hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
                stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            if no_hooks is not None:
                torch._C._autograd._saved_tensors_hooks_disable(no_hooks)
            yield

    return entered


def _pop_modes() -> None:
    while _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        _pop_mode()  # type: ignore[no-untyped-call]
    while _get_current_dispatch_mode_stack():
        _pop_dispatch_mode()


_Code = Callable[..., Any]


def wrap_backward_code(wrapper: Callable[[], Callable[[_Code], _Code] | None], undo: contextlib.ExitStack) -> None:
    """Until `undo` is closed, wrap Python code that a backward will call, at the moment autograd receives it.

    This is the backward of a `Function`, a hook of a tensor, and a hook that unpacks saved tensors, which includes the
    recomputation of a checkpoint. PyTorch does not record in which thread or context a node was made, so the three
    places where Python code enters the graph are patched. `wrapper` is called by the thread that builds the graph; it
    returns the decorator, or None to leave the code as it is.

    It is not enough to mark the backward passes that begin at a result of `simulate`: tensors leave ranks by closures,
    too, and a checkpoint, Function or hook in their graphs would then run its collectives on one rank, as most cases of
    tests/testing/test_simulated_backward.py.
    """
    hooks = graph.saved_tensors_hooks
    replace(undo, BackwardCFunction, "__init__", _marking_init(BackwardCFunction.__init__, wrapper))
    replace(undo, hooks, "__init__", _unpacking_init(hooks.__init__, wrapper))
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        replace(undo, Tensor, name, _registering(getattr(Tensor, name), wrapper))


def _marking_init(init: _Code, wrapper: Callable[[], Callable[[_Code], _Code] | None]) -> _Code:
    def __init__(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        if (wrap := wrapper()) is not None:
            me = weakref.ref(self)  # avoids a reference cycle
            # The engine calls `apply`, or `apply_boxed`, as an attribute of the instance.
            for name in ("apply", "apply_boxed"):
                if (code := getattr(type(self), name, None)) is not None:
                    setattr(self, name, wrap(lambda *grads, code=code: code(me(), *grads)))

    return __init__


def _unpacking_init(init: _Code, wrapper: Callable[[], Callable[[_Code], _Code] | None]) -> _Code:
    @wraps(init)
    def __init__(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        if (wrap := wrapper()) is not None:
            self.unpack_hook = wrap(self.unpack_hook)

    return __init__


def _registering(register: _Code, wrapper: Callable[[], Callable[[_Code], _Code] | None]) -> _Code:
    @wraps(register)
    def register_wrapped(self: Tensor, hook: _Code) -> Any:
        wrap = wrapper()
        return register(self, hook if wrap is None else wraps(hook)(wrap(hook)))

    return register_wrapped
