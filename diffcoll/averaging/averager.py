"""GradientAverager: average the gradients of a replicated model over the ranks while the backward pass runs.

`hooks.py` follows the backward pass, `reducer.py` reduces the buckets, `buckets.py` stores gradients contiguously in
memory. Buckets are sent in a duplicate of the group, so their messages cannot match other messages.

note  notes/training/gradient-averager.md, notes/why/when-gradients-synchronize.md
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from diffcoll.averaging import ownership
from diffcoll.averaging.comm_hook import CommHook, Hook
from diffcoll.averaging.functions import checked_weight
from diffcoll.averaging.gradient import Parameter, is_channels_last
from diffcoll.averaging.hooks import Hooks
from diffcoll.averaging.joined import Joined, joined
from diffcoll.averaging.messages import broadcast_from_first, twin
from diffcoll.averaging.module_buffers import ModuleBuffers, facts, named_buffers, refuse_without_memory
from diffcoll.averaging.ownership import Ignore, differentiable, named_parameters
from diffcoll.averaging.policy import NAME, Averaging, BroadcastBuffers, Settings, Unused, read_reduction
from diffcoll.averaging.reducer import Reducer
from diffcoll.averaging.watch import ModuleTree
from diffcoll.core.control import Control
from diffcoll.core.errors import message
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.tracing import untraced
from diffcoll.engines import guards
from diffcoll.engines.types import Group

Batch = TypeVar("Batch")


class GradientAverager:
    """Data-parallel training: average gradients over the ranks during `backward()`, without wrapping the module.

    It registers hooks on the parameters. From then on `backward()` returns with the averaged gradients in `.grad`,
    bitwise the same on all ranks. Choose `reduction="mean"` if every rank's batch has the same size, `"weighted"` if
    batch sizes or token counts differ, `"sum"` if each loss is already divided by the global count. For a training
    loop in which ranks have different numbers of batches, use `join`.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def gradient(x):
    ...     model = torch.nn.Linear(1, 1, bias=False)
    ...     dc.GradientAverager(model)
    ...     model(x).sum().backward()
    ...     return model.weight.grad
    >>> simulate(gradient, [torch.tensor([[2.0]]), torch.tensor([[4.0]])], rules=True)
    [tensor([[3.]]), tensor([[3.]])]

    Every rank must call backward, and its loss must use at least one parameter; ranks may use different ones. A
    parameter that this rank's loss does not use contributes zeros; if no rank uses it, its `.grad` stays None.
    Parameters may be frozen and unfrozen at any time, on all ranks alike; frozen ones are not sent. Backward
    accumulates into an existing `.grad`, as in PyTorch. After `zero_grad()`, a gradient that the user still holds is
    never written again.

    Each parameter has one averager: a new one on the same module or the same parameters replaces the old one.

    Args:
        module_or_params: an `nn.Module`, parameters, or pairs (name, parameter); the same on all ranks in number,
            order, names, shapes and dtypes. Any floating-point or complex dtype; dtypes and devices may be mixed.
            Integer parameters are only broadcast. Parameters added to the module later raise an error.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        reduction: `"mean"`: Σ_r g_r / N. `"sum"`: Σ_r g_r. `"weighted"`: Σ_r w_r g_r / Σ_r w_r, see `set_weight`. Other
            spellings as in `all_reduce`: `"avg"`, `ReduceOp.SUM`.
        bucket_mb: maximum size of one message in megabytes; a single larger gradient has a message of its own.
        comm_dtype: the dtype in which gradients are sent and added; None: their own.
        deterministic: add in the order of ranks, so that gradients have the same bits on every engine and for every
            `bucket_mb`. Buckets are then sent at the end of backward and do not overlap with it; see
            notes/training/gradient-averager.md. Not with `comm_hook`.
        broadcast_parameters: copy rank 0's parameters to all ranks on construction.
        broadcast_buffers: `"once"`: copy rank 0's buffers, integers included, to all ranks on construction, if a module
            is given. `"each forward"`: also before each training forward of the module that follows a reduction, which
            is what DistributedDataParallel's `True` means; with micro-batches before the first. Nothing is sent in
            evaluation or under `no_grad`. `"never"`: each rank keeps its own.
        hooks: False: backward sends nothing, as if always within `no_sync`; `synchronize` reduces what is in `.grad`.
        ignore: parameters and buffers that are neither averaged nor broadcast: their names, as in `named_parameters()`
            and `named_buffers()`, or a function (name, tensor) -> bool. The others must be the same on all ranks.
        comm_hook: replaces the all-reduce of each bucket, e.g. by a compressed one. `comm_hook(bucket)` receives a
            `GradientBucket` and returns the sum of `bucket.row` over the ranks, or what approximates it: a tensor of
            the same shape and dtype, or an object whose `wait()` returns one. The averager does all divisions.
            Called at the end of backward, for all buckets in order, before the first is waited for.
        unused: `"error"`: raise, on all ranks, if there are parameters that no rank has used since the last reduction.

    Raises:
        TypeError, ValueError: an argument is wrong on its own; a module has sparse gradients; DistributedDataParallel,
            FSDP or an averager that also has other parameters already reduces some of these.
        CollectiveMismatchError: the ranks' parameters, buffers to be broadcast or arguments differ; raised on all
            ranks, with the first difference. From backward: on some ranks other parameters are frozen, or `comm_hook`
            has raised or sent other tensors.
        CollectiveFailedError: from backward: a rank died or did not call it; names the bucket.
        RuntimeError: from backward: gradients would be wrong, with the cause, e.g. an optimizer step within backward.

    Source: notes/training/averaging.md.
    """

    def __init__(
        self,
        module_or_params: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        *,
        group: Group = None,
        reduction: Averaging | Literal["weighted"] = "mean",
        bucket_mb: float = 25.0,
        comm_dtype: torch.dtype | None = None,
        deterministic: bool = False,
        broadcast_parameters: bool = True,
        broadcast_buffers: BroadcastBuffers = "once",
        hooks: bool = True,
        ignore: Ignore = None,
        comm_hook: Hook | None = None,
        unused: Unused = "allow",
    ) -> None:
        module = module_or_params if isinstance(module_or_params, nn.Module) else None
        sends = broadcast_parameters, broadcast_buffers
        how = read_reduction(NAME, reduction, ("mean", "sum", "weighted"))
        arguments = Settings(how, bucket_mb, comm_dtype, deterministic, comm_hook, unused, *sends, hooks)
        arguments.check(module)
        named, ignored = named_parameters(module_or_params, ignore)
        engine = resolve(group, NAME)
        if engine.in_one_graph:
            got, expected = "simulated ranks that share one autograd graph", "ranks that call backward themselves"
            remedy = "simulate(…, rules=True), with backward inside"
            raise RuntimeError(message(NAME, "group", got, expected, remedy))
        ownership.refuse_shared(named)
        claims, ranks = ownership.claims_on(named), Control(engine, NAME)
        parameters = [_fact(*pair) + ownership.status(pair[1], claims, module, named) for pair in named]
        ranks.agree_on_each(parameters, "parameters")
        buffers = {} if broadcast_buffers == "never" else named_buffers(module, ignored)
        ranks.agree_on_each([*arguments.facts(), *facts(buffers)], "arguments")
        refuse_without_memory(buffers)
        ownership.detach_replaced(claims, module, named)
        broadcast_from_first([*(p for _, p in named if broadcast_parameters), *buffers.values()], group)
        repeats = broadcast_buffers == "each forward"
        repeated = ModuleBuffers(module, ignored, twin(engine, self)) if repeats else None
        engine = twin(engine, self)
        ownership.refuse_shared(named)  # again: another simulated rank may have made its averager since
        tree = ModuleTree(module, named, ignored, self)
        hook = None if comm_hook is None else CommHook(comm_hook, engine, group)
        owned = [Parameter(i, *pair) for i, pair in enumerate(differentiable(named))]
        self._reducer = Reducer(owned, engine, arguments, tree, repeated, hook)
        self._hooks = Hooks(self._reducer, no_sync_depth=int(not hooks))
        self._claim = ownership.Claim(named, self._reducer, tree.module, guards.THREAD.rank, self.detach)
        self._is_attached = True
        ownership.enter(self._claim)
        tree.attach(self._hooks.after_new_parameter)
        if repeated is not None:
            repeated.attach(self._hooks.end_failed_backward)
        self._hooks.attach()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradient accumulation: within the block, backward adds to this rank's `.grad` and sends nothing.

        The next backward outside the block reduces everything accumulated.
        """
        self._check_attached("no_sync")
        self._hooks.no_sync_depth += 1
        try:
            yield
        finally:
            self._hooks.no_sync_depth -= 1

    @untraced
    def set_weight(self, weight: float | Tensor) -> None:
        """Training with unequal batches: set the weight of the next batch, e.g. its number of samples or tokens.

        Call it once per batch, before its backward. With micro-batches under `no_sync`, call it before each one; all
        micro-batches of all ranks form one weighted mean. A weight counts when backward accumulates the first gradient
        of its batch, until `zero_grad()` drops all gradients. A weight of zero is allowed, even if an empty batch makes
        the loss NaN; if all weights are zero, gradients are zero.

        Args:
            weight: a non-negative number or a 0-d tensor; the value of a tensor is not checked.

        Raises:
            ValueError, TypeError: the weight is not such a number, or the reduction is not `"weighted"`.
        """
        policy, name = self._reducer.policy, f"{NAME}.set_weight"
        if not policy.is_weighted:
            raise ValueError(message(name, "weight", repr(weight), "none", 'say reduction="weighted"'))
        weight = checked_weight(name, weight)
        self._check_attached("set_weight")
        policy.set_weight(weight)

    @untraced
    def synchronize(self) -> None:
        """Reduce what is in `.grad` now, after backward under `no_sync` or with `hooks=False`; all ranks call it.

        A gradient that was already reduced is not reduced again.
        """
        self._check_attached("synchronize")
        self._hooks.end_failed_backward()
        self._reducer.begin()
        self._reducer.receive(self._reducer.send_rest())

    @untraced
    def skip_step(self, failed: bool | Tensor = True) -> bool:
        """Recovery from an error on one rank, e.g. out of memory: skip this step on all ranks if it failed on one.

        All ranks call it once per step, in all steps after the first call, between the one backward of the step that is
        reduced and `optimizer.step()`. A rank whose forward or backward has raised calls it with True, without another
        backward: the others' backward then returns without gradients. If it returns True, `.grad` is None on all ranks,
        micro-batches included, or zero if it is a view of memory of yours. Cost: one small message per step, in the
        first call another reduction. See notes/training/gradient-averager.md.

        Args:
            failed: whether this rank has failed, or finds another reason to skip, such as a loss that is not finite.

        Returns:
            Whether any rank has failed; the same on all ranks.

        Raises:
            RuntimeError: this step had no reduction, or several, of this averager.
        """
        self._check_attached("skip_step")
        return self._hooks.skip_step(bool(failed))

    def join(self, batches: Iterable[Batch], *, spare: Batch | None = None) -> Iterator[Batch]:
        """Training loop with unequal numbers of batches: iterate over this rank's batches; all ranks loop over it.

        A rank that runs out of batches repeats its last one with weight zero until every rank has run out. It takes the
        same optimizer steps, so parameters, optimizer state and schedule stay equal on all ranks, but its gradients and
        weights do not count. The mean is over the ranks that still have batches. Cost: one small message per batch.
        Each repetition is a new batch of the same tensors: dicts, lists and the like are copied. A `for` loop that is
        left early, by `break` on all ranks, ends this one. If you call `next` yourself instead, call `close()` then.

        >>> import torch, diffcoll as dc
        >>> from diffcoll.testing import simulate
        >>> def train(batches, spare):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     averager = dc.GradientAverager(model)
        ...     for x in averager.join(batches, spare=spare):
        ...         model(x).sum().backward()
        ...     return model.weight.grad.item()
        >>> simulate(train, [[torch.tensor([3.0])], []], [None, torch.zeros(1)], rules=True)
        [3.0, 3.0]

        Args:
            batches: this rank's batches; there may be none.
            spare: what this rank repeats if it has no batch at all: a batch in the form of the others', of any values.

        Raises:
            ValueError: a rank has neither a batch nor a spare one, and another has a batch; raised on all ranks.
            RuntimeError: another `join` of this averager has begun before this one ended; or a second loop over what
                this returned, after one that was left early.
        """
        self._check_attached("join")
        return Joined(joined(batches, spare, self._hooks, self._reducer))

    @untraced
    def detach(self) -> None:
        """Remove the hooks; gradients stay. All ranks call it.

        If this rank left backward by an exception, ranks that still wait in that backward raise.
        """
        if not self._is_attached:
            return
        self._is_attached = False
        ownership.leave(self._claim)
        engine, tree, buffers = self._reducer.engine, self._reducer.tree, self._reducer.buffers
        tree.detach()
        self._hooks.detach()
        if not engine.ended and self._claim.rank is guards.THREAD.rank:
            with contextlib.suppress(RuntimeError):  # the group has failed: no rank waits
                self._hooks.end_failed_backward()
        if buffers is not None:
            buffers.detach()
        if engine.size > 1:
            engine.close()

    def _check_attached(self, what: str) -> None:
        if not self._is_attached:
            raise RuntimeError(
                f"{NAME}.{what}: this averager was detached, or a newer one has taken over; use that one"
            )


def _fact(name: str, p: Tensor) -> str:
    return f"{name} {tuple(p.shape)} {p.dtype}{' channels_last' * is_channels_last(p)}"
