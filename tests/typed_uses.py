"""Uses that type checkers accept, with the types they find, and uses that they refuse: a comment is an error expected.

Checked by mypy and pyright (`make types`), which also report comments that expect an error where there is none.
It is not run.
"""

from collections.abc import Iterator
from typing import NamedTuple, assert_type

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

import diffcoll as dc
from diffcoll.testing import simulate, spawn


class Views(NamedTuple):
    first: Tensor
    second: Tensor


def trees(x: Tensor, p: nn.Parameter, xs: list[Tensor], views: Views, named: dict[str, list[Tensor]]) -> None:
    assert_type(dc.all_reduce(x), Tensor)
    assert_type(dc.all_reduce(xs), list[Tensor])
    assert_type(dc.all_gather(views), Views)
    assert_type(dc.broadcast(named, src=1), dict[str, list[Tensor]])
    assert_type(dc.scatter(x), Tensor)
    assert_type(dc.sum_gradients(xs), list[Tensor])
    dc.all_reduce(p).relu()
    dc.all_reduce(3.0)  # type: ignore
    dc.reduce_scatter(xs)  # type: ignore
    dc.scatter(None)  # type: ignore
    dc.all_reduce({"a": 3})  # type: ignore


def later(x: Tensor, xs: list[Tensor]) -> None:
    assert_type(dc.all_reduce(x, async_op=True), dc.Pending[Tensor])
    assert_type(dc.all_reduce(x, async_op=False), Tensor)
    assert_type(dc.reduce_scatter(x, async_op=True).wait(), Tensor)
    assert_type(dc.all_gather(xs, async_op=True).wait(), list[Tensor])
    dc.scan(x, async_op=True)  # type: ignore
    dc.all_reduce(x, async_op=True).sum()  # type: ignore
    torch.sin(dc.all_reduce(x, async_op=True))  # type: ignore


def operations(x: Tensor) -> None:
    dc.all_reduce(x, "avg")
    dc.all_reduce(x, ReduceOp.SUM)
    dc.all_reduce(x, "maxx")  # type: ignore
    dc.all_reduce(x, torch.amax)  # type: ignore


def scans(x: Tensor, views: Views) -> None:
    assert_type(dc.scan(x, "sum", exclusive=True), Tensor)
    assert_type(dc.scan(x, torch.logaddexp), Tensor)
    assert_type(dc.scan((x, x), lambda before, own: (before[0] * own[0], own[1])), tuple[Tensor, Tensor])
    assert_type(dc.scan(views, lambda before, own: before, exclusive=True, empty=views), Views)
    assert_type(dc.scan(views), Views)
    dc.scan(x, "mean")  # type: ignore
    dc.scan(views, lambda before: before)  # type: ignore


def groups(x: Tensor, group: ProcessGroup, mesh: DeviceMesh) -> None:
    dc.all_reduce(x, group=group)
    dc.all_reduce(x, group=mesh["tensor"])
    dc.all_reduce(x, group=None)
    with dc.set_default_group(mesh):
        dc.get_rank(group)
    dc.all_reduce(x, group=3)  # type: ignore
    dc.all_reduce(x, "sum", group)  # type: ignore
    dc.get_world_size("world")  # type: ignore


def placements(x: Tensor) -> None:
    dc.all_gather(x, grad_placement="replicate")
    dc.all_reduce(x, grad_placement=Replicate())
    dc.broadcast(x, grad_placement=Partial())
    dc.all_gather(x, grad_placement="replicated")  # type: ignore


def losses(x: Tensor, y: Tensor) -> None:
    assert_type(dc.nn.functional.clip_loss(x, y, 3.0, sizes=None), Tensor)
    assert_type(dc.nn.functional.sinkhorn(x, epsilon=0.1), Tensor)
    dc.nn.functional.sigreg_loss(x)  # type: ignore
    dc.nn.CLIPLoss(chunk_size=512)
    dc.nn.CLIPLoss(chunksize=512)  # type: ignore
    dc.nn.DiceLoss(dims=0.5)  # type: ignore
    assert_type(dc.nn.VocabParallelCrossEntropy(reduction="none").forward(x, x, y, bias_shard=y), Tensor)
    dc.nn.VocabParallelCrossEntropy(reduction="max")  # type: ignore
    dc.nn.functional.clip_loss(x, y, 3.0, reduction="mean")  # type: ignore
    dc.nn.functional.moments(x, 0, y)  # type: ignore
    assert_type(dc.nn.functional.token_mean(x, y, group=None), Tensor)
    dc.nn.functional.token_mean(x, 1.0)  # type: ignore
    assert_type(dc.nn.functional.loss_of_sums(torch.div, x, y), Tensor)


def averaging(model: nn.Module, gs: list[Tensor], loader: list[Tensor]) -> None:
    averager = dc.GradientAverager(model, reduction=ReduceOp.SUM, group=None)
    for x in dc.in_step(loader, empty=gs[0]):
        averager.backward(x.sum(), count=len(x))
    with averager.reduce(count=gs[0]):
        assert_type(dc.in_step(loader), Iterator[Tensor])
    assert_type(dc.global_mean(3.0), Tensor)
    dc.GradientAverager(model, reduction="max")  # type: ignore
    dc.GradientAverager(model, broadcast="once")  # type: ignore
    averager.reduce(count="3")  # type: ignore
    averager.reduce(3)  # type: ignore


def rank_of(x: Tensor) -> tuple[int, Tensor]:
    return dc.get_rank(), x


def harness(xs: list[Tensor]) -> None:
    assert_type(simulate(rank_of, xs), list[tuple[int, Tensor]])
    assert_type(spawn(rank_of, xs, backend="mpi"), list[tuple[int, Tensor]])
    assert_type([y for _, y in dc.ring(xs)], list[list[Tensor]])
    assert_type(dc.gather_batch(xs).tree, list[Tensor])
    simulate(3, xs)  # type: ignore
