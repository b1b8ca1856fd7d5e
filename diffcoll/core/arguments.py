"""One call of a collective: its arguments, read one by one, and its result.

group                 async_op
simulated, no rules   both        `diffcoll.truth`, in one autograd graph of all ranks
within torch.compile  False       one op in the graph
within torch.compile  True        two ops, start and wait
any other             False       `rules.apply`
any other             True        `rules.start`, and a `Pending`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from diffcoll.core import expect
from diffcoll.core.check_mode import common
from diffcoll.core.errors import Origin, message
from diffcoll.core.exchange import exchanged, exchanged_alike
from diffcoll.core.groups import resolve
from diffcoll.core.maps import Linear
from diffcoll.core.pending import Pending
from diffcoll.core.reductions import REDUCTIONS, Reduction, spelled
from diffcoll.core.rules import apply, start
from diffcoll.core.torch_private.transforms import batch_sizes
from diffcoll.core.trees import is_tree
from diffcoll.engines.engine import Engine
from diffcoll.engines.types import Group, word_of

#: A tensor, or nested tuples, lists and dicts of tensors.
Tensors: TypeAlias = Tensor | Sequence["Tensors"] | Mapping[Any, "Tensors"]
Tree = TypeVar("Tree", bound=Tensors)
#: Sizes of the blocks that x is cut into, and of the blocks that the ranks contribute.
Parts = Sequence[int] | None
Sizes = Sequence[int] | Literal["auto"] | None

#: Collectives whose x may be a tree.
TAKE_TREES = ("all_reduce", "all_gather", "broadcast", "sum_gradients", "scan")

_FRACTIONS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
#: Dtypes that PyTorch adds on the CPU, and therefore every engine.
ADDED = _FRACTIONS | _COMPLEX | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
#: Dtypes that PyTorch copies and concatenates; collectives that do not add accept them.
MOVED = (
    ADDED
    | {torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e4m3fnuz}
    | {torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
    | {getattr(torch, name) for name in ("bcomplex32",) if hasattr(torch, name)}  # since torch 2.15
)
#: What a reduction needs x to be, see `Reduction.needs`: the dtypes, what errors expect, and the remedy.
_NEEDS: dict[str, tuple[set[torch.dtype], str, str]] = {
    "numbers": (ADDED, "numbers that PyTorch adds", "pass x.to(torch.int64) to count, or x.to(torch.float32)"),
    "fractions": (_FRACTIONS | _COMPLEX, "a floating-point or complex x of 16 bits or more", "convert x first"),
    "ordered": (
        ADDED - _COMPLEX | {torch.bool},
        "numbers that PyTorch compares",
        "pass x.abs() or x.float()",
    ),
}
_OPS = ", ".join(f'"{name}"' for name in REDUCTIONS) + ", or a ReduceOp"
_DENSE = "a dense torch.Tensor"
#: Arguments that are lists of numbers.
_LISTS = ("pairs", "sizes", "split_sizes", "concat_sizes")


class Call:
    """The call `name(x, group=group, async_op=async_op, **arguments)`.

    The methods read one argument each, and keep it in one spelling. Their errors name operation, argument, what it got,
    what is expected and a remedy; so do those of the constructor, which reads group, async_op and x.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self, name: str, x: Any, group: Group, async_op: bool, arguments: dict[str, Any], origin: Origin | None = None
    ) -> None:
        self.name, self.x, self.group, self.async_op, self.arguments = name, x, group, async_op, arguments
        self.engine: Engine = resolve(group, name)
        #: Where it was called; None: it waits for its result, or is in a graph, which has no lines.
        self.origin = origin
        if expect.flag(name, "async_op", async_op) and origin is None and not self.engine.compiling:
            self.origin = Origin(name, 1, order=0)
        for argument, value in arguments.items():
            if argument not in _LISTS and isinstance(value, (Tensor, list, tuple)):
                self._refuse_outputs(argument, value)
        if isinstance(x, Tensor) or not (name in TAKE_TREES and is_tree(x)):
            self.tensor(x)

    def of(self, x: Tensor) -> Call:
        """Return the same call for a leaf of a tree, or for several leaves in one row."""
        return Call(self.name, x, self.group, self.async_op, {**self.arguments}, self.origin)

    def perform(self, f: Linear, x: Tensor, after: Callable[[Tensor], Tensor] | None = None) -> Any:
        """Return the result, after(f(x)), or with async_op a `Pending` of it."""
        if self.engine.in_one_graph:
            return self._in_truth(f, x)
        if self.async_op:
            wait = start(f, x, self.origin)
            return Pending(self.name, wait if after is None else lambda: after(wait()), self.origin)
        y = apply(f, x)
        return y if after is None else after(y)

    def _in_truth(self, f: Linear, x: Tensor) -> Any:
        """Return the result by `diffcoll.truth`; f is the map of the sum for a reduction that is not linear."""
        facts = " ".join(filter(None, [self.arguments.get("op"), common(f, x), *map(str, batch_sizes(x))]))
        y: Tensor = self.engine.run_truth(self.name, self.x, self.arguments, facts)
        return Pending(self.name, lambda: y, self.origin) if self.async_op else y

    # ── x ────────────────────────────────────────────────────────────────────────────────────────────────

    def tensor(self, x: Any) -> Tensor:
        """Return x, a tensor that the engine can move."""
        if not isinstance(x, Tensor):
            remedy = "pass the result, x.wait()" if isinstance(x, Pending) else "torch.as_tensor(x) makes one"
            if x is None:
                remedy = "every rank passes x; where its numbers are not read, torch.empty of its shape"
            raise TypeError(message(self.name, "x", type(x).__name__, _DENSE, remedy))
        if type(x) is not Tensor and any(c.__name__ == "DTensor" for c in type(x).__mro__):
            remedy = (
                "pass this rank's part, x.to_local(grad_placements=…): [Partial()] if its gradient is this rank's part "
                "of a sum, [Replicate()] if it is the whole gradient"
            )
            raise TypeError(message(self.name, "x", "a DTensor", _DENSE, remedy))
        # Dynamo does not trace x.layout in the backward of a user's Function.
        sparse = x.is_sparse or x.is_sparse_csr or x.is_mkldnn if self.engine.compiling else x.layout != torch.strided
        if sparse or x.is_nested or x.is_quantized:
            remedy = "pass its values, x.to_dense(), x.to_padded_tensor(0.0) or x.dequantize()"
            raise TypeError(message(self.name, "x", "a sparse, nested or quantized tensor", _DENSE, remedy))
        if x.dtype not in MOVED:
            remedy = "pass x.view(torch.uint8), and view the result as x.dtype"
            raise TypeError(message(self.name, "x", str(x.dtype), "a dtype that PyTorch can copy and join", remedy))
        if x.requires_grad and x.dtype not in ADDED and torch.is_grad_enabled():
            got, remedy = f"{x.dtype} that requires a gradient", "pass x.detach() or x.to(torch.bfloat16)"
            raise TypeError(message(self.name, "x", got, "a dtype whose gradients can be added", remedy))
        devices = self.engine.devices
        device = "cpu" if x.is_cpu else x.device.type
        if devices is not None and device not in devices:
            expected = f"a tensor on {' or '.join(devices)}, which is what {self.engine.description} moves"
            remedy = "move x there, or pass another group"
            raise ValueError(message(self.name, "x", f"a tensor on {device}", expected, remedy))
        return x

    def dtype(self, x: Tensor, needs: str) -> None:
        """Raise unless x has a dtype that a reduction needs."""
        dtypes, expected, remedy = _NEEDS[needs]
        if x.dtype not in dtypes:
            argument = "x" if needs == "numbers" else "op"
            raise TypeError(message(self.name, argument, f"a tensor of {x.dtype}", expected, remedy))

    # ── the other arguments ──────────────────────────────────────────────────────────────────────────────

    def error(self, argument: str, expected: str, remedy: str = "", got: object = None) -> ValueError:
        """Return the ValueError about one argument."""
        got = self.arguments.get(argument) if got is None else got
        if not isinstance(got, str):  # Dynamo cannot trace the repr of an object such as Partial("avg")
            got = repr(got) if isinstance(got, (int, float, tuple, list, type(None))) else type(got).__name__
        return ValueError(message(self.name, argument, got, expected, remedy))

    def replicated(self) -> bool:
        """Return whether the gradient that arrives at the result is declared whole, and equal, on every rank."""
        given = self.arguments["grad_placement"]
        value = given if isinstance(given, str) else word_of(given)
        if value not in ("partial", "replicate"):
            remedy = '"partial" if each rank has its own loss, "replicate" if all compute the same one'
            raise self.error("grad_placement", '"partial" or "replicate"', remedy)
        self.arguments["grad_placement"] = value
        return bool(value == "replicate")

    def op(self, x: Tensor) -> Reduction:
        """Return the reduction that `op` names."""
        op = self.arguments["op"]
        name = spelled(op)
        reduction = None if name is None else REDUCTIONS.get(name)
        if reduction is None:
            remedy = ""
            if str(name).lower() in ("band", "bor", "bxor"):
                remedy = 'reduce bool tensors with "min" (all) or "max" (any); bits have no derivative'
            elif callable(op):
                remedy = "f(dc.all_gather(x, stack=True)) reduces by a function f"
            elif not isinstance(op, str):  # for which Dynamo could not trace this
                remedy = expect.of_group(op)
            raise self.error("op", _OPS, remedy, got=name)
        self.dtype(x, reduction.needs)
        self.arguments["op"] = reduction.name
        return reduction

    def integer(self, argument: str) -> int:
        """Return an integer argument."""
        return expect.integer(self.name, argument, self.arguments[argument])

    def flag(self, argument: str) -> bool:
        """Return True or False."""
        return expect.flag(self.name, argument, self.arguments[argument])

    def dim(self, argument: str, x: Tensor, new: bool = False) -> int:
        """Return a dimension counted from the front; `new`: of the result, which has one dimension more than x."""
        d = self.arguments[argument] = expect.dim(self.name, argument, self.arguments[argument], x, new)
        return d

    def root(self, argument: str) -> int:
        """Return a rank within the group."""
        if self.arguments[argument] is None:
            remedy = f"dc.{self.name} takes no output: y = dc.{self.name}(x, {argument}=…)"
            raise TypeError(message(self.name, argument, None, "a rank within the group", remedy))
        value = self.integer(argument)
        if not 0 <= value < self.engine.size:
            raise self.error(argument, f"a rank within the group, from 0 to {self.engine.size - 1}")
        return value

    def pairs(self, argument: str) -> tuple[tuple[int, int], ...]:
        """Return a list of pairs (src, dst), sorted."""
        value, n, integer = self.arguments[argument], self.engine.size, partial(expect.integer, self.name, argument)
        try:
            pairs = sorted([(integer(src), integer(dst)) for src, dst in value])
        except (TypeError, ValueError):
            expected = "a list of pairs (src, dst) of ranks"
            raise TypeError(message(self.name, argument, repr(value), expected)) from None
        for end, ranks in zip(("src", "dst"), zip(*pairs, strict=True), strict=False):
            if not 0 <= min(ranks) <= max(ranks) < n:
                raise self.error(argument, f"ranks within the group, from 0 to {n - 1}")
            if len({*ranks}) < len(ranks):
                remedy = "send to several ranks with broadcast or several permutes"
                raise self.error(argument, f"each rank at most once as {end}", remedy)
        return tuple(pairs)

    # ── sizes ────────────────────────────────────────────────────────────────────────────────────────────

    def sizes_of_parts(self, x: Tensor, dim: int, argument: str = "sizes") -> tuple[int, ...]:
        """Return the sizes of the N blocks that x is cut into along dim; (): they are equal."""
        value = self.arguments[argument]
        length, n = x.shape[dim], self.engine.size
        if value is None:
            if length % n:
                remedy = f"pass {argument}=[…], one size per rank"
                raise self.error("x", f"a multiple of N = {n}", remedy, got=f"size {length} along dim {dim}")
            return ()
        sizes = expect.sizes(self.name, argument, value, n)
        if sum(sizes) != length:
            got = f"{list(sizes)}, which sums to {sum(sizes)}"
            raise self.error(argument, f"a sum of {length}, the size of x along dim {dim}", got=got)
        return sizes

    def sizes_of_all(self, x: Tensor, dim: int, argument: str = "sizes") -> tuple[int, ...]:
        """Return the sizes along dim of all ranks' tensors, of which x is this rank's; (): they are equal."""
        value = self.arguments[argument]
        if value is None:
            return ()
        if isinstance(value, str) and value == "auto":
            replicated = self.arguments.get("grad_placement") == "replicate"
            rows = exchanged_alike(f"{self.name}: x", self.engine, {"x": (x, dim)}, [x.shape[dim]], replicated)
            return tuple(size for (size,) in rows)
        return expect.sizes(self.name, argument, value, self.engine.size, (self.engine.rank, x.shape[dim]))

    def sizes_of_blocks(self, parts: tuple[int, ...], argument: str) -> tuple[int, ...]:
        """Return the sizes of the blocks received from the ranks; `parts` are the sizes of those sent to them."""
        value, rank = self.arguments[argument], self.engine.rank
        if isinstance(value, str) and value == "auto":
            return tuple(row[rank] for row in exchanged(self.engine, list(parts)))
        return expect.sizes(self.name, argument, value, self.engine.size, (rank, parts[rank]))

    def _refuse_outputs(self, argument: str, value: Any) -> None:
        """Raise if an argument holds tensors, outputs or inputs, as torch.distributed expects in its place."""
        if isinstance(value, Tensor) or any(isinstance(v, Tensor) for v in value):
            cat = not isinstance(value, Tensor) and self.name in ("reduce_scatter", "all_to_all", "scatter")
            remedy = f"{self.name} takes no output list: y = dc.{self.name}({'torch.cat(xs)' if cat else 'x'})"
            raise TypeError(message(self.name, argument, type(value).__name__, "no tensors", remedy))
