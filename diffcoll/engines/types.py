"""What users may pass of torch.distributed's and mpi4py's types, for type checkers and for `core.arguments`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias


class Communicator(Protocol):
    """An `mpi4py.MPI.Comm`; mpi4py may not be installed."""

    def Get_rank(self) -> int:
        """Return the rank of this process."""

    def Get_size(self) -> int:
        """Return the number of processes."""


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed import ReduceOp as _ReduceOp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Replicate

    #: What torch.distributed calls reductions.
    ReduceOp: TypeAlias = _ReduceOp | _ReduceOp.RedOpType
    #: What `group` may be, see `diffcoll.core.groups`.
    Group: TypeAlias = ProcessGroup | DeviceMesh | Communicator | None
    #: How the gradient of a result that is the same on all ranks is laid out over the ranks, in DTensor's words.
    GradPlacement: TypeAlias = Literal["partial", "replicate"] | Partial | Replicate
else:  # torch.distributed may not be available, and takes time to import
    ReduceOp = Any
    Group = Any
    GradPlacement = Literal["partial", "replicate"]


def word_of(placement: object) -> str | None:
    """Return what a placement of torch.distributed.tensor is called here; None: it is none that a gradient may have."""
    tensor = sys.modules.get("torch.distributed.tensor")  # where it was not imported, nobody has a placement
    if tensor is not None and placement == tensor.Partial():
        return "partial"
    return "replicate" if tensor is not None and placement == tensor.Replicate() else None
