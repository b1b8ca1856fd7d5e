"""One call of a collective by the user: its arguments, checked, and the way into the algebra."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from diffcoll.core import checks, joint
from diffcoll.core._torch import divide_, integers, is_traced, is_tree, times, tree_paths
from diffcoll.core.errors import CollectiveMismatchError, failure, message, user_line
from diffcoll.core.groups import met, resolve
from diffcoll.core.linear import MAPS, Linear, apply, start
from diffcoll.core.pending import Pending
from diffcoll.core.reducing import Reducing, Steps
from diffcoll.core.reductions import REDUCTIONS, Reduction, elementwise, spelled, users
from diffcoll.engines.engine import WIDER

__all__ = ["Call", "Cotangent", "Group", "Parts", "Sizes", "Tree", "known"]

#: A tensor, or nested tuples, lists and dicts of tensors.
Tree = TypeVar("Tree")

#: What `group` may be; engines recognise their own, see `diffcoll.core.groups`.
Group = Any
#: Sizes of blocks that x is cut into, and of blocks that the ranks bring.
Parts = Sequence[int] | None
Sizes = Sequence[int] | Literal["auto"] | None
#: Arguments of which every rank has its own.
PER_RANK = ("split_sizes", "concat_sizes")
#: Collectives whose x may be a tree.
TAKE_TREES = ("all_reduce", "all_gather", "broadcast", "sum_gradients")
Cotangent = Literal["partial", "replicated"]

#: What PyTorch adds up on the CPU, so that all engines can.
ADDED = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128)
) | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
#: What PyTorch copies and joins, and the collectives that add nothing move.
MOVED = (
    ADDED
    | {torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e4m3fnuz}
    | {torch.float8_e5m2, torch.float8_e5m2fnuz}
    # since torch 2.7 and 2.15
    | {getattr(torch, name) for name in ("float8_e8m0fnu", "bcomplex32") if hasattr(torch, name)}
)

_OPS = '"sum", "mean", "product", "max", "min", "logsumexp", a function that reduces dim 0 of a stack, or a ReduceOp'


def _a_function(op: object) -> str:
    """Return what ranks compare of a function: each may have made it for itself."""
    return "elementwise(a function)" if isinstance(op, elementwise) else "a function"


def known(name: str, x: Any, group: Group, *arguments: Any) -> Linear | None:
    """Return the map to which the same call came before, on a tensor of the same kind; None: look at the arguments.

    What was right then is right now. Cold, as between two steps of training, every line costs several times what it
    does in a loop, and looking at the arguments takes longer than a small message.
    """
    if torch.compiler.is_dynamo_compiling() or type(x) is not Tensor or not x.is_cpu or x.is_nested:
        return None
    engine = met(group)
    if engine is None or checks.is_on() or joint.is_joint():
        return None
    try:
        return engine.known.get((name, x.dtype, x.layout, *arguments))
    except TypeError:  # what has no hash is no argument
        return None


class Call:
    """`name(x, group=group, **arguments)`, checked argument by argument; raises what the user should read."""

    def __init__(
        self, name: str, x: Any, group: Group, async_op: bool = False, *, check_x: bool = True, **arguments: Any
    ) -> None:
        self.name = name
        self.x = x
        self.arguments = arguments
        self.async_op = async_op
        self.engine = resolve(group, name)
        self.reduction: Reduction | None = None
        self._agreed = False
        if async_op is not True and async_op is not False:
            raise self._not_a_flag("async_op", async_op)
        if not isinstance(x, Tensor):  # a list of outputs would be a tree
            for argument in arguments:
                self._refuse_tensors(argument)
        elif "op" in arguments:
            self._refuse_tensors("op")
        if check_x and (isinstance(x, Tensor) or not (name in TAKE_TREES and is_tree(x))):
            self.tensor(x)

    # ── what the ranks compare ───────────────────────────────────────────────────────────────────────────

    def agree(self, f: Linear, x: Tensor) -> None:
        """In check mode, compare this call, which came to f of x, with those of the other ranks."""
        if not self._agreed and self._compares():
            self._agreed = True
            self._compare((*self._meaning(f), *_kind(f, x)))

    def agree_on_leaves(self, shapes: Sequence[object], leaves: Sequence[Tensor]) -> None:
        """In check mode, compare the leaves of a tree, which have these shapes, with those of the other ranks.

        In joint worlds too, the paths and dtypes: there the leaves are combined one by one.
        """
        engine = self.engine
        if engine.joint:
            shapes = [""] * len(leaves)
        elif not self._compares():
            return
        rows = zip(tree_paths(self.x), leaves, shapes, strict=True)
        self._compare((self.name, "a tree"), [f"x{path}: {x.dtype} {shape}" for path, x, shape in rows])

    def fit(self, sent: list[list[int]], expected: list[list[int]]) -> None:
        """In check mode, compare the shapes of the blocks for and from each rank."""
        if not self._compares():
            return
        n, ndim = self.engine.size, len(sent[0])
        rows = self.gather_numbers([size for block in sent + expected for size in block], "blocks")
        told = [torch.tensor(row, device="cpu").view(2, n, ndim).tolist() for row in rows]
        for r in range(n):
            for s in range(n):
                block, place = told[r][0][s], told[s][1][r]
                if block != place:
                    why = f"rank {r} sends {tuple(block)} to rank {s}, which expects {tuple(place)}"
                    checks.refuse(self.engine, self._text(), f"{checks.disagree(self.engine)} {why}")

    def _compares(self) -> bool:
        engine = self.engine
        if not checks.is_on() or engine.joint or engine.compiling or engine.size == 1:
            return False
        return not (isinstance(self.x, Tensor) and is_traced(self.x))  # what it becomes compares itself, when it runs

    def _compare(self, facts: tuple[object, ...], leaves: Sequence[str] | None = None) -> None:
        try:
            later = self.async_op and not self.engine.joint  # where it is the same
            checks.compare(self.engine, (*facts, later), self._text(), leaves)
        except CollectiveMismatchError:
            raise
        except RuntimeError as error:
            raise failure(self.name, self.engine.description, self.engine.rank, None, error) from error

    def _meaning(self, f: Linear) -> tuple[object, ...]:
        """What the arguments come to, which must be the same on all ranks, however they are written."""
        values = [getattr(f, field.name) for field in fields(f) if field.name not in ("engine", *PER_RANK)]
        op: list[object] = []
        if self.reduction is not None:
            op = [v for field in fields(self.reduction) if not callable(v := getattr(self.reduction, field.name))]
            op.append(self.arguments.get("ties") if self.reduction.name in ("max", "min") else None)
        return self.name, *values, *op

    def _given(self) -> dict[str, Any]:
        given = {k: _a_function(v) if callable(v) else v for k, v in self.arguments.items()}
        return {**given, "async_op": True} if self.async_op else given

    def _text(self) -> str:
        x = f"{self.x.dtype} {tuple(self.x.shape)}" if isinstance(self.x, Tensor) else type(self.x).__name__
        words = ", ".join([x, *(f"{k}={v!r}" for k, v in self._given().items())])
        return f"{self.name}({words}) at {user_line()}"

    # ── the ways into the algebra: all that a call moves goes by one of them, and is compared first ──────

    def of(self, leaf: Tensor) -> Call:
        """Return the same call for one leaf of a tree."""
        call = copy(self)
        call._agreed = False
        call.x, call.arguments = leaf, dict(self.arguments)
        return call

    def apply(self, f: Linear, x: Tensor) -> Tensor:
        """Return f(x); in a joint world what truth makes of the call as the user wrote it."""
        y: Tensor = self.submit(f, x)
        return y

    def submit(self, f: Linear, x: Tensor, then: Callable[[Tensor], Tensor] | None = None) -> Any:
        """Return then(f(x)), or, with `async_op`, what is pending of it."""
        if checks.is_on():
            self.agree(f, x)
        if self.engine.joint:
            facts = self._meaning(f), _kind(f, x)
            y: Tensor = self.engine.run_truth(self.name, self.x, self.arguments, facts)
            return Pending(self.name, lambda: y) if self.async_op else y
        if self.async_op:
            wait = start(f, x)
            return Pending(self.name, wait if then is None else lambda: then(wait()))
        y = apply(f, x)
        return y if then is None else then(y)

    def reduce(self, f: Linear, x: Tensor, other: Callable[[Reducing], Steps]) -> Any:
        """Return f(x), f being the sum, or what `other` makes of a reduction that is not one, by the call's `op`."""
        self.reduction, x = self._reduction(x)
        reduction = self.reduction
        if checks.is_on():
            self.agree(f, x)
        if self.engine.joint:
            self.x = x
            return self.submit(f, x)
        if reduction.name == "sum":
            return self.submit(f, x)
        if reduction.over is not None:
            return self.submit(*other(Reducing(self.name, reduction, self.engine, x, checked=self._compares())))
        # The mean is the sum divided by N. In half precision the sum may overflow where the mean does not.
        wide = x.to(WIDER.get(x.dtype, x.dtype))
        return self.submit(f, wide, lambda y: divide_(y, self.engine.size).to(x.dtype))

    def remember(self, f: Linear) -> None:
        """Keep f for `known`: the call was right, and f of x was all that it came to."""
        if not self.engine.joint and not self.engine.compiling:
            key = (self.name, self.x.dtype, self.x.layout, *self.arguments.values())
            self.engine.known[key] = f

    def error(self, argument: str, expected: str, remedy: str = "", got: object = None) -> ValueError:
        """Return the ValueError about one argument."""
        got = self.arguments.get(argument) if got is None else got
        return ValueError(message(self.name, argument, got if isinstance(got, str) else repr(got), expected, remedy))

    # ── arguments ────────────────────────────────────────────────────────────────────────────────────────

    def tensor(self, x: Any) -> Tensor:
        """Return x, a tensor that the engine can move."""
        expected = "a dense torch.Tensor"
        if not isinstance(x, Tensor):
            raise TypeError(message(self.name, "x", type(x).__name__, expected, "torch.as_tensor(x) makes one"))
        if type(x) is not Tensor and any(c.__name__ == "DTensor" for c in type(x).__mro__):
            remedy = (
                "pass this rank's part, x.to_local(grad_placements=…): the gradient that comes back is this rank's "
                "part of a sum, [Partial()], or the whole, [Replicate()], and without grad_placements DTensor assumes "
                "the placements of x"
            )
            raise TypeError(message(self.name, "x", "a DTensor", expected, remedy))
        if x.is_nested:
            remedy = "pass x.values() and the lengths, or x.to_padded_tensor(0.0)"
            raise TypeError(message(self.name, "x", "a nested tensor", expected, remedy))
        if x.layout != torch.strided or x.is_quantized:
            layout = "quantized" if x.is_quantized else str(x.layout)
            raise TypeError(message(self.name, "x", f"a {layout} tensor", expected, "pass x.to_dense() or dequantize"))
        if x.dtype not in MOVED:
            remedy = "pass x.view(torch.uint8), and view the result as x.dtype"
            raise TypeError(message(self.name, "x", str(x.dtype), "a dtype that PyTorch can copy and join", remedy))
        if x.requires_grad and x.dtype not in ADDED and torch.is_grad_enabled():
            got, remedy = f"{x.dtype} that requires a gradient", "pass x.detach() or x.to(torch.bfloat16)"
            raise TypeError(message(self.name, "x", got, "a dtype whose gradients can be added", remedy))
        devices = self.engine.devices
        device = "cpu" if x.is_cpu else x.device.type
        if device == "meta" or (devices is not None and device not in devices):
            where = "tensors with memory" if devices is None else f"a tensor on {' or '.join(devices)}"
            text = f"{where}, which is what {self.engine.description} moves"
            remedy = "move x there, or name another group"
            raise ValueError(message(self.name, "x", f"a tensor on {device}", text, remedy))
        return x

    def cotangent(self, value: Cotangent) -> bool:
        """Return whether the cotangent is declared replicated."""
        if value not in ("partial", "replicated"):
            remedy = '"partial" if each rank has a loss of its own, "replicated" if all compute the same one'
            raise self.error("cotangent", '"partial" or "replicated"', remedy)
        return value == "replicated"

    def _reduction(self, x: Tensor) -> tuple[Reduction, Tensor]:
        """Return what the call's `op` and `ties` name, and x, scaled where the op says so."""
        op, ties = self.arguments["op"], self.arguments.get("ties", "even")
        if ties not in REDUCTIONS:
            raise self.error(
                "ties", '"even" or "first"', "they say who gets the gradient where several ranks are largest"
            )
        named = spelled(op)
        if named is None:
            if not callable(op):
                raise self.error("op", _OPS)
            return users(op), x
        name, factor = named
        reduction = REDUCTIONS[ties].get(name)
        if name in ("band", "bor", "bxor"):
            remedy = 'reduce bool tensors with "min" (all) or "max" (any); bits have no derivative'
            raise TypeError(message(self.name, "op", f"the bitwise {name.upper()}", _OPS, remedy))
        if reduction is None:
            raise self.error("op", _OPS)
        self.arguments["op"] = name  # what ranks compare, and truth knows
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
        return reduction, x if factor is None else times(x, factor)

    def adds(self, x: Tensor) -> None:
        """Check that tensors like x can be added up."""
        if x.dtype == torch.bool:
            remedy = "x.to(torch.int64) counts"
            raise TypeError(message(self.name, "x", "torch.bool", "numbers, which can be added", remedy))
        if x.dtype not in ADDED:
            raise TypeError(message(self.name, "x", str(x.dtype), "a dtype that PyTorch adds up", f"pass {_wider(x)}"))

    def dim(self, argument: str, x: Tensor, new: bool = False) -> int:
        """Return the dimension that an argument names, counted from the front; `new`: x is to get it yet."""
        value = self.integer(argument)
        n = x.dim() + new
        if n == 0:
            raise self.error("x", "at least one dimension", "x.reshape(1) has one", got="a 0-d tensor")
        if not -n <= value < n:
            raise self.error(argument, f"a dimension from {-n} to {n - 1}, since x has shape {tuple(x.shape)}")
        self.arguments[argument] = value % n  # what ranks compare
        return value % n

    def flag(self, argument: str) -> bool:
        """Return the truth value that an argument is."""
        value = self.arguments[argument]
        if value is not True and value is not False:
            raise self._not_a_flag(argument, value)
        return value

    def _not_a_flag(self, argument: str, value: object) -> TypeError:
        return TypeError(message(self.name, argument, type(value).__name__, "True or False"))

    def integer(self, argument: str) -> int:
        """Return the integer that an argument is."""
        self._refuse_tensors(argument)
        return self._integer(argument, self.arguments[argument])

    def _refuse_tensors(self, argument: str) -> None:
        """Raise if an argument is what torch.distributed expects in its place: tensors, to be filled or sent."""
        value = self.arguments[argument]
        listed = isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)
        if (listed or isinstance(value, Tensor)) and not argument.endswith("sizes"):
            x = "torch.cat(xs)" if listed and self.name in ("reduce_scatter", "all_to_all", "scatter") else "x"
            remedy = f"{self.name} takes no output list: y = dc.{self.name}({x})"
            raise TypeError(message(self.name, argument, type(value).__name__, "no tensors", remedy))

    def root(self, argument: str) -> int:
        """Return the rank that an argument names."""
        value = self.integer(argument)
        if not 0 <= value < self.engine.size:
            n = self.engine.size
            raise self.error(argument, f"a rank within the group, from 0 to {n - 1}")
        return value

    def pairs(self, argument: str) -> tuple[tuple[int, int], ...]:
        """Return the pairs (src, dst) that an argument lists."""
        value, n = self.arguments[argument], self.engine.size
        expected = "a list of pairs (src, dst) of ranks"
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(message(self.name, argument, repr(value), expected))
        if any(isinstance(p, str) or not isinstance(p, Sequence) or len(p) != 2 for p in value):
            raise TypeError(message(self.name, argument, repr(value), expected))
        pairs = tuple(sorted((self._integer(argument, src), self._integer(argument, dst)) for src, dst in value))
        for end, ranks in (("src", [p[0] for p in pairs]), ("dst", [p[1] for p in pairs])):
            if any(not 0 <= rank < n for rank in ranks):
                raise self.error(argument, f"ranks within the group, from 0 to {n - 1}")
            twice = [rank for rank in ranks if ranks.count(rank) > 1]
            if twice:
                remedy = "send to several ranks with broadcast or several permutes"
                raise self.error(argument, f"each rank at most once as {end} (rank {twice[0]} is there twice)", remedy)
        return pairs

    def sizes_of_parts(self, x: Tensor, dim: int, argument: str = "sizes") -> tuple[int, ...]:
        """Return the sizes of the N blocks that x is cut into along dim."""
        value = self.arguments[argument]
        length, n = x.shape[dim], self.engine.size
        if value is None:
            if length % n:
                remedy = f"pass {argument}=[…], one size per rank"
                raise self.error("x", f"a multiple of N = {n}", remedy, got=f"size {length} along dim {dim}")
            return (length // n,) * n
        sizes = self._sizes(argument, value)
        if sum(sizes) != length:
            got = f"{list(sizes)}, which sums to {sum(sizes)}"
            raise self.error(argument, f"a sum of {length}, the size of x along dim {dim}", got=got)
        return sizes

    def sizes_of_all(self, x: Tensor, dim: int, argument: str = "sizes") -> tuple[int, ...]:
        """Return the sizes along dim of all ranks' tensors, of which x is this rank's."""
        value = self.arguments[argument]
        length, n, rank = x.shape[dim], self.engine.size, self.engine.rank
        if value is None:
            return (length,) * n
        if isinstance(value, str) and value == "auto":
            return tuple(row[0] for row in self.gather_numbers([length]))
        sizes = self._sizes(argument, value, auto=True)
        if sizes[rank] != length:
            expected = f"{length} at position {rank}, the size of this rank's x along dim {dim}"
            raise self.error(argument, expected, f'{argument}="auto" asks every rank for its size')
        return sizes

    def sizes_of_blocks(self, parts: tuple[int, ...], argument: str) -> tuple[int, ...]:
        """Return the sizes of the blocks that come from the ranks, when `parts` are those that go to them."""
        value, rank = self.arguments[argument], self.engine.rank
        if isinstance(value, str) and value == "auto":
            return tuple(row[rank] for row in self.gather_numbers(list(parts)))
        sizes = self._sizes(argument, value, auto=True)
        if sizes[rank] != parts[rank]:
            raise self.error(argument, f"{parts[rank]} at position {rank}, the size of the block that stays here")
        return sizes

    def gather_numbers(self, numbers: list[int], what: str = "sizes") -> list[list[int]]:
        """Exchange a few integers, as many on each rank; one list from each rank, in order."""
        if self._compares():
            self._compare((self.name, what, len(numbers)))
        n = self.engine.size
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.engine.control_device)
        flat = integers(apply(MAPS["AllGather"](self.engine, 0, (len(numbers),) * n), mine))
        return [flat[i * len(numbers) : (i + 1) * len(numbers)] for i in range(n)]

    def broadcast_numbers(self, root: int, numbers: list[int] | None) -> list[int]:
        """Return the integers that the root passes to all; None on the other ranks."""
        if self._compares():
            self._compare((self.name, root))
        device = self.engine.control_device
        send = MAPS["Broadcast"](self.engine, root)
        length = int(apply(send, torch.tensor(len(numbers or ()), device=device)))
        row = torch.tensor(numbers if numbers else [0] * length, dtype=torch.int64, device=device)
        return integers(apply(send, row))

    def _sizes(self, argument: str, value: Any, auto: bool = False) -> tuple[int, ...]:
        n = self.engine.size
        either = ', "auto" or None' if auto else " or None"
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.error(argument, f"a list of {n} sizes, one per rank{either}")
        sizes = tuple(self._integer(argument, v) for v in value)
        if len(sizes) != n:
            raise self.error(argument, f"{n} sizes, one per rank")
        if any(size < 0 for size in sizes):
            raise self.error(argument, "sizes of zero or more")
        self.arguments[argument] = list(sizes)
        return sizes

    def _integer(self, argument: str, value: Any) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            if isinstance(value, torch.SymInt) or (torch.compiler.is_compiling() and isinstance(value, int)):
                return cast(int, value)  # maybe a symbol, of which index() would make a constant
            return operator.index(value)
        except TypeError:
            got = type(value).__name__
            raise TypeError(message(self.name, argument, got, "an integer")) from None


def _kind(f: Linear, x: Tensor) -> tuple[object, ...]:
    """What of f's x must be the same on all ranks."""
    shape = list(x.shape)
    if f.name == "all_to_all":
        return x.dtype, len(shape)  # `Call.fit` compares the blocks
    if isinstance(dim := getattr(f, "dim", None), int) and f.name in ("all_gather", "gather", "scatter"):
        shape[dim] = -1  # in the sizes of f
    return x.dtype, shape


def _wider(x: Tensor) -> str:
    return "x.to(torch.float32)" if x.is_floating_point() else "x.to(torch.int64)"
