"""The groups of `FullyShardedDataParallel`."""

from __future__ import annotations

from typing import Any


def groups_of_fsdp(module: Any) -> list[Any]:
    """Return the groups over which it shards, and with a hybrid strategy replicates, its parameters."""
    return [group for group in (module.process_group, getattr(module, "_inter_node_pg", None)) if group is not None]
