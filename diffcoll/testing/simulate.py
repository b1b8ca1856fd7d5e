"""Runs N ranks of the user's code in one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from diffcoll import truth
from diffcoll.core import expect
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.transforms import is_transformed
from diffcoll.engines import c10d, simulated_c10d
from diffcoll.engines.guards import backward_starts
from diffcoll.engines.local import LocalEngine
from diffcoll.engines.world import World
from diffcoll.testing._calls import per_rank_arguments

T = TypeVar("T")


def simulate(
    fn: Callable[..., T],
    *per_rank: Sequence[Any],
    rules: bool = False,
    torch_distributed: bool = False,
    seed: int = 0,
) -> list[T]:
    """Tests without processes: run fn on N simulated ranks, like `map`; returns the list of all ranks' results.

    The ranks are threads; one runs at a time, and the next one runs when it reaches a collective. A run is
    deterministic. Use the default to get reference gradients, `rules=True` to run training code that calls backward.

    By default all ranks share one autograd graph in which each collective is its definition in `diffcoll.truth`, so
    PyTorch itself derives the gradients. Call backward on the results, after simulate has returned:

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> xs = [torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)]
    >>> losses = simulate(lambda x, w: w * dc.all_reduce(x), xs, [1.0, 10.0])
    >>> torch.autograd.backward(losses)  # the sum of all ranks' losses
    >>> [x.grad for x in xs]
    [tensor(11.), tensor(11.)]

    With `rules=True` the library's own collectives and backward rules run, as on real processes. Call backward inside
    fn, since all ranks take part in it.

    With `torch_distributed=True` fn may call torch.distributed, as a published loss does, and need not be changed for
    that. The default process group is set up, as under `spawn`, so `init_process_group` raises, and diffcoll's
    collectives work in it too, with their rules:

    >>> import torch.distributed as dist
    >>> def total(x):
    ...     dist.all_reduce(x)
    ...     return x
    >>> simulate(total, [torch.tensor(3.0), torch.tensor(5.0)], torch_distributed=True)
    [tensor(8.), tensor(8.)]

    Args:
        fn: called as fn(a_r, b_r, …) on rank r, with `diffcoll` collectives inside. A tensor in its closure is shared
            by all ranks, unlike on real processes.
        per_rank: one or more sequences of equal length N, one element for each rank.
        rules: run the library's rules instead of the ground truth.
        torch_distributed: let fn call torch.distributed: its collectives, messages, groups, `DeviceMesh`,
            `DistributedDataParallel`. `get_backend()` is "gloo"; shapes and dtypes that a backend refuses, such as
            unequal shapes in lists on gloo, are no error. Compiled functions run uncompiled. Implies `rules`. Module
            globals and caches are shared by all ranks: a program that keeps process groups there, as Megatron-core,
            needs `spawn`. See notes/why/which-gradient.md.
        seed: rank r seeds its random number generators (torch, random, numpy) with (seed, r), as under `spawn`; the
            caller's generators are not changed.

    The ranks run in the modes of the caller: grad mode, autocast, `with torch.device(…)`, hooks for saved tensors, and
    PyTorch's other thread-local state. The caller's `torch.get_num_threads()` is divided among the ranks, at least one
    each. Each rank has an `os.environ` of its own, with `torch_distributed` with the variables that torchrun sets
    (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …). Processes that a rank starts inherit the caller's.

    Returns:
        The ranks' results, in order.

    Raises:
        TypeError, ValueError: per_rank are not sequences of equal length.
        CollectiveMismatchError: ranks call different collectives, or wait for a rank that has finished; lists the
            collective and line at which each rank waits.
        RuntimeError: fn calls torch.distributed, and `torch_distributed` is False.
        RuntimeError: with `torch_distributed`, a thread that is not a rank calls torch.distributed, or a rank uses a
            process group that another rank has made, or fn is the first in the process to use torch.compile.
        RuntimeError: called within a transform of torch.func, `joint_backward`, or a mode that traces or fakes tensors,
            which belong to the calling thread; call simulate outside of them, or enter them in fn.
        RuntimeError: without `rules`, backward ran inside fn through a collective; or the backward pass calls a
            collective (a recomputing checkpoint, an `autograd.Function` or a hook), which needs `rules=True` and
            backward inside fn.
        Exception: the first exception that fn raised on any rank.
    """
    expect.flag("simulate", "torch_distributed", torch_distributed)
    arguments = per_rank_arguments("simulate", per_rank)
    world = World(len(arguments), seed=seed, truth=None)
    bodies = [partial(fn, *a) for a in arguments]
    if torch_distributed:
        world.launched = True
        simulation = simulated_c10d.Simulation(world)
        with simulated_c10d.installed():
            return world.run([simulation.body(body) for body in bodies])
    if not rules:
        world.truth = partial(_truth, world)
    try:
        return world.run(bodies)
    except Exception as error:
        if not calls_torch_distributed(error):
            raise
        raise RuntimeError(
            "simulate: fn calls torch.distributed, which is not simulated by default; simulate(..., "
            "torch_distributed=True) sets up its default process group on simulated ranks, and runs such code"
        ) from error


def calls_torch_distributed(error: BaseException) -> bool:
    """Whether an error was raised in torch.distributed, and nobody has set up its default process group."""
    error = error.__cause__ or error
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not dist.is_initialized() and any(f"{name}.".startswith("torch.distributed.") for name in modules)


def _truth(
    world: World, name: str, xs: list[Any], arguments: list[dict[str, Any]], facts: list[tuple[object, object]]
) -> list[Any]:
    """Return the results of all ranks' calls of one collective by its definition in `diffcoll.truth`."""
    if any(isinstance(x, Tensor) and is_transformed(x) for x in xs):
        raise CollectiveMismatchError(
            f"{name}: a torch.func transform in one rank cannot differentiate through the graph of all ranks; "
            "use simulate(rules=True)"
        )
    common = dict(arguments[0])
    for key in truth.PER_RANK:
        if key in common and any(a[key] is not None for a in arguments):
            common[key] = [a[key] for a in arguments]
    (meaning, kind), *_ = facts
    for r, other in enumerate(arguments):
        differing = other if facts[r][0] != meaning else {}  # equal meanings may be spelled differently
        for key, value in differing.items():
            same = callable(value) and callable(common[key])  # each rank may have defined the function itself
            if key not in truth.PER_RANK and not same and value != common[key]:
                raise CollectiveMismatchError(f"{name}: {key}={common[key]!r} on rank 0, {value!r} on rank {r}")
        if facts[r][1] != kind:
            raise CollectiveMismatchError(f"{name}: x is {_of(xs[0])} on rank 0, {_of(xs[r])} on rank {r}")
    ys: list[Any] = getattr(truth, name)(xs, **common)
    for y in ys:
        if isinstance(y, Tensor) and y.requires_grad:
            y.register_hook(partial(_refuse_backward, world, name))  # type: ignore[no-untyped-call]
    return ys


def _of(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _refuse_backward(world: World, name: str, gradient: Tensor) -> None:
    backward_starts(world)
    if world.running:
        raise RuntimeError(
            f"backward ran through {name} inside simulate(), where it would differentiate one rank's loss only; call "
            "it on the results, after simulate has returned, as torch.autograd.backward(losses), or use "
            "simulate(rules=True)"
        )


def new_group(ranks: Sequence[int]) -> Any:
    """Tests with subgroups: make a group of some ranks, under `simulate` or on real processes; all ranks call it.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import new_group, simulate
    >>> def f(x):
    ...     pair = new_group([0, 2])
    ...     return x if dc.get_rank() == 1 else dc.all_reduce(x, group=pair)
    >>> simulate(f, [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)])
    [tensor(4.), tensor(2.), tensor(4.)]

    Args:
        ranks: ranks within the default group, each at most once, in any order. Rank i of the new group is ranks[i].
            With torch.distributed all processes of the job must call new_group.

    Returns:
        A value for `group=`: a `ProcessGroup`, an `MPI.Comm`, or, under `simulate` without
        `torch_distributed`, a handle.

    Raises:
        TypeError, ValueError: ranks is not a list of ranks of the default group, is empty, or has duplicates.
    """
    engine = resolve(None, "new_group")
    expected = f"a list of ranks of the default group, from 0 to {engine.size - 1}, each at most once"
    try:
        numbers = [index(r) for r in ranks]
    except TypeError:
        raise TypeError(message("new_group", "ranks", repr(ranks), expected)) from None
    if not numbers or len(set(numbers)) < len(numbers) or not all(0 <= r < engine.size for r in numbers):
        raise ValueError(message("new_group", "ranks", numbers, expected))
    if simulated_c10d.groups_of_rank() is not None and isinstance(engine, LocalEngine):
        return c10d.new_group([engine.group.ranks[r] for r in numbers])
    return engine.subgroup(numbers)
