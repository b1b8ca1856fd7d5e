"""Runs N ranks of the user's code in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from diffcoll.core.trees import tree_map
from diffcoll.engines.simulated import c10d
from diffcoll.engines.simulated.world import Truth, World, one_at_a_time
from diffcoll.testing._calls import per_rank_arguments

T = TypeVar("T")


def simulate(fn: Callable[..., T], *per_rank: Sequence[Any], seed: int = 0) -> list[T]:
    """Run fn on N simulated ranks in this process, called like `map`; returns the list of all ranks' results.

    It does what `spawn` does on processes. The ranks are threads; one runs at a time, and the next one runs when it
    reaches a collective. So a run is deterministic, and a deadlock or a mismatch is an error at once.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def gradient(x, w):
    ...     x = x.clone().requires_grad_()
    ...     (w * dc.all_reduce(x)).backward()
    ...     return x.grad
    >>> simulate(gradient, [torch.tensor(3.0), torch.tensor(5.0)], [1.0, 10.0])
    [tensor(11.), tensor(11.)]

    torch.distributed is set up on every rank: its collectives, messages, groups, `DeviceMesh` and
    `DistributedDataParallel` work; `get_backend()` is "gloo". A published loss need not be changed:

    >>> import torch.distributed as dist
    >>> def total(x):
    ...     dist.all_reduce(x)
    ...     return x
    >>> simulate(total, [torch.tensor(3.0), torch.tensor(5.0)])
    [tensor(8.), tensor(8.)]

    Tensors may have no memory (meta, `FakeTensorMode`): what is compared is what makes ranks hang, for a thousand ranks
    on one machine. Until an asynchronous call is waited for, its outputs are NaN, and its inputs must not be modified.

    Args:
        fn: called as fn(a_r, b_r, …) on rank r; it calls backward itself, since all ranks take part in that. A tensor
            in its closure is shared by all ranks, unlike on processes, and so are module globals and caches: a program
            that keeps process groups there, as Megatron-core, needs `spawn`. Compiled functions run uncompiled.
        per_rank: one or more sequences of equal length N, one element for each rank.
        seed: rank r seeds its random number generators (torch on all devices, random, numpy) with (seed, r), as under
            `spawn`; the caller's generators are not changed.

    The ranks have the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, …). They are new threads, to which
    the caller's grad mode, autocast or default device do not apply. `torch.get_num_threads()` is divided among them.

    Returns:
        The ranks' results, in order; tensors in them come detached.

    Raises:
        TypeError, ValueError: per_rank are no sequences of one length.
        CollectiveMismatchError: ranks call different collectives, or wait for a rank that has finished, or have not
            joined what another one started; lists the collective and line at which each rank waits.
        RuntimeError: called on a simulated rank, within a transform of torch.func or `joint_backward`; or a thread that
            a rank has started calls a collective.
        RuntimeError, ValueError: a rank uses a process group that another rank has made, or what is another rank's in
            a mesh that it has made.
        Exception: the first exception that fn raised on any rank.
    """
    results = run_ranks(fn, per_rank_arguments("simulate", per_rank), seed)
    return [tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result) for result in results]


def run_ranks(
    fn: Callable[..., T], rows: Sequence[Sequence[Any]], seed: int = 0, truth: Truth | None = None
) -> list[T]:
    """Run fn on simulated ranks; return the results as they are. `truth`: see `World`."""
    with one_at_a_time(), c10d.installed():
        return World(len(rows), seed, truth).run([partial(c10d.with_groups, partial(fn, *row)) for row in rows])
