"""Private torch API that the library needs outside of its engines, each with the reason."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._functorch import eager_transforms
from torch._library.fake_class_registry import FakeScriptObject
from torch.autograd import Function, Variable, forward_ad, grad_mode, graph, profiler
from torch.autograd.function import BackwardCFunction
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode
from torch.utils.checkpoint import CheckpointFunction, _StopRecomputationError

__all__ = [
    "COMPILES",
    "LAZY_MODULES",
    "RELEASE",
    "after_backward",
    "ambient",
    "apply_rule",
    "backward_at_work",
    "batch_last",
    "before_node",
    "carries_tangents",
    "constant_in_graphs",
    "divide_",
    "forward_mode",
    "has_earlier_hooks",
    "integers",
    "is_backward_nested",
    "is_batched_by_autograd",
    "is_differentiating",
    "is_jit_tracing",
    "is_traced",
    "is_transformed",
    "is_plain",
    "is_profiling",
    "is_recomputing",
    "is_tree",
    "is_within_reentrant_checkpoint",
    "is_within_transform",
    "is_zero_without_memory",
    "nodes_after_nested_backward",
    "over_batch",
    "registries",
    "set_forward_mode",
    "save_under_each_hook",
    "shared_forward_mode",
    "tangents_ignored",
    "storage_uses",
    "times",
    "tree_flatten",
    "tree_map",
    "tree_paths",
    "unfaked",
    "untraced",
    "version",
    "wrapped_backward_code",
    "versions",
]


T = TypeVar("T")

#: What PyTorch imports when a process first calls an optimizer, a graph, or grad with cotangents: a second each time.
LAZY_MODULES = ("torch._dynamo",)

#: PyTorch's release, major and minor number.
RELEASE = tuple(int(n) for n in torch.__version__.split(".")[:2])

#: Whether our ops can be compiled and traced. Seen on torch 2.11 and before: Dynamo takes an MPI communicator for no
#: constant, and tracers in threads crash; on 2.9 and before, sizes told by other ranks have no value while tracing.
COMPILES = RELEASE >= (2, 12)

_KEY = torch._C._TorchDispatchModeKey
_TRACING_MODES = (_KEY.PROXY, _KEY.FAKE, _KEY.FUNCTIONAL)

_RUN_BACKWARD = graph._engine_run_backward.__code__
_NODE = BackwardCFunction.apply.__code__
_REENTRANT = CheckpointFunction.forward.__code__


def is_transformed(x: Tensor) -> bool:
    """Whether a torch.func transform has wrapped x.

    There is no public question for it; a joint graph must refuse such tensors, for the transform's levels
    belong to one thread.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def integers(x: Tensor) -> list[int]:
    """Return the numbers of a row, also of one that a transform of torch.func has wrapped."""
    # torch 2.9 and before: tolist() asks for memory, which the transform's wrapper has not.
    if not torch.compiler.is_compiling() and is_transformed(x):
        return [int(n) for n in x.cpu()]
    numbers: list[int] = x.tolist()
    return numbers


def is_within_transform() -> bool:
    """Whether code runs within a transform of torch.func, vmap included."""
    return bool(torch._C._are_functorch_transforms_active())


def is_differentiating() -> bool:
    """Whether code runs within torch.func.grad, vjp, jvp and the like, or a level of forward mode.

    Ops of torch.library have no rules for these, and drop tangents without a word.
    """
    stack = torch._C._functorch.get_interpreter_stack() or []
    within = any(i.key() != torch._C._functorch.TransformType.Vmap for i in stack)
    return within or forward_ad._current_level >= 0


def apply_rule(rule: Any, x: Tensor, *more: object) -> Tensor:
    """Return rule.apply(x, *more), rule being a Function.

    Function.apply first binds its arguments to the signature of forward, so that they may be given by name; that takes
    as long as a small message does. And where nothing records what is done to x, as in a first backward, forward alone
    is the same. Both can be left out where no transform of torch.func is at work.
    """
    y: Tensor
    if torch._C._are_functorch_transforms_active():
        y = rule.apply(x, *more)
    elif x.requires_grad or (forward_ad._current_level >= 0 and not is_batched_by_autograd(x)):
        y = super(Function, rule).apply(x, *more)
    else:
        y = rule.forward(x, *more)
    return y


def is_jit_tracing() -> bool:
    """Whether torch.jit.trace is at work; its public question has no types."""
    return torch._C._is_tracing()


def is_plain(x: Tensor) -> bool:
    """Whether x is memory, and what is done to it is done and no more; asked of every tensor that moves, in 0.2 µs.

    False needs a closer look, by `is_traced` and `is_batched_by_autograd`: a Parameter is not plain either.
    """
    return (
        type(x) is Tensor
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_tracing()
        and not torch._C._functorch.is_legacy_batchedtensor(x)
    )


def is_traced(x: Tensor) -> bool:
    """Whether what is done to x is recorded instead of, or as well as, done, or x is of a class that says what is done.

    Then x may have no memory (FakeTensor, wrapper subclasses), or its memory may change behind the tracer's back.
    make_fx, torch.export, AOTAutograd and torch.jit.trace trace; modes that only look on (FlopCounterMode) do not.
    PyTorch has no public question for it.
    """
    if is_jit_tracing() or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return True
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in _TRACING_MODES)


def is_batched_by_autograd(x: Tensor) -> bool:
    """Whether x is a batch in the vmap of `is_grads_batched` and `functional.jacobian(vectorize=True)`.

    It is older than torch.func's: it calls no vmap rule of an autograd Function, but runs it on batches. And it comes
    before autograd: what records, and has tangents, is the tensor behind the batch. So a Function that was applied to
    the batch would lose them.
    """
    return bool(torch._C._functorch.is_legacy_batchedtensor(x))


def over_batch(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x) of such a batch; the function maps a tensor whose last dimension is the batch to another.

    There is no public way to the tensor behind a batch.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    inner = torch._remove_batch_dim(x, level, 0, x.dim())
    while inner.shape[-1] == 0:  # it is not of this level, but of one further out
        level -= 1
        inner = torch._remove_batch_dim(x, level, 0, x.dim())
    y = function(inner).movedim(-1, 0).contiguous()  # as its as_strided wants it, by which autograd lays out gradients
    return torch._add_batch_dim(y, 0, level)


def batch_last(y: Tensor) -> tuple[Tensor, int]:
    """Return what a vmap rule returns of a result whose last dimension is the batch.

    Not -1: torch 2.9 and before take it for the position of a bit.
    """
    return y, y.dim() - 1


def constant_in_graphs(function: T) -> T:
    """Make Dynamo run a function as it stands, and take what it returns for a constant.

    torch.compiler.assume_constant_result sets the same mark, after it has imported Dynamo: a second in every process.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def untraced(function: T) -> T:
    """Make Dynamo neither trace a function nor what it calls, be it called by a traced function or by autograd.

    torch.compiler.disable does the same, after it has imported Dynamo: a second in every process.
    """
    mark = "_torchdynamo_disable"  # a traced function that calls it is cut there
    if hasattr(eval_frame, "set_code_exec_strategy"):
        setattr(function, mark, True)
        skip = eval_frame._FrameAction.SKIP
        code = function.__code__  # type: ignore[attr-defined]  # not traced on its own either, when autograd calls it
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
        return function

    @wraps(function)  # type: ignore[arg-type]  # torch 2.6 can skip one frame, and not what it calls
    def outside(*args: Any, **kwargs: Any) -> Any:
        before = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)  # type: ignore[operator]
        finally:
            eval_frame.set_eval_frame(before)

    setattr(outside, mark, True)
    eval_frame.skip_code(outside.__code__)  # type: ignore[attr-defined]
    return outside  # type: ignore[return-value]


def is_profiling() -> bool:
    """Whether a profiler of torch is at work; to ask it by its public calls takes longer than a small message."""
    return profiler._is_profiler_enabled


# Python's operators make a tensor of a number and save it for backward, so that a part of the graph can be gone through
# once only. These overloads of ATen, which have no other name, keep the number.


def divide_(x: Tensor, divisor: float) -> Tensor:
    """Divide x by a number in place; the node saves no tensor."""
    y: Tensor = torch.ops.aten.div_.Scalar(x, divisor)
    return y


def times(x: Tensor, factor: float | Tensor) -> Tensor:
    """Return x · factor; the node saves no tensor if factor is a number."""
    y: Tensor = x * factor if isinstance(factor, Tensor) else torch.ops.aten.mul.Scalar(x, factor)
    return y


def is_zero_without_memory(x: Tensor) -> bool:
    """Whether x is a tensor of zeros that has no memory, as autograd makes them in forward mode."""
    return x._is_zerotensor()


def after_backward(do: Callable[[], None]) -> None:
    """Do something when the backward that runs is over, before its call returns; DDP is built on the same."""
    Variable._execution_engine.queue_callback(do)


def backward_at_work() -> int:
    """Return the number of the backward that runs; one within another has its own."""
    return torch._C._current_graph_task_id()


def is_recomputing() -> bool:
    """Whether code runs again within a backward, as checkpoints make it, which may stop in the middle of it.

    They do not say so; they are the ones that record within a backward, but for those with create_graph.
    """
    return backward_at_work() >= 0 and torch.is_grad_enabled()


def has_earlier_hooks(p: Tensor) -> bool:
    """Whether hooks run after a gradient of p is accumulated and before the one that was registered last."""
    return len(p._post_accumulate_grad_hooks or ()) > 1


def is_backward_nested() -> bool:
    """Whether the backward that runs was called by a node of another, as reentrant checkpoints do.

    The engine knows, and does not say. Its calls are on the stack, the outer one too, if it did not hand over to a
    thread of its own: the stack of that begins with a node.
    """
    frame: FrameType = sys._getframe()
    runs = 0
    while frame.f_back is not None:
        frame = frame.f_back
        runs += frame.f_code is _RUN_BACKWARD
    return runs > (frame.f_code is not _NODE)


def nodes_after_nested_backward() -> list[Any]:
    """Return the nodes that the outer backward goes on to after the one that has called the inner one."""
    node = torch._C._current_autograd_node()
    return [] if node is None else [following for following, _ in node.next_functions if following is not None]


def is_within_reentrant_checkpoint() -> bool:
    """Whether code runs in the first forward of `checkpoint(…, use_reentrant=True)`; only the stack says so."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _REENTRANT:
        frame = frame.f_back
    return frame is not None


class _SavedTensorsHooks:
    """A pair of hooks for saved tensors that somebody has entered, a checkpoint say, with a context for the second."""

    def __init__(
        self,
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._pack, self._unpack, self._context = pack, unpack, context
        # A checkpoint that has all it needs, but is not the innermost, stops at the next tensor that is its own. Not at
        # once: that would leave the innermost one by an exception, and PyTorch takes its hooks away only later.
        self.complete = False

    def pack(self, x: Tensor) -> Any:
        if self.complete:
            raise _StopRecomputationError
        return self._pack(x)

    def unpack(self, packed: Any) -> Tensor:
        with self._context():
            return self._unpack(packed)


def save_under_each_hook(save: Callable[[], None], context: Callable[[], AbstractContextManager[None]]) -> None:
    """Call save once for each pair of hooks for saved tensors that is in force, the outermost first.

    PyTorch calls the innermost pair only. From here on whatever they unpack is unpacked within the context, and so it
    is there that a checkpoint computes its function again. There is no public way to hooks that somebody else entered.
    """
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        _refuse_saved_tensors_hooks("joint_backward: a collective within")
        save()
        return
    top, pop = torch._C._autograd._top_saved_tensors_default_hooks, torch._C._autograd._pop_saved_tensors_default_hooks
    push = torch._C._autograd._push_saved_tensors_default_hooks
    entered: list[_SavedTensorsHooks] = []
    while (pair := top(True)) is not None:
        owner = getattr(pair[0], "__self__", None)
        entered.append(owner if isinstance(owner, _SavedTensorsHooks) else _SavedTensorsHooks(*pair, context))
        pop()
    try:
        while entered:
            hooks = entered.pop()
            push(hooks.pack, hooks.unpack)
            try:
                save()
            except _StopRecomputationError:
                if not entered:
                    raise
                hooks.complete = True
    finally:
        while entered:
            hooks = entered.pop()
            push(hooks.pack, hooks.unpack)


def _refuse_saved_tensors_hooks(where: str) -> None:
    """Raise where a pair of hooks for saved tensors is in force, on releases that have no way to that pair."""
    error = (
        f"{where} a checkpoint or other hooks for saved tensors: torch {torch.__version__} does not show them, "
        "torch 2.8 and later do; use one of these, or do without the hooks here"
    )
    with graph.disable_saved_tensors_hooks(error):  # raises it if there is such a pair
        pass


def registries(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts of parameters and of submodules, of every module below; nn.Module's own iterators are slow."""
    return [registry for m in module.modules() for registry in (m._parameters, m._modules)]


def versions(xs: Iterable[Tensor]) -> list[int]:
    """Return how often each was changed in place, see `version`."""
    return [x._version for x in xs]


def version(x: Tensor) -> int:
    """Return how often x has been changed in place; autograd counts it, and shows it under this name only."""
    return x._version


def storage_uses(x: Tensor) -> int:
    """Return how many references hold the memory of x, its own included; there is no public question for it.

    Every tensor on it counts, views too; NumPy arrays and DLPack capsules hold the tensor that they were made of.
    All who have asked for the storage itself in Python share one object, whose references count as well.
    """
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def unfaked(x: Any) -> Any:
    """Return what x stands for: while Dynamo traces, process groups come as stand-ins of no public type."""
    return x.real_obj if isinstance(x, FakeScriptObject) else x


# torch's own notion of nested tuples, lists and dicts, the one that its transforms and torch.compile know, has no
# public module in every release that we run on.


#: torch 2.7 and before have no public name for it.
_is_leaf: Callable[[Any], bool] = getattr(_pytree, "tree_is_leaf", None) or _pytree._is_leaf


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply fn to every leaf of a tree."""
    return _pytree.tree_map(fn, tree)


def tree_flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of a tree in the order of their paths, and the function that makes such a tree of others.

    A dict lists its items in the order of insertion, which may differ between ranks. Here dict keys are sorted by
    type and repr. A TypeError if that does not tell them apart on every rank alike.
    """
    pairs, spec = _leaves_with_paths(tree)
    places = [tuple(_place(entry) for entry in path) for path, _ in pairs]
    order = sorted(range(len(pairs)), key=places.__getitem__)
    if len(set(places)) < len(places):
        path = next(path for (path, _), place in zip(pairs, places, strict=True) if places.count(place) > 1)
        raise TypeError(f"{_pytree.keystr(path)} is the path of two leaves; use strings as keys")

    def rebuild(others: list[Any]) -> Any:
        placed = [None] * len(order)
        for i, other in zip(order, others, strict=True):
            placed[i] = other
        return _pytree.tree_unflatten(placed, spec)

    return [pairs[i][1] for i in order], rebuild


def tree_paths(tree: Any) -> list[str]:
    """Return where each leaf is, as one writes it: ['a'][0]; in the order of `tree_flatten`."""
    pairs, _ = _leaves_with_paths(tree)
    paths = sorted((path for path, _ in pairs), key=lambda path: tuple(_place(entry) for entry in path))
    return [_pytree.keystr(path) for path in paths]


def _leaves_with_paths(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Return (path, leaf) of each leaf, and the structure; nodes registered without keys count their children."""
    try:
        return _pytree.tree_flatten_with_path(tree)
    except ValueError:  # a node has no keys
        leaves, spec = _pytree.tree_flatten(tree)
        return list(zip(_paths(tree), leaves, strict=True)), spec


def _paths(tree: Any) -> Iterator[tuple[Any, ...]]:
    if _is_leaf(tree):
        yield ()
        return
    node = _pytree.SUPPORTED_NODES[_pytree._get_node_type(tree)]
    if node.flatten_with_keys_fn is not None:
        children = list(node.flatten_with_keys_fn(tree)[0])
    else:
        children = [(_pytree.SequenceKey(i), child) for i, child in enumerate(node.flatten_fn(tree)[0])]
    for key, child in children:
        for path in _paths(child):
            yield key, *path


def _place(entry: Any) -> tuple[Any, ...]:
    """What one entry of a path is sorted by: an index, or the type and repr of a key."""
    if isinstance(entry, _pytree.SequenceKey):
        return 0, entry.idx
    key = entry.key if isinstance(entry, _pytree.MappingKey) else str(entry)
    text = repr(key)
    if isinstance(key, (Tensor, frozenset)) or " at 0x" in text:  # another text in every process
        kind = type(key).__name__
        raise TypeError(f"got a dict key of type {kind}, expected strings or numbers, which are the same on all ranks")
    return 1, type(key).__name__, text


def is_tree(x: Any) -> bool:
    """Whether x is a tree and not a leaf."""
    return not isinstance(x, Tensor) and not _is_leaf(x)


# Forward mode is kept in globals of the process, not of the thread, and has one level. Simulated ranks are
# threads that hand over in the middle of it. So each rank takes its view of the globals along, and the level
# is entered by the first rank that enters it and left by the last.


def carries_tangents() -> bool:
    """Whether what is computed now carries tangents along, by a level of forward mode that this thread is in.

    Within a rule for tangents it does not, nor in inference mode.
    """
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def tangents_ignored() -> AbstractContextManager[None]:
    """Return a context in which nothing carries tangents along, as PyTorch has it within a rule for them."""
    context: AbstractContextManager[None] = forward_ad._set_fwd_grad_enabled(False)
    return context


def forward_mode() -> tuple[int, int]:
    """Return where this thread is in forward mode: the level it is in, and how deep torch.func.jvp nests."""
    return forward_ad._current_level, eager_transforms.JVP_NESTING


def set_forward_mode(state: tuple[int, int]) -> None:
    """Go on where `forward_mode` said that this thread was."""
    forward_ad._current_level, eager_transforms.JVP_NESTING = state


@contextlib.contextmanager
def shared_forward_mode() -> Iterator[None]:
    """Let threads that hand over to each other be in forward mode at the same time."""
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    inside = 0

    def enter_dual_level() -> int:
        nonlocal inside
        if inside == 0 or forward_ad._current_level >= 0:
            enter()  # type: ignore[no-untyped-call]  # raises, as torch does, where this thread is in it already
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


# ── what PyTorch keeps for each thread ───────────────────────────────────────────────────────────────────


def ambient() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return the context manager that gives another thread the modes of this one.

    PyTorch has no public way to hand them on; its own threads (autograd's, jit's) get them in C++.
    """
    modes = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()  # type: ignore[no-untyped-call]
    traced = [type(m).__name__ for m in modes[1] if getattr(m, "_mode_key", None) is not None]
    if traced:
        raise RuntimeError(
            f"simulate: called within {traced[-1]}, expected a call outside of it: its state belongs to one thread, "
            "and ranks are other threads; trace, or fake tensors, in the function that each rank runs"
        )
    autocast = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _autocast_devices()
    ]
    cached = torch.is_autocast_cache_enabled()
    recording = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled(), torch.is_inference_mode_enabled()
    hooks = _innermost_saved_tensors_hooks()
    no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    threads, replay = torch._C._is_multithreading_enabled(), torch._C._is_view_replay_enabled()
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
            stack.enter_context(grad_mode.set_multithreading_enabled(threads))
            stack.enter_context(grad_mode._force_original_view_tracking(replay))
            if has_layout_policy:
                stack.enter_context(grad_mode.enforce_grad_layout_policy(layout))
            stack.callback(_pop_modes)
            for mode in modes[0]:
                _push_mode(mode)  # type: ignore[no-untyped-call]  # not entered a second time
            for mode in modes[1]:
                _push_dispatch_mode(mode)
            if hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
                stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            if no_hooks is not None:
                torch._C._autograd._saved_tensors_hooks_disable(no_hooks)
            yield

    return entered


def _autocast_devices() -> list[str]:
    if hasattr(torch._C, "_autocast_supported_devices"):  # since torch 2.9
        return torch._C._autocast_supported_devices()
    return [device for device in _AUTOCAST_DEVICES if torch.amp.is_autocast_available(device)]


_AUTOCAST_DEVICES = ("cpu", "cuda", "mtia", "maia", "xpu", "ipu", "hpu", "xla", "mps", "privateuseone")


def _innermost_saved_tensors_hooks() -> Any:
    if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):  # since torch 2.8
        return torch._C._autograd._top_saved_tensors_default_hooks(True)
    _refuse_saved_tensors_hooks("simulate: called within")
    return None


def _pop_modes() -> None:
    while _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        _pop_mode()  # type: ignore[no-untyped-call]
    while _get_current_dispatch_mode_stack():
        _pop_dispatch_mode()


# ── Python code that a backward calls ────────────────────────────────────────────────────────────────────

_Code = Callable[..., Any]
_patching = threading.Lock()
_patches = 0
_unpatch = contextlib.ExitStack()


@contextlib.contextmanager
def wrapped_backward_code(wrapper: Callable[[], Callable[[_Code], _Code] | None]) -> Iterator[None]:
    """Within the block, wrap Python code that a backward will call, at the moment autograd receives it.

    This is the backward of a `Function`, a hook of a tensor, and a hook that unpacks saved tensors, which includes the
    recomputation of a checkpoint. PyTorch does not record in which thread or context a node was made, so the three
    places where Python code enters the graph are patched. `wrapper` is called by the thread that builds the graph; it
    returns the decorator, or None to leave the code as it is. All callers pass the same wrapper.
    """
    global _patches
    with _patching:
        _patches += 1
        if _patches == 1:
            _patch(BackwardCFunction, "__init__", _marking_init(BackwardCFunction.__init__, wrapper))
            _patch(graph.saved_tensors_hooks, "__init__", _unpacking_init(graph.saved_tensors_hooks.__init__, wrapper))
            for name in ("register_hook", "register_post_accumulate_grad_hook"):
                _patch(Tensor, name, _registering(getattr(Tensor, name), wrapper))
    try:
        yield
    finally:
        with _patching:
            _patches -= 1
            if _patches == 0:
                _unpatch.close()


def _patch(where: type, name: str, by: _Code) -> None:
    if name in vars(where):
        _unpatch.callback(setattr, where, name, vars(where)[name])
    else:
        _unpatch.callback(delattr, where, name)
    setattr(where, name, by)


def _marking_init(init: _Code, wrapper: Callable[[], Callable[[_Code], _Code] | None]) -> _Code:
    def __init__(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        if (wrap := wrapper()) is not None:
            me = weakref.ref(self)  # the instance must not hold itself
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


def before_node(y: Tensor, do: Callable[[], None]) -> None:
    """Call `do` in every backward, before the node that made y; the tensor itself shows no hook."""
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda grads: do())
