"""Private torch API that the library uses outside of its engines, each with the reason."""

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
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase  # libraries recognize batch norm by this class
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # documented for users, in a module that is private by name
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

__all__ = [
    "COMPILES",
    "LAZY_MODULES",
    "RELEASE",
    "TorchDispatchMode",
    "after_backward",
    "ambient",
    "apply_rule",
    "assert_in_graph",
    "assume",
    "backward_at_work",
    "BatchNormBase",
    "batch_last",
    "batch_norm_statistics",
    "batch_norm_sums",
    "before_node",
    "carries_tangents",
    "constant_in_graphs",
    "control_flow",
    "divide_",
    "forward_mode",
    "has_earlier_hooks",
    "has_hooks",
    "integers",
    "is_backward_compiled",
    "is_backward_nested",
    "is_batched_by_autograd",
    "is_differentiating",
    "is_eager",
    "is_jit_tracing",
    "is_known",
    "is_observed",
    "is_traced",
    "is_transformed",
    "is_plain",
    "is_profiling",
    "is_recomputing",
    "is_tree",
    "is_vmapped",
    "base",
    "is_view",
    "is_within_reentrant_checkpoint",
    "is_within_transform",
    "is_zero_without_memory",
    "leaves_of_graph",
    "nodes_after_nested_backward",
    "nodes_of_graph",
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
    "unobserved",
    "untraced",
    "version",
    "without_transforms",
    "wrapped_backward_code",
    "versions",
]


T = TypeVar("T")

#: PyTorch imports this at a process's first use of an optimizer, a graph, or grad with cotangents; it takes a second.
LAZY_MODULES = ("torch._dynamo",)

#: PyTorch's release, major and minor number.
RELEASE = tuple(int(n) for n in torch.__version__.split(".")[:2])

#: Whether our ops can be compiled and traced. On torch 2.11 and before, Dynamo does not accept an MPI communicator as a
#: constant, and tracers in threads crash; on 2.9 and before, sizes exchanged between ranks have no value while tracing.
COMPILES = RELEASE >= (2, 12)

_KEY = torch._C._TorchDispatchModeKey
_TRACING_MODES = (_KEY.PROXY, _KEY.FAKE, _KEY.FUNCTIONAL)

_RUN_BACKWARD = graph._engine_run_backward.__code__
_NODE = BackwardCFunction.apply.__code__


def is_transformed(x: Tensor) -> bool:
    """Whether a torch.func transform has wrapped x; no public API tells.

    Simulated ranks in one graph must refuse such tensors: the levels of a transform belong to one thread.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def integers(x: Tensor) -> list[int]:
    """Return x.tolist() of a 1-d integer tensor, which a torch.func transform may have wrapped."""
    # torch 2.9 and before: tolist() reads memory, which the transform's wrapper does not have.
    if not torch.compiler.is_compiling() and is_transformed(x):
        return [int(n) for n in x.cpu()]
    numbers: list[int] = x.tolist()
    return numbers


def assume(condition: bool) -> None:
    """While tracing, state a fact about sizes that have no value yet, as those received from another rank."""
    # Private by its name; torch's errors about such sizes tell users to call it.
    torch._check(condition)  # type: ignore[no-untyped-call]


def assert_in_graph(condition: Tensor, text: str) -> None:
    """Raise a RuntimeError when a traced program runs and the condition, a 0-d bool, is False there."""
    # No public function adds an assertion about values to a graph.
    torch._assert_async(condition, text)


def without_transforms(x: Tensor) -> Tensor:
    """Return the tensor that torch.func transforms have wrapped, with all batches of vmap; no public API does."""
    while is_transformed(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def is_known(condition: bool) -> bool:
    """Whether a condition on sizes is true; while tracing, False if it depends on a size that has no value yet."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy, which takes 0.3 s

    return guard_or_false(condition)


def control_flow() -> str:
    """Return the name of the operator, such as torch.cond, in whose branch or loop Dynamo is tracing; "": none.

    To be called by a function that is constant in graphs. Only Dynamo's tracers tell.
    """
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    translating = dynamo and getattr(dynamo.tls, "current_tx", None)
    tracer = translating and translating.output.current_tracer
    while tracer:
        name = str(tracer.source_target).removesuffix("_impl")
        if name in ("cond", "while_loop", "map", "scan", "associative_scan"):
            return name
        tracer = tracer.parent
    return ""


def is_vmapped(x: Tensor) -> bool:
    """Whether torch.func.vmap has batched x, also below torch.func.grad, so that it has no single value to read.

    No public API tells, and reading raises an error on this rank alone.
    """
    while is_transformed(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def is_within_transform() -> bool:
    """Whether code runs within a transform of torch.func, vmap included."""
    return bool(torch._C._are_functorch_transforms_active())


def is_differentiating() -> bool:
    """Whether code runs within torch.func.grad, vjp, jvp and the like, or a level of forward mode.

    Ops of torch.library have no rules for these; they drop tangents silently.
    """
    stack = torch._C._functorch.get_interpreter_stack() or []
    within = any(i.key() != torch._C._functorch.TransformType.Vmap for i in stack)
    return within or forward_ad._current_level >= 0


def apply_rule(rule: Any, x: Tensor, *more: object) -> Tensor:
    """Return rule.apply(x, *more) of a Function, with less overhead if no torch.func transform is active.

    Function.apply binds its arguments to the signature of forward, which takes as long as a small message. If nothing
    records x, as in a first-order backward, calling forward alone is equivalent.
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
    """Whether torch.jit.trace is active; the public torch.jit.is_tracing has no type annotations."""
    return torch._C._is_tracing()


def is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary tensor with memory, neither traced nor batched; a fast check made in every call.

    If False, use `is_traced` and `is_batched_by_autograd` to tell: a Parameter, for example, is not plain either.
    """
    return (
        type(x) is Tensor
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_tracing()
        and not torch._C._functorch.is_legacy_batchedtensor(x)
    )


def is_eager(*xs: Tensor) -> bool:
    """Whether operations on xs are computed at once, with no derivative but reverse mode outside torch.func.

    Then a Function without rules for vmap and forward mode may be applied, which calls kernels and writes in place.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return all(is_plain(x.detach() if type(x) is nn.Parameter else x) for x in xs)


def is_observed() -> bool:
    """Whether a TorchDispatchMode or a TorchFunctionMode is active; no public API tells."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hide operations from the modes of `is_observed`.

    A collective consists of messages and of writes to memory that these fill. A mode may replace any operation by an
    earlier result, as selective checkpoints do when they recompute, also on one rank only. PyTorch's own function for
    this, `_disable_current_modes`, hides operations from dispatch modes only.
    """
    functions, dispatched = [], []
    while torch._C._len_torch_function_stack():
        functions.append(_pop_mode())  # type: ignore[no-untyped-call]
    while torch._C._len_torch_dispatch_stack():
        dispatched.append(_pop_dispatch_mode())
    try:
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
    if is_jit_tracing() or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return True
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in _TRACING_MODES)


def is_batched_by_autograd(x: Tensor) -> bool:
    """Whether x is a batch in the vmap of `is_grads_batched` and `functional.jacobian(vectorize=True)`.

    That vmap is older than torch.func's. It ignores the vmap rule of a Function and runs its forward on the batched
    tensor. It is dispatched before autograd: graph and tangents belong to the tensor inside the batch, so a Function
    that is applied to the batch would lose them.
    """
    return bool(torch._C._functorch.is_legacy_batchedtensor(x))


def over_batch(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x) of such a batch; input and output of function have the batch as last dimension.

    No public API returns the tensor inside a batch.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    inner = torch._remove_batch_dim(x, level, 0, x.dim())
    while inner.shape[-1] == 0:  # x is a batch of an outer level
        level -= 1
        inner = torch._remove_batch_dim(x, level, 0, x.dim())
    # Autograd lays out gradients by as_strided, whose rule in this vmap needs the batch first in memory.
    y = function(inner).movedim(-1, 0).contiguous()
    return torch._add_batch_dim(y, 0, level)


def batch_last(y: Tensor) -> tuple[Tensor, int]:
    """Return the result of a vmap rule, (y, batch dimension), if the batch is y's last dimension.

    The dimension is not -1, because torch 2.9 and before shift a bit by it.
    """
    return y, y.dim() - 1


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
    if hasattr(eval_frame, "set_code_exec_strategy"):
        setattr(function, mark, True)
        skip = eval_frame._FrameAction.SKIP
        code = function.__code__  # type: ignore[attr-defined]  # for calls from autograd, which are not traced calls
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
        return function

    @wraps(function)  # type: ignore[arg-type]  # torch 2.6 can skip a frame, but not its callees
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
    """Whether a torch profiler is active; the public calls take longer than a small message."""
    return profiler._is_profiler_enabled


def batch_norm_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over all dimensions but 1, by torch's kernel of batch norm.

    It allocates nothing of the size of x and adds up in float64 on the CPU; not documented.
    """
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean, var


def batch_norm_sums(g: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return Σ g x̂ and Σ g over all dimensions but 1.

    By the backward of torch's kernel of batch norm in evaluation, which has no public name. It reads g and x once and
    allocates nothing of their size.
    """
    kernel = torch.ops.aten.native_batch_norm_backward.default
    _, sum_gx, sum_g = kernel(g, x, None, mean, var, None, None, False, eps, [False, True, True])
    return sum_gx, sum_g


# Python's operators convert a number to a tensor and save it for backward. Backward frees it, so a second one raises.
# These overloads, which have no public name, save the number.


def divide_(x: Tensor, divisor: float) -> Tensor:
    """Divide x by a number, in place unless a mode observes it; saves no tensor for backward.

    A selective checkpoint that replaces an operation in place by its earlier result leaves x as it is.
    """
    in_place = torch.compiler.is_compiling() or not is_observed()
    y: Tensor = torch.ops.aten.div_.Scalar(x, divisor) if in_place else torch.ops.aten.div.Scalar(x, divisor)
    return y


def times(x: Tensor, factor: float | Tensor) -> Tensor:
    """Return x · factor; saves no tensor for backward if factor is a number."""
    y: Tensor = x * factor if isinstance(factor, Tensor) else torch.ops.aten.mul.Scalar(x, factor)
    return y


def is_zero_without_memory(x: Tensor) -> bool:
    """Whether x is a ZeroTensor, which has no memory; autograd makes them in forward mode."""
    return x._is_zerotensor()


def after_backward(do: Callable[[], None]) -> None:
    """Call `do` at the end of the current backward, before its call returns; DDP uses the same API."""
    Variable._execution_engine.queue_callback(do)


def backward_at_work() -> int:
    """Return the graph task id of the current backward, -1: none; a nested backward has its own id."""
    return torch._C._current_graph_task_id()


def is_backward_compiled() -> bool:
    """Whether compiled autograd runs the current backward: then `after_backward` never calls its function."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


def is_recomputing() -> bool:
    """Whether a checkpoint recomputes its function, which may stop in the middle.

    No API tells. Grad mode is on within a backward only in a recomputation, or with create_graph=True.
    """
    return backward_at_work() >= 0 and torch.is_grad_enabled()


def has_earlier_hooks(p: Tensor) -> bool:
    """Whether p has post-accumulate hooks that run before the one registered last."""
    return len(p._post_accumulate_grad_hooks or ()) > 1


def has_hooks(x: Tensor) -> bool:
    """Whether hooks are registered on this leaf tensor; pickling drops them without a word."""
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


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


def is_backward_nested() -> bool:
    """Whether the current backward was called by a node of another one, as reentrant checkpoints do.

    The engine does not expose it, so its calls on the stack are counted. The outer call is on this stack, unless the
    engine runs the outer pass in a thread of its own; the stack of such a thread begins with a node.
    """
    frame: FrameType = sys._getframe()
    runs = 0
    while frame.f_back is not None:
        frame = frame.f_back
        runs += frame.f_code is _RUN_BACKWARD
    return runs > (frame.f_code is not _NODE)


def nodes_after_nested_backward() -> list[Any]:
    """Return the nodes that follow the current one in the outer backward, after the nested backward has ended."""
    node = torch._C._current_autograd_node()
    return [] if node is None else [following for following, _ in node.next_functions if following is not None]


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


def _stop_recomputation() -> type[BaseException]:
    """Return the class of the exception by which a checkpoint stops its recomputation."""
    from torch.utils.checkpoint import _StopRecomputationError  # deferred: see is_within_reentrant_checkpoint

    return _StopRecomputationError


class _SavedTensorsHooks:
    """A pair of hooks for saved tensors that is in force, e.g. a checkpoint's, with a context for its unpack hook."""

    def __init__(
        self,
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._pack, self._unpack, self._context = pack, unpack, context
        # An outer checkpoint that has recomputed all it needs stops at the next tensor it would save. Stopping at once
        # would leave the inner checkpoint by an exception, whose hooks PyTorch removes only later.
        self.complete = False

    def pack(self, x: Tensor) -> Any:
        if self.complete:
            raise _stop_recomputation()
        return self._pack(x)

    def unpack(self, packed: Any) -> Tensor:
        with self._context():
            return self._unpack(packed)


def save_under_each_hook(save: Callable[[], None], context: Callable[[], AbstractContextManager[None]]) -> None:
    """Call save once for each pair of hooks for saved tensors that is in force, the outermost first.

    PyTorch calls the innermost pair only. From now on their unpack hooks run within the context, and so does a
    checkpoint's recomputation. No public API returns the hooks that other code has entered.
    """
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
            except _stop_recomputation():
                if not entered:
                    raise
                hooks.complete = True
    finally:
        while entered:
            hooks = entered.pop()
            push(hooks.pack, hooks.unpack)


def registries(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts of parameters and submodules of a module and all submodules; nn.Module's iterators are slow."""
    return [registry for m in module.modules() for registry in (m._parameters, m._modules)]


def versions(xs: Iterable[Tensor]) -> list[int]:
    """Return the `version` of each tensor."""
    return [x._version for x in xs]


def version(x: Tensor) -> int:
    """Return autograd's version counter of x, which every in-place modification increments."""
    return x._version


def is_view(x: Tensor) -> bool:
    """Whether x was made as a view of another tensor, as a slice of a buffer; no public API tells.

    Gradients that autograd makes are not, even if they share the memory of the gradient that was passed to backward.
    """
    return x._is_view()


def base(x: Tensor) -> Tensor | None:
    """Return the tensor of which x is a view, with which it shares its version; no public API tells."""
    return x._base


def storage_uses(x: Tensor) -> int:
    """Return the number of references to the storage of x, its own included; no public API tells.

    Every tensor on the storage counts, views too; NumPy arrays and DLPack capsules hold the tensor they were made from.
    Python code that holds the storage itself shares one object, whose references count as well.
    """
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def unfaked(x: Any) -> Any:
    """Return the process group behind x: while Dynamo traces, groups are replaced by objects of a private type."""
    return x.real_obj if isinstance(x, FakeScriptObject) else x


# torch's pytrees, which its transforms and torch.compile use, have no public module in some supported releases.


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply fn to every leaf of a tree."""
    return _pytree.tree_map(fn, tree)


def tree_flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of a tree in the order of their paths, and the function that rebuilds it from new leaves.

    The insertion order of dicts may differ between ranks, so keys are sorted by type and repr. Raises TypeError if
    that order is ambiguous or may differ between ranks.
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
    """Return the path of each leaf as Python code, e.g. ['a'][0], in the order of `tree_flatten`."""
    pairs, _ = _leaves_with_paths(tree)
    paths = sorted((path for path, _ in pairs), key=lambda path: tuple(_place(entry) for entry in path))
    return [_pytree.keystr(path) for path in paths]


def _leaves_with_paths(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Return (path, leaf) of each leaf, and the structure; children of nodes without keys are numbered."""
    try:
        return _pytree.tree_flatten_with_path(tree)
    except ValueError:  # a node is registered without keys
        leaves, spec = _pytree.tree_flatten(tree)
        return list(zip(_paths(tree), leaves, strict=True)), spec


def _paths(tree: Any) -> Iterator[tuple[Any, ...]]:
    if _pytree.tree_is_leaf(tree):
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
    """Return the sort key of one entry of a path: an index, or the type and repr of a dict key."""
    if isinstance(entry, _pytree.SequenceKey):
        return 0, entry.idx
    key = entry.key if isinstance(entry, _pytree.MappingKey) else str(entry)
    text = repr(key)
    if isinstance(key, (Tensor, frozenset)) or " at 0x" in text:  # repr differs between processes
        kind = type(key).__name__
        raise TypeError(f"got a dict key of type {kind}, expected strings or numbers, which are the same on all ranks")
    return 1, type(key).__name__, text


def is_tree(x: Any) -> bool:
    """Whether x is a tree and not a leaf."""
    return not isinstance(x, Tensor) and not _pytree.tree_is_leaf(x)


# Forward mode has one level, kept in globals of the process, not of the thread. Simulated ranks are threads that
# switch within it. So the globals are saved and restored for each rank; the first rank enters the level and the last
# one exits it.


def carries_tangents() -> bool:
    """Whether operations propagate tangents: within a level of forward mode, outside jvp rules and inference mode."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def tangents_ignored() -> AbstractContextManager[None]:
    """Return a context in which operations do not propagate tangents, as within a jvp rule."""
    context: AbstractContextManager[None] = forward_ad._set_fwd_grad_enabled(False)
    return context


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


# ── PyTorch's thread-local state ─────────────────────────────────────────────────────────────────────────


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


# ── Python code that backward calls ──────────────────────────────────────────────────────────────────────

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


def before_node(y: Tensor, do: Callable[[], None]) -> None:
    """Call `do` in every backward before the node that made y; the hook is not listed in y's own hooks."""
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda grads: do())
