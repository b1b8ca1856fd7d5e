"""Which parameters an averager owns: those of its argument that are not ignored and that nothing else reduces.

The module holds its averager, in a forward hook, and the two are freed together; the list of claims holds it weakly. An
averager of bare parameters keeps itself and them alive until `detach()`. Hooks of parameters hold it weakly:
a strong reference would be a cycle through the autograd engine, which Python's garbage collector cannot see.

note  notes/training/gradient-averager.md
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from diffcoll.averaging.policy import NAME
from diffcoll.core.errors import message
from diffcoll.engines import guards

#: The argument of the user.
Ignore: TypeAlias = Iterable[str] | Callable[[str, Tensor], bool] | None
#: Whether the parameter or buffer of this name is left out.
Ignored: TypeAlias = Callable[[str, Tensor], bool]
Named: TypeAlias = list[tuple[str, Tensor]]

SPARSE = "got sparse gradients, expected dense ones; use sparse=False in nn.Embedding, or leave it out by ignore=…"
_EXPECTED = "a module, parameters, or pairs (name, parameter)"
_EXPECTED_IGNORE = "names of parameters or buffers, or a function (name, tensor) -> bool"


# ── the parameters of the argument ───────────────────────────────────────────────────────────────────────


def named_parameters(given: Any, ignore: Ignore) -> tuple[Named, Ignored]:
    """Return the names and parameters of the argument, and the function that says what is left out.

    Raises unless all are leaves that nothing else reduces.
    """
    module = given if isinstance(given, nn.Module) else None
    pairs: Named
    if module is not None:
        # An override, as in losses of TorchRL, need not have the option: each parameter has one name then.
        takes = inspect.signature(module.named_parameters).parameters.values()
        every = any(each.name == "remove_duplicate" or each.kind is each.VAR_KEYWORD for each in takes)
        pairs = [*(module.named_parameters(remove_duplicate=False) if every else module.named_parameters())]
    else:
        if isinstance(given, (Tensor, str)) or not isinstance(given, Iterable):
            raise TypeError(message(NAME, "module_or_params", type(given).__name__, _EXPECTED))
        pairs = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(given)]
        for pair in pairs:
            if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], Tensor):
                raise TypeError(message(NAME, "module_or_params", repr(pair)[:80], _EXPECTED))
    ignored = _checked_ignore(ignore, module, pairs)
    if module is not None:
        _refuse_modules(module, ignored)
    first: dict[int, tuple[str, Tensor]] = {}
    for name, p in pairs:
        if not ignored(name, p):
            first.setdefault(id(p), (name, p))
    named = [*first.values()]
    for name, p in named:
        if is_lazy(p):
            remedy = "initialize lazy modules by a forward pass first, on all ranks"
            raise _refused(f"{name}, which is not initialized yet", "initialized parameters", remedy)
        if not p.is_leaf:
            raise _refused(f"{name}, which is not a leaf", "leaf tensors")
        if is_sharded(p):
            raise TypeError(
                f"{NAME}: module_or_params: {name}: FSDP or tensor parallelism shards this parameter. FSDP reduces "
                "its gradient itself; with tensor parallelism alone, average p.grad.to_local() over the data axis by "
                f"diffcoll.average_gradients; give {NAME} the other parameters"
            )
    if not named:
        raise _refused("nothing", "at least one parameter")
    if not differentiable(named):
        got, kinds = f"{named[0][0]}, which is of {named[0][1].dtype}", "floating-point or complex dtype"
        raise _refused(got, f"at least one parameter of {kinds}")
    return named, ignored


def _refused(got: str, expected: str, remedy: str = "") -> ValueError:
    return ValueError(message(NAME, "module_or_params", got, expected, remedy))


def differentiable(named: Named) -> Named:
    """Return the parameters that can have a gradient; integer parameters, e.g. 8-bit weights, cannot."""
    return [(name, p) for name, p in named if p.is_floating_point() or p.is_complex()]


def _refuse_modules(given: nn.Module, ignored: Ignored) -> None:
    """Raise for sparse gradients, and for modules that reduce their own gradients."""
    for name, module in given.named_modules():
        where = f"{NAME}: module_or_params: {name or type(module).__name__}"
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and getattr(module, "sparse", False) is True
        if is_embedding and not ignored(f"{name}.weight".lstrip("."), module.weight):
            raise TypeError(f"{where}: {SPARSE}")
        if isinstance(module, DistributedDataParallel):
            raise TypeError(
                f"{where}: is in DistributedDataParallel, which averages its gradients; remove one of the two: "
                f"give {NAME} the module without DistributedDataParallel, or remove {NAME}"
            )
        if isinstance(module, torch.jit.ScriptModule):
            why = "is scripted, and cannot be watched for new parameters"
            raise TypeError(f"{where}: {why}; give {NAME} its named_parameters()")


def _checked_ignore(ignore: Any, module: nn.Module | None, named: Named) -> Ignored:
    """Return the function that says what is left out; raise if a name is unknown or the answer depends on the name.

    `named` has all parameters, a shared one once for each of its names; buffers of the module may be left out too.
    """
    if ignore is None:
        return lambda name, tensor: False
    if callable(ignore):
        ignored: Ignored = lambda name, tensor: bool(ignore(name, tensor))  # noqa: E731
    else:
        buffers = [] if module is None else [name for name, _ in module.named_buffers()]
        names = _checked_names(ignore, [*(name for name, _ in named), *buffers])
        ignored = lambda name, tensor: name in names  # noqa: E731
    aliases: dict[int, list[str]] = {}
    for name, p in named:
        aliases.setdefault(id(p), []).append(name)
    by_name = dict(named)
    for shared in aliases.values():
        left = [name for name in shared if ignored(name, by_name[name])]
        if left and len(left) < len(shared):
            others = ", ".join(name for name in shared if name not in left)
            got = f"{', '.join(left)}, which is the same parameter as {others}"
            raise ValueError(message(NAME, "ignore", got, "all names of a shared parameter, or none"))
    return ignored


def _checked_names(ignore: Any, known: Sequence[str]) -> frozenset[str]:
    if isinstance(ignore, (str, Tensor)) or not isinstance(ignore, Iterable):
        raise TypeError(message(NAME, "ignore", repr(ignore)[:80], _EXPECTED_IGNORE))
    names = list(ignore)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(message(NAME, "ignore", repr(name)[:80], _EXPECTED_IGNORE))
        if name not in known:
            near = [k for k in known if k.startswith(f"{name}.")] or get_close_matches(name, known, 3) or known
            raise ValueError(message(NAME, "ignore", repr(name), f"a name such as {', '.join(near[:3])}"))
    return frozenset(names)


# ── other owners ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Claim:
    """The parameters of one averager, its reducer, and the function that detaches it."""

    named: Named
    reducer: Any
    #: A weak reference; the module is None if parameters were given.
    module: Callable[[], nn.Module | None]
    #: The simulated rank that made the averager; None: not simulated.
    rank: Any
    detach: Callable[[], None]

    def is_same(self, module: nn.Module | None, named: Named) -> bool:
        """Whether the averager is on this module or on exactly these parameters, so that a new one replaces it."""
        of_module = module is not None and self.module() is module
        return of_module or {id(p) for _, p in named} == {id(p) for _, p in self.named}


#: In order of construction; those of bare parameters are kept alive.
_claims: weakref.WeakKeyDictionary[Claim, Claim | None] = weakref.WeakKeyDictionary()


def enter(claim: Claim) -> None:
    """Add a claim until it leaves or is freed."""
    _claims[claim] = claim if claim.module() is None else None


def leave(claim: Claim) -> None:
    """Remove a claim."""
    _claims.pop(claim, None)


def claims() -> list[Claim]:
    """Return all claims in order of construction."""
    return [claim for ref in _claims.keyrefs() if (claim := ref()) is not None]


def averaged() -> set[int]:
    """Return the ids of all parameters that are averaged."""
    return {id(t) for claim in claims() for _, t in claim.named}


def claims_on(named: Named) -> list[Claim]:
    """Return the claims on any of these parameters."""
    ids = {id(p) for _, p in named}
    return [claim for claim in claims() if any(id(p) in ids for _, p in claim.named)]


def refuse_shared(named: Named) -> None:
    """Raise if another simulated rank, a thread of this process, averages the same parameters."""
    me: Any = guards.THREAD.rank
    ranks = [claim.rank for claim in claims_on(named) if me is not None and claim.rank is not None]
    if any(rank is not me and rank.world is me.world for rank in ranks):
        remedy = "make the module in the function that each rank runs"
        raise _refused("parameters that another simulated rank holds as well", "parameters of this rank's own", remedy)


def status(p: Tensor, of_others: list[Claim], module: nn.Module | None, named: Named) -> str:
    """Return words for the averager that p already has; all ranks must agree on them."""
    claim = next((claim for claim in of_others if any(p is q for _, q in claim.named)), None)
    return "" if claim is None else ", taken over" if claim.is_same(module, named) else ", averaged by another"


def detach_replaced(of_others: list[Claim], module: nn.Module | None, named: Named) -> None:
    """Detach the averagers that a new one replaces; raise if one of them has some of the parameters and others too."""
    ids = {id(p) for _, p in named}
    for claim in of_others:
        if not claim.is_same(module, named):
            first = next(name for name, p in claim.named if id(p) in ids)
            got = f"{first}, which another {NAME} averages, together with others than these"
            remedy = "call detach() on that one first, or make one for all of them"
            raise _refused(got, "parameters of which no other has some", remedy)
    for claim in of_others:
        claim.detach()


def is_sharded(p: Tensor) -> bool:
    """Whether p is a DTensor, or a flat parameter of FSDP or a part of one, which FSDP marks."""
    tensor = sys.modules.get("torch.distributed.tensor")  # to import it would be slow
    flat = getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False)
    return bool(flat) or (tensor is not None and isinstance(p, tensor.DTensor))


def find_ddp(parameters: Iterable[Tensor]) -> bool:
    """Whether a DistributedDataParallel averages one of these parameters.

    Its hooks are registered in C++ and PyTorch keeps no list of instances, so this searches all objects of the process.
    That takes tens of milliseconds; use it for error messages only.
    """
    ids = {id(p) for p in parameters}
    kinds = {DistributedDataParallel, *DistributedDataParallel.__subclasses__()}
    ddps = [x for x in gc.get_objects() if type(x) in kinds]
    return any(id(p) in ids for ddp in ddps for p in ddp.parameters())
