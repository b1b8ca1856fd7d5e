"""Finds the lines of code at which a tensor leaves the autograd graph.

A collective of torch.distributed is no part of autograd: its outputs have no history. That is intended in the forward
or backward of an `autograd.Function`, and for tensors that require no gradient. Elsewhere the gradient of the call is
lost, or, for calls in place, it is that of the identity. `GraphCuts` sees every call, whichever function made it: at
PyTorch's dispatcher, and on simulated ranks at the methods of their process group, which the dispatcher does not see.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from diffcoll.core.errors import Origin
from diffcoll.core.torch_private.autograd import backward_at_work
from diffcoll.core.torch_private.tracing import TorchDispatchMode
from diffcoll.engines.rank_state import THREAD
from diffcoll.engines.simulated.group import SimulatedGroup

#: Dispatcher namespaces of torch.distributed's collectives.
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
#: Operators of these namespaces that move no data.
_LOCAL = ("wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd")
#: Names of operators where they differ from the functions that users call.
_CALLED = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "recv_any_source_": "recv",
}

#: Operators that are called as functions are, but for an underscore.
_SAME = ("broadcast", "reduce", "gather", "scatter", "reduce_scatter", "send", "recv")
#: Methods of a process group that are named otherwise than the operators.
_METHOD_OF = {"recv_any_source_": "recv_anysource"}
#: The code of the methods of simulated process groups, under the same names.
_METHODS = {
    method.__code__: called
    for name, called in [*((f"{name}_", name) for name in _SAME), *_CALLED.items()]
    if (method := vars(SimulatedGroup).get(_METHOD_OF.get(name, name.removesuffix("_")))) is not None
}
_FUNCTIONAL = "torch.distributed._functional_collectives"
#: Modules of this library that stand between the user's call of a collective and its record.
_BETWEEN = ("diffcoll.engines.simulated.group", __name__)
#: Modules that stand between the user's call of a function and its record; those of torch in some releases.
_WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame", "torch.overrides", __name__)


@dataclass(frozen=True)
class Cuts:
    """The graph cuts of all ranks, in words, each once."""

    #: Calls of collectives that lost a gradient.
    collectives: tuple[str, ...] = ()
    #: Calls of `detach()` and `.data`.
    detached: tuple[str, ...] = ()

    @classmethod
    def of_all(cls, each: Iterable[Cuts]) -> Cuts:
        """Return those of several ranks together."""
        columns = zip(*((cuts.collectives, cuts.detached) for cuts in each), strict=True)
        return cls(*(tuple(dict.fromkeys(itertools.chain(*column))) for column in columns))

    @property
    def lines(self) -> tuple[str, ...]:
        """All of them, for the report."""
        return self.collectives + self.detached


class GraphCuts:
    """Context manager: records the lines at which this thread takes tensors out of the autograd graph."""

    def __init__(self) -> None:
        #: Line and words of each collective that lost a gradient.
        self.collectives: dict[str, str] = {}
        #: Lines of `detach()` and `.data` on tensors that require a gradient.
        self.detached: dict[str, str] = {}
        self._modes = contextlib.ExitStack()

    @property
    def found(self) -> Cuts:
        """What was recorded."""
        return Cuts(tuple(self.collectives.values()), tuple(self.detached.values()))

    def __enter__(self) -> GraphCuts:
        """Begin to record."""
        self._modes.enter_context(Detaches(self.detached))
        if THREAD.rank is None:
            self._modes.enter_context(_Dispatched(self))
        self._modes.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(self._on_call)
        return self

    def __exit__(self, *error: object) -> None:
        """End."""
        self.end()

    def end(self) -> None:
        """Record no more, as where the forward has ended."""
        self._modes.close()

    def _on_call(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call of a method of a simulated process group."""
        if event == "call" and (name := _METHODS.get(frame.f_code)) is not None:
            self.collective(name, [value for key, value in frame.f_locals.items() if key != "self"])

    def collective(self, name: str, args: Sequence[Any]) -> None:
        """Record a collective of torch.distributed, called in the forward."""
        frames = list(_frames())
        callers = [module for module, _ in frames if not module.startswith(("torch.", *_BETWEEN))]
        if backward_at_work() != -1 or (callers and callers[0].startswith("diffcoll.")):
            return
        if _within_function() or not any(x.requires_grad for x in _tensors(args)):
            return
        # The functional collectives of newer releases run without grad mode in an autograd kernel of their own.
        if not torch.is_grad_enabled() and any(module == _FUNCTIONAL for module, _ in frames):
            return
        line = Origin("").line
        if torch.is_grad_enabled():
            what = "cuts the graph: it took or filled a tensor that requires a gradient, outside of autograd"
        else:
            what = "runs under no_grad, with a tensor that requires a gradient"
        self.collectives.setdefault(line, f"{name} at {line} {what}")


class _Dispatched(TorchDispatchMode):
    """Tells of each collective that PyTorch's dispatcher sees."""

    def __init__(self, cuts: GraphCuts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuts = cuts

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, _, name = op.name().partition("::")
        name = name.partition(".")[0]
        if namespace in _NAMESPACES and name not in _LOCAL:
            self._cuts.collective(_CALLED.get(name, name.rstrip("_")), args)
        return op(*args, **(kwargs or {}))


def _within_function() -> bool:
    """Whether this is the forward of an `autograd.Function`, which has its own backward."""
    forwards = {getattr(cls.forward, "__code__", None) for cls in _subclasses(Function)}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in forwards:
        frame = frame.f_back
    return frame is not None


def _subclasses(cls: Any) -> Iterator[Any]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _frames() -> Iterator[tuple[str, str]]:
    """Yield (module, function) of each caller, from the inside."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield str(frame.f_globals.get("__name__")), frame.f_code.co_name
        frame = frame.f_back


class Detaches(TorchFunctionMode):
    """Looks at the lines of the user's that call `detach()` or read `.data`, for tensors that require a gradient.

    Args:
        lines: what records them. None: they keep the graph, to find out whether they lose the gradient.
    """

    def __init__(self, lines: dict[str, str] | None = None) -> None:
        super().__init__()
        self._lines = lines

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _DETACHING and args[0].requires_grad and torch.is_grad_enabled() and _users_call():
            if self._lines is None:
                return args[0].clone()
            line = Origin("").line
            self._lines.setdefault(line, f"{_DETACHING[func]} at {line} takes a tensor out of the graph")
        return func(*args, **(kwargs or {}))


#: `Tensor.data` and functions, as a function mode sees them, by what users write.
_DETACHING = {Tensor.detach: "detach()", Tensor.detach_: "detach_()", Tensor.data.__get__: ".data"}  # type: ignore[attr-defined]


def _users_call() -> bool:
    """Whether the function was called from a line of the user's, and not inside this library or torch."""
    caller = next((module for module, _ in _frames() if module not in _WRAPPERS), "")
    return caller.partition(".")[0] not in ("torch", "diffcoll")


def _tensors(args: Any) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)
