"""What traces or observes operations: Dynamo, make_fx, torch.jit, modes, profilers; private torch API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._library.fake_class_registry import FakeScriptObject
from torch.autograd import profiler
from torch.overrides import _pop_mode, _push_mode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

#: Documented for users, in a module that is private by name.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

_KEY = torch._C._TorchDispatchModeKey
_TRACING_MODES = (_KEY.PROXY, _KEY.FAKE, _KEY.FUNCTIONAL)

T = TypeVar("T")


def assume(condition: bool) -> None:
    """While tracing, state a fact about sizes that have no value yet, as those received from another rank."""
    # Private by its name; torch's errors about such sizes tell users to call it.
    torch._check(condition)  # type: ignore[no-untyped-call]


def assert_in_graph(condition: Tensor, text: str) -> None:
    """Raise a RuntimeError when a traced program runs and the condition, a 0-d bool, is False there."""
    # No public function adds an assertion about values to a graph.
    torch._assert_async(condition, text)


def is_known(condition: bool) -> bool:
    """Whether a condition on sizes is true; while tracing, False if it depends on a size that has no value yet."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy, which takes 0.3 s

    return guard_or_false(condition)


def is_observed() -> bool:
    """Whether a TorchDispatchMode, a TorchFunctionMode or torch.jit.trace is active; no public API tells."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or torch._C._is_tracing())


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hide operations from the modes of `is_observed`, and from transforms of torch.func.

    A collective consists of messages and of writes to memory that these fill. A mode may replace any operation by an
    earlier result, as selective checkpoints do when they recompute, also on one rank only. PyTorch's own function for
    this, `_disable_current_modes`, hides operations from dispatch modes only. Within torch.func.grad and jvp a new
    tensor is a wrapper without memory; no public API makes one outside.
    """
    functions, dispatched = [], []
    while torch._C._len_torch_function_stack():
        functions.append(_pop_mode())  # type: ignore[no-untyped-call]
    while torch._C._len_torch_dispatch_stack():
        dispatched.append(_pop_dispatch_mode())
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for mode in reversed(dispatched):
            _push_dispatch_mode(mode)
        for mode in reversed(functions):
            _push_mode(mode)  # type: ignore[no-untyped-call]


def is_traced(x: Tensor) -> bool:
    """Whether operations on x are traced, or x is of a subclass with its own `__torch_dispatch__`; no public API tells.

    Then x may have no memory (FakeTensor, wrapper subclasses), or writes to its memory may be missing from the trace.
    make_fx, torch.export, AOTAutograd and torch.jit.trace trace; modes that only observe (FlopCounterMode) do not.
    """
    return is_tracing() or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_tracing() -> bool:
    """Whether operations on every tensor are traced; no public API tells."""
    return torch._C._is_tracing() or any(torch._C._get_dispatch_mode(kind) is not None for kind in _TRACING_MODES)


def constant_in_graphs(function: T) -> T:
    """Make Dynamo call a function instead of tracing it, and treat its result as a constant.

    torch.compiler.assume_constant_result sets the same attribute, but imports Dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def untraced(function: T, reason: str | None = None) -> T:
    """Make Dynamo trace neither a function nor its callees, whether a traced function or autograd calls it.

    A traced caller breaks its graph, or under fullgraph raises an error with the reason. torch.compiler.disable does
    the same, but imports Dynamo, which takes a second.
    """
    mark = "_torchdynamo_disable"
    if reason:
        setattr(function, mark + "_msg", reason)
    setattr(function, mark, True)
    skip = eval_frame._FrameAction.SKIP
    code = function.__code__  # type: ignore[attr-defined]  # for calls from autograd, which are not traced calls
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    return function


def is_profiling() -> bool:
    """Whether a torch profiler is active; the public calls take longer than a small message."""
    return profiler._is_profiler_enabled


def is_watched() -> bool:
    """Whether `is_observed` or `is_profiling`."""
    return profiler._is_profiler_enabled or is_observed()


def unfaked(x: Any) -> Any:
    """Return the process group behind x: while Dynamo traces, groups are replaced by objects of a private type."""
    return x.real_obj if isinstance(x, FakeScriptObject) else x
