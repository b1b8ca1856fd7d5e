"""Batch normalization with the statistics of all ranks' batches.

forward   mean, var over samples, positions and ranks;  x̂ = (x − mean) / √(var + eps);  y = w x̂ + b
adjoint   gx = w / √(var + eps) · (g − Σ g / n − x̂ Σ g x̂ / n), the sums over the ranks too
note      notes/training/batch-norm.md
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from diffcoll.core import expect
from diffcoll.core.dtypes import wider
from diffcoll.core.errors import message
from diffcoll.core.groups import get_world_size, resolve
from diffcoll.core.torch_private.tensors import BatchNormBase
from diffcoll.core.torch_private.tracing import is_jit_tracing
from diffcoll.core.torch_private.transforms import without_transforms
from diffcoll.engines.types import Group
from diffcoll.nn.convention import same_options
from diffcoll.nn.in_group import InGroup
from diffcoll.nn.normalize import batch_norm

_NAME = "SyncBatchNorm"


class Synchronized(nn.Module):
    """First base of batch norms over all ranks. Their `_own_forward` is that of one process, for scripted modules."""

    if TYPE_CHECKING:  # torch.jit.script reads annotations of a class, but not these types
        converted_from: type[nn.Module] | None
        running_mean: Tensor | None
        _in: InGroup
        _own_forward: Callable[..., Any]
        _forward: Callable[..., Any]

    @property
    @torch.jit.unused
    def group(self) -> Group:
        """The group as it was passed."""
        return self._in.group

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, of its shape, dtype and memory format, and what a subclass makes of it."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_scripted(self.training, self.running_mean is not None)
            y: Tensor = self._own_forward(x)
        else:  # torch.jit.script does not compile this branch
            y = self._forward(x)
        return y


class SyncBatchNorm(Synchronized, BatchNormBase):
    """Small batches on each rank: batch norm over the samples of all ranks, as one process with the whole batch.

    It has the parameters, buffers and `state_dict` of `torch.nn.BatchNorm1d`, `2d` and `3d`, and replaces any of them:
    x is (N, C), (N, C, L), (N, C, H, W) or (N, C, D, H, W). `convert_sync_batchnorm` replaces those of a model.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> x = torch.randn(6, 3, 4, 4)
    >>> norm = dc.nn.SyncBatchNorm(3, track_running_stats=False)
    >>> ys = simulate(norm, [x[:1], x[1:1], x[1:]], rules=True)  # 1, 0 and 5 samples
    >>> torch.allclose(torch.cat(ys), torch.nn.BatchNorm2d(3)(x), atol=1e-5)
    True

    Training has one collective in forward, of 3 C + 2 values from each rank, and one all_reduce of 2 C in backward.
    Evaluation with running statistics has none. The ranks may have different numbers of samples, and none, but all of
    them call the layer, in the same mode. If the loss of one rank ignores its output, use `joint_backward`. If some
    ranks train nothing, their outputs require a gradient too, and they run backward as the others. A rank under
    `no_grad` or `inference_mode`, or compiled without anything to train, is an error on all ranks if others need
    gradients. Differentiable to any order.

    The gradients of weight and bias are this rank's part; reduced over the ranks as the loss is (mean, sum), they are
    those of the whole batch. Running statistics are the same on all ranks, and the running variance is unbiased. A
    checkpoint updates them twice, as with BatchNorm.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of a new batch in the running statistics; None: each batch has the same weight.
        affine: whether there are parameters weight and bias.
        track_running_stats: False: evaluation uses the statistics of the batch too, of all ranks.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
            Copies of the module use the same group. Only a module with None can be pickled.
        device: of parameters and buffers.
        dtype: of parameters and buffers. float16 and bfloat16 input may have parameters of float32 or of its own dtype;
            statistics are computed in float32 then. Otherwise the dtype of the input.

    Raises:
        TypeError, ValueError: x has the wrong dtype or shape, or the whole batch has one value for each channel. A
            compiled function does not check the latter.

    Source: notes/training/batch-norm.md.
    """

    #: What `revert_sync_batchnorm` makes of this module; None: a batch norm for any number of dimensions.
    converted_from = cast("type[nn.Module] | None", None)  # an annotation is read by torch.jit.script

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        group: Group = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if group is not None:
            resolve(group, _NAME)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._in = InGroup(group, _NAME)

    def _own_forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )

    def _forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy):
            return node_of(self, x)
        if torch.compiler.is_compiling() or not is_jit_tracing():  # which warns of every comparison of a size
            check_input(x, self.num_features, weight=self.weight, running_mean=self.running_mean)
        if not self.training and self.running_mean is not None:
            return self._own_forward(x)
        options = {"eps": self.eps, "momentum": self.momentum, "weight": self.weight, "bias": self.bias}
        same_options("SyncBatchNorm", self.group, **options)
        track = partial(self._track, x.shape)
        return batch_norm(x, self.weight, self.bias, self.eps, self.group, track)

    def _track(self, shape: torch.Size, count: float | Tensor, mean: Tensor, var: Tensor) -> None:
        """Update the running statistics, unless no rank has a value; refuse a single value for each channel."""
        local = refuse_one_value(shape, count, self.group)
        tracked = self.training and self.track_running_stats
        if not tracked or self.running_mean is None or self.running_var is None:
            return
        factor: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1 if local else (torch.as_tensor(count) > 0).long().squeeze())
            if self.momentum is None:
                factor = 1 / self.num_batches_tracked.clamp_min(1).to(mean.dtype)
        update(self.running_mean, self.running_var, factor, local, count, mean, var)


def check_scripted(training: bool, tracked: bool) -> None:
    """Raise, in a scripted module, if it would normalize with its own batch."""
    if training or not tracked:
        raise RuntimeError(
            "SyncBatchNorm: a scripted module sends nothing: call eval(), which needs running statistics, or script "
            "what revert_sync_batchnorm(copy.deepcopy(model)) returns, which normalizes with the batch of this process"
        )


def check_input(x: object, c: int | None, **own: Tensor | None) -> None:
    """Raise unless x has c channels and can be normalized with the module's own tensors."""
    x = expect.floating(_NAME, "x", x, "x.float() is one")
    if x.dim() < 2:
        raise ValueError(message(_NAME, "x", f"a {x.dim()}-d tensor", "(N, C, …), at least 2 dimensions"))
    if c is not None and x.shape[1] != c:
        got, expected = f"{x.shape[1]} channels in shape {tuple(x.shape)}", f"num_features = {c} in dim 1"
        raise ValueError(message(_NAME, "x", got, expected))
    for name, tensor in own.items():
        if tensor is not None and tensor.dtype not in (x.dtype, wider(x.dtype)):
            remedy = "x.to(module.weight.dtype), or module.to(x.dtype)"
            raise TypeError(message(_NAME, "x", x.dtype, f"{tensor.dtype}, the dtype of {name}", remedy))


def refuse_one_value(shape: torch.Size, count: float | Tensor, group: Group) -> int:
    """Return how many values for each channel this rank has; raise if all ranks together have one.

    Only a rank with at most one value reads the count of all ranks, which makes the host wait for a GPU.
    """
    local = shape.numel() // max(shape[1], 1)
    if local <= 1 and not torch.compiler.is_compiling() and _is_one(count):
        got = f"one value on {get_world_size(group)} ranks, x of shape {tuple(shape)} on this one"
        remedy = "pass more samples, or call module.eval()"
        raise ValueError(message(_NAME, "x", got, "more than 1 value per channel when training", remedy))
    return local


def _is_one(count: float | Tensor) -> bool:
    """Whether the count is 1; in each batch of vmap it is the same."""
    return bool((without_transforms(count) == 1).any()) if isinstance(count, Tensor) else count == 1


def update(
    running_mean: Tensor,
    running_var: Tensor,
    factor: float | Tensor,
    local: int,
    count: float | Tensor,
    mean: Tensor,
    var: Tensor,
) -> None:
    """Move running statistics towards those of the batch, unless no rank has a value; local: of `refuse_one_value`."""
    if not local:
        count = count.to(mean) if isinstance(count, Tensor) else mean.new_full((), count)
    for running, value in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
        value = value if local else torch.where(count > 0, value, running)  # type: ignore[arg-type]
        running.lerp_(value.to(running.dtype), factor)


def node_of(module: nn.Module, *args: Any, **more: Any) -> Any:
    """Add a call of the module to the graph that torch.fx traces, as it does for the modules of torch.nn."""
    tracer: fx.Tracer = next(x for x in (*args, *more.values()) if isinstance(x, fx.Proxy)).tracer  # type: ignore[assignment]
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, more)
