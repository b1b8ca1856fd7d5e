"""Which parameters an averager reduces, and what is refused since something else reduces it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from diffcoll.averaging.messages import NAME
from diffcoll.core.errors import message

Named: TypeAlias = list[tuple[str, Tensor]]

_DDP = "DDP averages these gradients itself: pass the module that it wraps, and train that one"
_SHARDED = (
    "FSDP or tensor parallelism shards this parameter. FSDP reduces its gradient itself; with tensor parallelism "
    "alone, average p.grad.to_local() over the axis of the data by diffcoll.all_reduce; pass the other parameters"
)


def named_parameters(given: Any) -> Named:
    """Return the names and parameters of the argument `module_or_params`, a shared one once.

    Raises:
        TypeError, ValueError: something in it is no initialized leaf, sharded, or reduced by DDP.
    """
    if isinstance(given, nn.Module):
        if any(isinstance(module, DistributedDataParallel) for module in given.modules()):
            raise _wrong(TypeError, "DistributedDataParallel", _DDP)
        given = given.named_parameters()
    elif isinstance(given, Tensor) or not isinstance(given, Iterable):
        raise _wrong(TypeError, type(given).__name__)
    named: dict[int, tuple[str, Tensor]] = {}
    for i, each in enumerate(given):
        name, p = each if isinstance(each, tuple) and len(each) == 2 else (str(i), each)
        if not isinstance(name, str) or not isinstance(p, Tensor):
            raise _wrong(TypeError, repr(each)[:80])
        if is_lazy(p) or not p.is_leaf:
            raise _wrong(ValueError, f"{name}, which is not initialized or not a leaf")
        if _is_sharded(p):
            raise _wrong(TypeError, name, _SHARDED)
        named.setdefault(id(p), (name, p))
    if not differentiable([*named.values()]):
        raise _wrong(ValueError, "no parameter of a floating-point or complex dtype")
    return [*named.values()]


def differentiable(named: Named) -> Named:
    """Return the parameters that can have a gradient; integer parameters, e.g. 8-bit weights, cannot."""
    return [(name, p) for name, p in named if p.is_floating_point() or p.is_complex()]


def _wrong(kind: type[Exception], got: str, remedy: str = "") -> Exception:
    expected = "a module, parameters, or pairs (name, parameter), as an optimizer takes them"
    return kind(message(NAME, "module_or_params", got, expected, remedy))


def _is_sharded(p: Tensor) -> bool:
    sharding = sys.modules.get("torch.distributed.tensor")  # to import it takes time
    is_flat = getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False)
    return is_flat or (sharding is not None and isinstance(p, sharding.DTensor))
