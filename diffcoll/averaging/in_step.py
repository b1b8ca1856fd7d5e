"""A loop in which all ranks take equally many steps, whatever their numbers of batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from diffcoll.core.control import Control
from diffcoll.core.groups import resolve
from diffcoll.core.trees import is_tree, tree_map
from diffcoll.engines.engine import Engine
from diffcoll.engines.types import Group

Batch = TypeVar("Batch")


def in_step(batches: Iterable[Batch], empty: Batch | None = None, group: Group = None) -> Iterator[Batch]:
    """Training loop with unequal numbers of batches: a rank that has run out gets empty ones until all have run out.

    All ranks loop over it, and leave the loop alike. An empty batch takes part in every collective of the model and of
    the loss (SyncBatchNorm, losses of `diffcoll.nn`) and adds nothing. With a loss of this rank's rows, pass its sum to
    `backward`, and the number of rows as `count`. Cost: one small message per step.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def train(batches):
    ...     model = torch.nn.Linear(1, 1, bias=False)
    ...     averager, gradients = dc.GradientAverager(model), []
    ...     for x in dc.in_step(batches):
    ...         model.zero_grad()
    ...         averager.backward(model(x).sum(), count=len(x))
    ...         gradients.append(round(model.weight.grad.item(), 2))
    ...     return gradients
    >>> one, two, three = (torch.full((n, 1), float(n)) for n in (1, 2, 3))
    >>> simulate(train, [[one, three], [two]])
    [[1.67, 3.0], [1.67, 3.0]]

    Args:
        batches: this rank's batches; there may be none.
        empty: the empty batch. None: `x[:0]` of every tensor in this rank's last batch, nested in dicts, lists, tuples
            and dataclasses; 0-d tensors and other objects stay as they are.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Raises:
        ValueError: a rank has neither a batch nor `empty`, and another has a batch; raised on all ranks.
        RuntimeError: the iterator of another rank has raised; that rank raises its own error.

    Source: notes/training/averaging.md.
    """
    return _steps(iter(batches), empty, resolve(group, "in_step"))


def _steps(batches: Iterator[Batch], empty: Batch | None, engine: Engine) -> Iterator[Batch]:
    last: Any = empty
    while True:
        error, has_batch = None, False
        try:
            batch, has_batch = next(batches), True
        except StopIteration:
            pass
        except BaseException as raised:  # the other ranks wait for this one
            error = raised
        flags = Control(engine, "in_step").numbers([has_batch, not has_batch and last is None, error is not None])
        have, lack, raise_ = ([r for r, flag in enumerate(column) if flag] for column in zip(*flags, strict=True))
        if error is not None:
            raise error
        if raise_:
            raise RuntimeError(f"in_step: batches: the iterator has raised on rank {', '.join(map(str, raise_))}")
        if not have:
            return
        if lack:
            raise ValueError(
                f"in_step: empty: got None on rank {', '.join(map(str, lack))}, which has no batch at all, while "
                "others have one; pass empty=…, a batch of no rows in the form of the others', on that rank or on all"
            )
        if not has_batch:
            batch = last if empty is not None else emptied(last)
        elif empty is None:
            last = batch
        yield batch


def emptied(batch: Any) -> Any:
    """Return a batch without rows: `x[:0]` of every tensor that has rows; containers are copied."""
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    if is_tree(batch):
        return tree_map(emptied, batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        new: Any = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(new, field.name, emptied(getattr(batch, field.name)))
        return new
    return batch
