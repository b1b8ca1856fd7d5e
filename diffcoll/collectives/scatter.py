"""One rank's tensor; every rank receives its block.

forward   y_r    = x_src[block r]                      blocks along dim
adjoint   gx_src = [gy_0 … gy_{N-1}]; empty elsewhere  gather
note      notes/collectives/gather.md#scatter                             truth  diffcoll.truth.scatter
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import override

from diffcoll.collectives import gather
from diffcoll.core import trees
from diffcoll.core.arguments import Call, Parts, Tensors, Tree
from diffcoll.core.blocks import as_row, cut
from diffcoll.core.bound import Bound, BoundTree
from diffcoll.core.call import perform
from diffcoll.core.control import digest
from diffcoll.core.linear import Linear, linear_map, then
from diffcoll.core.pending import Pending
from diffcoll.core.torch_private.transforms import carries_tangents, has_tangent, is_within_transform
from diffcoll.core.torch_private.trees import is_tree, tree_paths
from diffcoll.engines.devices import number_of, type_numbered
from diffcoll.engines.types import Group

T = TypeVar("T")


@linear_map
class Scatter(Linear):
    """y_r = x_src[block r], with sizes[r] the size of block r along dim; on other ranks x has size 0 along dim."""

    name: ClassVar[str] = "scatter"
    src: int
    dim: int
    sizes: tuple[int, ...]

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        n, rank = self.engine.size, self.engine.rank
        y = x.new_empty(self.shape(x.shape))
        blocks = cut(x, self.dim, self.sizes) if rank == self.src else [None] * n
        return then(self.engine.exchange(blocks, [y if s == self.src else None for s in range(n)]), y)

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        return [*x[: self.dim], self.sizes[self.engine.rank], *x[self.dim + 1 :]]

    @cached_property
    def adjoint(self) -> Linear:
        """gx_src = [gy_0 … gy_{N-1}]; empty elsewhere."""
        return gather.Gather(self.engine, self.src, self.dim, self.sizes)


@overload
def scatter(
    x: None,
    src: int = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Parts = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def scatter(
    x: None,
    src: int = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Parts = ...,
    async_op: Literal[True],
) -> Pending[Tensor]: ...


@overload
def scatter(
    x: Tree,
    src: int = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Parts = ...,
    async_op: Literal[False] = ...,
) -> Tree: ...


@overload
def scatter(
    x: Tree,
    src: int = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Parts = ...,
    async_op: Literal[True],
) -> Pending[Tree]: ...


@overload
def scatter(
    x: None,
    src: int = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Parts = ...,
    async_op: bool,
) -> Tensor | Pending[Tensor]: ...


@overload
def scatter(
    x: Tree,
    src: int = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Parts = ...,
    async_op: bool,
) -> Tree | Pending[Tree]: ...


def scatter(
    x: Tensors | None,
    src: int = 0,
    dim: int = 0,
    *,
    group: Group = None,
    sizes: Parts = None,
    async_op: bool = False,
) -> Tensors | Pending[Any]:
    """Send block r of rank src's x, along a dimension, to each rank r.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(dc.scatter, [torch.tensor([1.0, 2.0]), None])
    [tensor([1.]), tensor([2.])]

    Args:
        x: at least one dimension; any dtype. On ranks other than src it may be None, or a tensor, whose gradient is
            zero. With None the rank takes part in `backward()`, but not in `torch.autograd.grad`, which
            differentiates with respect to chosen inputs, nor in a `torch.func` transform, where it is an error: pass
            a tensor there.
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
            On ranks other than src a tree has the same structure, and any of its leaves may be None.
            Under `torch.compile` x must be a tensor of the same shape on all ranks, and requires a gradient on all
            ranks or on none.
        src: the rank within the group that sends.
        dim: the dimension to cut along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: None: N equal blocks. A list: each rank's size, zeros allowed. `dim` and `sizes` of rank src are used on
            all ranks. It sends them, with shape and dtype, in an additional small message.
        async_op: do not block: return a `Pending`, whose `wait()` gives the result. Communication overlaps with
            computation in the backward too.

    Returns:
        A new tensor with the dtype of rank src's x, and its shape except for this rank's size along `dim`.

    Raises:
        TypeError, ValueError: an argument is invalid.
        CollectiveMismatchError: on the other ranks, if an argument is invalid on one; on all ranks, if they differ in
            src, if a tree has another structure than on rank src, or if a compiled x is not like that of rank src.

    Source: notes/collectives/gather.md#scatter.
    """
    return perform(_scatter, "scatter", x, group, async_op, src=src, dim=dim, sizes=sizes)


class _Block(NamedTuple):
    """A leaf as rank src describes it, and this rank's x for it, which off src has size 0 along dim."""

    dim: int
    parts: tuple[int, ...]
    x: Tensor

    def shape(self, rank: int) -> list[int]:
        """Return the shape of the block of one rank."""
        return [*self.x.shape[: self.dim], self.parts[rank], *self.x.shape[self.dim + 1 :]]


def _scatter(call: Call, x: Any) -> Bound | BoundTree:
    if isinstance(x, Tensor) or not is_tree(x):
        root = _told(call, lambda: call.root("src"))
        return _bind(call, root, _blocks(call, root, [x], [""], 0)[0])
    root, (leaves, rebuild) = _told(call, lambda: (call.root("src"), trees.flattened(call.name, "x", x)))
    paths = tree_paths(x)
    blocks = _blocks(call, root, leaves, paths, 1 + digest(repr(paths)))
    if call.engine.in_one_graph:
        parts = [_bind(call.of(leaf), root, block) for leaf, block in zip(leaves, blocks, strict=True)]
        return BoundTree(call, parts, rebuild)
    return _rows(call, root, blocks, rebuild)


def _told(call: Call, read: Callable[[], T]) -> T:
    """Return what `read` does, or raise its error, after the other ranks have been told that there is one."""
    try:
        return read()
    except (TypeError, ValueError):
        if not torch.compiler.is_compiling():
            call.header(0, [], valid=False)
        raise


def _bind(call: Call, root: int, block: _Block) -> Bound:
    call = call.of(call.x, dim=block.dim, sizes=list(block.parts))  # those of rank src
    return Bound(call, Scatter(call.engine, root, block.dim, block.parts), block.x)


def _rows(call: Call, root: int, blocks: list[_Block], rebuild: Callable[[list[Tensor]], Any]) -> BoundTree:
    """Scatter one row for each dtype and device: its leaves' blocks for rank 0, then those for rank 1, and so on."""
    groups, shapes = trees.by_dtype(block.x for block in blocks), [block.shape(call.engine.rank) for block in blocks]

    def bound() -> Iterator[Bound]:
        for of_row in ([blocks[i] for i in indices] for indices in groups):
            sizes = tuple(sum(prod(block.shape(r)) for block in of_row) for r in range(call.engine.size))
            row = _row(of_row, cuts=call.engine.rank == root)
            yield Bound(call.of(row), Scatter(call.engine, root, 0, sizes), row)

    return BoundTree(call, bound(), lambda ys: rebuild(trees.unpacked(zip(groups, ys, strict=True), shapes)))


def _row(blocks: list[_Block], cuts: bool) -> Tensor:
    if not cuts:
        return as_row([block.x for block in blocks])
    # With one more dimension, as `pieces` has.
    of_leaves = [block.x.unsqueeze(-1).split_with_sizes(list(block.parts), block.dim) for block in blocks]
    return as_row([part for of_rank in zip(*of_leaves, strict=True) for part in of_rank])


def _blocks(call: Call, root: int, leaves: list[Any], paths: list[str], structure: int) -> list[_Block]:
    """Return the blocks that rank src describes in a message; `structure` is 0 for a single tensor."""
    if torch.compiler.is_compiling():
        return _compiled(call, root, leaves, paths, structure)
    try:
        if call.engine.rank == root:
            blocks = [_described(call.of(leaf), leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
        else:
            for leaf, path in zip(leaves, paths, strict=True):
                if leaf is not None:
                    call.tensor(leaf, "x" + path)
                elif is_within_transform() and not call.engine.in_one_graph:
                    remedy = "pass a tensor that depends on the arguments of the function as on rank src"
                    raise call.error("x" + path, "a tensor on every rank in a torch.func transform", remedy, "None")
    except (TypeError, ValueError):
        call.header(root, [], structure, valid=False)
        raise
    if call.engine.rank == root:
        numbers = [number for block in blocks for number in _header(block)]
        call.header(root, numbers, structure, forward=any(has_tangent(block.x) for block in blocks))
        return blocks
    numbers = call.header(root, [], structure, forward=carries_tangents())
    blocks = []
    for leaf in leaves:
        block, numbers = _empty(numbers, call.engine.size, leaf)
        blocks.append(block)
    return blocks


def _compiled(call: Call, root: int, leaves: list[Any], paths: list[str], structure: int) -> list[_Block]:
    """Return the blocks under torch.compile: shapes must be known while tracing; the graph compares them with src's."""
    if None in leaves:
        remedy = "pass a tensor of the shape that rank src has, whose values are not used"
        raise call.error("x", "a tensor on every rank under torch.compile", remedy, got="None")
    blocks = [_described(call.of(leaf), leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
    from diffcoll.core import compiled  # registers an op for every map, which takes time

    compiled.header(call.engine, root, structure, [number for block in blocks for number in _header(block)])
    if call.engine.rank == root:
        return blocks
    return [block._replace(x=block.x.narrow(block.dim, 0, 0)) for block in blocks]


def _described(call: Call, leaf: Any, path: str) -> _Block:
    x = call.tensor(leaf, "x" + path)
    d = call.dim("dim", x)
    return _Block(d, call.sizes_of_parts(x, d), x)


# ── the header that rank src sends: dtype, shape, dim and sizes ──────────────────────────────────────────

_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)


def _header(block: _Block) -> list[int]:
    x = block.x
    trained, moving = x.requires_grad and torch.is_grad_enabled(), has_tangent(x)
    kind = [_DTYPES.index(x.dtype), number_of(x.device), trained + 2 * moving]
    return [*kind, block.dim, x.dim(), *x.shape, *block.parts]


def _empty(numbers: list[int], n: int, x: Tensor | None) -> tuple[_Block, list[int]]:
    """Return this rank's block of size 0 along dim by the first header in `numbers`, and the numbers after it."""
    dtype, device, derivatives, dim, dims, *rest = numbers
    requires_grad, moving = derivatives % 2, derivatives // 2
    shape, sizes, following = rest[:dims], rest[dims : dims + n], rest[dims + n :]
    shape[dim] = 0
    if x is not None and (x.requires_grad or not requires_grad):
        x = x if requires_grad or not x.requires_grad else x.detach()
        none = x.flatten()[:0].to(_DTYPES[dtype]).reshape(shape)
    else:  # a new leaf, so that this rank takes part in the gather of the backward
        none = torch.empty(shape, dtype=_DTYPES[dtype], device=type_numbered(device))
        none = none.requires_grad_() if requires_grad else none
    if moving and not has_tangent(none):  # so that this rank takes part in the scatter of the tangent
        none = forward_ad.make_dual(none, torch.zeros_like(none))  # type: ignore[no-untyped-call]
    elif has_tangent(none) and not moving:
        none = forward_ad.unpack_dual(none).primal  # type: ignore[no-untyped-call]
    return _Block(dim, tuple(sizes), none), following
