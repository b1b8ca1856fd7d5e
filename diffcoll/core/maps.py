"""The linear maps between ranks, each beside its adjoint. All derivatives of all collectives follow from these.

| map           | y_r                            | adjoint                                     |
|---------------|--------------------------------|---------------------------------------------|
| AllReduce     | Σ_s x_s                        | AllReduce; replicated: SumGradients         |
| SumGradients  | x_r, x replicated              | AllReduce, replicated                       |
| AllGather     | [x_0 … x_{N−1}]                | ReduceScatter; replicated: Split            |
| ReduceScatter | (Σ_s x_s)[block r]             | AllGather                                   |
| Split         | x[block r], x replicated       | AllGather, replicated                       |
| AllToAll      | [x_s block r]_s                | AllToAll, dimensions and sizes swapped      |
| Broadcast     | x_src                          | Reduce; replicated: Keep                    |
| Keep          | x_src on src, x replicated; 0  | Broadcast, replicated                       |
| Reduce        | Σ_s x_s on dst; 0              | Broadcast                                   |
| Permute       | x_src; 0 where none is sent    | Permute, pairs reversed                     |
| Scan          | Σ_{s≤r} x_s                    | Scan, reversed                              |

Gather is `AllToAll.to_root`, whose sizes are zero towards all ranks but the root; scatter is its adjoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core.blocks import blocks_of, cut, in_one_row, join
from diffcoll.core.dtypes import wider
from diffcoll.engines.engine import Engine, Wait, done

Sizes = tuple[int, ...]
_DENSE = torch.contiguous_format


@dataclass(eq=False, repr=False)  # a frozen one takes longer to import
class Linear(ABC):
    """A linear map from all ranks' x to all ranks' y, for the rank of `engine`; never changed after `part_of`.

    Dimensions are counted from the front. A map does not act on further dimensions of x, so the same object serves
    under vmap, which moves the batch dimension last. `sizes`: of the ranks' blocks along `dim`; (): all are equal.
    """

    #: Name of the public function, as in `diffcoll.truth` and `notes/`; that of the map's class, but for `part_of`.
    name: ClassVar[str]
    #: The reduction of which the map is a part, the root of a gather: what its fields do not tell.
    detail: ClassVar[str] = ""
    #: Whether x has been read when `start` returns, so that it may change before the wait.
    reads_at_once: ClassVar[bool] = False
    #: Whether it is the identity on a single rank.
    identity_alone: ClassVar[bool] = True
    #: Whether x is replicated: one tensor of which every rank has a copy. Maps whose y may be so have a field
    #: `replicated`.
    of_replicated: ClassVar[bool] = False

    engine: Engine

    @abstractmethod
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        """Start on a plain tensor x; the returned function waits for y, in fresh memory.

        `later`: whether something else is done before the wait. Unless the map `reads_at_once`, x must not change then.
        """

    @property
    @abstractmethod
    def adjoint(self) -> Linear:
        """F* with Σ_r ⟨(F x)_r, y_r⟩ = Σ_r ⟨x_r, (F* y)_r⟩ for all x and y.

        If x or y is replicated, it is one tensor of which every rank has a copy, and its sum has one term, not N.
        """

    def shape(self, x: Sequence[int]) -> list[int]:
        """Return the shape of y for an x of this shape."""
        return list(x)


L = TypeVar("L", bound=Linear)


def part_of(f: L, name: str, detail: str = "") -> L:
    """Return a map that was made just now, as a part of a public function of this name; its adjoint has its own."""
    f.name, f.detail = name, detail  # type: ignore[misc]
    return f


def _then(wait: Wait, y: Tensor | Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that waits and then returns y."""
    if wait is done:
        return (lambda: y) if isinstance(y, Tensor) else y

    def finish() -> Tensor:
        wait()
        return y if isinstance(y, Tensor) else y()

    return finish


def _with(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """Return the shape with another size along dim."""
    return [*shape[:dim], size, *shape[dim + 1 :]]


def _parts(sizes: Sizes, length: int, n: int) -> Sizes:
    """Return the sizes of the N blocks of a tensor of this length."""
    return sizes or (length // n,) * n


# ── sums ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False, repr=False)
class AllReduce(Linear):
    """y_r = Σ_s x_s."""

    name: ClassVar[str] = "all_reduce"
    reads_at_once: ClassVar[bool] = True
    replicated: bool = False

    @override
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        y = torch.empty_like(x) if x.is_contiguous() else torch.empty_like(x, memory_format=_DENSE)
        return _then(self.engine.all_reduce(x, y, later), y)

    @property
    @override
    def adjoint(self) -> Linear:
        """gx_r = Σ_s gy_s; replicated: gx_r = gy_r."""
        return SumGradients(self.engine) if self.replicated else self


@dataclass(eq=False, repr=False)
class SumGradients(Linear):
    """y_r = x.

    y is a copy: it may be modified in place, and autograd may pass one gradient to several inputs, which must not share
    memory.
    """

    name: ClassVar[str] = "sum_gradients"
    reads_at_once: ClassVar[bool] = True
    of_replicated: ClassVar[bool] = True

    @override
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        y = x.clone(memory_format=_DENSE)
        return lambda: y

    @property
    @override
    def adjoint(self) -> Linear:
        """gx_r = Σ_s gy_s."""
        return AllReduce(self.engine, True)


@dataclass(eq=False, repr=False)
class Scan(Linear):
    """y_r = Σ_{s≤r} x_s; exclusive: s<r; reverse: s≥r or s>r."""

    name: ClassVar[str] = "scan"
    reads_at_once: ClassVar[bool] = True
    reverse: bool = False
    exclusive: bool = False

    @property
    @override
    def identity_alone(self) -> bool:  # type: ignore[override]
        return not self.exclusive

    @override
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        # ⌈log₂ N⌉ rounds. After round k, y_r is the sum of the last 2^k terms.
        y = x.to(wider(x.dtype), copy=True, memory_format=_DENSE)
        before = torch.empty_like(y)
        if self.exclusive:
            mine, y = y, torch.zeros_like(y)
            self._shift(mine, y, 1)
        distance = 1
        while distance < self.engine.size:
            if self._shift(y, before, distance):
                y += before
            distance *= 2
        y = y.to(x.dtype)
        return lambda: y

    def _shift(self, y: Tensor, before: Tensor, distance: int) -> bool:
        """Receive in `before` the y of the rank `distance` before this one, if there is one."""
        n, rank = self.engine.size, self.engine.rank
        to, source = (rank - distance, rank + distance) if self.reverse else (rank + distance, rank - distance)
        sends = [y if s == to else None for s in range(n)]
        self.engine.exchange(sends, [before if s == source else None for s in range(n)])()
        return 0 <= source < n

    @property
    @override
    def adjoint(self) -> Linear:
        """gx_r = Σ_{s≥r} gy_s."""
        return Scan(self.engine, not self.reverse, self.exclusive)


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False, repr=False)
class AllGather(Linear):
    """y_r = [x_0 … x_{N−1}], with sizes[s] the size of x_s along dim."""

    name: ClassVar[str] = "all_gather"
    reads_at_once: ClassVar[bool] = True
    dim: int
    sizes: Sizes = ()
    replicated: bool = False
    #: Dtype in which x is sent, exact for every x; the adjoint sends gradients in theirs. None: x's own.
    sent: torch.dtype | None = None

    @override
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        if self.sent is None:
            return self._start(x, later)
        dtype, wait = x.dtype, self._start(x.to(self.sent), later)
        return lambda: wait().to(dtype)

    def _start(self, x: Tensor, later: bool) -> Callable[[], Tensor]:
        engine = self.engine
        sizes = self.sizes or (x.shape[self.dim],) * engine.size
        row, counts, joined = join(x, x.shape, self.dim, sizes, engine)
        if not later:
            return _then(engine.all_gather(x.contiguous(), row, counts), joined)
        row.split_with_sizes(counts)[engine.rank].view(x.shape).copy_(x)  # x may change
        return _then(engine.all_gather(None, row, counts, later), joined)

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        length = sum(self.sizes) if self.sizes else x[self.dim] * self.engine.size
        return _with(x, self.dim, length)

    @property
    @override
    def adjoint(self) -> Linear:
        """gx_r = (Σ_s gy_s)[block r]; replicated: gx_r = gy_r[block r]."""
        return (Split if self.replicated else ReduceScatter)(self.engine, self.dim, self.sizes)


@dataclass(eq=False, repr=False)
class ReduceScatter(Linear):
    """y_r = (Σ_s x_s)[block r], with sizes[r] the size of block r along dim."""

    name: ClassVar[str] = "reduce_scatter"
    dim: int
    sizes: Sizes = ()

    @override
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        row, counts = in_one_row(x, self.dim, _parts(self.sizes, x.shape[self.dim], self.engine.size))
        y = x.new_empty(self.shape(x.shape))
        return _then(self.engine.reduce_scatter(row, counts, y, later), y)

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        return _with(x, self.dim, self.sizes[self.engine.rank] if self.sizes else x[self.dim] // self.engine.size)

    @property
    @override
    def adjoint(self) -> Linear:
        """gx_r = [gy_0 … gy_{N−1}]."""
        return AllGather(self.engine, self.dim, self.sizes)


@dataclass(eq=False, repr=False)
class Split(Linear):
    """y_r = x[block r], with sizes[r] the size of block r along dim."""

    name: ClassVar[str] = "split"
    reads_at_once: ClassVar[bool] = True
    of_replicated: ClassVar[bool] = True
    dim: int
    sizes: Sizes = ()

    @override
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        rank = self.engine.rank
        sizes = _parts(self.sizes, x.shape[self.dim], self.engine.size)
        y = x.narrow(self.dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=_DENSE)
        return lambda: y

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        return _with(x, self.dim, self.sizes[self.engine.rank] if self.sizes else x[self.dim] // self.engine.size)

    @property
    @override
    def adjoint(self) -> Linear:
        """gx_r = [gy_0 … gy_{N−1}]."""
        return AllGather(self.engine, self.dim, self.sizes, True)


@dataclass(eq=False, repr=False)
class AllToAll(Linear):
    """y_r = [x_s block r]_s.

    `split_sizes[s]` is the size along split_dim of the block for rank s, `concat_sizes[s]` the size along concat_dim of
    the block from rank s.
    """

    name: ClassVar[str] = "all_to_all"
    split_dim: int
    concat_dim: int
    split_sizes: Sizes
    concat_sizes: Sizes

    @classmethod
    def to_root(cls, engine: Engine, root: int, dim: int, sizes: Sizes) -> AllToAll:
        """Return the gather of the ranks' blocks, of these sizes along dim, on one rank; its adjoint is the scatter."""
        none, rank = (0,) * engine.size, engine.rank
        sent = (*none[:root], sizes[rank], *none[root + 1 :])
        return cls(engine, dim, dim, sent, sizes if rank == root else none)

    @override
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        shape = _with(x.shape, self.split_dim, self.split_sizes[self.engine.rank])
        row, counts, joined = join(x, shape, self.concat_dim, self.concat_sizes, self.engine)
        recvs = blocks_of(row, counts, shape, self.concat_dim, self.concat_sizes)
        return _then(self.engine.exchange(cut(x, self.split_dim, self.split_sizes), recvs, later), joined)

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        y = _with(x, self.split_dim, self.split_sizes[self.engine.rank])
        return _with(y, self.concat_dim, sum(self.concat_sizes))

    @property
    @override
    def adjoint(self) -> Linear:
        """gx_r = [gy_s block r]_s: every block is sent back to its source."""
        return AllToAll(self.engine, self.concat_dim, self.split_dim, self.concat_sizes, self.split_sizes)


# ── from and to one rank ─────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False, repr=False)
class Broadcast(Linear):
    """y_r = x_src."""

    name: ClassVar[str] = "broadcast"
    reads_at_once: ClassVar[bool] = True
    src: int
    replicated: bool = False

    @override
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        mine = self.engine.rank == self.src
        y = x.clone(memory_format=_DENSE) if mine else torch.empty_like(x, memory_format=_DENSE)
        return _then(self.engine.broadcast(y, self.src, later), y)

    @property
    @override
    def adjoint(self) -> Linear:
        """gx_src = Σ_s gy_s (replicated: gy_src); 0 elsewhere."""
        return (Keep if self.replicated else Reduce)(self.engine, self.src)


@dataclass(eq=False, repr=False)
class Keep(Linear):
    """y_src = x_src, x replicated; 0 elsewhere: the adjoint of the replicated broadcast."""

    name: ClassVar[str] = "broadcast"
    reads_at_once: ClassVar[bool] = True
    of_replicated: ClassVar[bool] = True
    src: int

    @override
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        mine = self.engine.rank == self.src
        y = x.clone(memory_format=_DENSE) if mine else torch.zeros_like(x, memory_format=_DENSE)
        return lambda: y

    @property
    @override
    def adjoint(self) -> Linear:
        """gx_r = gy_src."""
        return Broadcast(self.engine, self.src, replicated=True)


@dataclass(eq=False, repr=False)
class Reduce(Linear):
    """y_dst = Σ_s x_s; 0 elsewhere."""

    name: ClassVar[str] = "reduce"
    dst: int

    @override
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        y = x.clone(memory_format=_DENSE) if self.engine.rank == self.dst else x.contiguous()
        wait = self.engine.reduce(y, self.dst, later)
        return _then(wait, y if self.engine.rank == self.dst else torch.zeros_like(x, memory_format=_DENSE))

    @property
    @override
    def adjoint(self) -> Linear:
        """gx_r = gy_dst."""
        return Broadcast(self.engine, self.dst)


@dataclass(eq=False, repr=False)
class Permute(Linear):
    """y_dst = x_src for each pair (src, dst); 0 where none is received."""

    name: ClassVar[str] = "permute"
    pairs: tuple[tuple[int, int], ...]

    @property
    @override
    def identity_alone(self) -> bool:  # type: ignore[override]
        return bool(self.pairs)

    @override
    def start(self, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
        n, rank = self.engine.size, self.engine.rank
        source = next((src for src, dst in self.pairs if dst == rank), None)
        target = next((dst for src, dst in self.pairs if src == rank), None)
        y = (x.new_zeros if source is None else x.new_empty)(x.shape)
        sends = [x.contiguous() if s == target else None for s in range(n)]
        return _then(self.engine.exchange(sends, [y if s == source else None for s in range(n)], later), y)

    @property
    @override
    def adjoint(self) -> Linear:
        """gx_src = gy_dst; 0 where none was sent."""
        return Permute(self.engine, tuple((dst, src) for src, dst in self.pairs))


#: The maps by name: in a compiled graph a map is a text, see `diffcoll.core.compiled`.
MAPS: dict[str, Any] = {kind.__name__: kind for kind in Linear.__subclasses__()}
