"""Audit of differentiable collectives: is the gradient that of the sum of all ranks' losses?

    python examples/audit_collectives.py              # one line for each collective
    python examples/audit_collectives.py MAX          # the full reports of collectives with this name

Simulated ranks hold x = 3 and 5 (of reduce_scatter two numbers each), and lose 1 · y and 10 · y. PyTorch differentiates
the same on one process, which gives the right gradients; causes are found on three ranks too. Packages
that are not installed are skipped. audit_published_losses.py goes on with losses.

What it found, on torch 2.13:

    collective                       gradients              right                  cause
  torch-distributed-nn 2.13.0
    all_reduce SUM                   11, 11                 11, 11                 right
    all_reduce AVG                   5.5, 5.5               5.5, 5.5               right
    all_reduce MAX                   10, 10                 0, 11                  wrong in direction
    all_reduce MIN                   1, 1                   11, 0                  wrong in direction
    all_reduce PRODUCT               10, 10                 55, 33                 wrong in direction
    all_gather                       11, 22                 11, 22                 right
    broadcast                        11, 0                  11, 0                  right
    reduce_scatter AVG               1, 10, 1, 10           0.5, 5, 0.5, 5         scaled
  torch-distributed-functional-collectives 2.13.0
    all_reduce SUM                   11, 11                 11, 11                 right
    all_reduce AVG                   RuntimeError           5.5, 5.5               raises
    all_reduce MAX                   RuntimeError           0, 11                  raises
    all_reduce MIN                   RuntimeError           11, 0                  raises
    all_reduce PRODUCT               RuntimeError           55, 33                 raises
    all_gather_tensor                11, 22                 11, 22                 right
    broadcast                        1, 10                  11, 0                  graph cut
    reduce_scatter_tensor AVG        RuntimeError           0.5, 5, 0.5, 5         raises
  lightning 2.6.6
    all_gather(sync_grads=True)      11, 22                 11, 22                 right
    all_gather(sync_grads=False)     RuntimeError           11, 22                 no contribution
  sentence-transformers 6.2.0
    all_gather(with_grad=True)       11, 22                 11, 22                 right
    all_gather(with_grad=False)      1, 20                  11, 22                 local slice
"""

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import audit_sharded_layers
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn_functional
from torch import Tensor
from torch.distributed import _functional_collectives as functional_collectives

from diffcoll.testing import GradientMismatchError, Report, assert_matches_single_process, simulate

X = torch.tensor([[3.0], [5.0], [2.0]]).double()
SQUARE = torch.tensor([[3.0, 2.0, 4.0], [5.0, 7.0, 6.0], [1.0, 8.0, 9.0]]).double()
WEIGHTS = torch.tensor([[1], [10], [100]])


@dataclass
class Collective:
    """A published collective on a rank's x, and what each rank has then on one process, as rows."""

    name: str
    on_rank: Callable[[Tensor], Tensor]
    on_one_process: Callable[[Tensor], Tensor]
    x: Tensor = field(default_factory=lambda: X)

    def batch(self, ranks: int) -> tuple[Tensor, Tensor]:
        x = self.x[:ranks, : self.x.shape[1] if self.x.shape[1] == 1 else ranks]
        return x.clone(), WEIGHTS[:ranks]

    def distributed(self, x: Tensor, weight: Tensor) -> Tensor:
        return (weight * self.on_rank(x[0])).sum()

    def single(self, x: Tensor, weight: Tensor) -> Tensor:
        return (weight * self.on_one_process(x)).sum()

    def gradients(self) -> str:
        """Return each rank's gradient, or the error."""

        def on_rank(x: Tensor, weight: Tensor) -> list[float]:
            x = x.clone().requires_grad_()
            self.distributed(x, weight).backward()
            assert x.grad is not None
            return x.grad.flatten().tolist()

        try:
            found = simulate(on_rank, *(part.split(1) for part in self.batch(2)))
        except RuntimeError as error:
            return type(error).__name__
        return numbers(value for of_rank in found for value in of_rank)

    def right(self) -> str:
        x, weights = self.batch(2)
        (found,) = torch.autograd.grad(self.single(x.requires_grad_(), weights), x)
        return numbers(found.flatten().tolist())

    def audit(self) -> Report | RuntimeError:
        try:
            return assert_matches_single_process(
                self.distributed,
                self.single,
                self.batch,
                ranks=[(1, 1), (1, 1, 1)],
                rank_reduction="sum",
                on=["simulated"],
            )
        except GradientMismatchError as error:
            return error.report
        except RuntimeError as error:
            return error


def numbers(values: Iterator[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


# ── what each rank has after a collective of all ranks' rows: one row, or a row for each rank ────────────


def total(x: Tensor) -> Tensor:
    return x.sum(0)


def mean(x: Tensor) -> Tensor:
    return x.mean(0)


def largest(x: Tensor) -> Tensor:
    return x.amax(0)


def smallest(x: Tensor) -> Tensor:
    return x.amin(0)


def product(x: Tensor) -> Tensor:
    return x.prod(0)


def first(x: Tensor) -> Tensor:
    return x[:1]


def weighted(x: Tensor) -> Tensor:
    """Weigh all ranks' numbers with 1, 2 and so on, and add them."""
    return (x.flatten() * torch.arange(1, x.numel() + 1)).sum()


def blocks(x: Tensor) -> Tensor:
    """Each rank's number of the mean over ranks."""
    return x.mean(0).unsqueeze(1)


# ── the collectives, by package ──────────────────────────────────────────────────────────────────────────

REDUCTIONS = {"SUM": total, "AVG": mean, "MAX": largest, "MIN": smallest, "PRODUCT": product}


def gather(name: str, all_gather: Callable[[Tensor], Any]) -> Collective:
    def on_rank(x: Tensor) -> Tensor:
        found = all_gather(x)
        return weighted(torch.stack([*found]) if isinstance(found, (tuple, list)) else found)

    return Collective(name, on_rank, weighted)


def torch_distributed_nn() -> Iterator[Collective]:
    for name, whole in REDUCTIONS.items():
        yield Collective(
            f"all_reduce {name}", partial(nn_functional.all_reduce, op=getattr(dist.ReduceOp, name)), whole
        )
    yield gather("all_gather", nn_functional.all_gather)
    yield Collective("broadcast", partial(nn_functional.broadcast, src=0), first)

    def reduce_scatter(x: Tensor) -> Tensor:
        return nn_functional.reduce_scatter(torch.empty_like(x[:1]), [*x.split(1)], op=dist.ReduceOp.AVG)

    yield Collective("reduce_scatter AVG", reduce_scatter, blocks, SQUARE)


def torch_distributed_functional_collectives() -> Iterator[Collective]:
    of = functional_collectives
    for name, whole in REDUCTIONS.items():
        op = name.lower()
        yield Collective(f"all_reduce {name}", lambda x, op=op: of.all_reduce(x, op, dist.group.WORLD), whole)
    yield gather("all_gather_tensor", lambda x: of.all_gather_tensor(x, 0, dist.group.WORLD))
    yield Collective("broadcast", lambda x: of.broadcast(x, 0, dist.group.WORLD), first)

    def reduce_scatter(x: Tensor) -> Tensor:
        return of.reduce_scatter_tensor(x, "avg", 0, dist.group.WORLD)

    yield Collective("reduce_scatter_tensor AVG", reduce_scatter, blocks, SQUARE)


def lightning() -> Iterator[Collective]:
    of = importlib.import_module("lightning.fabric.utilities.distributed")._all_gather_ddp_if_available
    yield gather("all_gather(sync_grads=True)", partial(of, sync_grads=True))
    yield gather("all_gather(sync_grads=False)", of)


def sentence_transformers() -> Iterator[Collective]:
    of = importlib.import_module("sentence_transformers.util.distributed").all_gather
    yield gather("all_gather(with_grad=True)", partial(of, with_grad=True))
    yield gather("all_gather(with_grad=False)", of)


PACKAGES = (torch_distributed_nn, torch_distributed_functional_collectives, lightning, sentence_transformers)


def line(collective: Collective, report: Report | RuntimeError) -> str:
    seen = "raises" if not isinstance(report, Report) else report.observed[0] if report.observed else "right"
    return f"  {collective.name:32} {collective.gradients():22} {collective.right():22} {seen}"


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"  {'collective':32} {'gradients':22} {'right':22} observed")
    audit_sharded_layers.audited(PACKAGES, line, " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
