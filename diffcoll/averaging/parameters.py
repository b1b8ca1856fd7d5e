"""Selects and checks the parameters of an averager, and detects changes of its module.

note  notes/averaging.md
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from diffcoll.averaging.ignoring import Ignored
from diffcoll.averaging.state import NAME
from diffcoll.core.errors import message
from diffcoll.core.torch_private.tensors import registries

SPARSE = "got sparse gradients, expected dense ones; use sparse=False in nn.Embedding, or leave it out by ignore=…"
Pairs: TypeAlias = list[tuple[str, Tensor]]
_EXPECTED = "a module, parameters, or pairs (name, parameter)"


def named_parameters(operation: str, given: Any, ignored: Callable[[Pairs], Ignored]) -> tuple[Pairs, Ignored]:
    """Return the names and parameters of the argument; raise unless all are leaves that nothing else reduces.

    Args:
        operation: for errors.
        given: a module, parameters, or pairs.
        ignored: makes of all pairs, shared parameters once for each of their names, the function that ignores some.
    """
    if isinstance(given, nn.Module):
        leaves_out = ignored([*given.named_parameters(remove_duplicate=False)])
        _refuse_modules(operation, given, leaves_out)
        named: Pairs = [pair for pair in given.named_parameters() if not leaves_out(*pair)]
    else:
        if isinstance(given, (Tensor, str)) or not isinstance(given, Iterable):
            raise TypeError(message(operation, "module_or_params", type(given).__name__, _EXPECTED))
        pairs = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(given)]
        for pair in pairs:
            if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], Tensor):
                raise TypeError(message(operation, "module_or_params", repr(pair)[:80], _EXPECTED))
        leaves_out = ignored(pairs)
        named = list({id(p): (name, p) for name, p in reversed(pairs) if not leaves_out(name, p)}.values())[::-1]
    for name, p in named:
        if is_lazy(p):
            got = f"{name}, which is not initialized yet"
            remedy = "initialize lazy modules by a forward pass first, on all ranks"
            raise ValueError(message(operation, "module_or_params", got, "initialized parameters", remedy))
        if not p.is_leaf:
            got = f"{name}, which is not a leaf"
            raise ValueError(message(operation, "module_or_params", got, "leaf tensors"))
        if _is_sharded(p):
            raise TypeError(
                f"{operation}: module_or_params: {name}: FSDP or tensor parallelism shards this parameter and reduces "
                f"its own gradients; remove {operation}, or give it the other parameters"
            )
    if not named:
        raise ValueError(message(operation, "module_or_params", "nothing", "at least one parameter"))
    if not differentiable(named):
        got = f"{named[0][0]}, which is of {named[0][1].dtype}"
        expected = "at least one parameter of floating-point or complex dtype"
        raise ValueError(message(operation, "module_or_params", got, expected))
    return named, leaves_out


def _refuse_modules(operation: str, given: nn.Module, ignored: Ignored) -> None:
    """Raise for sparse gradients, and for modules that reduce their own gradients."""
    for name, module in given.named_modules():
        where = f"{operation}: module_or_params: {name or type(module).__name__}"
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and getattr(module, "sparse", False) is True
        if is_embedding and not ignored(f"{name}.weight".lstrip("."), module.weight):
            raise TypeError(f"{where}: {SPARSE}")
        if isinstance(module, DistributedDataParallel):
            raise TypeError(
                f"{where}: is in DistributedDataParallel, which averages its gradients; remove one of the two: "
                f"give {operation} the module without DistributedDataParallel, or remove {operation}"
            )
        if isinstance(module, torch.jit.ScriptModule):
            why = "is scripted, and cannot be watched for new parameters"
            raise TypeError(f"{where}: {why}; give {operation} its named_parameters()")
        if isinstance(module, _fsdp_classes()):
            raise TypeError(f"{where}: FSDP shards this module and reduces its own gradients; remove {operation}")


def differentiable(named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the parameters that can have a gradient; integer parameters, e.g. 8-bit weights, cannot."""
    return [(name, p) for name, p in named if p.is_floating_point() or p.is_complex()]


def _fsdp_classes() -> tuple[type, ...]:
    """Return the classes of sharded modules, if they were imported; importing them here would be slow."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (fsdp.FullyShardedDataParallel, fsdp.FSDPModule) if fsdp else ()


def _is_sharded(p: Tensor) -> bool:
    """Whether p is a DTensor, or a flat parameter of FSDP or a part of one, which FSDP marks."""
    tensor = sys.modules.get("torch.distributed.tensor")
    flat = getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False)
    return bool(flat) or (tensor is not None and isinstance(p, tensor.DTensor))


def is_sharded(module: nn.Module | None, parameters: Iterable[Tensor]) -> str:
    """Return words for the (sub)module or parameter that FSDP has sharded since; "": none."""
    for name, m in module.named_modules() if module is not None else ():
        if isinstance(m, _fsdp_classes()):
            return name or type(m).__name__
    return "one of its parameters" if any(_is_sharded(p) for p in parameters) else ""


def find_ddp(parameters: Iterable[Tensor]) -> bool:
    """Whether a DistributedDataParallel averages one of these parameters.

    Its hooks are registered in C++ and PyTorch keeps no list of instances, so this searches all objects of the process.
    That takes tens of milliseconds; use it for error messages only.
    """
    ids = {id(p) for p in parameters}
    kinds = {DistributedDataParallel, *DistributedDataParallel.__subclasses__()}
    ddps = [x for x in gc.get_objects() if type(x) in kinds]
    return any(id(p) in ids for ddp in ddps for p in ddp.parameters())


class ForwardHook:
    """A forward pre-hook that calls a method of an averager's part, except in a compiled forward.

    The module holds it. It holds the averager weakly; copies of the module have no averager.
    """

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Call the method, except while Dynamo traces the forward."""
        if torch.compiler.is_compiling():
            return
        method = self._method()
        if method is not None:
            method()

    def __getattr__(self, name: str) -> Any:
        """Explain, to torch.jit.script, that it cannot compile this hook: it asks for the hook's name first."""
        if name == "__name__":
            raise AttributeError(
                f"{NAME}: torch.jit.script compiles forward hooks, and cannot compile this averager's; call detach() "
                f"first; to train the scripted module, make a {NAME} of its named_parameters()"
            )
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies and pickles of a module contain `{}.get` as the hook: a no-op, loaded without diffcoll."""
        return getattr, ({}, "get")


class Watch(ForwardHook):
    """Detects added, replaced or removed parameters of a module, held weakly, and its submodules.

    It holds `kept`: the averager, which the module keeps alive by this hook.
    """

    def __init__(self, module: nn.Module, method: Callable[[], None], kept: object) -> None:
        super().__init__(method)
        self.module, self.kept = weakref.ref(module), kept
        self.record()

    def record(self) -> None:
        """Record the module's current submodules and parameters.

        The objects, not their ids: a new object may have the id of one that was freed.
        """
        module = self.module()
        self._registries = [] if module is None else registries(module)
        self._recorded = self._registered()

    def has_changed(self) -> bool:
        """Whether any submodule or parameter was added, replaced or removed since they were recorded."""
        now = self._registered()
        return len(now) != len(self._recorded) or not all(map(is_, now, self._recorded))

    def _registered(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._registries))]
