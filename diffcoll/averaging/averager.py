"""GradientAverager: average the gradients of a replicated model over the ranks in a block around backward.

note  notes/training/averaging.md
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from diffcoll.averaging.global_mean import checked_count
from diffcoll.averaging.messages import NAME, broadcast_from_first, twin
from diffcoll.averaging.parameters import differentiable, named_parameters
from diffcoll.averaging.reducer import Block, Reducer
from diffcoll.core import expect
from diffcoll.core.control import Control
from diffcoll.core.dtypes import FLOATS
from diffcoll.core.errors import message
from diffcoll.core.groups import resolve
from diffcoll.core.reductions import spelled
from diffcoll.core.torch_private.tracing import untraced
from diffcoll.engines.types import Group, ReduceOp

#: How to write a block.
_BLOCK = "call averager.backward(loss), or `with averager.reduce(): loss.backward()`, both with count=n if needed"
#: What an attribute of a wrapped module would be, and what `with averager:` would do.
_NO_WRAPPER = f"a {NAME} wraps nothing: call your model, and use its parameters() and state_dict(); {_BLOCK}"


class GradientAverager:
    """Data-parallel training: average the gradients of a model over the ranks, without wrapping it.

    The reduction is a block. At its end `.grad` has the mean over the ranks, the same bits on all of them; while
    backward runs in it, complete buckets are sent. Outside of a block nothing happens: gradients are this rank's own,
    and an optimizer's step on them raises, if backward used the same parameters as in the last block.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def gradient(x):
    ...     model = torch.nn.Linear(1, 1, bias=False)
    ...     averager = dc.GradientAverager(model)
    ...     averager.backward(model(x).sum())
    ...     return model.weight.grad
    >>> simulate(gradient, [torch.tensor([[2.0]]), torch.tensor([[4.0]])])
    [tensor([[3.]]), tensor([[3.]])]

    Args:
        module_or_params: an `nn.Module`, parameters, or pairs (name, parameter); the same on all ranks in number,
            order, names, shapes, strides and dtypes, which may be mixed, as devices may. Integer parameters are only
            broadcast. Parameters may be frozen and unfrozen at any time. Those that a module gets later are not
            averaged: make the averager when the model is complete, like an optimizer, and before the forward.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        reduction: `"mean"`: Σ_r g_r / N, for equal batches and for losses of `diffcoll.nn`. `"sum"`: Σ_r g_r, if each
            loss is already divided by the global count. A block with a `count` replaces both. Spelled as in
            `all_reduce`.
        bucket_mb: maximum size of one message in megabytes; a single larger gradient has a message of its own.
        comm_dtype: the dtype in which gradients are sent and added; None: their own.
        broadcast: copy rank 0's parameters, and a module's buffers, to all ranks on construction.

    Raises:
        TypeError, ValueError: an argument is wrong on its own; DDP or FSDP reduces some of these parameters.
        CollectiveMismatchError: the ranks' parameters, buffers or arguments differ; raised on all ranks, with the first
            difference.

    Source: notes/training/averaging.md.
    """

    def __init__(
        self,
        module_or_params: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        *,
        group: Group = None,
        reduction: Literal["mean", "avg", "average", "sum"] | ReduceOp = "mean",
        bucket_mb: float = 25.0,
        comm_dtype: torch.dtype | None = None,
        broadcast: bool = True,
    ) -> None:
        how = spelled(reduction)
        expect.choice(NAME, "reduction", how if how in ("mean", "sum") else reduction, ("mean", "sum"))
        if not expect.is_number(bucket_mb) or not bucket_mb > 0:
            raise ValueError(message(NAME, "bucket_mb", repr(bucket_mb), "a number of megabytes above zero"))
        if comm_dtype is not None and comm_dtype not in FLOATS:
            expected = f"{', '.join(map(str, FLOATS))} or None"
            raise TypeError(message(NAME, "comm_dtype", repr(comm_dtype), expected))
        expect.flag(NAME, "broadcast", broadcast)
        tensors = named_parameters(module_or_params)
        named = differentiable(tensors)
        if broadcast and isinstance(module_or_params, nn.Module):
            tensors += module_or_params.named_buffers()
        engine = resolve(group, NAME)
        arguments = f"{how=}, bucket_mb={float(bucket_mb)}, {comm_dtype=}, {broadcast=}"
        facts = [f"{name}: {tuple(t.shape)} {t.dtype} on {t.device.type}" for name, t in tensors]
        facts += [f"{name}: strides {t.stride()}" for name, t in named]  # which their gradients get
        Control(engine, NAME).agree_on_each([arguments, *facts], "arguments, parameters or buffers")
        if broadcast:
            broadcast_from_first([t for _, t in tensors], group)
        self._group, self._is_closed = group, False
        self._reducer = Reducer(named, twin(engine, self), how == "mean", bucket_mb * 2**20, comm_dtype)

    @property
    def group(self) -> Group:
        """The group over which gradients are reduced, as it was passed."""
        return self._group

    def reduce(self, *_wrong: NoReturn, count: float | Tensor | None = None) -> Block:
        """Return the block at whose end `.grad` is reduced: everything in it, earlier micro-batches included.

        All ranks enter it equally often. What happens in it may differ: a rank may use other parameters or none, may
        call backward several times or not at all. A parameter that this rank has not used contributes zeros; one that
        no rank has used keeps `.grad` None. With micro-batches, call plain `loss.backward()` for all but the last; or
        for all, and then `with averager.reduce(): pass`.

        Zero, clip and step outside of the block. `GradScaler.unscale_` within it is wrong, and not noticed. Blocks of
        two averagers without common parameters, as of a generator and a discriminator, may be open at once.

        Args:
            count: for unequal batches: the number of items (rows, tokens) over which this rank's loss is a *sum*. The
                gradient is then Σ_r g_r / Σ_r n_r, right with collectives in the model too. A number or a 0-d tensor,
                which stays on its device; 0 where there is nothing; if it is 0 on all ranks, gradients are zero. All
                ranks pass one, or none does. It counts everything in `.grad`, earlier micro-batches included.

        Raises:
            ValueError, TypeError: from here: the count is neither, or requires a gradient, as a loss does.
            RuntimeError: at the end, on all ranks: a rank has left its block by an error, and raises that itself; or
                gradients were modified or taken in the block, or, with `"sum"` or a count, were reduced before, by
                whichever averager. `.grad` is None on all ranks; call `zero_grad()` and take the next step.
            CollectiveMismatchError: at the end, on all ranks: some pass a count, and others do not.
            CollectiveFailedError: a rank has died or did not enter its block; names the message.
        """
        if self._is_closed:
            raise RuntimeError(f"{NAME}.reduce: was closed by close(); make a new {NAME}, or use plain backward()")
        if _wrong or (isinstance(count, Tensor) and count.requires_grad):
            got = "it by position" if _wrong else "a tensor that requires a gradient"
            raise TypeError(message(f"{NAME}.reduce", "count", got, "count=n, a number of items", _BLOCK))
        return Block(self._reducer, None if count is None else checked_count(f"{NAME}.reduce", "count", count))

    @untraced
    def backward(self, loss: Tensor, *_wrong: NoReturn, count: float | Tensor | None = None) -> None:
        """Call `loss.backward()` in a block, see `reduce`."""
        if _wrong:
            raise TypeError(message(f"{NAME}.backward", "loss", f"{1 + len(_wrong)} by position", "one", _BLOCK))
        with self.reduce(count=count):
            torch.autograd.backward(loss)

    def close(self) -> None:
        """Remove all hooks and free the communicator; gradients stay. All ranks call it.

        From then on training is plain PyTorch, e.g. for steps on local gradients.
        """
        if not self._is_closed:
            self._is_closed = True
            self._reducer.close()

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Explain that the model is called, and that `reduce` returns the context manager."""
        raise TypeError(_NO_WRAPPER)

    __enter__ = __exit__ = __call__

    def __getattr__(self, name: str) -> Any:
        """Explain that a module's attributes are the module's."""
        raise AttributeError(f"{name}: {_NO_WRAPPER}")
