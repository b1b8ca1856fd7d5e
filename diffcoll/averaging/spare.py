"""A batch for ranks that have none in `join`: a copy of another rank's, sent without pickling.

The structure is sent as text in JSON, the tensors as bytes.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import MutableMapping, MutableSequence
from typing import Any

import torch
from torch import Tensor

from diffcoll.averaging.communicating import communicating
from diffcoll.averaging.state import NAME
from diffcoll.core.errors import message
from diffcoll.engines.engine import Engine

_REMEDY = "died, hangs, or has not entered join"
_SCALARS = (bool, int, float, str, type(None))


def copy_where_needed(batch: Any, needs_copy: bool, have: list[int], engine: Engine) -> Any:
    """Return this rank's batch, or a copy of that of the lowest rank that has one; all ranks call it.

    Args:
        batch: of this rank.
        needs_copy: whether this rank has none.
        have: 1 for each rank that has one, 0 for others.
        engine: of the ranks.

    Raises:
        ValueError: on all ranks, if a copy is needed of a batch that contains anything but tensors and scalars in
            tuples, lists and dicts.
    """
    without = have.count(0)
    if not without or not _sum(needs_copy, engine):
        return batch
    copy = _copied(batch, have.index(1), engine, without)
    return copy if needs_copy else batch


def copied_containers(batch: Any) -> Any:
    """Return the batch with copies of the containers in it, also nested ones, and the same tensors."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, tuple):
        items = [copied_containers(item) for item in batch]
        if all(new is old for new, old in zip(items, batch, strict=True)):
            return batch
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    new: Any = batch
    if isinstance(batch, (MutableMapping, MutableSequence)):
        new = copy.copy(batch)
        for key in list(batch) if isinstance(batch, MutableMapping) else range(len(batch)):
            item = copied_containers(batch[key])
            if item is not batch[key]:
                new[key] = item
    elif isinstance(batch, set):
        new = batch.copy()
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        new = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(new, field.name, copied_containers(getattr(batch, field.name)))
    return new


def _copied(batch: Any, source: int, engine: Engine, without: int) -> Any:
    tensors: list[Tensor] = []
    text = b""
    if engine.rank == source:
        try:
            text = b"+" + json.dumps(_described(batch, tensors)).encode()
        except _Unknown as unknown:
            tensors, text = [], f"-{unknown}".encode()
    length = _sent(torch.tensor([len(text)]), source, engine)
    text = bytes(_sent(torch.tensor(list(text) or [0] * int(length), dtype=torch.uint8), source, engine).tolist())
    if text[:1] == b"-":
        got = f"{without} of {engine.size} ranks with none, and rank {source}'s first, of which they would get a copy, "
        got += f"contains {text[1:].decode()}"
        expected = "tensors, numbers, strings and None in tuples, lists and dicts"
        remedy = "pass spare=, what a rank without a batch repeats"
        raise ValueError(message(f"{NAME}.join", "batches", got, expected, remedy))
    return _made(json.loads(text[1:]), iter(tensors), source, engine)


class _Unknown(Exception):
    """An object that has no description."""


def _described(x: Any, tensors: list[Tensor]) -> list[Any]:
    """Return JSON for x; append its tensors."""
    if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_quantized:
        tensors.append(x.detach())
        return ["tensor", list(x.shape), str(x.dtype).removeprefix("torch."), x.device.type, x.requires_grad]
    if type(x) in _SCALARS:
        return ["scalar", x]
    if type(x) in (list, tuple):
        return [type(x).__name__, [_described(item, tensors) for item in x]]
    if type(x) is dict:
        return ["dict", [[_described(k, tensors), _described(v, tensors)] for k, v in x.items()]]
    raise _Unknown(f"a {type(x).__module__}.{type(x).__qualname__}")


def _made(description: list[Any], tensors: Any, source: int, engine: Engine) -> Any:
    kind, *facts = description
    if kind == "scalar":
        return facts[0]
    if kind == "tensor":
        shape, dtype, device, requires_grad = facts
        like = torch.zeros(shape, dtype=getattr(torch, dtype))
        mine = next(tensors) if engine.rank == source else like
        sent = _sent(mine.to("cpu").contiguous().resolve_conj().resolve_neg(), source, engine)
        return sent.to(device).requires_grad_(requires_grad)
    if kind == "dict":
        return {_made(k, tensors, source, engine): _made(v, tensors, source, engine) for k, v in facts[0]}
    items = [_made(item, tensors, source, engine) for item in facts[0]]
    return tuple(items) if kind == "tuple" else items


def _sum(flag: bool, engine: Engine) -> int:
    total = torch.tensor([int(flag)], device=engine.control_device)
    engine.operation, engine.later = f"{NAME}.join", False
    with communicating(engine, "join", total.nbytes, "a flag", _REMEDY):
        engine.all_reduce(total, total)()
    return int(total)


def _sent(x: Tensor, source: int, engine: Engine) -> Tensor:
    """Return rank source's x; the same shape and dtype on all ranks."""
    x = x.to(engine.control_device, copy=True)
    engine.operation, engine.later = f"{NAME}.join", False
    with communicating(engine, "join", x.nbytes, "a copy of a batch", _REMEDY):
        engine.broadcast(x, source)()
    return x.cpu()
