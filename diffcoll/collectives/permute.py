"""Point-to-point messages along given pairs of ranks.

forward   y_dst  = x_src for each pair (src, dst); 0 where none is received     the shape of x_src; of x_r where none is
adjoint   gx_src = gy_dst; 0 where none was sent                                permute, pairs reversed
note      notes/collectives/permute.md                                                    truth  diffcoll.truth.permute
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core import trees
from diffcoll.core.arguments import Call, Sizes, Tree
from diffcoll.core.bound import Bound, BoundTree
from diffcoll.core.call import perform
from diffcoll.core.linear import Linear, linear_map, then
from diffcoll.core.pending import Pending
from diffcoll.engines.types import Group


@linear_map
class Permute(Linear):
    """y_dst = x_src for each pair (src, dst); 0 where none is received.

    x_r has size `sizes[r]` along dim and y_r has `results[r]`; both are empty if x has the same shape on all ranks.
    """

    name: ClassVar[str] = "permute"
    pairs: tuple[tuple[int, int], ...]
    dim: int = 0
    sizes: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        n, rank = self.engine.size, self.engine.rank
        source = next((src for src, dst in self.pairs if dst == rank), None)
        target = next((dst for src, dst in self.pairs if src == rank), None)
        y = (x.new_zeros if source is None else x.new_empty)(self.shape(x.shape))
        sends = [x.contiguous() if s == target else None for s in range(n)]
        return then(self.engine.exchange(sends, [y if s == source else None for s in range(n)]), y)

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        return [*x[: self.dim], self.results[self.engine.rank], *x[self.dim + 1 :]] if self.results else list(x)

    @cached_property
    def adjoint(self) -> Linear:
        """gx_src = gy_dst; 0 where none was sent."""
        return Permute(self.engine, tuple((dst, src) for src, dst in self.pairs), self.dim, self.results, self.sizes)


@overload
def permute(
    x: Tree,
    pairs: Sequence[tuple[int, int]],
    *,
    group: Group = ...,
    dim: int = ...,
    sizes: Sizes = ...,
    async_op: Literal[False] = ...,
) -> Tree: ...


@overload
def permute(
    x: Tree,
    pairs: Sequence[tuple[int, int]],
    *,
    group: Group = ...,
    dim: int = ...,
    sizes: Sizes = ...,
    async_op: Literal[True],
) -> Pending[Tree]: ...


@overload
def permute(
    x: Tree,
    pairs: Sequence[tuple[int, int]],
    *,
    group: Group = ...,
    dim: int = ...,
    sizes: Sizes = ...,
    async_op: bool,
) -> Tree | Pending[Tree]: ...


def permute(
    x: Tree,
    pairs: Sequence[tuple[int, int]],
    *,
    group: Group = None,
    dim: int = 0,
    sizes: Sizes = None,
    async_op: bool = False,
) -> Tree | Pending[Tree]:
    """Send x from src to dst for each pair (src, dst) of ranks.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda x: dc.permute(x, [(0, 1), (1, 2)]), [torch.tensor(float(r)) for r in (5, 6, 7)])
    [tensor(0.), tensor(5.), tensor(6.)]
    >>> simulate(lambda x: dc.permute(x, [(0, 1)], sizes=[1, 2]), [torch.tensor([5]), torch.tensor([6, 7])])
    [tensor([0]), tensor([5])]

    Args:
        x: any dtype; any shape, the same on all ranks except, with `sizes`, for its size along `dim`.
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        pairs: ranks within the group, the same list on all ranks; each rank at most once as src and at most
            once as dst.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        dim: the dimension along which the ranks' x have these `sizes`.
        sizes: None: x has the same shape on all ranks. A list: each rank's size of x along `dim`, zeros allowed.
            `"auto"`: the ranks exchange their sizes first, in an additional small message.
        async_op: do not block: return a `Pending`, whose `wait()` gives the result. Communication overlaps with
            computation in the backward too.

    Returns:
        A new tensor of x's dtype: what was sent to this rank, of size `sizes[src]` along `dim`, or zeros of the shape
            of its own x. The loss must use it on every rank, also where it is zero: this rank receives the gradient
            of what it sent in the backward of its result.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/permute.md.
    """
    return perform(_permute, "permute", x, group, async_op, pairs=pairs, dim=dim, sizes=sizes)


def _permute(call: Call, x: Any) -> Bound | BoundTree:
    return bind(call, x, Permute, call.pairs("pairs"))


def bind(call: Call, x: Any, kind: type[Permute], pairs: tuple[tuple[int, int], ...]) -> Bound | BoundTree:
    """Bind the map of this kind to a tensor or a tree."""
    if isinstance(x, Tensor):
        d = call.dim("dim", x, new=x.dim() == 0 and call.arguments["sizes"] is None)
        return Bound(call, _map(call, kind, pairs, d, _sizes(call, x, d)), x)
    if call.arguments["sizes"] is None:
        for leaf in trees.checked(call)[0]:
            call.of(leaf).dim("dim", leaf, new=leaf.dim() == 0)
        return trees.by_message(call, lambda call, row: Bound(call, kind(call.engine, pairs), row))
    rank = call.engine.rank
    source = next((src for src, dst in pairs if dst == rank), rank)
    rows = trees.Rows(
        lambda call, leaf: (leaf, call.dim("dim", leaf)),
        lambda call, sizes: _map(call, kind, pairs, 0, sizes),
        [source],
    )
    return trees.by_blocks(call, lambda call, x: bind(call, x, kind, pairs), rows)


def _sizes(call: Call, x: Tensor, dim: int) -> tuple[int, ...]:
    """Return the sizes of all ranks' x; () if all are equal."""
    if call.arguments["sizes"] is None:
        return ()
    sizes = call.sizes_of_all(x, dim)
    even = not torch.compiler.is_compiling() and len(set(sizes)) == 1
    return () if even else sizes


def _map(
    call: Call, kind: type[Permute], pairs: tuple[tuple[int, int], ...], dim: int, sizes: tuple[int, ...]
) -> Permute:
    if not sizes:
        return kind(call.engine, pairs)
    results = [*sizes]
    for src, dst in pairs:
        results[dst] = sizes[src]
    return kind(call.engine, pairs, dim, sizes, tuple(results))
