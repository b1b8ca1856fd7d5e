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
from dataclasses import fields
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.core.exchange import exchanged, sizes_of_ranks
from diffcoll.core.groups import resolve
from diffcoll.core.maps import PER_RANK, Linear
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
TAKE_TREES = ("all_reduce", "all_gather", "broadcast", "sum_gradients")

#: Dtypes that PyTorch adds on the CPU, and therefore every engine.
ADDED = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128)
) | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
#: Dtypes that PyTorch copies and concatenates; collectives that do not add accept them.
MOVED = (
    ADDED
    | {torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e4m3fnuz}
    | {torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
    | {getattr(torch, name) for name in ("bcomplex32",) if hasattr(torch, name)}  # since torch 2.15
)

_OPS = ", ".join(f'"{name}"' for name in REDUCTIONS) + ", or a ReduceOp"


class Call:
    """The call `name(x, group=group, async_op=async_op, **arguments)`.

    The methods read one argument each. Their errors name operation, argument, what it got, what is expected and a
    remedy; so do those of the constructor, which reads group, async_op and x.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(self, name: str, x: Any, group: Group, async_op: bool, arguments: dict[str, Any]) -> None:
        self.name, self.x, self.group, self.async_op, self.arguments = name, x, group, async_op, arguments
        self.engine: Engine = resolve(group, name)
        if async_op is not True and async_op is not False:
            expect.flag(name, "async_op", async_op)
        if isinstance(x, Tensor):
            self.tensor(x)
            return
        for argument in arguments:  # a list of output tensors would be taken for a tree
            self._refuse_tensors(argument)
        if not (name in TAKE_TREES and is_tree(x)):
            self.tensor(x)

    def of(self, x: Tensor) -> Call:
        """Return the same call for a leaf of a tree, or for several leaves in one row."""
        return Call(self.name, x, self.group, self.async_op, self.arguments)

    def perform(self, f: Linear, x: Tensor, after: Callable[[Tensor], Tensor] | None = None) -> Any:
        """Return the result, after(f(x)), or with async_op a `Pending` of it."""
        if self.engine.in_one_graph:
            return self._in_truth(f, x)
        if self.async_op:
            wait = start(f, x)
            return Pending(self.name, wait if after is None else lambda: after(wait()))
        y = apply(f, x)
        return y if after is None else after(y)

    def _in_truth(self, f: Linear, x: Tensor) -> Any:
        """Return the result by `diffcoll.truth`; f is the map of the sum for a reduction that is not linear."""
        arguments = dict(self.arguments)  # in one spelling
        if "op" in arguments:
            arguments["op"] = self.op(self.x).name
        if "grad_placement" in arguments:
            arguments["grad_placement"] = "replicate" if self.replicated() else "partial"
        for name in ("dim", "split_dim", "concat_dim"):
            if arguments.get(name, 0) < 0:
                arguments[name] %= max(1, self.x.dim() + arguments.get("stack", False))
        values = [getattr(f, field.name) for field in fields(f) if field.name not in PER_RANK]
        meaning = self.name, f.detail, arguments.get("op"), *values
        kind = x.dtype, f.common_shape(x.shape), batch_sizes(x)
        y: Tensor = self.engine.run_truth(self.name, self.x, arguments, (meaning, kind))
        return Pending(self.name, lambda: y) if self.async_op else y

    def error(self, argument: str, expected: str, remedy: str = "", got: object = None) -> ValueError:
        """Return the ValueError about one argument."""
        got = self.arguments.get(argument) if got is None else got
        if not isinstance(got, str):
            # Dynamo cannot trace the repr of an object of a class with a base in C++, such as Partial("avg").
            traces = self.engine.compiling and not isinstance(got, (int, float, tuple, list, type(None)))
            got = type(got).__name__ if traces else repr(got)
        return ValueError(message(self.name, argument, got, expected, remedy))

    def tensor(self, x: Any, argument: object = "x") -> Tensor:
        """Return x, a tensor that the engine can move; `argument` is what errors call it."""
        expected = "a dense torch.Tensor"
        if not isinstance(x, Tensor):
            remedy = "pass the result, x.wait()" if isinstance(x, Pending) else "torch.as_tensor(x) makes one"
            raise TypeError(message(self.name, argument, type(x).__name__, expected, remedy))
        if type(x) is not Tensor and any(c.__name__ == "DTensor" for c in type(x).__mro__):
            remedy = (
                "pass this rank's part, x.to_local(grad_placements=…): [Partial()] if its gradient is this rank's part "
                "of a sum, [Replicate()] if it is the whole gradient; without grad_placements DTensor assumes the "
                "placements of x"
            )
            raise TypeError(message(self.name, argument, "a DTensor", expected, remedy))
        if x.is_nested:
            remedy = "pass x.values() and the lengths, or x.to_padded_tensor(0.0)"
            raise TypeError(message(self.name, argument, "a nested tensor", expected, remedy))
        # Dynamo does not trace x.layout in the backward of a user's Function.
        sparse = x.is_sparse or x.is_sparse_csr or x.is_mkldnn if self.engine.compiling else x.layout != torch.strided
        if sparse or x.is_quantized:
            layout = "quantized" if x.is_quantized else str(x.layout)
            raise TypeError(
                message(self.name, argument, f"a {layout} tensor", expected, "pass x.to_dense() or dequantize")
            )
        if x.dtype not in MOVED:
            remedy = "pass x.view(torch.uint8), and view the result as x.dtype"
            raise TypeError(
                message(self.name, argument, str(x.dtype), "a dtype that PyTorch can copy and join", remedy)
            )
        if x.requires_grad and x.dtype not in ADDED and torch.is_grad_enabled():
            got, remedy = f"{x.dtype} that requires a gradient", "pass x.detach() or x.to(torch.bfloat16)"
            raise TypeError(message(self.name, argument, got, "a dtype whose gradients can be added", remedy))
        devices = self.engine.devices
        device = "cpu" if x.is_cpu else x.device.type
        if device == "meta" or (devices is not None and device not in devices):
            where = "tensors with memory" if devices is None else f"a tensor on {' or '.join(devices)}"
            text = f"{where}, which is what {self.engine.description} moves"
            remedy = "move x there, or pass another group"
            raise ValueError(message(self.name, argument, f"a tensor on {device}", text, remedy))
        return x

    def replicated(self) -> bool:
        """Return whether the gradient that arrives at the result is declared whole, and equal, on every rank."""
        given = self.arguments["grad_placement"]
        value = given if isinstance(given, str) else word_of(given)
        if value not in ("partial", "replicate"):
            remedy = '"partial" if each rank has its own loss, "replicate" if all compute the same one'
            raise self.error("grad_placement", '"partial" or "replicate"', remedy)
        return bool(value == "replicate")

    def op(self, x: Tensor) -> Reduction:
        """Return the reduction that `op` names."""
        op = self.arguments["op"]
        name = spelled(op)
        reduction = None if name is None else REDUCTIONS.get(name)
        if reduction is None:
            self._refuse_tensors("op")
            remedy = "f(dc.all_gather(x, stack=True)) reduces by a function f" if callable(op) else ""
            if str(name).lower() in ("band", "bor", "bxor"):
                remedy = 'reduce bool tensors with "min" (all) or "max" (any); bits have no derivative'
            raise self.error("op", _OPS, remedy)
        if reduction.needs == "numbers":
            self.adds(x)
        got = f'"{name}" of {x.dtype}'
        if reduction.needs == "fractions" and not (x.dtype in ADDED and (x.is_floating_point() or x.is_complex())):
            expected = "a floating-point or complex x" + " of 16 bits or more" * x.is_floating_point()
            raise TypeError(message(self.name, "op", got, expected, "convert x first"))
        if reduction.needs == "ordered" and x.is_complex():
            remedy = "reduce x.abs(), or x.real and x.imag apart"
            raise TypeError(message(self.name, "op", got, "numbers that are ordered", remedy))
        if reduction.needs == "ordered" and x.dtype not in ADDED and x.dtype != torch.bool:
            raise TypeError(message(self.name, "op", got, "a dtype that PyTorch compares", f"pass {_wider(x)}"))
        return reduction

    def adds(self, x: Tensor) -> None:
        """Raise unless tensors like x can be added."""
        if x.dtype == torch.bool:
            remedy = "pass x.to(torch.int64) to count"
            raise TypeError(message(self.name, "x", "torch.bool", "numbers, which can be added", remedy))
        if x.dtype not in ADDED:
            raise TypeError(message(self.name, "x", str(x.dtype), "a dtype that PyTorch adds up", f"pass {_wider(x)}"))

    def integer(self, argument: str) -> int:
        """Return an integer argument."""
        value = self.arguments[argument]
        if type(value) is int:
            return value
        self._refuse_tensors(argument)
        return expect.integer(self.name, argument, value)

    def dim(self, argument: str, x: Tensor, new: bool = False) -> int:
        """Return a dimension counted from the front; `new`: of the result, which has one dimension more than x."""
        value = self.integer(argument)
        n = x.dim() + new
        if n == 0:
            raise self.error("x", "at least one dimension", "x.reshape(1) has one", got="a 0-d tensor")
        if not -n <= value < n:
            raise self.error(argument, f"a dimension from {-n} to {n - 1}, since x has shape {tuple(x.shape)}")
        return value % n

    def root(self, argument: str) -> int:
        """Return a rank within the group."""
        value = self.integer(argument)
        if not 0 <= value < self.engine.size:
            raise self.error(argument, f"a rank within the group, from 0 to {self.engine.size - 1}")
        return value

    def pairs(self, argument: str) -> tuple[tuple[int, int], ...]:
        """Return a list of pairs (src, dst), sorted."""
        value, n = self.arguments[argument], self.engine.size
        expected = "a list of pairs (src, dst) of ranks"
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(message(self.name, argument, repr(value), expected))
        if any(isinstance(p, str) or not isinstance(p, Sequence) or len(p) != 2 for p in value):
            raise TypeError(message(self.name, argument, repr(value), expected))
        read = partial(expect.integer, self.name, argument)
        pairs = tuple(sorted((read(src), read(dst)) for src, dst in value))
        for end, ranks in (("src", [p[0] for p in pairs]), ("dst", [p[1] for p in pairs])):
            if any(not 0 <= rank < n for rank in ranks):
                raise self.error(argument, f"ranks within the group, from 0 to {n - 1}")
            if len(set(ranks)) < len(ranks):
                twice = [rank for rank in ranks if ranks.count(rank) > 1]
                remedy = "send to several ranks with broadcast or several permutes"
                raise self.error(argument, f"each rank at most once as {end} (rank {twice[0]} is listed twice)", remedy)
        return pairs

    def sizes_of_parts(self, x: Tensor, dim: int, argument: str = "sizes") -> tuple[int, ...]:
        """Return the sizes of the N blocks that x is cut into along dim."""
        value = self.arguments[argument]
        length, n = x.shape[dim], self.engine.size
        if value is None:
            if length % n:
                remedy = f"pass {argument}=[…], one size per rank"
                raise self.error("x", f"a multiple of N = {n}", remedy, got=f"size {length} along dim {dim}")
            return ()
        sizes = self._sizes(argument, value)
        if sum(sizes) != length:
            got = f"{list(sizes)}, which sums to {sum(sizes)}"
            raise self.error(argument, f"a sum of {length}, the size of x along dim {dim}", got=got)
        return sizes

    def sizes_of_all(self, x: Tensor, dim: int, argument: str = "sizes") -> tuple[int, ...]:
        """Return the sizes along dim of all ranks' tensors, of which x is this rank's."""
        value = self.arguments[argument]
        length, rank = x.shape[dim], self.engine.rank
        if value is None:
            return ()
        if isinstance(value, str) and value == "auto":
            return sizes_of_ranks(self.name, self.engine, [(x, dim)])[0]
        sizes = self._sizes(argument, value, auto=True)
        if sizes[rank] != length:
            expected = f"{length} at position {rank}, the size of this rank's x along dim {dim}"
            raise self.error(argument, expected, f'{argument}="auto" asks every rank for its size')
        return sizes

    def sizes_of_blocks(self, parts: tuple[int, ...], argument: str) -> tuple[int, ...]:
        """Return the sizes of the blocks received from the ranks; `parts` are the sizes of those sent to them."""
        value, rank = self.arguments[argument], self.engine.rank
        if isinstance(value, str) and value == "auto":
            return tuple(row[rank] for row in exchanged(self.engine, list(parts)))
        sizes = self._sizes(argument, value, auto=True)
        if sizes[rank] != parts[rank]:
            raise self.error(argument, f"{parts[rank]} at position {rank}, the size of the block that this rank keeps")
        return sizes

    def _sizes(self, argument: str, value: Any, auto: bool = False) -> tuple[int, ...]:
        n = self.engine.size
        either = ', "auto" or None' if auto else " or None"
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.error(argument, f"a list of {n} sizes, one per rank{either}")
        sizes = tuple(expect.integer(self.name, argument, v) for v in value)
        if len(sizes) != n:
            raise self.error(argument, f"{n} sizes, one per rank")
        if any(size < 0 for size in sizes):
            raise self.error(argument, "sizes of zero or more")
        return sizes

    def _refuse_tensors(self, argument: str) -> None:
        """Raise if an argument holds tensors, outputs or inputs, as torch.distributed expects in its place."""
        value = self.arguments[argument]
        listed = isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)
        if (listed or isinstance(value, Tensor)) and not argument.endswith("sizes"):
            x = "torch.cat(xs)" if listed and self.name in ("reduce_scatter", "all_to_all", "scatter") else "x"
            remedy = f"{self.name} takes no output list: y = dc.{self.name}({x})"
            raise TypeError(message(self.name, argument, type(value).__name__, "no tensors", remedy))


def _wider(x: Tensor) -> str:
    return "x.to(torch.float32)" if x.is_floating_point() else "x.to(torch.int64)"
