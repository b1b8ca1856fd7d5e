"""One call of a collective by the user: its arguments, checked, and the way into the algebra."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from diffcoll import checks, joint
from diffcoll._torch import is_tree
from diffcoll.collectives.linear import Linear, apply, start
from diffcoll.collectives.pending import Pending
from diffcoll.engines.engine import WIDER
from diffcoll.errors import CollectiveMismatchError, failure, message, user_line
from diffcoll.groups import met, resolve
from diffcoll.reductions import REDUCTIONS, Reduction, spelled, users

if TYPE_CHECKING:
    from diffcoll.collectives.reducing import Reducing, Steps

__all__ = ["Call", "Cotangent", "Group", "Parts", "Sizes", "Tree", "known"]

#: A tensor, or nested tuples, lists and dicts of tensors.
Tree = TypeVar("Tree")

#: What `group` may be; engines recognise their own, see `diffcoll.groups`.
Group = Any
#: Sizes of blocks that x is cut into, and of blocks that the ranks bring.
Parts = Sequence[int] | None
Sizes = Sequence[int] | Literal["auto"] | None
#: Arguments of which every rank has its own.
PER_RANK = ("split_sizes", "concat_sizes")
#: Collectives whose x may be a tree.
TAKE_TREES = ("all_reduce", "all_gather", "broadcast", "sum_gradients")
Cotangent = Literal["partial", "replicated"]

_OPS = '"sum", "mean", "product", "max", "min", "logsumexp", a function that reduces dim 0 of a stack, or a ReduceOp'


def known(name: str, x: Any, group: Group, *arguments: Any) -> Linear | None:
    """Return the map to which the same call came before, on a tensor of the same kind; None: look at the arguments.

    What was right then is right now. Cold, as between two steps of training, every line costs several times what it
    does in a loop, and looking at the arguments takes longer than a small message.
    """
    if torch.compiler.is_dynamo_compiling() or type(x) is not Tensor or not x.is_cpu:
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
        self._agreed = False
        if async_op is not True and async_op is not False:
            raise self._not_a_flag("async_op", async_op)
        if check_x and (isinstance(x, Tensor) or not (name in TAKE_TREES and is_tree(x))):
            self.tensor(x)

    def agree(self) -> None:
        """In check mode, compare this call with those of the other ranks; before it moves anything."""
        if self._agreed or not self._compares():
            return
        self._agreed = True
        given = {k: v for k, v in self._given().items() if k not in PER_RANK}
        try:
            checks.compare(self.engine, (self.name, self._same(), given), self._text())
        except CollectiveMismatchError:
            raise
        except RuntimeError as error:
            raise failure(self.name, self.engine.description, self.engine.rank, None, error) from error

    def fit(self, sent: list[list[int]], expected: list[list[int]]) -> None:
        """In check mode, compare the shapes of the blocks for and from each rank."""
        if not self._compares():
            return
        n, ndim = self.engine.size, len(sent[0])
        rows = self.tell([size for block in sent + expected for size in block])
        told = [torch.tensor(row).view(2, n, ndim).tolist() for row in rows]
        for r in range(n):
            for s in range(n):
                block, place = told[r][0][s], told[s][1][r]
                if block != place:
                    why = f"rank {r} sends {tuple(block)} to rank {s}, which expects {tuple(place)}"
                    checks.refuse(self.engine, self._text(), f"{checks.disagree(self.engine)} {why}")

    def _compares(self) -> bool:
        engine = self.engine
        return checks.is_on() and not engine.joint and not engine.compiling and engine.size > 1

    def _given(self) -> dict[str, Any]:
        return {k: "a function" if callable(v) else v for k, v in self.arguments.items()}

    def _text(self) -> str:
        x = f"{self.x.dtype} {tuple(self.x.shape)}" if isinstance(self.x, Tensor) else type(self.x).__name__
        words = ", ".join(f"{k}={v!r}" for k, v in self._given().items())
        return f"{self.name}({x}, {words}) at {user_line()}"

    def _same(self) -> object:
        """What of x must be the same on all ranks."""
        x = self.x
        if self.name == "scatter" or not isinstance(x, Tensor):
            return None
        if self.name == "all_to_all":
            return x.dtype, x.dim()
        shape = list(x.shape)
        if self.arguments.get("sizes") is not None and self.name in ("all_gather", "gather") and shape:
            shape[self.arguments["dim"]] = -1  # the sizes are compared as an argument
        return x.dtype, shape

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
            self.agree()
        if self.engine.joint:
            y: Tensor = self.engine.meet_in_truth(self.name, self.x, self.arguments)
            return Pending(self.name, lambda: y) if self.async_op else y
        if self.async_op:
            wait = start(f, x)
            return Pending(self.name, wait if then is None else lambda: then(wait()))
        y = apply(f, x)
        return y if then is None else then(y)

    def reduce(self, f: Linear, x: Tensor, other: Callable[[Reducing], Steps]) -> Any:
        """Return f(x), f being the sum, or what `other` makes of a reduction that is not one, by the call's `op`."""
        reduction, x = self._reduction(x)
        if self.engine.joint:
            self.x = x
            return self.submit(f, x)
        if reduction.name == "sum":
            return self.submit(f, x)
        if reduction.over is not None:
            from diffcoll.collectives.reducing import Reducing  # it is made of collectives

            self.agree()
            return self.submit(*other(Reducing(self.name, reduction, self.engine, x)))
        # The mean is the sum divided by N. In half precision the sum may overflow where the mean does not.
        wide = x.to(WIDER.get(x.dtype, x.dtype))
        return self.submit(f, wide, lambda y: y.div_(self.engine.size).to(x.dtype))

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
            remedy = "pass this rank's part, x.to_local() (placements are DTensor's own matter)"
            raise TypeError(message(self.name, "x", "a DTensor", expected, remedy))
        if x.layout != torch.strided or x.is_quantized:
            layout = "quantized" if x.is_quantized else str(x.layout)
            raise TypeError(message(self.name, "x", f"a {layout} tensor", expected, "pass x.to_dense() or dequantize"))
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
        if reduction.needs == "fractions" and not (x.is_floating_point() or x.is_complex()):
            got = f'"{name}" of {x.dtype}'
            raise TypeError(message(self.name, "op", got, "a floating-point or complex x", "convert x first"))
        if reduction.needs == "ordered" and x.is_complex():
            remedy = "reduce x.abs(), or x.real and x.imag apart"
            raise TypeError(message(self.name, "op", f'"{name}" of {x.dtype}', "numbers that are ordered", remedy))
        return reduction, x if factor is None else x * factor

    def adds(self, x: Tensor) -> None:
        """Check that tensors like x can be added up."""
        if x.dtype == torch.bool:
            remedy = "x.to(torch.int64) counts"
            raise TypeError(message(self.name, "x", "torch.bool", "numbers, which can be added", remedy))

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
        return self._integer(argument, self.arguments[argument])

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
        pairs = tuple((self._integer(argument, src), self._integer(argument, dst)) for src, dst in value)
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
            return tuple(row[0] for row in self.tell([length]))
        sizes = self._sizes(argument, value, auto=True)
        if sizes[rank] != length:
            expected = f"{length} at position {rank}, the size of this rank's x along dim {dim}"
            raise self.error(argument, expected, f'{argument}="auto" asks every rank for its size')
        return sizes

    def sizes_of_blocks(self, parts: tuple[int, ...], argument: str) -> tuple[int, ...]:
        """Return the sizes of the blocks that come from the ranks, when `parts` are those that go to them."""
        value, rank = self.arguments[argument], self.engine.rank
        if isinstance(value, str) and value == "auto":
            return tuple(row[rank] for row in self.tell(list(parts)))
        sizes = self._sizes(argument, value, auto=True)
        if sizes[rank] != parts[rank]:
            raise self.error(argument, f"{parts[rank]} at position {rank}, the size of the block that stays here")
        return sizes

    def tell(self, numbers: list[int]) -> list[list[int]]:
        """Exchange a few integers, as many on each rank; one list from each rank, in order."""
        from diffcoll.collectives.all_gather import AllGather  # all_gather.py makes calls itself

        self.agree()
        n = self.engine.size
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.engine.control_device)
        flat: list[int] = apply(AllGather(self.engine, 0, (len(numbers),) * n), mine).tolist()
        return [flat[i * len(numbers) : (i + 1) * len(numbers)] for i in range(n)]

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
            return operator.index(value)
        except TypeError:
            got = type(value).__name__
            raise TypeError(message(self.name, argument, got, "an integer")) from None
