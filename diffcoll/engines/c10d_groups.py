"""Makes and destroys process groups of torch.distributed."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_naming = threading.Lock()


def new_group(ranks: list[int], name: str | None = None, **more: Any) -> Any:
    """Make a group whose ranks are in the given order.

    Args:
        ranks: global ranks.
        name: None: torch's own, which is equal on all ranks only if all have made the same groups so far.
        more: arguments of `torch.distributed.new_group`.

    Returns:
        The group; on ranks that are not in it, what no function accepts as a group.
    """
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:  # since torch 2.12
        more["sort_ranks"] = False
    elif ranks != sorted(ranks):
        remedy = "pass ranks in ascending order, or use torch 2.12 or later"
        raise ValueError(f"new_group: got ranks {ranks}, which torch {torch.__version__} would sort; {remedy}")
    with contextlib.nullcontext() if name is None else _named(name):
        group = dist.new_group(ranks, **more)
    return dist.GroupMember.NON_GROUP_MEMBER if group is None else group


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Let the group that this thread makes have this name, which no public argument says."""
    me = threading.get_ident()
    with _naming:
        before = distributed_c10d._process_group_name

        def process_group_name(*args: Any, **more: Any) -> str:
            return name if threading.get_ident() == me else before(*args, **more)

        distributed_c10d._process_group_name = process_group_name  # type: ignore[assignment]
        try:
            yield
        finally:
            distributed_c10d._process_group_name = before
