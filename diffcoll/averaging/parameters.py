"""Which parameters an averager reduces, and what is refused: what something else reduces, or cannot be reduced."""

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

SPARSE = "has sparse gradients, which are not reduced; use sparse=False in nn.Embedding, or leave the parameter out"
_EXPECTED = "a module, parameters, or pairs (name, parameter)"
_DDP = "DistributedDataParallel averages these gradients itself; pass the module that it wraps, and train that one"
_SHARDED = (
    "FSDP or tensor parallelism shards this parameter. FSDP reduces its gradient itself; with tensor parallelism "
    "alone, average p.grad.to_local() over the axis of the data by diffcoll.all_reduce; pass the other parameters"
)


def named_parameters(given: Any) -> Named:
    """Return the names and parameters of the argument `module_or_params`, a shared one once.

    Raises:
        TypeError, ValueError: something in it is no leaf, not initialized, sharded, reduced by DDP, or sparse.
    """
    if isinstance(given, nn.Module):
        _refuse_modules(given)
        pairs = [*given.named_parameters()]
    elif isinstance(given, (Tensor, str)) or not isinstance(given, Iterable):
        raise TypeError(message(NAME, "module_or_params", type(given).__name__, _EXPECTED))
    else:
        pairs = [pair if isinstance(pair, tuple) else (str(i), pair) for i, pair in enumerate(given)]
    named: dict[int, tuple[str, Tensor]] = {}
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], Tensor):
            raise TypeError(message(NAME, "module_or_params", repr(pair)[:80], _EXPECTED))
        named.setdefault(id(pair[1]), pair)
    for name, p in named.values():
        _refuse_parameter(name, p)
    if not differentiable([*named.values()]):
        got = "nothing" if not named else "integers only"
        raise ValueError(message(NAME, "module_or_params", got, "a parameter of a floating-point or complex dtype"))
    return [*named.values()]


def differentiable(named: Named) -> Named:
    """Return the parameters that can have a gradient; integer parameters, e.g. 8-bit weights, cannot."""
    return [(name, p) for name, p in named if p.is_floating_point() or p.is_complex()]


def _refuse_modules(given: nn.Module) -> None:
    for name, module in given.named_modules():
        where = f"{NAME}: module_or_params: {name or type(module).__name__}"
        if isinstance(module, DistributedDataParallel):
            raise TypeError(f"{where}: {_DDP}")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise TypeError(f"{where}: {SPARSE}")


def _refuse_parameter(name: str, p: Tensor) -> None:
    where = f"{NAME}: module_or_params: {name}"
    if is_lazy(p):
        raise ValueError(f"{where}: is not initialized; run a forward first, on all ranks")
    if not p.is_leaf:
        raise ValueError(f"{where}: is not a leaf; pass the tensors that an optimizer takes")
    sharding = sys.modules.get("torch.distributed.tensor")  # to import it takes time
    is_flat = getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False)
    if is_flat or (sharding is not None and isinstance(p, sharding.DTensor)):
        raise TypeError(f"{where}: {_SHARDED}")
