"""Differentiable collectives for PyTorch.

One law: N ranks, rank r computes a loss ℓ_r and calls `backward()` once; the objective is ℓ_0 + … + ℓ_{N−1}. Every
backward here returns the gradient of this sum of all ranks' losses with respect to this rank's tensors.

    import diffcoll as dc
    y = dc.all_gather(x)          # on every rank; y.sum().backward() is right on every rank
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from diffcoll.collectives.all_gather import all_gather
from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.collectives.all_to_all import all_to_all
from diffcoll.collectives.broadcast import broadcast
from diffcoll.collectives.gather import gather
from diffcoll.collectives.permute import permute
from diffcoll.collectives.reduce import reduce
from diffcoll.collectives.reduce_scatter import reduce_scatter
from diffcoll.collectives.scan import scan
from diffcoll.collectives.scatter import scatter
from diffcoll.collectives.shift import shift
from diffcoll.collectives.split import split
from diffcoll.collectives.sum_gradients import sum_gradients
from diffcoll.core.check_mode import check_mode
from diffcoll.core.errors import CollectiveFailedError, CollectiveMismatchError
from diffcoll.core.groups import get_rank, get_world_size, set_default_group
from diffcoll.core.joint import joint_backward
from diffcoll.core.pending import Pending

if TYPE_CHECKING:
    from diffcoll import nn as nn
    from diffcoll import truth as truth
    from diffcoll.averaging.averager import GradientAverager
    from diffcoll.averaging.global_mean import global_mean
    from diffcoll.averaging.in_step import in_step
    from diffcoll.composed.gather_batch import GatheredBatch, gather_batch
    from diffcoll.composed.halo_exchange import halo_exchange
    from diffcoll.composed.ring import ring

__all__ = [
    "CollectiveFailedError",
    "CollectiveMismatchError",
    "GatheredBatch",
    "GradientAverager",
    "Pending",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "check_mode",
    "gather",
    "gather_batch",
    "get_rank",
    "get_world_size",
    "global_mean",
    "halo_exchange",
    "in_step",
    "joint_backward",
    "nn",
    "permute",
    "reduce",
    "reduce_scatter",
    "ring",
    "scan",
    "scatter",
    "set_default_group",
    "shift",
    "split",
    "sum_gradients",
    "truth",
]

__version__ = "1.0.0"


#: Names that are imported when they are first used, so that `import diffcoll` stays fast, and their modules.
_DEFERRED = {
    "GatheredBatch": "diffcoll.composed.gather_batch",
    "GradientAverager": "diffcoll.averaging.averager",
    "gather_batch": "diffcoll.composed.gather_batch",
    "global_mean": "diffcoll.averaging.global_mean",
    "halo_exchange": "diffcoll.composed.halo_exchange",
    "in_step": "diffcoll.averaging.in_step",
    "nn": "diffcoll.nn",
    "ring": "diffcoll.composed.ring",
    "truth": "diffcoll.truth",
}


def __getattr__(name: str) -> Any:
    """Import a deferred name. Python calls this for names that the module does not have, so once per name."""
    if name not in _DEFERRED:
        raise AttributeError(f"module 'diffcoll' has no attribute {name!r}")
    module = import_module(_DEFERRED[name])
    value = module if _DEFERRED[name] == f"diffcoll.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, those not imported yet too."""
    return sorted(__all__)
