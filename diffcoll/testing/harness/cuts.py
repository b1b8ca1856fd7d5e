"""Finds the lines of code at which a tensor leaves the autograd graph.

A collective of torch.distributed is no part of autograd: its outputs have no history. That is intended in the forward
or backward of an `autograd.Function`, and for tensors that require no gradient. Elsewhere the gradient of the call is
lost, or, for calls in place, it is that of the identity.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

import diffcoll as dc
from diffcoll.averaging.messages import broadcast_from_first
from diffcoll.collectives import COLLECTIVES
from diffcoll.core.errors import Origin
from diffcoll.core.trees import tree_flatten

#: Lines of code in words, and whether each is a call of `detach()` or `.data`, and not of a collective.
Cuts: TypeAlias = dict[str, bool]

#: The code of the collectives of torch.distributed.
_COLLECTIVES = {
    inspect.unwrap(getattr(dist, name)).__code__: name
    for name in (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast"),
        *("reduce", "reduce_scatter", "reduce_scatter_tensor", "gather", "scatter", "send", "recv", "isend", "irecv"),
    )
}
#: The code of this library's, which are differentiable unless they run under no_grad.
_OURS = {inspect.unwrap(getattr(dc, name)).__code__: name for name in COLLECTIVES}
#: `Tensor.data` and functions, as a function mode sees them, by what users write.
_DETACHING = {Tensor.detach: "detach()", Tensor.detach_: "detach_()", Tensor.data.__get__: ".data"}  # type: ignore[attr-defined]
#: Modules that stand between the user's call of a function and its record; those of torch in some releases.
_WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame", "torch.overrides", __name__)


@contextlib.contextmanager
def recorded() -> Iterator[Cuts]:
    """Record the lines at which this thread takes tensors out of the autograd graph."""
    cuts: Cuts = {}
    detaches = Detaches(cuts)

    def on_call(frame: FrameType, event: str, _: object) -> None:
        codes = _COLLECTIVES if torch.is_grad_enabled() else _COLLECTIVES | _OURS
        name = codes.get(frame.f_code) if event == "call" else None
        given = tree_flatten(list(frame.f_locals.values()))[0] if name else []
        if any(map(detaches.has_gradient, given)) and not _is_intended(frame):
            what = "runs under no_grad, with a tensor that requires a gradient, or would"
            if torch.is_grad_enabled():
                what = "cuts the graph: it took or filled a tensor that requires a gradient, outside of autograd"
            cuts[f"{name} at {Origin('', frame=frame).line} {what}"] = False

    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        with detaches:
            yield cuts
    finally:
        sys.setprofile(before)


def of_all_ranks(each: Iterable[Cuts]) -> Cuts:
    """Return those of several ranks together, the collectives first."""
    found = {line: detached for cuts in each for line, detached in cuts.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _is_intended(frame: FrameType) -> bool:
    """Whether the forward of an `autograd.Function`, which has its own backward, makes the call, or an averager."""
    intended = {getattr(cls.forward, "__code__", None) for cls in _subclasses(Function)}
    intended.add(broadcast_from_first.__code__)
    return any(caller.f_code in intended for caller in _callers(frame))


def _subclasses(cls: Any) -> Iterator[Any]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those of its callers, from the inside."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class Detaches(TorchFunctionMode):
    """Looks at the lines of the user's that call `detach()` or read `.data`, for tensors that require a gradient.

    And at what is computed from these under no_grad.

    Args:
        cuts: what records them. None: they keep the graph, to find out whether they lose the gradient.
        kept: the lines whose calls keep it; None: all.
    """

    def __init__(self, cuts: Cuts | None = None, kept: Collection[str] | None = None) -> None:
        super().__init__()
        self._cuts, self._kept = cuts, kept
        self._computed: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def has_gradient(self, x: object) -> bool:
        """Whether x requires a gradient, or would but for no_grad."""
        return isinstance(x, Tensor) and (x.requires_grad or self._computed.get(id(x)) is x)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _DETACHING and args[0].requires_grad and torch.is_grad_enabled():
            modules = (str(frame.f_globals.get("__name__")) for frame in _callers(sys._getframe(1)))
            caller = next(module for module in modules if module not in _WRAPPERS)
            if caller.partition(".")[0] not in ("torch", "diffcoll"):
                line = f"{_DETACHING[func]} at {Origin('').line} takes a tensor out of the graph"
                if self._cuts is not None:
                    self._cuts[line] = True
                elif self._kept is None or line in self._kept:
                    return args[0].clone()
        y = func(*args, **(kwargs or {}))
        if self._cuts is not None and not torch.is_grad_enabled() and isinstance(y, Tensor):
            if any(map(self.has_gradient, tree_flatten(list(args))[0])):
                self._computed[id(y)] = y
        return y
