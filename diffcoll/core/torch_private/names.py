"""The private names of torch that the library uses, in one table: no public API serves instead.

A release of torch that lacks one is an error that names it: at import for what every call needs, for a subsystem at its
first use.
"""

from __future__ import annotations

from functools import reduce as fold
from importlib import import_module
from typing import Any

import torch

#: The releases on which the suite has passed.
TESTED = "2.11 to 2.15"
#: By subsystem: name → what it is used for.
NAMES = {
    "every call": {
        "torch._C._current_graph_task_id": "which backward runs",
        "torch._C._autograd._top_saved_tensors_default_hooks": "whether a checkpoint is in force",
        "torch._C._autograd._pop_saved_tensors_default_hooks": "to leave a checkpoint for a while",
        "torch._C._autograd._push_saved_tensors_default_hooks": "to enter it again",
        "torch._C._TorchDispatchModeKey": "which modes trace",
        "torch._C._get_dispatch_mode": "whether one does",
        "torch._C._is_tracing": "whether torch.jit.trace does",
        "torch._C._len_torch_dispatch_stack": "whether a mode sees operations",
        "torch._C._len_torch_function_stack": "whether a mode sees functions",
        "torch.overrides._pop_mode": "to hide operations from modes of functions",
        "torch.overrides._push_mode": "to enter these again",
        "torch.utils._python_dispatch.TorchDispatchMode": "a base class",
        "torch.utils._python_dispatch._pop_mode": "to hide operations from modes",
        "torch.utils._python_dispatch._push_mode": "to enter these again",
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": "to hide operations from transforms",
        "torch._library.fake_class_registry.FakeScriptObject": "what groups are while Dynamo traces",
        "torch._C._dynamo.eval_frame.set_code_exec_strategy": "functions that Dynamo does not trace",
        "torch._C._dynamo.eval_frame._FrameAction.SKIP": "the same",
        "torch._C._dynamo.eval_frame._FrameExecStrategy": "the same",
        "torch.autograd.profiler._is_profiler_enabled": "whether a profiler is active",
        "torch._check": "facts about sizes in a graph",
        "torch._assert_async": "assertions in a graph",
        "torch._C._functorch.is_functorch_wrapped_tensor": "whether a transform has wrapped a tensor",
        "torch._C._functorch.get_unwrapped": "what it has wrapped",
        "torch._C._functorch.maybe_get_bdim": "the batch of vmap",
        "torch._C._functorch.is_legacy_batchedtensor": "the batch of is_grads_batched",
        "torch._C._functorch.get_interpreter_stack": "which transforms are active",
        "torch._C._functorch.TransformType.Vmap": "whether one differentiates",
        "torch._C._are_functorch_transforms_active": "whether any is",
        "torch.autograd.forward_ad._current_level": "the level of forward mode",
        "torch._C._is_fwd_grad_enabled": "whether tangents are propagated",
        "torch.nn.modules.batchnorm._BatchNorm": "the class by which libraries recognize batch norm",
        "torch.ops.aten.native_batch_norm_backward.default": "sums of batch norm without a tensor of x's size",
        "torch.ops.aten.div.Scalar": "a quotient that saves nothing for backward",
        "torch.Tensor._is_zerotensor": "whether a tangent has no memory",
        "torch.Tensor._backward_hooks": "whether pickling drops hooks",
        "torch.Tensor._post_accumulate_grad_hooks": "the same",
        "torch.Tensor._version": "whether a tensor was modified",
        "torch._foreach_copy_": "many copies in one call",
        "torch._foreach_lerp_": "running statistics in one call",
        "torch._C._storage_Use_Count": "who holds a gradient",
        "torch.UntypedStorage._cdata": "the same",
    },
    "torch.distributed": {
        "torch.distributed.distributed_c10d._resolve_process_group": "the group that a graph names",
        "torch.distributed.distributed_c10d._get_process_group_store": "a store for a group of our own",
        "torch.distributed.distributed_c10d._DistributedBackendOptions": "the same, of a backend that is registered",
        "torch.distributed.Backend._plugins": "the same",
        "torch.distributed.ProcessGroup._register_backend": "the same",
        "torch.distributed.ProcessGroup._set_group_name": "the same",
        "torch.distributed.ProcessGroup._get_backend": "the options of a group",
        "torch._C._distributed_c10d.Backend.Options._timeout": "the timeout of a group",
        "torch.distributed.ProcessGroup._start_coalescing": "messages that NCCL starts together",
        "torch.distributed.ProcessGroup._end_coalescing": "the same",
    },
    "simulated ranks": {
        "torch._C._distributed_c10d._register_process_group": "groups of each rank",
        "torch._C._distributed_c10d._unregister_all_process_groups": "the same",
        "torch._C._distributed_c10d._set_thread_isolation_mode": "the same",
        "torch.distributed.distributed_c10d._World": "the same",
        "torch.distributed.distributed_c10d._world": "the same",
        "torch.distributed.distributed_c10d._update_default_pg": "the same",
        "torch.distributed.distributed_c10d._new_process_group_helper": "the same",
        "torch.autograd.forward_ad._current_level": "the level of forward mode of each rank",
        "torch._guards.CompileContext.current_compile_id": "whether Dynamo traces",
        "torch._guards.TracingContext.try_get": "the same",
        "torch.fx.experimental.proxy_tensor.get_proxy_mode": "whether make_fx traces",
        "torch._subclasses.fake_tensor.FakeTensor": "tensors without memory",
        "torch._C._dispatch_get_all_op_names": "which functional collectives there are",
        "torch._C._dispatch_has_kernel_for_dispatch_key": "the same",
        "torch.library.Library._destroy": "kernels that are replaced for a while",
        "torch._library.simple_registry.singleton": "the same, of FakeTensorMode",
        "torch._C.DispatchKeySet": "kernels for the CPU",
    },
    "torch.compile": {
        "torch._higher_order_ops.effects._EffectType.ORDERED": "collectives in a graph stay, in their order",
        "torch._inductor.lowering.fallback_handler": "the same",
        "torch._inductor.lowering.register_lowering": "the same",
        "torch._inductor.virtualized.V": "the same",
        "torch.utils.checkpoint.SAC_IGNORED_OPS": "checkpoints in a graph keep results",
        "torch.fx.traceback.get_current_meta": "the same",
        "torch.fx.experimental.symbolic_shapes.guard_or_false": "sizes without a value yet",
    },
}


def require(subsystem: str) -> None:
    """Raise unless this release of torch has all the private names of a subsystem.

    Raises:
        ImportError: it lacks one.
    """
    for name, reason in NAMES[subsystem].items():
        resolve(name, reason)


def resolve(name: str, reason: str) -> Any:
    """Return what a name of torch stands for; raise an ImportError where this release lacks it."""
    try:
        return fold(_attribute, name.split(".")[1:], torch)
    except (AttributeError, ImportError):
        raise ImportError(
            f"diffcoll: torch {torch.__version__} lacks {name}, which is used for: {reason}; diffcoll was tested on "
            f"torch {TESTED}: install one of these, or a newer diffcoll"
        ) from None


def _attribute(holder: Any, name: str) -> Any:
    """Return an attribute, or the module of this name within a package."""
    try:
        return getattr(holder, name)
    except AttributeError:
        return import_module(f"{holder.__name__}.{name}")
